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
from dwindle.report.summary import summarise
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
    counts = [sum(map(len, r["indices"])) for r in lines if r["event"] == "prune"]
    assert max(counts) == 3, "an event removes a group of each of three layers"
    assert figures[0].panels[0].series[0].x == [sum(counts[: place + 1]) for place in range(5)]


def test_a_single_spike_does_not_flatten_the_loss(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=400)
    lines = records(run / "metrics.jsonl")
    lines[200]["loss"] = 1000.0
    write_lines(run / "metrics.jsonl", lines)
    panel = next(f for f in build_figures(open_run(run)) if f.id == "loss").panels[0]
    assert panel.top is not None and panel.top < 10
    assert max(max(series.y) for series in panel.series) == 1000


@pytest.mark.parametrize("at", [1, 60, 199])
@pytest.mark.parametrize("pause", [1.0, 86_400.0])
def test_time_between_stop_and_resume_does_not_count(tmp_path: Path, at: int, pause: float) -> None:
    """A resumed process begins later and counts from zero; its first step includes loading."""
    run = make_run(tmp_path / "run", steps=200)
    before = running_clock(open_run(run).metrics)
    lines = records(run / "metrics.jsonl")
    done = lines[at - 1]["time"]["running"]
    for line in lines[at:]:
        line["time"] |= {"began": line["time"]["began"] + done + pause, "running": line["time"]["running"] - done + 5}
    write_lines(run / "metrics.jsonl", lines)
    after = running_clock(open_run(run).metrics)
    assert before is not None and after is not None and not before.stops
    assert after.seconds[-1] == pytest.approx(before.seconds[-1] + 5)
    assert after.stops == pytest.approx([before.seconds[at - 1]])


