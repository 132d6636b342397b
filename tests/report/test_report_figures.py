"""The numbers in the figures and tables, against simple loops."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_runs import make_run, write_lines

from dwindle.report.clock import running_clock
from dwindle.report.figures import build_figures
from dwindle.report.results import result_tables
from dwindle.report.run import open_run
from dwindle.report.summary import duration, summarise
from dwindle.report.tables import PUBLISHED_COST, cost_of, cost_table
from dwindle.report.thinning import moving_mean, rounded, thin, thin_steps


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_thinning_keeps_extremes_ends_and_order() -> None:
    chance = np.random.default_rng(0)
    for size in (1, 2, 999, 1000, 1001, 12_345, 100_000):
        y = chance.normal(size=size)
        y[size // 3] = 1e6
        y[size // 2] = -1e6
        kept = thin(y, 1000)
        assert len(kept) <= 1002 and kept[0] == 0 and kept[-1] == size - 1
        assert (np.diff(kept) > 0).all()
        assert y[kept].max() == y.max() and y[kept].min() == y.min()
    assert len(thin(np.zeros(0), 10)) == 0


def test_steps_are_thinned_at_their_changes() -> None:
    y = np.repeat([5.0, 3.0, 2.0], [10, 1, 20])
    assert thin_steps(y, 100).tolist() == [0, 10, 11, 30]
    assert len(thin_steps(np.zeros(0), 10)) == 0


def test_moving_mean_equals_a_loop() -> None:
    y = np.random.default_rng(1).normal(size=57)
    for window in (1, 2, 5, 8, 100):
        loop = []
        for i in range(len(y)):
            around = [j for j in range(i - window // 2, i + (window + 1) // 2) if 0 <= j < len(y)]
            loop.append(y[around].mean())
        np.testing.assert_allclose(moving_mean(y, window), loop, atol=1e-12)


def test_short_numbers() -> None:
    assert rounded(np.array([3.0, 0.123456789, 1e-7, 1234567.0])) == [3, 0.12346, 1e-07, 1234567]


def test_pruned_share_and_saliency_equal_a_loop(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=100, events=40)
    events = [r for r in records(run / "ledger.jsonl") if r["event"] == "prune"]
    figures = {figure.id: figure for figure in build_figures(open_run(run))}
    totals = {"attn": 3 * 8, "ffn": 3 * 40, "stem": 32}
    for series in figures["share"].panels[0].series:
        for x, y in zip(series.x, series.y, strict=True):
            gone = sum(
                len(layer) for e in events if e["type"] == series.color and e["tokens"] <= x for layer in e["indices"]
            )
            last_of_token = [p for p in zip(series.x, series.y, strict=True) if p[0] == x][-1]
            if last_of_token == (x, y):
                assert y == pytest.approx(100 * gone / totals[series.color], rel=1e-4)
    for series in figures["saliency"].panels[0].series:
        assert series.x == [e["tokens"] for e in events]
        assert series.y == pytest.approx([e["saliency"][series.color] for e in events], rel=1e-4)
    loss = figures["loss"]
    assert [mark.x for mark in loss.marks] == [
        r["tokens"] for r in records(run / "ledger.jsonl") if r["event"] == "compact"
    ]
    assert sum(len(rug.x) for rug in loss.rugs) == len({(e["type"], e["tokens"]) for e in events})
    sizes = loss.panels[1].series[0]
    assert sizes.y[-1] == events[-1]["parameters"] and sizes.y[0] == records(run / "ledger.jsonl")[0]["parameters"]


def test_without_training_the_axis_counts_groups(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=10, events=5, finished=False, recipe=None)
    (run / "metrics.jsonl").unlink()
    lines = [{**r, "tokens": 0} if r["event"] == "prune" else r for r in records(run / "ledger.jsonl")]
    write_lines(run / "ledger.jsonl", [r for r in lines if r["event"] != "compact"])
    figures = build_figures(open_run(run))
    assert [figure.x_label for figure in figures] == ["groups removed"] * 2
    assert figures[0].panels[0].series[0].x == [1, 2, 3, 4, 5]


def test_a_single_spike_does_not_flatten_the_loss(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=400)
    lines = records(run / "metrics.jsonl")
    lines[200]["loss"] = 1000.0
    write_lines(run / "metrics.jsonl", lines)
    panel = next(f for f in build_figures(open_run(run)) if f.id == "loss").panels[0]
    assert panel.top is not None and panel.top < 10
    assert max(max(series.y) for series in panel.series) == 1000


def test_time_between_stop_and_resume_does_not_count(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=100)
    before = running_clock(open_run(run))
    lines = records(run / "metrics.jsonl")
    for line in lines[60:]:
        line["time"]["wall"] += 86_400
    write_lines(run / "metrics.jsonl", lines)
    after = running_clock(open_run(run))
    assert before is not None and after is not None and not before.stops
    assert after.seconds[-1] == pytest.approx(before.seconds[-1], rel=1e-3)
    assert after.stops == pytest.approx([after.seconds[59]])


def shifted(run: Path, *, at: int, seconds: float) -> None:
    """As if the run had been stopped for so long before the record in this place."""
    lines = records(run / "metrics.jsonl")
    for line in lines[at:]:
        line["time"]["wall"] += seconds
    write_lines(run / "metrics.jsonl", lines)


@pytest.mark.parametrize("at", [60, 100])  # in the middle, and after a checkpoint, from which a killed run goes on
def test_a_short_stop_does_not_count_either(tmp_path: Path, at: int) -> None:
    """A user's run of 15 seconds, stopped and resumed half a minute later, had a running time of 38 seconds."""
    recipe = '[source]\nmodel = "org/source"\n\n[checkpoint]\nevery = 20\n'
    run = make_run(tmp_path / "run", steps=200, recipe=recipe)
    before = running_clock(open_run(run))
    shifted(run, at=at, seconds=22)
    after = running_clock(open_run(run))
    assert before is not None and after is not None
    assert after.seconds[-1] == pytest.approx(before.seconds[-1], rel=1e-3)
    assert after.stops == pytest.approx([after.seconds[at - 1]])


