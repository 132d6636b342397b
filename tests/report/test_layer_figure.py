"""The figure of layers: parameters before and after as the models themselves have them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import dwindle
from dwindle.core.figure import Figure
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
    options = {"method": "adapt", "rounds": 3, "amplitude": 0.1, "sequences": 2, "seq_len": 16}
    result = dwindle.prune(tmp_path / "model", "70%", out=tmp_path / "out", **options)  # type: ignore[arg-type]
    figure = figure_named(tmp_path / "out", "layers")
    for series, model in zip(
        figure.panels[0].series, (dwindle.load(tmp_path / "model").model, result.model), strict=True
    ):
        assert series.y == [sum(p.numel() for p in layer.parameters()) for layer in model.model.layers]
    assert figure_named(tmp_path / "out", "saliency").caption.endswith(
        "each layer removes its own least salient groups."
    )
    assert summarise(open_run(str(tmp_path / "out")))["architecture"]["regular"]  # each layer by itself
    allocated = [event["importance"] for event in result.ledger if event["event"] == "allocation"]
    first, last = figure.panels[1].series
    assert first.y == pytest.approx(allocated[0]) and last.y == pytest.approx(allocated[-1])


def test_layers_that_are_alike_need_no_figure(tmp_path: Path) -> None:
    tiny_directory(tmp_path / "model")
    options = {"sequences": 2, "seq_len": 16}
    dwindle.prune(tmp_path / "model", "70%", out=tmp_path / "out", **options)  # type: ignore[arg-type]
    run = open_run(str(tmp_path / "out"))
    assert run.architecture is not None and len(set(run.architecture.parameters)) == 1
    assert "layers" not in {figure.id for figure in build_figures(run)}


def test_layers_have_whole_numbers(tmp_path: Path) -> None:
    """The ticks of five layers were 0 0 1 2 2 2 3 4 4."""
    pytest.importorskip("matplotlib", reason="extra [plots] is not installed")
    from dwindle.core.drawing import write_figure
    from dwindle.core.figure import Panel, Series

    panel = Panel("parameters", "count", [Series("before", "valid", list(range(5)), [9, 9, 8, 8, 7], "dots")])
    figure = Figure("layers", "Layer by layer", "", "layer", "count", [panel])
    _, drawn = write_figure(figure, tmp_path)
    ticks = [text for text in re.findall(r">(\d+)</text>", drawn.read_text()) if int(text) < 5]
    assert ticks == ["0", "1", "2", "3", "4"]


def test_a_line_that_is_alone_is_named_where_its_panel_is_not() -> None:
    from dwindle.core.figure import Panel, Series

    lines = {name: Series(name, "train", [0], [1]) for name in ("train", "learning rate", "speed (mean of 3)")}
    assert Panel("loss, nats per token", "number", [lines["train"]]).named == [lines["train"]]
    assert Panel("learning rate", "number", [lines["learning rate"]]).named == []
    assert Panel("speed", "number", [lines["speed (mean of 3)"]]).named == []
    assert len(Panel("speed", "number", list(lines.values())).named) == 3
    assert Panel("speed", "number", list(lines.values()), legend=False).named == []