def test_pauses_between_steps_count(tmp_path: Path) -> None:
    """Validation, checkpoints and compactions, which a process makes between steps."""
    run = make_run(tmp_path / "run", steps=200)
    lines = records(run / "metrics.jsonl")
    for place, line in enumerate(lines):
        line["time"]["running"] += 45.0 * (place // 20)
    write_lines(run / "metrics.jsonl", lines)
    clock = running_clock(open_run(run).metrics)
    assert clock is not None and not clock.stops
    assert clock.seconds.tolist() == pytest.approx([line["time"]["running"] for line in lines])


def test_the_distillation_loss_is_a_loss(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    lines = [{**line, "distill_loss": 0.5} for line in records(run / "metrics.jsonl")]
    write_lines(run / "metrics.jsonl", lines)
    figures = {figure.id: figure for figure in build_figures(open_run(run))}
    assert "tasks" not in figures
    panels = {panel.label.split(",")[0]: panel for panel in figures["loss"].panels}
    assert list(panels) == ["loss", "parameters", "distillation"] and "teacher" in figures["loss"].caption
    assert {value for series in panels["distillation"].series for value in series.y} == {0.5}


def test_the_sources_loss_is_a_line_from_the_first_to_the_last_token(tmp_path: Path) -> None:
    loss, *_, optimizer = build_figures(open_run(make_run(tmp_path / "run", source_loss=2.25)))
    source = next(series for series in loss.panels[0].series if series.name == "source")
    assert (source.x, source.y, source.style) == ([512, 200 * 512], [2.25, 2.25], "target")
    assert "2.250" in loss.caption and optimizer.id == "optimizer", "the loss comes first, the optimizer last"
    for figure in build_figures(open_run(make_run(tmp_path / "old"))):
        assert "source" not in {series.name for panel in figure.panels for series in panel.series}


@pytest.mark.parametrize(("factor", "unit"), [(1, "MFLOP/s"), (1e6, "TFLOP/s")])
def test_the_unit_of_speed_fits_it(tmp_path: Path, factor: float, unit: str) -> None:
    run = make_run(tmp_path / "run")
    lines = records(run / "metrics.jsonl")
    for line in lines:
        line["time"]["tokens_per_s"] = 10 * factor
        line["flops_per_token"] = 3e6
    write_lines(run / "metrics.jsonl", lines)
    panel = next(f for f in build_figures(open_run(run)) if f.id == "throughput").panels[1]
    assert panel.label == f"model {unit}" and set(panel.series[0].y) == {30}


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


def test_utilisation_is_drawn_where_it_is_written(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    lines = [{**r, "time": {**r["time"], "mfu": 0.5}} for r in records(run / "metrics.jsonl")]
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


TASK = {"task": "piqa", "title": "PIQA", "metric": "acc", "acc": 0.6, "acc_stderr": 0.011, "acc_norm": 0.62}


def evaluation(model: str, parameters: int, acc: float, **more: Any) -> str:
    """A result of ``dwindle eval`` with a task and a text."""
    text = {"name": "wikitext", "word_perplexity": 50 * acc, "bits_per_byte": 1.5 * acc, "nats_per_token": 2 * acc}
    value = {
        "format": "dwindle-eval-1",
        "model": model,
        "parameters": parameters,
        "engine": "own",
        "limit": None,
        "tasks": [{**TASK, "acc": acc, "num_items": 1838}],
        "texts": [text],
        "average": {"value": acc / 2, "acc": None},
    }
    return json.dumps(value | more)


def test_the_source_stands_beside_the_result(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    before, after = open_run(run).parameters_before, open_run(run).parameters_after
    assert before is not None and after is not None
    (run / "evaluation.json").write_text(evaluation("run/model", int(after), 0.6))
    (alone,) = [table for table in result_tables(open_run(run)) if table.id == "evaluation"]
    assert alone.columns == ["task", "metric", "score", "items"] and "dwindle eval org/source" in alone.note
    (run / "evaluation-source.json").write_text(evaluation("elsewhere", int(before), 0.7))
    scores, texts = result_tables(open_run(run))
    assert scores.columns == ["task", "metric", "source", "result", "difference", "items"]
    assert scores.rows[0] == ["PIQA", "acc", "70.00 ±\u00a01.10", "60.00 ±\u00a01.10", "-10.00", "1838"]
    assert scores.rows[1] == ["average of the seven", "", "35.00", "30.00", "-5.00", ""]
    assert "dwindle eval" not in scores.note and "elsewhere, own (evaluation-source.json)" in scores.note
    assert texts.columns == ["", "source", "result", "difference"]
    assert texts.rows[0] == ["wikitext: nats per token", "1.400", "1.200", "-0.200"]
    assert texts.rows[2] == ["wikitext: word perplexity", "35.0", "30.0", "-5.0"]


def test_generated_answers_are_shown(tmp_path: Path) -> None:
    """By their main metric, beside the other tasks or alone; these are not zero-shot."""
    run = make_run(tmp_path / "run")
    before, after = open_run(run).parameters_before, open_run(run).parameters_after
    assert before is not None and after is not None
    ifeval = {"task": "ifeval", "title": "IFEval", "metric": "inst_loose", "num_items": 477, "left_out": {}}
    for name, size, score in (("evaluation.json", after, 0.25), ("evaluation-source.json", before, 0.5)):
        one = ifeval | {"values": {"prompt_loose": 0.125, "inst_loose": score}, "stderrs": {"inst_loose": None}}
        (run / name).write_text(evaluation("m", int(size), 0.6, generated=[one], texts=[], average={}))
    (scores,) = result_tables(open_run(run))
    assert [row[0] for row in scores.rows] == ["PIQA", "IFEval"] and scores.note.startswith("In percent.")
    assert scores.rows[1] == ["IFEval", "inst_loose", "50.00", "25.00", "-25.00", "477"]
    (run / "evaluation-source.json").write_text(evaluation("m", int(before), 0.6, generated=[one], tasks=[], texts=[]))
    assert result_tables(open_run(run))[0].rows[0][2:4] == ["50.00", "25.00"]
    for odd in ([1], [ifeval], [one | {"values": {"inst_loose": "1"}}], 3):
        (run / "evaluation.json").write_text(evaluation("m", int(after), 0.6, generated=odd))
        assert "result" not in result_tables(open_run(run))[0].columns


def test_scores_of_different_limits_are_not_subtracted(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    before, after = open_run(run).parameters_before, open_run(run).parameters_after
    assert before is not None and after is not None
    (run / "evaluation.json").write_text(evaluation("run/model", int(after), 0.6, limit=100))
    (run / "evaluation-source.json").write_text(evaluation("org/source", int(before), 0.7))
    scores, _ = result_tables(open_run(run))
    assert "difference" not in scores.columns and "cannot be compared" in scores.note
    assert "source: all items" in scores.note and "result: first 100" in scores.note


def test_files_of_one_model_share_a_column(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    size = int(open_run(run).parameters_after or 0)
    other = [{**TASK, "task": "boolq", "title": "BoolQ"}]
    (run / "eval-1.json").write_text(evaluation("m", size, 0.6))
    (run / "eval-2.json").write_text(evaluation("m", size, 0.6, tasks=other, texts=[], average={}))
    scores, _ = result_tables(open_run(run))
    assert scores.columns[2:-1] == ["score"] and [row[0] for row in scores.rows[:2]] == ["PIQA", "BoolQ"]
    (run / "eval-3.json").write_text(evaluation("m", size, 0.5))
    assert result_tables(open_run(run))[0].columns[2:-1] == ["result", "result · 2"], "two measurements of one task"


def test_latency_and_results_of_other_versions(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    spread = {"median": 1.5, "low": 1.25, "high": 2.0}
    row = {"model": "m", "runtime": "torch", "threads": 1, "parameters": 10**6, "prefill_ms_per_token": spread}
    (run / "latency.json").write_text(json.dumps({"rows": [{**row, "decode_ms_per_token": spread}], "repeats": 3}))
    (latency,) = result_tables(open_run(run))
    assert latency.rows[0][:4] == ["m", "torch", "1", "1M"] and latency.rows[0][6] == "1.5 (1.25–2)"
    assert latency.note == "3 repeats. From latency.json."
    odd: list[Any] = [{"rows": [{**row, "decode_ms_per_token": spread}], "repeats": "3"}, {"rows": [row]}, {"rows": []}]
    for value in [*odd, {"format": "dwindle-eval-9", "tasks": [{"odd": 1}]}, [1, "x", {"only": None}], 3]:
        for name in ("latency.json", "evaluation.json"):
            (run / name).write_text(json.dumps(value))
        assert result_tables(open_run(run)) == []
    (run / "bench.json").write_text("{broken")
    assert result_tables(open_run(run)) == []


def test_the_verdict_comes_first(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=100, events=40, source_loss=2.0)
    found = summarise(open_run(run))
    after = records(run / "metrics.jsonl")[-1]["valid_loss"]
    assert (
        found["status"] == "finished" and f"{after - 2.0:.2f} nats per token worse than the source" in found["verdict"]
    )
    assert "(held-out.txt)" in found["verdict"] and f"perplexity 7.39 → {np.exp(after):.3g}" in found["verdict"]
    labels = ["source", "target", "result", "loss against the source", "tokens of training"]
    assert [tile["label"] for tile in found["tiles"]] == labels
    assert found["tiles"][1]["value"] == "50%" and found["tiles"][3]["value"] == f"{after - 2.0:+.2f}"
    assert found["samples"] == [
        {"prompt": "Once upon a time", "source": "there was a fox.", "result": "there was."},
    ]
    assert " in 40 prune events; the model was rebuilt at smaller shapes 2 times." in found["removed"]
    assert list(found)[4:8] == ["status_text", "verdict", "tiles", "samples"]


@pytest.mark.parametrize(("source", "tone"), [(9.0, "good"), (2.2, "fair"), (0.5, "poor")])
def test_the_difference_has_a_tone(tmp_path: Path, source: float, tone: str) -> None:
    found = summarise(open_run(make_run(tmp_path / "run", source_loss=source)))
    assert found["tiles"][3]["tone"] == tone
    assert ("better" if source == 9.0 else "worse") + " than the source" in found["verdict"]


def test_a_run_without_the_sources_loss_says_so(tmp_path: Path) -> None:
    found = summarise(open_run(make_run(tmp_path / "run")))
    assert found["verdict"].endswith("The source was not measured on the same text.") and found["samples"] == []
    assert "loss against the source" not in [tile["label"] for tile in found["tiles"]]


def test_a_running_run_is_judged_so_far(tmp_path: Path) -> None:
    found = summarise(open_run(make_run(tmp_path / "run", events=10, finished=False, source_loss=2.0)))
    assert "is not reached yet" in found["verdict"] and found["verdict"].endswith(" so far.")
    assert found["tiles"][2]["label"] == "so far" and found["samples"][0]["result"] is None


def test_a_missed_target_is_said(tmp_path: Path) -> None:
    found = summarise(open_run(make_run(tmp_path / "run", missed=True)))
    assert found["status_text"] == "finished, target missed" and found["status"] == "missed"
    assert "The target of 50% was missed." in found["verdict"] and found["removed"].startswith("Removed: ")


def test_the_papers_cost_is_shown_on_request(tmp_path: Path) -> None:
    run = open_run(make_run(tmp_path / "run"))
    assert summarise(run)["cost"] is None
    assert summarise(run, published=True)["cost"]["rows"][0][-1].endswith(" s")