def test_what_belongs_to_the_run_counts(tmp_path: Path) -> None:
    """Validation and checkpoints take time that no column names; both come again and again."""
    recipe = '[source]\nmodel = "org/source"\n\n[checkpoint]\nevery = 20\n'
    run = make_run(tmp_path / "run", steps=200, recipe=recipe)
    before = running_clock(open_run(run))
    lines = records(run / "metrics.jsonl")
    late = 0.0
    for place, line in enumerate(lines):
        late += 30.0 * ("valid_loss" in line) + 45.0 * (place > 0 and place % 20 == 0)
        line["time"]["wall"] += late
    write_lines(run / "metrics.jsonl", lines)
    after = running_clock(open_run(run))
    assert before is not None and after is not None and not after.stops
    assert after.seconds[-1] == pytest.approx(before.seconds[-1] + late, rel=1e-3)


def test_a_stop_keeps_the_pauses_that_are_named(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=100)
    lines = records(run / "metrics.jsonl")
    at = next(place for place, line in enumerate(lines) if "compaction" in line["time"])
    plain = sum(line["time"]["seconds"] for line in lines)
    shifted(run, at=at, seconds=86_400)
    clock = running_clock(open_run(run))
    assert clock is not None and clock.seconds[-1] == pytest.approx(plain + 0.8, rel=1e-3)


