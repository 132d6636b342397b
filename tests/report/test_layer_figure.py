"""The figure of layers: parameters before and after as the models themselves have them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import dwindle
from dwindle.report.figure import Figure
from dwindle.report.figures import build_figures
from dwindle.report.run import open_run
from dwindle.report.summary import summarise
from tiny import tiny_directory


def figure_named(run: Path, name: str) -> Figure:
    return next(figure for figure in build_figures(open_run(str(run))) if figure.id == name)


def test_book_keeping_is_no_evaluation(tmp_path: Path) -> None:
    """FLOPs of a token change with the model's size, but nobody measured them in the loop."""
    line = {"step": 1, "tokens": 64, "loss": 3.0, "flops_per_token": 850e6, "time": {"seconds": 1.0}}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    (tmp_path / "recipe.toml").write_text("")
    assert "tasks" not in {figure.id for figure in build_figures(open_run(str(tmp_path)))}


def test_parameters_and_importance_of_every_layer(tmp_path: Path) -> None:
    tiny_directory(tmp_path / "model")
    options = {"method": "adapt", "rounds": 3, "amplitude": 0.1, "num_sequences": 2, "seq_len": 16}
    result = dwindle.prune(tmp_path / "model", "70%", out=tmp_path / "out", **options)  # type: ignore[arg-type]
    figure = figure_named(tmp_path / "out", "layers")
    for series, model in zip(
        figure.panels[0].series, (dwindle.load(tmp_path / "model").model, result.model), strict=True
    ):
        assert series.y == [sum(p.numel() for p in layer.parameters()) for layer in model.model.layers]
    assert figure_named(tmp_path / "out", "saliency").caption.endswith("every layer loses the weakest of its own.")
    assert summarise(open_run(str(tmp_path / "out")))["architecture"]["regular"]  # each layer by itself
    allocated = [event["importance"] for event in result.ledger if event["event"] == "allocation"]
    first, last = figure.panels[1].series
    assert first.y == pytest.approx(allocated[0]) and last.y == pytest.approx(allocated[-1])
