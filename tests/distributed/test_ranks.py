"""Several gloo ranks compute what one process computes, and continue each other's runs."""

from __future__ import annotations

import errno
import os
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_ranks, start_ranks, wait_ranks
from safetensors.torch import load_file

import dwindle.run.plan
import dwindle.run.pretrain
from dwindle.core.errors import UserError
from dwindle.core.files import NotWritten
from dwindle.core.run_directory import RunDirectory
from dwindle.distributed.engines import Parallel, choose_parallel, num_shards
from dwindle.distributed.world import World, joined
from dwindle.pruning.ledger import read_ledger
from dwindle.recipe.recipe import Recipe
from dwindle.report.run import open_run
from dwindle.report.tables import cost_of
from dwindle.run.pretrain import pretrain, resume
from dwindle.training import checkpoint_writer as checkpointwriter
from dwindle.training.loop import Trainer
from runs import COMPACT_OFTEN, assert_same, metrics, tiny_recipe
from tiny import tiny_directory

STEPS = 14


def recipe(place: Path, parallel: str = "auto", *, prune: dict[str, Any] | None = None, **training: Any) -> Recipe:
    """7 sequences a step, which no number of ranks divides; widths that 3 ranks do not divide either."""
    settings: dict[str, Any] = {"target": "50%", "horizon": 0.7, **COMPACT_OFTEN, "compact_threshold": 0.15}
    settings |= {"smoothing": 0.3, "attention": "cluster", "milestones": ["70%"]}
    return tiny_recipe(
        place,
        steps=STEPS,
        sequences=7,
        data={"valid": ["pydoc:valid"], "valid_tokens": 264},
        training={"micro_batch": 2, "parallel": parallel} | training,
        prune=settings | (prune or {}),
        validation={"every": 6},
        checkpoint={"every": 4, "keep_last": 9},
    )


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("ranks")
    tiny_directory(place / "model", tie_word_embeddings=True, num_hidden_layers=2)
    return place


@pytest.fixture(scope="module")
def alone(place: Path) -> Path:
    """The run of one process that all others are compared with."""
    run = place / "alone"
    pretrain(recipe(place), run)
    ledger = read_ledger(run)
    removed = [event["type"] for event in ledger if event["event"] == "prune"]
    assert len(removed) >= 10 and set(removed) == {"attn", "ffn", "stem"}
    assert sum(event["event"] == "compact" for event in ledger) >= 2
    return run


@pytest.fixture(scope="module")
def on_three(place: Path, alone: Path) -> Path:
    run = place / "fsdp-3"
    run_ranks(3, lambda rank: pretrain(recipe(place, "fsdp"), run))
    return run


@pytest.mark.parity
def test_three_sharded_ranks_equal_one_process(on_three: Path, alone: Path) -> None:
    assert_same(on_three, alone)
    assert [cost_of(open_run(run)).num_devices for run in (on_three, alone)] == [3, 1]  # type: ignore[union-attr]
    newest = RunDirectory(on_three).list_checkpoints()[-1]
    assert len(list(newest.glob("model-*-of-00003.safetensors"))) == 3 and not (newest / "model.safetensors").exists()


@pytest.mark.parity
def test_one_launched_process_is_sharded_if_asked_and_equals_a_plain_one(place: Path, alone: Path) -> None:
    """FSDP with one shard: the way to try a backend without a second device."""
    for parallel, weights in (("fsdp", "model-00001-of-00001.safetensors"), ("auto", "model.safetensors")):
        run = place / f"{parallel}-1"
        run_ranks(1, lambda rank, p=parallel, r=run: pretrain(recipe(place, p), r))  # type: ignore[misc]
        assert_same(run, alone)
        assert (RunDirectory(run).list_checkpoints()[-1] / weights).is_file()
    forget_after(place / "fsdp-1", 8)
    resume(place / "fsdp-1")  # not launched, so a plain process
    assert_same(place / "fsdp-1", alone)


def test_saved_on_three_resumed_on_two_then_on_one(on_three: Path, alone: Path, place: Path) -> None:
    run = place / "elastic"
    shutil.copytree(on_three, run)
    forget_after(run, 8)
    run_ranks(2, lambda rank: resume(run))
    assert_same(run, alone)
    forget_after(run, 12)
    resume(run)
    assert_same(run, alone)
    forget_after(run, 13)  # written by one process at step 14: nothing of two is left in it
    assert RunDirectory(run).list_checkpoints()[-1].name == "step-00000012"
    run_ranks(3, lambda rank: resume(run))
    assert_same(run, alone)


