"""Several runs side by side: one figure, and what makes them different."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from made_runs import make_run, write_lines
from rich.table import Table

from dwindle.report.overlay import overlay
from dwindle.report.run import Run, open_run
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
    assert [short_settings(one) for one in found] == ["efficientllm, no distillation", "adapt, distilled 0.75"]
    assert different_settings([first]) == [{}]
    paced = [{"source.model": "m", "prune.ratio": "1:2"}, {"source.model": "m", "prune.method": "adapt"}]
    assert different_settings(paced)[0] == {"prune.ratio": "1:2"}  # which the other recipe leaves open
    assert short_settings({"training.seed": 0, "prune.second_order": False}) == "seed 0, no second order"
    assert [short_settings({"prune.enabled": on}) for on in (True, False)] == ["pruning", "no pruning"]
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


def test_what_a_recipe_leaves_open_is_no_difference(tmp_path: Path) -> None:
    """The ledger says what it was: ``dwindle prune`` writes no recipe, and all options."""
    one, other = (make_run(tmp_path / name, recipe=PLAIN) for name in ("a", "b"))
    for run in (one, other):
        lines = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]
        lines[0]["options"] = {"method": "adapt", "metric": "taylor", "groups": ["attn", "ffn"], "seed": 3}
        write_lines(run / "ledger.jsonl", lines)
    (other / "recipe.toml").unlink()
    assert all(not {"prune.groups", "prune.seed"} & set(row.settings) for row in list_runs(tmp_path))


def test_a_metric_that_only_the_ledger_names(tmp_path: Path) -> None:
    make_run(tmp_path / "a", recipe=PLAIN)
    make_run(tmp_path / "b", recipe=PLAIN.replace("[distill]", 'metric = "wanda"\n[distill]'))
    assert [row.settings for row in list_runs(tmp_path)] == [{"prune.metric": "taylor"}, {"prune.metric": "wanda"}]


def two_runs(place: Path, **more: Any) -> list[Run]:
    return [
        open_run(make_run(place / "x" / "run", steps=200, recipe=PLAIN, **more)),
        open_run(make_run(place / "y" / "run", steps=100, recipe=PLAIN.replace("0.0", "0.75"), seed=1, **more)),
    ]


def test_one_figure_of_several_runs(tmp_path: Path) -> None:
    runs = two_runs(tmp_path)
    figure = overlay(runs)
    assert figure.x_label == "tokens"
    assert [panel.label for panel in figure.panels] == ["validation loss, nats per token", "parameters"]
    for panel in figure.panels:
        assert [series.name for series in panel.series] == ["x/run", "y/run"]
        assert len({series.color for series in panel.series}) == 2
    assert figure.caption.splitlines() == ["x/run: no distillation", "y/run: distilled 0.75"]
    assert figure.panels[0].series[0].y[-1] == pytest.approx(runs[0].metrics.last("valid_loss"), rel=1e-4)


def test_few_validations_leave_the_train_loss(tmp_path: Path) -> None:
    runs = two_runs(tmp_path)
    lines = [json.loads(line) for line in runs[1].directory.metrics.read_text().splitlines()]
    for line in lines[:-1]:
        line.pop("valid_loss", None)
    write_lines(runs[1].directory.metrics, lines)
    panels = overlay([runs[0], open_run(runs[1].folder)]).panels
    assert [panel.label.split(" loss")[0] for panel in panels] == ["validation", "train", "parameters"]
    assert [panel.legend for panel in panels] == [True, True, False]  # the source's line has its name


def test_a_model_that_was_not_trained_has_no_curve(tmp_path: Path) -> None:
    """It neither adds a panel nor takes the names from the others."""
    runs = two_runs(tmp_path, source_loss=1.0)
    runs[1].directory.metrics.unlink()
    validation, parameters = overlay([runs[0], open_run(runs[1].folder)]).panels
    assert [series.name for series in validation.named] == ["x/run", "untouched source"] and not parameters.named


def test_the_line_of_the_largest_source(tmp_path: Path) -> None:
    """A run that trains a pruned model calls that one its source."""
    runs = two_runs(tmp_path, source_loss=1.5)
    small = {"hidden": 8, "layers": 1, "heads": 2, "kv": 1, "ffn": 4}
    later = open_run(make_run(tmp_path / "z", shape=small, events=2, recipe=PLAIN, source_loss=4.0))
    figure = overlay([later, *runs], ["pruned first", "", "teacher"])
    *curves, source = figure.panels[0].series
    assert [series.name for series in curves] == ["pruned first", "x/run", "teacher"] and figure.caption == ""
    assert (source.name, source.y, source.x[-1]) == ("untouched source", [1.5, 1.5], 200 * 512)


def test_curves_that_begin_high_do_not_flatten_the_rest(tmp_path: Path) -> None:
    runs = two_runs(tmp_path)
    lines = [json.loads(line) for line in runs[0].directory.metrics.read_text().splitlines()]
    lines[9]["valid_loss"] = 50.0
    write_lines(runs[0].directory.metrics, lines)
    panel = overlay([open_run(runs[0].folder), runs[1]]).panels[0]
    late = [y for series in panel.series for x, y in zip(series.x, series.y, strict=True) if x >= series.x[-1] / 4]
    assert panel.top is not None and max(late) < panel.top < 10 and max(panel.series[0].y) == 50.0


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
    code, out, err = shell("plot", "one=a", "the other=b", "--out", "named", "--dpi", "50")
    drawn = json.loads((tmp_path / "named" / "figures.json").read_text())["overlay"]
    assert code == 0 and [line["name"] for line in drawn["panels"][0]["series"]] == ["one", "the other"]
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
    (table,) = render_runs(list_runs(tmp_path)).renderables
    assert isinstance(table, Table) and [column.header for column in table.columns][-1] == "differs in"
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


def test_names_stand_apart_at_the_ends_of_lines(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="extra [plots] is not installed")
    from dwindle.core.drawing import draw, pyplot_settings

    figure = overlay(two_runs(tmp_path, source_loss=1.0), ["first", "second"])
    with pyplot_settings() as pyplot:
        drawn = draw(pyplot, figure)
        places = {text.get_text(): text.get_position() for text in drawn.axes[0].texts}
        low, high = drawn.axes[0].get_ylim()
        pyplot.close(drawn)
    assert set(places) == {"first", "second", "untouched source"} and {x for x, _ in places.values()} == {1.01}
    heights = sorted(y for _, y in places.values())
    assert all(above - below > 0.05 * (high - low) for below, above in pairwise(heights))
    assert places["untouched source"][1] == 1.0
