"""Tasks in the training loop: numbers in the metrics, and not a bit of difference in the training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from eval_sets import write_sets

from dwindle.evaluation.callback import TaskEvaluator
from dwindle.evaluation.evaluate import EvalData, evaluate_model, load_data
from dwindle.training.config import TrainingConfig
from dwindle.training.loop import Trainer
from dwindle.training.metrics import MetricsWriter
from dwindle.training.optim import LRSchedule, build_optimizer
from tiny import tiny_model, tiny_tokenizer, tokens

NUM_STEPS = 4


class Batches:
    """The same windows for every run."""

    num_tokens_per_step = num_predictions = 16

    def __init__(self) -> None:
        self.step = 0

    def next_step(self) -> list[torch.Tensor]:
        self.step += 1
        return [tokens(2, 9, seed=self.step)]

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


def train(folder: Path, callbacks: list[Any]) -> tuple[Trainer, list[dict[str, Any]]]:
    model = tiny_model("llama", dtype=torch.float32, vocab_size=257, attention_dropout=0.1)
    config = TrainingConfig(tokens=1, lr=1e-3, optimizer="adamw", ce_chunk_tokens=1024)
    trainer = Trainer(
        model,
        build_optimizer(model, config),
        LRSchedule(kind="constant", lr=1e-3, num_steps=NUM_STEPS, warmup_steps=1),
        Batches(),
        config=config,
        num_steps=NUM_STEPS,
        callbacks=[*callbacks, MetricsWriter(folder / "metrics.jsonl")],
    )
    torch.manual_seed(3)
    trainer.run()
    return trainer, [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def data(tmp_path: Path) -> EvalData:
    return load_data(["commonsense,copa,wikitext"], [str(write_sets(tmp_path / "sets"))])


def test_metrics_appear_and_training_is_unchanged(tmp_path: Path, data: EvalData) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    evaluator = TaskEvaluator(data, tiny_tokenizer(), every=3)
    trainer, lines = train(tmp_path / "a", [evaluator])
    plain, plain_lines = train(tmp_path / "b", [])
    for line, same in zip(lines, plain_lines, strict=True):
        assert (line["loss"], line["grad_norm"]) == (same["loss"], same["grad_norm"])
    before, after = plain.model.state_dict(), trainer.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert [("tasks/average" in line) for line in lines] == [False, False, True, True]
    assert trainer.model.training

    expected = evaluate_model(trainer.model, tiny_tokenizer(), data, quiet=True)
    assert lines[-1]["tasks/average"] == expected.average()
    assert lines[-1]["tasks/copa"] == expected.task("copa").acc  # type: ignore[union-attr]
    assert lines[-1]["tasks/wikitext"] == expected.texts[0].bits_per_byte
    assert "tasks" in lines[-1]["time"]
    assert not any(name.startswith("tasks") for name in lines[0])