def forget_after(run: Path, step: int) -> None:
    """As if the run had been killed after that step."""
    shutil.rmtree(run / "model")
    for checkpoint in RunDirectory(run).list_checkpoints():
        if int(checkpoint.name.removeprefix("step-")) > step:
            shutil.rmtree(checkpoint)


@pytest.mark.parity
def test_replicated_ranks_equal_one_process(place: Path, alone: Path) -> None:
    run = place / "ddp-2"

    def task(rank: int) -> None:
        warnings.simplefilter("error", FutureWarning)  # what torch is about to drop is not used
        pretrain(recipe(place, "ddp"), run)

    run_ranks(2, task)
    assert_same(run, alone)
    assert (RunDirectory(run).list_checkpoints()[-1] / "model.safetensors").exists()


@pytest.mark.parametrize(("size", "per_node"), [(4, 2), (2, 1)])
def test_sharded_inside_nodes_and_replicated_over_them(place: Path, tmp_path: Path, size: int, per_node: int) -> None:
    run, short = tmp_path / "hsdp", {"tokens": 6 * 168}
    pretrain(recipe(place, **short), tmp_path / "short")
    run_ranks(size, lambda rank: pretrain(recipe(place, "hsdp", micro_batch=1, **short), run), per_node=per_node)
    assert_same(run, tmp_path / "short")
    files = RunDirectory(run).list_checkpoints()[-1].glob(f"model-*-of-{per_node:05d}.safetensors")
    assert len(list(files)) == per_node


