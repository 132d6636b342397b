"""The studies of evaluation and quantization, on a tiny model: one JSON with everything that they promise."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from eval_sets import DOCUMENTS, write_sets

import dwindle
from tiny import tiny_directory

STUDIES = Path(__file__).resolve().parents[2] / "studies"


def run_study(name: str, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.syspath_prepend(str(STUDIES))  # as for a script
    spec = importlib.util.spec_from_file_location(f"study_{name}", STUDIES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--device", "cpu", *arguments])
    module.main()


def test_both_engines_item_by_item(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lm_eval", reason="pip install 'lm_eval==0.4.13'")
    model, sets, out = tiny_directory(tmp_path / "model"), write_sets(tmp_path / "sets"), tmp_path / "out"
    options = ["--tasks", "piqa,arc_easy", "--engine", "both", "--model", str(model), "--data", str(sets)]
    run_study("evaluate_seven", monkeypatch, *options, "--out", str(out), "--tolerance", "1e-30")
    written = (out / "results.json").read_text()
    assert str(tmp_path) not in written and '"where": "piqa' in written
    found = json.loads(written)["comparison"]["float32"]
    assert found["num_items"] == len(DOCUMENTS["piqa"]) + len(DOCUMENTS["arc_easy"])
    assert found["largest_difference"] < 1e-4 and found["accuracies_identical"]
    assert found["num_answered_differently"] == 0
    assert set(found["accuracies"]) == {"piqa", "arc_easy"}
    expected = dwindle.evaluate(model, ["arc_easy"], data=[str(sets)]).tasks[0]
    assert found["accuracies"]["arc_easy"]["acc_norm"] == {"harness": expected.acc_norm, "dwindle": expected.acc_norm}
    assert found["seconds"]["harness"] > 0 and found["seconds"]["dwindle"] > 0
    listed: list[dict[str, Any]] = found["beyond_tolerance"]
    assert len(listed) == min(20, found["num_beyond_tolerance"])
    assert all(max(abs(a - b) for a, b in zip(e["harness"], e["dwindle"], strict=True)) > 0 for e in listed)


def test_quantization_on_a_whole_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 30)
    model = tiny_directory(tmp_path / "model")
    options = ["--model", str(model), "--valid", str(text), "--seq-len", "64", "--out", str(tmp_path / "out")]
    run_study("quantize_wikitext", monkeypatch, *options)
    found = json.loads((tmp_path / "out" / "quantization.json").read_text())
    num_tokens = len(text.read_text())  # bytes are tokens here
    assert num_tokens - 64 <= found["tokens"] <= num_tokens
    perplexity = found["schemes"]["w8a8"]["perplexity"]
    assert set(perplexity) == {"source", "plain", "quantized"}
    change = found["schemes"]["w8a8"]["against_source"]
    assert change["source"] == 0 and change["plain"] == pytest.approx(perplexity["plain"] / perplexity["source"] - 1)
