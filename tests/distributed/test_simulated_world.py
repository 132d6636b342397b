"""``--dry-run --world``: the counts equal closed forms, and those of two real ranks."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import run_ranks
from transformers import AutoConfig

from dwindle.anatomy.anatomy import Anatomy
from dwindle.core.config import write_toml
from dwindle.distributed.traffic import Tally, Traffic
from dwindle.pruning.pruner import Pruner
from dwindle.recipe.recipe import Recipe
from dwindle.run.pretrain import pretrain
from dwindle.run.simulation import simulate
from dwindle.training.callbacks import Callback
from hostile import assert_refused, command
from runs import COMPACT_OFTEN, tiny_recipe
from tiny import tiny_directory

LAYERS, SEQ_LEN = 2, 24


def recipe(place: Path, parallel: str, sequences: int = 12, **training: Any) -> Recipe:
    prune: dict[str, Any] = {
        "target": "50%",
        "horizon": 0.6,
        "warmup_steps": 3,
        **COMPACT_OFTEN,
        "compact_threshold": 0.3,
    }
    settings = {"micro_batch": 2, "parallel": parallel, "precision": "fp32"} | training
    return tiny_recipe(place, steps=8, sequences=sequences, seq_len=SEQ_LEN, training=settings, prune=prune)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration alone: no weights, no tokenizer."""
    place = tmp_path_factory.mktemp("world")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8, "num_key_value_heads": 8}
    config = AutoConfig.for_model("llama", **sizes, num_hidden_layers=LAYERS, vocab_size=1024)
    config.save_pretrained(place / "model")
    return place


def anatomy_of(place: Path) -> Anatomy:
    return Anatomy.of_config(AutoConfig.from_pretrained(place / "model"))


def parameters(place: Path) -> int:
    return anatomy_of(place).count(anatomy_of(place).source).total