def test_bf16_shards_keep_fp32_weights(place: Path) -> None:
    """Other roundings than autocast (the residual stream is bf16), the same training."""
    for name, size in (("bf16-1", 1), ("bf16-2", 2)):
        parallel = "fsdp" if size > 1 else "auto"
        settings = recipe(place, parallel, prune={"enabled": False}, precision="bf16", tokens=6 * 168)
        with torch.backends.mkldnn.flags(enabled=False):  # ends the process on machines that announce AMX but forbid it
            run_ranks(size, lambda rank, s=settings, n=name: pretrain(s, place / n))  # type: ignore[misc]
    ours, theirs = ([line["loss"] for line in metrics(place / name)] for name in ("bf16-2", "bf16-1"))
    assert ours == pytest.approx(theirs, abs=0.05)
    newest = RunDirectory(place / "bf16-2").list_checkpoints()[-1]
    weights = load_file(newest / "model-00001-of-00002.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}


def test_a_full_disk_is_reported_by_one_rank_and_ends_all(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def full(*_: object, **__: object) -> None:
        raise NotWritten("no", OSError(errno.ENOSPC, "No space left on device"))

    def task(rank: int) -> None:
        dwindle.run.pretrain.save_model = full  # type: ignore[attr-defined]
        try:
            pretrain(recipe(place), place / "full")
        except UserError as error:
            os.write(2, f"error: {error}\n".encode())
            raise SystemExit(2) from None

    statuses = wait_ranks(start_ranks(2, task))
    assert [os.waitstatus_to_exitcode(status) for status in statuses] == [2, 2]
    assert capfd.readouterr().err.count("the disk is full") == 1


@pytest.mark.parametrize(
    ("parallel", "failing", "function", "said"),
    [
        ("ddp", {0}, "write_tensors", "error: /"),
        ("fsdp", {1}, "write_tensors", "error: process 1: /"),
        ("fsdp", {0, 1}, "write_tensors", "error: /"),
        ("fsdp", {0}, "begin_checkpoint", "error: /"),
    ],
)
def test_a_checkpoint_that_cannot_be_written_is_reported_once_and_ends_all(
    place: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    parallel: str,
    failing: set[int],
    function: str,
    said: str,
) -> None:
    """After a good one, so that a later save finds it out; there is always a rank without a fault of its own."""
    settings, size = recipe(place, parallel), max(failing) + 2
    settings.checkpoint.every = 2

    def task(rank: int) -> None:
        written = getattr(checkpointwriter, function)

        def full(place: Path, *rest: Any) -> Any:
            if rank in failing and RunDirectory(tmp_path / "run").list_checkpoints():
                raise OSError(errno.ENOSPC, "No space left on device")
            return written(place, *rest)

        setattr(checkpointwriter, function, full)
        try:
            pretrain(settings, tmp_path / "run")
        except UserError as error:
            os.write(2, f"error: {error}\n".encode())
            raise SystemExit(2) from None

    statuses = wait_ranks(start_ranks(size, task))
    told = capfd.readouterr().err
    assert [os.waitstatus_to_exitcode(status) for status in statuses] == [2] * size
    assert told.count("error: ") == 1 and said in told and "the disk is full" in told and "Traceback" not in told
    assert [path.name for path in RunDirectory(tmp_path / "run").list_checkpoints()] == ["step-00000002"]


def test_a_mistake_is_reported_by_one_rank_and_ends_all(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def task(rank: int) -> None:
        try:
            pretrain(recipe(place, "fsdp"), place / "alone")
        except UserError as error:
            os.write(2, f"error: {error}\n".encode())
            raise SystemExit(2) from None

    (place / "alone").mkdir(exist_ok=True)
    (place / "alone" / "recipe.toml").touch()
    statuses = wait_ranks(start_ranks(2, task))
    assert [os.waitstatus_to_exitcode(status) for status in statuses] == [2, 2]
    said = capfd.readouterr().err
    assert said.count("error: ") == 1 and re.search(r"error: --out .*alone: .*exists", said)


def test_tensors_of_the_main_process_reach_all() -> None:
    def task(rank: int) -> None:
        with joined("cpu", timeout_s=600) as world:
            for shape in ((3, 4), (5,), ()):
                sent = torch.arange(max(1, torch.Size(shape).numel()), dtype=torch.float64).reshape(shape)
                assert torch.equal(world.broadcast(sent if rank == 0 else None), sent)

    run_ranks(2, task)


@pytest.mark.parametrize(("parallel", "message"), [("none", "is for one process"), ("hsdp", "there is only one")])
def test_parallelism_that_does_not_fit(parallel: Parallel, message: str) -> None:
    with pytest.raises(UserError, match=message):
        choose_parallel(World(size=2, local_size=2), parallel, 1)


def test_shards() -> None:
    """What a micro-batch is chosen by: how many devices share the weights."""
    one_node, two_nodes = World(size=4, local_size=4), World(size=4, local_size=2)
    big = 2_000_000_000
    assert num_shards(World(), choose_parallel(World(), "fsdp", big)) == 1
    assert num_shards(one_node, choose_parallel(one_node, "auto", 1_000_000)) == 1
    assert num_shards(one_node, choose_parallel(one_node, "auto", big)) == 4
    assert num_shards(two_nodes, choose_parallel(two_nodes, "auto", big)) == 2
    assert num_shards(two_nodes, choose_parallel(two_nodes, "fsdp", big)) == 4


def test_all_ranks_stop_after_the_same_step(place: Path) -> None:
    """One is asked after the others have already been told of this step: they learn it with the next."""
    run = place / "stopped"

    def task(rank: int) -> None:
        original = Trainer._read

        def read(self: Trainer, sums: torch.Tensor, norm: torch.Tensor) -> tuple[float, float]:
            if rank == 1 and self.step == 3:
                self.stop.request()
            return original(self, sums, norm)

        Trainer._read = read  # type: ignore[method-assign]
        result = pretrain(recipe(place), run)
        assert (result.status, result.step) == ("stopped", 5)

    run_ranks(2, task)
    assert [c.name for c in RunDirectory(run).list_checkpoints()] == ["step-00000004", "step-00000005"]


def test_the_main_process_chooses_the_micro_batch_for_all(place: Path) -> None:
    run = place / "settled"

    def task(rank: int) -> None:
        dwindle.run.plan.micro_batch_of = lambda *_: 3 - 2 * rank  # type: ignore[attr-defined]
        pretrain(recipe(place, micro_batch=0, tokens=4 * 168, prune={"enabled": False}), run)

    run_ranks(2, task)
    assert "micro_batch = 3" in (run / "recipe.toml").read_text()