def test_the_distillation_loss_is_a_loss(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    lines = [{**line, "distill_loss": 0.5} for line in records(run / "metrics.jsonl")]
    write_lines(run / "metrics.jsonl", lines)
    figures = {figure.id: figure for figure in build_figures(open_run(run))}
    assert "tasks" not in figures
    named = {series.name.split(" (")[0] for series in figures["loss"].panels[0].series}
    assert named == {"train", "validation", "distillation"} and "teacher" in figures["loss"].caption


def test_cost_equals_a_loop(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=100, events=40)
    lines = records(run / "metrics.jsonl")
    for line in lines:
        line["time"]["devices"] = 8
    write_lines(run / "metrics.jsonl", lines)
    last = max(r["tokens"] for r in records(run / "ledger.jsonl") if r["event"] == "prune")
    pruning = sum(r["time"]["seconds"] for r in lines if r["tokens"] <= last)
    later = sum(r["time"]["seconds"] for r in lines if r["tokens"] > last)
    cost = cost_of(open_run(run))
    assert cost is not None and cost.num_devices == 8
    assert cost.pruning_hours == pytest.approx(8 * pruning / 3600, rel=1e-3)
    assert cost.later_hours == pytest.approx(8 * later / 3600, rel=1e-3)
    assert (cost.pruning_tokens, cost.later_tokens) == (last, lines[-1]["tokens"] - last)
    table = cost_table(open_run(run))
    assert table is not None and len(table.rows) == 1 + len(PUBLISHED_COST)
    assert all(len(row) == len(table.columns) for row in table.rows)
    assert all(row[0].startswith("published") for row in table.rows[1:])


@pytest.mark.parametrize("key", ["utilisation", "mfu"])
def test_utilisation_is_drawn_where_it_is_written(tmp_path: Path, key: str) -> None:
    run = make_run(tmp_path / "run")
    lines = [{**r, "time": {**r["time"], key: 0.5}} for r in records(run / "metrics.jsonl")]
    write_lines(run / "metrics.jsonl", lines)
    figure = next(f for f in build_figures(open_run(run)) if f.id == "throughput")
    assert figure.panels[1].label == "utilisation" and set(figure.panels[1].series[0].y) == {50}
    assert ", 0.8 s" in figure.marks[0].text


def test_what_callbacks_measure_becomes_a_figure(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    lines = records(run / "metrics.jsonl")
    for line in lines[9::10]:
        line |= {"tasks/arc_easy": 0.4 + line["step"] / 1000, "tasks/wikitext": 1.5}
    write_lines(run / "metrics.jsonl", lines)
    figure = next(f for f in build_figures(open_run(run)) if f.id == "tasks")
    assert [[series.name for series in panel.series] for panel in figure.panels] == [["arc_easy"], ["wikitext"]]
    assert len(figure.panels[0].series[0].x) == 20 and figure.panels[0].series[0].y[-1] == 60


def test_result_files_of_several_shapes(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run / "evaluation.json").write_text(json.dumps({"tasks": {"piqa": {"acc": 0.61}, "boolq": {"acc": 0.5, "n": 9}}}))
    (run / "model" / "latency.json").write_text(json.dumps({"rows": [{"model": "a", "ms": {"decode": 1.25}}]}))
    (run / "bench.json").write_text("{broken")
    (run / "eval-list.json").write_text(json.dumps([1, "x", {"only": None}]))
    tables = result_tables(open_run(run))
    assert [(t.title, t.columns) for t in tables] == [
        ("Evaluation", ["only"]),
        ("Evaluation", ["", "acc", "n"]),
        ("Latency", ["model", "ms decode"]),
    ]
    assert tables[1].rows == [["piqa", "0.61", ""], ["boolq", "0.5", "9"]] and tables[2].rows == [["a", "1.25"]]


def test_our_own_result_files_are_shown_in_their_columns(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    task = {"task": "piqa", "title": "PIQA", "metric": "acc", "acc": 0.6123, "acc_stderr": 0.011, "acc_norm": 0.62}
    found = {
        "format": "dwindle-eval-1",
        "model": "m",
        "engine": "own",
        "tasks": [{**task, "num_items": 1838, "num_skipped": 0}],
        "texts": [{"name": "wikitext", "word_perplexity": 30.25, "bits_per_byte": 0.9}],
        "average": {"value": 0.5, "acc": None},
    }
    (run / "evaluation.json").write_text(json.dumps(found))
    spread = {"median": 1.5, "low": 1.25, "high": 2.0}
    row = {"model": "m", "runtime": "torch", "threads": 1, "parameters": 10**6, "prefill_ms_per_token": spread}
    (run / "latency.json").write_text(json.dumps({"rows": [{**row, "decode_ms_per_token": spread}], "repeats": 3}))
    scores, texts, latency = result_tables(open_run(run))
    assert scores.rows[0] == ["PIQA", "acc", "61.23", "1.10", "61.23", "62.00", "1,838", "0"]
    assert scores.rows[1][:3] == ["average of the seven", "", "50.00"] and "m, own" in scores.note
    assert (texts.title, texts.rows[0][:3]) == ("Perplexity", ["wikitext", "30.25", "0.9"])
    assert latency.rows[0][:4] == ["m", "torch", "1", "1M"] and latency.rows[0][6] == "1.5 (1.25–2)"
    assert latency.note == "3 repeats. From latency.json."
    (run / "evaluation.json").write_text(json.dumps({"format": "dwindle-eval-9", "tasks": [{"odd": 1}]}))
    assert result_tables(open_run(run))[0].rows == [["1"]]


def test_story_and_tiles(tmp_path: Path) -> None:
    found = summarise(open_run(make_run(tmp_path / "run", steps=100, events=40)))
    assert found["status"] == "finished" and ", pruned from " in found["story"]
    assert [tile["label"] for tile in found["tiles"]] == [
        "parameters",
        "tokens",
        "prune events",
        "validation loss",
        "running time",
    ]
    assert found["tiles"][2]["value"] == "40" and "target 50%" in found["tiles"][0]["note"]


def test_a_missed_target_is_said(tmp_path: Path) -> None:
    found = summarise(open_run(make_run(tmp_path / "run", missed=True)))
    assert found["status_text"] == "finished, target missed" and found["status"] == "missed"
    assert " Removed: " in found["story"] and found["story"].endswith("The target of 50% was missed.")


def test_durations() -> None:
    assert [duration(s) for s in (0.5, 59, 61, 3700, 200_000)] == [
        "0.5 s",
        "59 s",
        "1 min 01 s",
        "1 h 01 min",
        "2 d 7 h",
    ]
