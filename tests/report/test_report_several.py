"""Several runs side by side: one figure, and what makes them different."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from made_runs import make_run

from dwindle.report.overlay import overlay
from dwindle.report.run import open_run
from dwindle.report.runs import list_runs, render_runs
from dwindle.report.settings import different_settings, short_settings

PLAIN = '[source]\nmodel = "org/source"\n[prune]\ntarget = "50%"\nmethod = "efficientllm"\n[distill]\nweight = 0.0\n'


def test_settings_that_differ() -> None:
    first = {"prune.method": "efficientllm", "distill.weight": 0.0, "training.lr": 0.001, "only": 1}
    second = {"prune.method": "adapt", "distill.weight": 0.75, "training.lr": 0.001}
    found = different_settings([first, second])
    assert found == [
        {"prune.method": "efficientllm", "distill.weight": 0.0},
        {"prune.method": "adapt", "distill.weight": 0.75},
    ]
    assert [short_settings(one) for one in found] == ["efficientllm", "adapt, distilled 0.75"]
    assert different_settings([first]) == [{}]
    paced = [{"source.model": "m", "prune.ratio": "1:2"}, {"source.model": "m", "prune.method": "adapt"}]
    assert different_settings(paced)[0] == {"prune.ratio": "1:2"}  # which the other recipe leaves open
    assert short_settings({"training.seed": 0, "prune.second_order": False}, with_off=True) == "seed 0, no second order"
    many = {f"training.k{i}": i + 1 for i in range(9)}
    assert short_settings(many).endswith("k4 5 and 4 more")


def test_runs_say_how_they_differ(tmp_path: Path) -> None:
    make_run(tmp_path / "a", recipe=PLAIN)
    make_run(tmp_path / "b", recipe=PLAIN.replace("0.0", "0.75"))
    make_run(tmp_path / "c", recipe=PLAIN, missed=True)
    rows = {row.run: row for row in list_runs(tmp_path)}
    assert {name: row.settings for name, row in rows.items()} == {
        "a": {"distill.weight": 0.0},
        "b": {"distill.weight": 0.75},
        "c": {"distill.weight": 0.0},
    }
    assert {name: row.status for name, row in rows.items()} == {"a": "finished", "b": "finished", "c": "target missed"}


def test_a_metric_that_only_the_ledger_names(tmp_path: Path) -> None:
    make_run(tmp_path / "a", recipe=PLAIN)
    make_run(tmp_path / "b", recipe=PLAIN.replace("[distill]", 'metric = "wanda"\n[distill]'))
    assert [row.settings for row in list_runs(tmp_path)] == [{"prune.metric": "taylor"}, {"prune.metric": "wanda"}]


def test_one_figure_of_several_runs(tmp_path: Path) -> None:
    runs = [
        open_run(make_run(tmp_path / "x" / "run", steps=200, recipe=PLAIN)),
        open_run(make_run(tmp_path / "y" / "run", steps=100, recipe=PLAIN.replace("0.0", "0.75"), seed=1)),
    ]
    figure = overlay(runs)
    assert figure.x_label == "tokens"
    assert [panel.label for panel in figure.panels] == [
        "train loss, nats per token",
        "validation loss, nats per token",
        "parameters",
    ]
    for panel in figure.panels:
        assert [series.name for series in panel.series] == ["x/run", "y/run"]
        assert len({series.color for series in panel.series}) == 2
    assert figure.caption.splitlines() == ["x/run: no distillation", "y/run: distilled 0.75"]
    assert figure.panels[1].series[0].y[-1] == pytest.approx(runs[0].metrics.last("valid_loss"), rel=1e-4)


def test_figures_and_pages_of_several_runs_as_typed(shell, tmp_path: Path) -> None:
    make_run(tmp_path / "a", recipe=PLAIN)
    make_run(tmp_path / "b", recipe=PLAIN.replace("0.0", "0.75"))
    code, out, err = shell("report", "a", "b")
    assert code == 2 and out == "" and err.count("\n") == 1
    assert "one run" in err and "dwindle plot a b --out DIR" in err and "dwindle runs" in err
    (tmp_path / "c").mkdir()
    pytest.importorskip("matplotlib", reason="extra [plots] is not installed")
    code, out, err = shell("plot", "a", "b", "--out", "plots", "--dpi", "50", "--json")
    assert code == 0 and json.loads(out)["files"] == ["figures.json", "overlay.png", "overlay.svg"], err
    assert set(json.loads((tmp_path / "plots" / "figures.json").read_text())) == {"overlay"}
    code, _, err = shell("plot", "a", "c", "--out", "more")
    assert code == 2 and "c: has no recipe.toml" in err
    code, _, err = shell("plot", "a", "a", "--out", "more")
    assert code == 2 and "a: is given twice" in err
    for name in "defghij":
        make_run(tmp_path / name, steps=2, events=1)
    code, _, err = shell("plot", *"abdefghij", "--out", "more")
    assert code == 2 and "9 runs: a figure can show at most 8" in err


def test_the_table_of_runs_as_typed(shell, tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "a", recipe=PLAIN)
    make_run(tmp_path / "runs" / "b", recipe=PLAIN.replace("0.0", "0.75"), missed=True)
    code, out, _ = shell("runs")
    assert code == 0 and "target missed" in out and "distilled" in out and "differs in" in out
    rows = json.loads(shell("runs", "--json")[1])
    assert rows[1]["settings"] == {"distill.weight": 0.75} and rows[1]["status"] == "target missed"


def test_a_setting_of_one_run_only_is_shown(tmp_path: Path) -> None:
    """Most runs leave it open, so that there is nothing usual to say below the table."""
    for name in "abc":
        make_run(tmp_path / name, recipe=PLAIN)
    make_run(tmp_path / "b", recipe=PLAIN.replace("[distill]", 'ratio = "1:2"\n[distill]'))
    table = render_runs(list_runs(tmp_path))
    assert [column.header for column in table.columns][-1] == "differs in"
    assert list(table.columns[-1].cells) == ["", "ratio 1:2", ""]


def test_long_lines_of_a_ledger_are_read(tmp_path: Path) -> None:
    """A pruned directory has one event, which may be longer than the end of the file that is looked at first."""
    run = make_run(tmp_path / "a", recipe=PLAIN)
    (run / "metrics.jsonl").unlink()
    first = {"event": "source", "source": "s", "parameters": 1000, "options": {"note": "x" * 300_000}}
    prune = {"event": "prune", "parameters": 600, "removed": "x" * 2_000_000}
    lines = [first, prune, {"event": "compact"}]
    (run / "ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (row,) = list_runs(tmp_path)
    assert (row.source_parameters, row.parameters) == (1000, 600)