def padded_size(shape: Sequence[int], world: int) -> int:
    """Elements of a tensor whose rows are padded to a multiple of the ranks."""
    return -(-shape[0] // world) * world * math.prod(shape[1:])


@pytest.mark.parametrize("world", [8, pytest.param(512, marks=pytest.mark.slow)])
def test_sharded_counts_are_closed_forms(place: Path, world: int) -> None:
    """Groups: one per layer, and one of embeddings, head and norm, which stays gathered until its backward pass."""
    each, width = 6, 4
    plan = simulate(recipe(place, "fsdp", sequences=world * each), world)
    total, groups, micro_batches = parameters(place), LAYERS + 1, each // 2
    assert (plan.parameters, plan.micro_batches, plan.sequences_per_micro_batch) == (total, micro_batches, 2)
    step, event = plan.parts["step"], plan.parts["event"]
    gathers = micro_batches * (groups + LAYERS)
    assert step.collectives == {"all-gather": gathers, "reduce-scatter": micro_batches * groups, "all-reduce": 2}
    rows = anatomy_of(place).rows
    padded = {row.name: padded_size(row.full_shape, world) for row in rows}
    in_layers = sum(padded[row.name] for row in rows if row.layer is not None)
    whole = sum(padded.values())
    gathered = micro_batches * (whole + in_layers) * width
    reduced = micro_batches * whole * width
    scalars = 2 * (2 * 8 + 8)  # loss and stop request, then the squared norm, in fp64
    expected = (gathered + reduced + scalars) * (world - 1) / world
    assert step.bytes_sent == pytest.approx(expected, abs=gathers + micro_batches * groups + 2)
    assert plan.checkpoint_bytes >= 3 * whole * width / world  # weights and two moments; counters beside them
    assert plan.state_bytes == pytest.approx(3 * whole * width / world, abs=4000)  # flags and buffers
    assert event.collectives == {"all-reduce": 1, "broadcast": 1}
    assert plan.parts["compaction"].collectives == {"all-gather": 3 * len(rows)}  # weights and both moments
    assert plan.parts["checkpoint"] == Traffic({"barrier": 1}, 0, 0, plan.parts["checkpoint"].peak_bytes)


def test_replicated_and_hybrid_counts(place: Path) -> None:
    total = parameters(place)
    ddp = simulate(recipe(place, "ddp", sequences=64), 64)
    step = ddp.parts["step"]
    assert set(step.collectives) == {"all-reduce"}  # gradients once, in fp32, and the loss
    assert step.bytes_sent == pytest.approx(2 * (4 * total + 16) * 63 / 64, abs=3)
    assert step.bytes_between_nodes == step.bytes_sent
    assert ddp.state_bytes == pytest.approx(4 * 4 * total, rel=0.01)  # and the buckets of the gradients
    hsdp = simulate(recipe(place, "hsdp", sequences=64), 64)
    assert hsdp.parts["step"].collectives == {"all-gather": 5, "reduce-scatter": 3, "all-reduce": 3 + 2}
    crossing = 2 * (4 * total / 8) * 7 / 8 + 2 * 16 * 63 / 64  # this rank's rows, between the nodes; and the loss
    assert hsdp.parts["step"].bytes_between_nodes == pytest.approx(crossing, rel=0.01)
    assert hsdp.state_bytes == pytest.approx(3 * 4 * total / 8, rel=0.02)


class Recorder(Callback):
    """What each step of a real rank sends, with the events, compactions and checkpoints after it."""

    def __init__(self) -> None:
        self.tally, self.steps = Tally(), list[dict[str, Any]]()

    def on_start(self, trainer: Any) -> None:
        self.tally.__enter__()

    def after_step(self, trainer: Any) -> None:
        pruner = next(c for c in trainer.callbacks if isinstance(c, Pruner))
        compacted = "compacted" in trainer.extra_metrics
        line = asdict(self.tally.lap()) | {"events": trainer.extra_metrics["events"], "compacted": compacted}
        self.steps.append(line | {"finished": pruner.finished})

    def on_end(self, trainer: Any) -> None:
        self.steps.append(asdict(self.tally.lap()))  # the checkpoint after the last step
        self.tally.__exit__(None, None, None)


@pytest.mark.parity
@pytest.mark.parametrize(("parallel", "optimizer"), [("fsdp", "adamw"), ("fsdp", "muon"), ("ddp", "adamw")])
def test_two_real_ranks_send_what_was_counted(tmp_path: Path, parallel: str, optimizer: str) -> None:
    tiny_directory(tmp_path / "model", num_hidden_layers=LAYERS)
    settings = recipe(tmp_path, parallel, optimizer=optimizer)

    def task(rank: int) -> None:
        warnings.simplefilter("ignore")
        recorder = Recorder()
        pretrain(settings, tmp_path / "run", callbacks=[recorder])
        if rank == 0:
            (tmp_path / "steps.json").write_text(json.dumps(recorder.steps))

    run_ranks(2, task)
    *steps, last = json.loads((tmp_path / "steps.json").read_text())
    counted = simulate(settings, 2)
    plain = steps[2]  # DDP builds its buckets in the first two
    assert not plain["events"] and sent(plain) == sent(counted.parts["step"])
    first = next(step for step in steps if step["events"])
    assert not first["compacted"] and sent(first) == sent(counted.parts["step"].plus(counted.parts["event"]))
    compacted = next(step for step in steps if step["compacted"])
    step_and_event = counted.parts["step"].plus(counted.parts["event"])
    assert compacted["collectives"] == step_and_event.plus(counted.parts["compaction"]).collectives
    if parallel == "fsdp":  # gathers the model as it was; DDP sends the new one, whose size the gradients decide
        assert sent(compacted) == sent(step_and_event.plus(counted.parts["compaction"]))
    assert last["collectives"] == counted.parts["checkpoint"].collectives


def sent(traffic: Any) -> tuple[Any, int]:
    found = traffic if isinstance(traffic, dict) else asdict(traffic)
    return found["collectives"], found["bytes_sent"]


def test_no_rank_keeps_whole_gradients(place: Path) -> None:
    """Each micro-batch reduces its own to the rows of each rank: a second one costs the rows that are added to."""
    one, two = (simulate(recipe(place, "fsdp", sequences=8 * n, micro_batch=1), 8) for n in (1, 2))
    more = two.parts["step"].peak_bytes - one.parts["step"].peak_bytes
    assert 0 <= more <= 1.1 * 4 * parameters(place) / 8


def test_nodes_exchange_gradients_once_a_step(place: Path) -> None:
    one, two = (simulate(recipe(place, "hsdp", sequences=64 * n, micro_batch=1), 64).parts["step"] for n in (1, 2))
    assert two.collectives == {"all-gather": 10, "reduce-scatter": 6, "all-reduce": 3 + 2}
    assert two.bytes_between_nodes == one.bytes_between_nodes


def test_a_teacher_is_gathered_too(place: Path) -> None:
    settings = recipe(place, "fsdp", sequences=8)
    settings.distill.weight = 0.5
    plan = simulate(settings, 8)
    assert plan.parts["step"].collectives["all-gather"] == (2 * LAYERS + 1) + LAYERS
    assert not dist.is_initialized()


def test_mistakes_are_one_line(place: Path) -> None:
    write_toml(recipe(place, "fsdp"), place / "recipe.toml")
    refused = {
        ("--world", "8"): "--dry-run",
        ("--dry-run", "--world", "0"): "at least 1",
        ("--dry-run", "--world", "13"): "a step has 12 sequences",
        ("--dry-run", "--world", "6", "--nproc", "4"): "a multiple",
        ("--dry-run", "--world", "8", "--price", "2"): "--price",
    }
    for options, said in refused.items():
        assert said in assert_refused(command("pretrain", place / "recipe.toml", *options))


def test_the_table_and_the_json_agree(place: Path) -> None:
    write_toml(recipe(place, "fsdp"), place / "recipe.toml")
    arguments = ("pretrain", place / "recipe.toml", "--dry-run", "--world", "8")
    found = json.loads(command(*arguments, "--json")[1])
    assert list(found["parts"]) == ["step", "event", "checkpoint", "compaction"]
    shown = command(*arguments)[1]
    assert f"{found['parts']['step']['collectives']['all-gather']} all-gather" in " ".join(shown.split())


def test_a_model_without_storage_takes_no_memory() -> None:
    with Tally() as tally:
        kept = [torch.empty(1000, device="meta"), torch.empty(1000)]
        assert tally.held_bytes == 4000
        del kept
    assert tally.lap().peak_bytes == 4000
