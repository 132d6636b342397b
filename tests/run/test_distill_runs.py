"""Runs with a teacher, and from random weights: what they equal, how they resume, what is refused."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import dwindle
from dwindle.core.config import from_dict
from dwindle.core.errors import UserError
from dwindle.core.run_directory import RunDirectory
from dwindle.pruning.config import PretrainPruneConfig
from dwindle.pruning.ledger import read_ledger
from dwindle.recipe.recipe import Recipe
from dwindle.run.plan import make_plan, teacher_dtype
from dwindle.run.pretrain import pretrain, resume
from runs import COMPACT_OFTEN, tiny_recipe
from tiny import tiny_directory


def recipe(place: Path, *, distill: dict[str, Any] | None = None, steps: int = 12, **source: Any) -> Recipe:
    """12 steps of 4 × 24 tokens with events and compactions in the first 8."""
    return tiny_recipe(
        place,
        steps=steps,
        sequences=4,
        source=source,
        training={"micro_batch": 3},
        prune={"target": "70%", "horizon": 0.7, **COMPACT_OFTEN},
        distill=distill or {},
        checkpoint={"every": 5, "keep_last": 9},
    )


def outcome(run: Path) -> tuple[list[dict[str, Any]], dict[str, Any], list[dict[str, Any]]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    weights = load_file(run / "model" / "model.safetensors")
    return [{k: v for k, v in line.items() if k != "time"} for line in lines], weights, read_ledger(run)


def assert_equal(one: Path, other: Path) -> None:
    (lines, weights, ledger), (lines2, weights2, ledger2) = outcome(one), outcome(other)
    assert lines == lines2 and ledger == ledger2
    assert weights.keys() == weights2.keys()
    assert all(torch.equal(weight, weights2[name]) for name, weight in weights.items())


def test_a_compaction_keeps_the_graphs_of_the_teacher(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced without code generation: a graph for the teacher, one for the source's shapes, one for each rebuilt."""
    monkeypatch.setattr("dwindle.training.compiling.torch.compile", functools.partial(torch.compile, backend="eager"))
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    settings = recipe(place, distill={"weight": 0.5})
    settings.training.compile = True
    pretrain(settings, place / "compiled")
    rebuilt = sum(event["event"] == "compact" for event in read_ledger(place / "compiled"))
    assert rebuilt >= 2
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2 + rebuilt
    torch.compiler.reset()


def test_weight_zero_is_a_run_without_a_teacher(place: Path) -> None:
    pretrain(recipe(place), place / "without")
    pretrain(recipe(place, distill={"weight": 0.0}), place / "zero")
    assert_equal(place / "zero", place / "without")


def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(place: Path) -> None:
    settings = recipe(place, distill={"weight": 0.5, "temperature": 2.0, "top_k": 9})
    whole, broken = place / "whole", place / "broken"
    pretrain(settings, whole)
    shutil.copytree(whole, broken)
    shutil.rmtree(broken / "model")
    for checkpoint in RunDirectory(broken).list_checkpoints()[1:]:
        shutil.rmtree(checkpoint)
    assert resume(broken).status == "finished"
    assert_equal(broken, whole)
    lines, _, ledger = outcome(whole)
    assert sum(event["event"] == "compact" for event in ledger) >= 1
    assert lines[0]["distill_loss"] == pytest.approx(0, abs=1e-5)  # nothing has changed yet: the student is the teacher
    assert lines[-1]["distill_loss"] > 1e-3
    assert "weight = 0.5" in (whole / "recipe.toml").read_text()


def test_a_teacher_keeps_the_student_near(place: Path) -> None:
    """The more it counts, the nearer the student stays; the step's own loss is the cross-entropy in every run."""
    ends = []
    for weight in (0.1, 0.9):
        run = place / f"weight-{weight}"
        pretrain(recipe(place, distill={"weight": weight, "teacher": str(place / "model")}), run)
        lines, _, _ = outcome(run)
        ends.append(lines[-1]["distill_loss"])
        assert lines[0]["loss"] == outcome(place / "weight-0.1")[0][0]["loss"]
    assert ends[1] < ends[0]


def test_what_is_refused(place: Path) -> None:
    tiny_directory(place / "other-size", vocab_size=258)
    wrong = {
        "distill.weight: 1.5 must be at least 0 and at most 1": {"weight": 1.5},
        "distill.weight: is 0, so there is no teacher": {"weight": 0.0, "top_k": 5},
        "distill.temperature: 0.0 must be above 0": {"weight": 0.5, "temperature": 0.0},
        "distill.top_k": {"weight": 0.5, "top_k": 258},
        "distill.teacher": {"weight": 0.5, "teacher": str(place / "other-size")},
    }
    for key, settings in wrong.items():
        with pytest.raises(UserError, match=f"^{key}(: |$)"):
            pretrain(
                from_dict(Recipe, recipe(place).model_dump(exclude_none=True) | {"distill": settings}),
                place / "refused",
            )
        assert not (place / "refused").exists()
    shutil.copytree(place / "model", place / "renumbered")
    file = place / "renumbered" / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    file.write_text(json.dumps(tokenizer))
    with pytest.raises(UserError, match="other numbers to tokens"):
        pretrain(recipe(place, distill={"weight": 0.5, "teacher": str(place / "renumbered")}), place / "refused")


def test_the_plan_counts_the_teacher(place: Path) -> None:
    settings = recipe(place)
    plain = make_plan(settings).memory_bytes_estimate
    settings.distill.weight = 0.5
    parameters = sum(p.numel() for p in dwindle.load(place / "model").model.parameters())
    logits = 3 * 4 * 72 * 257
    found = make_plan(settings)
    assert found.memory_bytes_estimate == plain + 4 * (parameters + 72 * 32) + logits
    assert found.teacher == str(place / "model")
    assert teacher_dtype("bf16", "cuda") == torch.bfloat16 and teacher_dtype("bf16", "cpu") == torch.float32


def test_random_weights_at_the_shape_of_the_source(place: Path) -> None:
    """The first loss is that of a model built by transformers with the same seed, and the seed decides."""
    firsts = {}
    for name, seed in (("scratch", 3), ("again", 3), ("another", 4)):
        settings = recipe(place, steps=1, random_init=True)
        settings.prune, settings.training.seed, settings.data.seed = PretrainPruneConfig(enabled=False), seed, 0
        settings.training.warmup = 0
        pretrain(settings, place / name)
        firsts[name] = json.loads((place / name / "metrics.jsonl").read_text())["loss"]
    assert firsts["scratch"] == firsts["again"] != firsts["another"]
    source = dwindle.load(place / "model").model
    torch.manual_seed(3)
    fresh = AutoModelForCausalLM.from_config(source.config)
    from dwindle.data.batches import BatchStream
    from dwindle.data.training_data import open_training_data
    from dwindle.training.loss import language_model_loss

    tokenizer = dwindle.load(place / "model").tokenizer
    data = open_training_data(settings.data, tokenizer, seed=0, cache_dir=place / "cache")
    tokens = torch.cat(BatchStream(data.mixture, tokens_per_step=96, micro_batch=4).next_step())
    expected = language_model_loss(fresh, tokens, chunk_tokens=4096).cross_entropy / 96
    assert firsts["scratch"] == pytest.approx(expected.item(), rel=1e-5)
