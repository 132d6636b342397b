"""Source and result on held-out text, against plain transformers: in a run, after a resume, and without training."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console

import dwindle
from dwindle.core.quality import Quality, read_quality
from dwindle.core.run_directory import RunDirectory
from dwindle.data.text_windows import calibration_windows, validation_windows
from dwindle.recipe.recipe import Recipe
from dwindle.report.runs import list_runs, render_runs
from dwindle.run.pretrain import pretrain, resume
from dwindle.training.callbacks import Callback
from dwindle.training.sampling import NEW_TOKENS
from runs import metrics, tiny_recipe
from tiny import tiny_tokenizer


def recipe(place: Path, **tables: dict[str, Any]) -> Recipe:
    valid = {"valid": ["pydoc:valid"], "valid_tokens": 480}
    prune = {"target": "60%", "horizon": 0.5}
    return tiny_recipe(place, steps=6, **{"data": valid, "prune": prune, "checkpoint": {"every": 2}} | tables)


def plain_loss(model: Any, windows_NT: torch.Tensor) -> float:
    with torch.no_grad():
        logits = model(input_ids=windows_NT[:, :-1]).logits
    return float(F.cross_entropy(logits.flatten(0, 1).double(), windows_NT[:, 1:].flatten()))


def plain_sample(model: Any, prompt: str) -> str:
    """By transformers' own generation."""
    tokenizer = tiny_tokenizer()
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    found = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=0, pad_token_id=0)
    return str(tokenizer.decode(found[0, ids.shape[1] :], skip_special_tokens=True))


def assert_judged(quality: Quality, source: Any, result: Any, windows_NT: torch.Tensor) -> None:
    assert quality.tokens == windows_NT[:, 1:].numel()
    assert quality.source_loss == pytest.approx(plain_loss(source, windows_NT), rel=1e-5)
    assert quality.result_loss == pytest.approx(plain_loss(result, windows_NT), rel=1e-5)
    assert len(quality.samples) == 2
    for sample in quality.samples:
        assert sample.prompt and sample.source == plain_sample(source, sample.prompt)
        assert sample.result == plain_sample(result, sample.prompt)


def test_a_run_knows_its_source(place: Path) -> None:
    run = place / "run"
    result = pretrain(recipe(place), run)
    source, model = (dwindle.load(path).model for path in (place / "model", run / "model"))
    windows_NT = validation_windows(["pydoc:valid"], tiny_tokenizer(), 24, 480)
    quality = RunDirectory(run).read_quality()
    assert quality is not None and quality == result.quality == read_quality(run / "model" / "quality.json")
    assert_judged(quality, source, model, windows_NT)
    lines = metrics(run)
    assert [line.get("source_valid_loss") for line in lines] == [quality.source_loss, *[None] * 4, quality.source_loss]
    assert lines[-1]["valid_loss"] == quality.result_loss
    (row,) = list_runs(run)
    assert row.source_valid_loss == quality.source_loss and row.valid_loss == quality.result_loss
    shown = io.StringIO()
    Console(file=shown, width=160).print(render_runs([row]))
    assert "to source" in shown.getvalue() and f"{quality.change:+.4f}" in shown.getvalue()
    before, after = round(quality.source_loss, 3), round(quality.result_loss, 3)
    assert quality.losses() == f"source {before:.3f} → {after:.3f} ({after - before:+.3f})"


class StopAt3(Callback):
    def after_step(self, trainer: Any) -> None:
        if trainer.step == 3:
            trainer.stop.request()


def test_a_stopped_run_keeps_its_source_and_ends_alike(place: Path) -> None:
    whole, parts = place / "whole", place / "parts"
    pretrain(recipe(place), whole)
    assert pretrain(recipe(place), parts, callbacks=[StopAt3()]).status == "stopped"
    begun = RunDirectory(parts).read_quality()
    assert begun is not None and begun.source_loss is not None and begun.result_loss is None
    assert all(sample.source is not None and sample.result is None for sample in begun.samples)
    resume(parts, callbacks=[StopAt3()])
    assert (parts / "quality.json").read_bytes() == (whole / "quality.json").read_bytes()
    assert metrics(parts) == metrics(whole)


def test_judging_changes_no_weight(place: Path) -> None:
    """Neither validation nor samples draw random numbers or leave a trace in the model."""
    with_text, without = place / "with", place / "without"
    pretrain(recipe(place), with_text)
    pretrain(recipe(place, data={}), without)
    quality = RunDirectory(without).read_quality()
    assert quality is not None and quality.losses() == "" and all(sample.result for sample in quality.samples)
    ours, theirs = (path / "model" / "model.safetensors" for path in (with_text, without))
    assert ours.read_bytes() == theirs.read_bytes()


def test_pruning_measures_on_text_it_was_not_calibrated_on(place: Path) -> None:
    sizes: dict[str, Any] = {"num_sequences": 4, "seq_len": 32, "seed": 0}
    windows, held_out = calibration_windows(["pydoc"], tiny_tokenizer(), num_held_out=8, **sizes)
    assert torch.equal(windows, calibration_windows(["pydoc"], tiny_tokenizer(), **sizes)[0])
    assert held_out.shape == (8, 32) and not {tuple(w.tolist()) for w in windows} & {
        tuple(w.tolist()) for w in held_out
    }
    pruned = dwindle.prune(place / "model", "60%", sequences=4, seq_len=32, out=place / "pruned")
    quality = RunDirectory(place / "pruned").read_quality()
    assert quality is not None and quality == pruned.quality and quality.held_out
    _, held_out = calibration_windows(["pydoc"], tiny_tokenizer(), num_held_out=128, **sizes)
    assert_judged(quality, dwindle.load(place / "model").model, pruned.model, held_out)
    assert json.loads(json.dumps(pruned.to_json()))["quality"]["source_loss"] == quality.source_loss


def test_a_short_text_is_measured_and_says_so(place: Path) -> None:
    text = place / "short.txt"
    text.write_text("Little text. " * 20)
    pruned = dwindle.prune(place / "model", "60%", sequences=16, seq_len=32, data=[str(text)])
    assert pruned.quality is not None and not pruned.quality.held_out and pruned.quality.text == ["short.txt"]
    unmeasured = dwindle.prune(place / "model", "60%", sequences=16, seq_len=32, data=[str(text)], measure=False)
    assert unmeasured.quality is None and unmeasured.structure == pruned.structure
