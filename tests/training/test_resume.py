"""A run that is interrupted and resumed equals one that is not, to the bit."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import RandomBatches, make_trainer, tiny_llama
from torch import Tensor

from dwindle.core.errors import UserError
from dwindle.core.jsonl import JsonLinesFile
from dwindle.core.run_directory import RunDirectory
from dwindle.training.callbacks import Callback, Checkpointer, Validator, truncate_to
from dwindle.training.checkpoint import CheckpointWarning, latest_checkpoint, open_checkpoint
from dwindle.training.loop import Trainer
from dwindle.training.metrics import MetricsWriter
from dwindle.training.rng import seed_everything
from dwindle.training.stop import StopSignal

NUM_STEPS = 14


class Killed(BaseException):
    """Ends the process as far as the loop is concerned, wherever it is raised."""


class Smoother(Callback):
    """Stands for a pruner: state in JSON and tensors, an append-only file, and edits to weights and moments."""

    def __init__(self, path: Path) -> None:
        self.ledger = JsonLinesFile(path)
        self.count = 0
        self.average: Tensor | None = None

    def after_backward(self, trainer: Trainer) -> None:
        grad = trainer.model.model.norm.weight.grad
        self.average = grad.clone() if self.average is None else 0.9 * self.average + 0.1 * grad

    def after_step(self, trainer: Trainer) -> None:
        if trainer.step % 3 == 0 and self.average is not None:
            index = int(self.average.abs().argmin())
            weight = trainer.model.model.norm.weight
            with torch.no_grad():
                weight[index] = 0.0
                trainer.optimizer.state[weight]["exp_avg"][index] = 0.0
            self.count += 1
            self.ledger.append({"step": trainer.step, "index": index, "count": self.count})
        trainer.extra_metrics["dead"] = self.count

    def on_end(self, trainer: Trainer) -> None:
        self.ledger.close()

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]

    def tensors(self) -> dict[str, Tensor]:
        return {} if self.average is None else {"average": self.average}

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        self.average = tensors["average"]


class KillAt(Callback):
    def __init__(self, step: int | None, hook: str) -> None:
        self.step, self.hook = step, hook

    def _maybe(self, trainer: Trainer, hook: str) -> None:
        if self.hook == hook and trainer.step == self.step:
            raise Killed

    def after_backward(self, trainer: Trainer) -> None:
        self._maybe(trainer, "after_backward")

    def after_step(self, trainer: Trainer) -> None:
        self._maybe(trainer, "after_step")

    def on_checkpoint(self, trainer: Trainer) -> None:
        self._maybe(trainer, "on_checkpoint")


def build(
    run: Path, kill: tuple[int | None, str] = (None, ""), stop: StopSignal | None = None, **training: Any
) -> Trainer:
    seed_everything(5)
    windows = RandomBatches((3,)).step_tokens(999)
    callbacks = [
        Smoother(run / "ledger.jsonl"),
        Validator(windows, every=5, batch=2),
        MetricsWriter(run / "metrics.jsonl"),
        KillAt(*kill),
        Checkpointer(run, every=4, keep_last=2, extra_files=["metrics.jsonl", "ledger.jsonl"]),
    ]
    model = tiny_llama(dropout=0.2)
    steps: dict[str, Any] = {"sizes": (2, 1), "num_steps": NUM_STEPS, "ce_chunk_tokens": 7}
    return make_trainer(model, callbacks, stop=stop, **steps, **training)


def resume(
    run: Path, kill: tuple[int | None, str] = (None, ""), stop: StopSignal | None = None, **training: Any
) -> Trainer:
    trainer = build(run, kill, stop, **training)
    trainer.load_checkpoint(open_checkpoint(latest_checkpoint(run)))
    return trainer


def outcome(run: Path) -> dict[str, Any]:
    """Everything a finished run leaves behind, without what depends on the clock."""
    last = RunDirectory(run).list_checkpoints()[-1]
    files = {path.name: path.read_bytes() for path in last.glob("*.safetensors")}
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        assert line.pop("time").keys() == {"tokens_per_s", "seconds", "began", "running", "devices"}
    state = json.loads((last / "state.json").read_text())
    state["callbacks"]["Checkpointer"]["lengths"].pop("metrics.jsonl")
    ledger = (run / "ledger.jsonl").read_bytes()
    return {"files": files, "metrics": lines, "ledger": ledger, "state": state, "step": last.name}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    run = tmp_path_factory.mktemp("uninterrupted")
    assert build(run).run() == "finished"
    result = outcome(run)
    assert [line["step"] for line in result["metrics"]] == list(range(1, NUM_STEPS + 1))
    assert {line["step"] for line in result["metrics"] if "valid_loss" in line} == {5, 10, 14}
    assert set(result["files"]) == {f"{g}.safetensors" for g in ("model", "optimizer", "rng", "callbacks")}
    return result


@pytest.mark.parity
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((6, "after_step"), (9, "after_backward")),
        ((4, "after_step"), (8, "on_checkpoint")),
        ((12, "on_checkpoint"), (14, "after_step")),
    ],
)
def test_two_interruptions(
    tmp_path: Path, expected: dict[str, Any], first: tuple[int, str], second: tuple[int, str]
) -> None:
    with pytest.raises(Killed):
        build(tmp_path, first).run()
    if not RunDirectory(tmp_path).list_checkpoints():
        for name in ("metrics.jsonl", "ledger.jsonl"):
            truncate_to(tmp_path / name, 0)
        again = build(tmp_path, second)
    else:
        again = resume(tmp_path, second)
    with pytest.raises(Killed):
        again.run()
    assert resume(tmp_path).run() == "finished"
    assert outcome(tmp_path) == expected


@pytest.mark.parity
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_interrupted_with_moments_in_bf16(tmp_path: Path, optimizer: str) -> None:
    training = {"optimizer": optimizer, "moments": "bf16"}
    assert build(tmp_path / "whole", **training).run() == "finished"
    with pytest.raises(Killed):
        build(tmp_path / "killed", (9, "after_backward"), **training).run()
    assert resume(tmp_path / "killed", **training).run() == "finished"
    assert outcome(tmp_path / "killed") == outcome(tmp_path / "whole")
    last = open_checkpoint(latest_checkpoint(tmp_path / "killed")).tensors("optimizer")
    kept = {key.split("/")[0]: tensor.dtype for key, tensor in last.items()}
    moments = {"exp_avg", "exp_avg_sq", *(["momentum_buffer"] if optimizer == "muon" else [])}
    assert {key for key, dtype in kept.items() if dtype == torch.bfloat16} == moments


@pytest.mark.parity
def test_stopping_at_every_step_leaves_no_trace(tmp_path: Path, expected: dict[str, Any]) -> None:
    stop = StopSignal()
    stop.request()
    status = build(tmp_path, stop=stop).run()
    for _ in range(NUM_STEPS - 1):
        assert status == "stopped"
        status = resume(tmp_path, stop=stop).run()
    assert status == "finished"
    assert outcome(tmp_path) == expected


def test_from_the_one_before_a_damaged_checkpoint(tmp_path: Path, expected: dict[str, Any]) -> None:
    with pytest.raises(Killed):
        build(tmp_path, (11, "after_step")).run()
    damaged = RunDirectory(tmp_path).list_checkpoints()[-1]
    assert damaged.name == "step-00000008"
    (damaged / "optimizer.safetensors").write_bytes(b"nonsense")
    with pytest.warns(CheckpointWarning, match=r"optimizer\.safetensors"):
        trainer = resume(tmp_path)
    assert trainer.step == 4
    assert trainer.run() == "finished"
    assert outcome(tmp_path) == expected


def test_resuming_a_finished_run_changes_nothing(tmp_path: Path, expected: dict[str, Any]) -> None:
    build(tmp_path).run()
    assert resume(tmp_path).run() == "finished"
    assert outcome(tmp_path) == expected


def test_a_lost_metrics_file_is_refused(tmp_path: Path) -> None:
    build(tmp_path).run()
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(UserError, match=r"metrics\.jsonl: has 0 bytes"):
        resume(tmp_path)


def test_state_of_an_unknown_callback_is_refused(tmp_path: Path) -> None:
    build(tmp_path).run()
    trainer = make_trainer(tiny_llama(), num_steps=NUM_STEPS)
    with pytest.raises(UserError, match=r"state of Smoother"):
        trainer.load_checkpoint(open_checkpoint(latest_checkpoint(tmp_path)))


def test_logs_that_cannot_be_synced_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("dwindle.training.callbacks.synced_length", full)
    with pytest.raises(UserError, match=r"the disk is full; there is no earlier checkpoint: free at least"):
        build(tmp_path).run()
