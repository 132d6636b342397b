"""The figure of layers: parameters before and after as the models themselves have them."""

from __future__ import annotations

from pathlib import Path

import pytest

import dwindle
from dwindle.report.figures import build_figures
from dwindle.report.run import open_run
from tiny import tiny_directory


def test_parameters_and_importance_of_every_layer(tmp_path: Path) -> None:
    tiny_directory(tmp_path / "model")
    options = {"method": "adapt", "rounds": 3, "amplitude": 0.1, "num_sequences": 2, "seq_len": 16}
    result = dwindle.prune(tmp_path / "model", "70%", out=tmp_path / "out", **options)  # type: ignore[arg-type]
    figure = next(figure for figure in build_figures(open_run(str(tmp_path / "out"))) if figure.id == "layers")
    for series, model in zip(
        figure.panels[0].series, (dwindle.load(tmp_path / "model").model, result.model), strict=True
    ):
        assert series.y == [sum(p.numel() for p in layer.parameters()) for layer in model.model.layers]
    allocated = [event["importance"] for event in result.ledger if event["event"] == "allocation"]
    first, last = figure.panels[1].series
    assert first.y == pytest.approx(allocated[0]) and last.y == pytest.approx(allocated[-1])
