"""Reading runs that grow, were cut off, or come from other versions."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from made_runs import make_run, write_lines

import dwindle
from dwindle.core.errors import UserError
from dwindle.core.names import public_name
from dwindle.core.sizes import format_count
from dwindle.report import verdict
from dwindle.report.architecture import architecture_of
from dwindle.report.jsonlines import GrowingJsonLines
from dwindle.report.logs import KINDS, LedgerLog, MetricsLog
from dwindle.report.run import open_run
from dwindle.report.runs import list_runs
from dwindle.report.summary import summarise
from tiny import merged_directory


def records(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lines_are_handed_out_once_and_only_whole(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log = GrowingJsonLines(path)
    assert log.read() == (False, [])
    path.write_bytes(b'{"a": 1}\n{"a": 2')
    assert log.read() == (False, [{"a": 1}])
    assert log.unfinished
    with path.open("ab") as file:
        file.write(b'2}\n\n[3]\nnonsense\n{"a": 4}\n')
    assert log.read() == (False, [{"a": 22}, {"a": 4}])
    assert log.num_bad == 2 and not log.unfinished
    assert log.read() == (False, [])


def test_a_file_that_was_cut_back_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n{"a": 3}\n')
    log = GrowingJsonLines(path)
    log.read()
    path.write_text('{"a": 1}\n')
    assert log.read() == (True, [{"a": 1}])
    path.write_text('{"a": 1}\n{"b": 2}\n')
    assert log.read() == (False, [{"b": 2}])
    path.write_text('{"a": 1}\n{"c": 2}\n{"c": 3}\n')  # longer than before, but not what was read before
    assert log.read() == (True, [{"a": 1}, {"c": 2}, {"c": 3}])
    path.unlink()
    assert log.read() == (True, [])


def test_bytes_of_any_kind_do_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'\xff\xfe\x00\n{"a": 1}\n' + b"[" * 100_000 + b'\n{"a": "1},{"}\n{"x": 1},{"y": 2}\n')
    log = GrowingJsonLines(path)
    assert log.read() == (False, [{"a": 1}, {"a": "1},{"}])
    assert log.num_bad == 3


def test_metrics_columns_equal_a_loop(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=120)
    log = MetricsLog(run / "metrics.jsonl")
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:50]))
    log.refresh()
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(lines[50:])
    log.refresh()
    rows = list(map(json.loads, lines))
    for name in ("loss", "valid_loss", "parameters"):
        wanted = [(place, row[name]) for place, row in enumerate(rows) if name in row]
        column = log.column(name)
        assert list(zip(column.rows.tolist(), column.values.tolist(), strict=True)) == wanted
    assert log.column("time.compaction").values.tolist() == [r["time"]["compaction"] for r in rows if "compacted" in r]
    assert log.last("tokens") == rows[-1]["tokens"] and log.last("nothing") is None


def test_metrics_of_other_versions(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    odd = [{"loss": 1.0}, {"step": "1", "tokens": 2}, {"step": 1, "tokens": None}]
    good = [
        {"step": 1, "tokens": 10, "loss": None, "note": "text", "time": 3, "list": [1, 2], "big": 10**400},
        {"step": 2, "tokens": 20, "loss": 2.5, "skipped": True, "time": {"seconds": 1.5}},
    ]
    write_lines(path, odd + good)
    log = MetricsLog(path)
    log.refresh()
    assert (log.num_rows, log.num_odd) == (2, 3)
    assert log.column("loss").rows.tolist() == [1] and log.column("skipped").values.tolist() == [1.0]
    assert log.last("time.seconds") == 1.5


def test_ledger_counts_equal_a_loop(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=100, events=30)
    log = LedgerLog(run / "ledger.jsonl")
    log.refresh()
    events = [r for r in records(run / "ledger.jsonl") if r["event"] == "prune"]
    assert len(log.prunes) == 30
    for kind in KINDS:
        gone = sum(len(layer) for e in events if e["type"] == kind for layer in e["indices"])
        assert log.num_gone(kind) == gone
    assert log.prunes.parameters.tolist() == [e["parameters"] for e in events]
    assert log.prunes.saliency[1].tolist() == [e["saliency"]["ffn"] for e in events]
    assert [c.sizes["ffn"] for c in log.compactions] == [
        [r["ffn"]] for r in records(run / "ledger.jsonl") if r["event"] == "compact"
    ]


def test_ledger_of_other_versions(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    prune = {"event": "prune", "step": 1, "tokens": 5, "type": "ffn", "indices": [[1]], "parameters": 7}
    odd = [
        {"event": "teleport"},
        {"no": "event"},
        {**prune, "type": "token"},
        {**prune, "indices": [["a"]]},
        {**prune, "indices": 3},
        {**prune, "parameters": None},
    ]
    write_lines(path, [*odd, prune, {**prune, "indices": [[2]], "saliency": {"ffn": None, "attn": "high"}}])
    log = LedgerLog(path)
    log.refresh()
    assert log.num_odd == len(odd) and len(log.prunes) == 2 and log.gone["ffn"] == [{1, 2}]
    assert np.isnan(log.prunes.saliency[0]).all()


def test_what_is_left_is_the_source_without_what_was_removed(tmp_path: Path) -> None:
    """Also before the result, or any checkpoint, is written."""
    shape = {"hidden": 32, "layers": 3, "heads": 9, "kv": 3, "ffn": 40}
    run = make_run(tmp_path / "run", steps=100, events=70, shape=shape)
    left = json.loads((run / "model" / "structure.json").read_text())
    ledger = LedgerLog(run / "ledger.jsonl")
    ledger.refresh()
    view = architecture_of(ledger, {})
    assert view is not None and not view.parameters
    assert (view.hidden_before, view.hidden_after) == (32, len(left["hidden"]))
    for layer_view, layer in zip(view.layers, left["layers"], strict=True):
        assert layer_view.kv_of_query == [q // 3 for q in range(9)]
        assert sorted(set(range(9)) - set(layer_view.gone_queries)) == layer["query_heads"]
        assert (layer_view.kv_before, layer_view.kv_after) == (3, len(layer["kv_heads"]))
        assert (layer_view.ffn_before, layer_view.ffn_after) == (40, len(layer["ffn"]))
    assert [view.total(kind) for kind in KINDS] == [27, 120, 32, 6]


@pytest.mark.parametrize(
    "damage",
    [
        {"layer_kv_of_query": [[0] * 8]},
        {"layer_kv_of_query": [[0]] * 3},
        {"layer_ffn": [1] * 3},
        {"layer_ffn": 3},
        {"hidden": 10**400},
        {"hidden": "many"},
        {"hidden": None},
    ],
)
def test_sizes_that_do_not_fit_the_events_are_not_shown(tmp_path: Path, damage: dict) -> None:
    run = make_run(tmp_path / "run", steps=100, events=70)
    lines = records(run / "ledger.jsonl")
    write_lines(run / "ledger.jsonl", [lines[0] | damage, *lines[1:]])
    found = summarise(open_run(run))
    assert found["architecture"] is None and found["missing"] == [
        "ledger.jsonl does not begin with the source's sizes: the architecture cannot be shown."
    ]


def test_whole_layers_and_blocks_are_drawn_as_gone(tmp_path: Path) -> None:
    """Layer 1 is gone, layer 2 has lost its FFN; their sizes are those of the other layers."""
    full = {"query_heads": [0, 1, 2, 3], "kv_heads": [0, 1], "kv_of_query": [0, 0, 1, 1], "ffn": [0, 1, 2]}
    none = {"query_heads": [], "kv_heads": [], "kv_of_query": [], "ffn": [], "absent": ["attn", "mlp"]}
    layers = [full, none, full | {"ffn": [], "absent": ["mlp"]}]
    structure = {"format": 1, "hidden": [0, 1], "layers": layers, "layer_parameters": [9, 0, 5]}
    (tmp_path / "structure.json").write_text(json.dumps(structure))
    sizes = {"hidden": 2, "layer_kv_of_query": [[0, 0, 1, 1]] * 3, "layer_ffn": [3] * 3, "layer_parameters": [9] * 3}
    first = {"event": "source", "format": 1, "source": "tiny", "parameters": 40, **sizes}
    prune = {"event": "prune", "step": 1, "tokens": 0, "type": "layer", "saliency": {"layer": 0.5}}
    influence = {"event": "allocation", "step": 1, "importance": [0.3, None, 0.2], "sparsity": [0, 1, 0]}
    removed = [{"indices": [[], [0, 1], []], "parameters": 31}, {"indices": [[], [], [1]], "parameters": 27}]
    write_lines(tmp_path / "ledger.jsonl", [first, influence, *(prune | one for one in removed)])
    run = open_run(tmp_path)
    view = run.architecture
    assert view is not None and [la.absent for la in view.layers] == [(), ("attn", "mlp"), ("mlp",)]
    assert [(la.queries_after, la.ffn_before, la.ffn_after) for la in view.layers] == [(4, 3, 3), (0, 3, 0), (4, 3, 0)]
    found = summarise(run)
    totals = found["architecture"]["totals"]
    assert ["layers", "3", "2"] in totals and ["of these without attention or FFN", "0", "1"] in totals
    assert ["query heads per layer", "4", "4"] in totals and ["FFN channels per layer", "3", "3"] in totals
    assert "1 of 3 layers" in verdict.removed(run) and "the attention or the FFN of 1 layer" in verdict.removed(run)
    assert {figure["id"] for figure in found["figures"]} >= {"saliency", "share", "layers"}


def test_what_is_missing_is_said_and_the_rest_is_shown(tmp_path: Path) -> None:
    whole = make_run(tmp_path / "whole")
    assert open_run(whole).missing() == []
    no_ledger = make_run(tmp_path / "no_ledger")
    (no_ledger / "ledger.jsonl").unlink()
    found = summarise(open_run(no_ledger))
    assert any("ledger.jsonl is missing" in line for line in found["missing"])
    assert [figure["id"] for figure in found["figures"]] == ["loss", "throughput", "optimizer"]
    no_metrics = make_run(tmp_path / "no_metrics", recipe=None)
    (no_metrics / "metrics.jsonl").unlink()
    found = summarise(open_run(no_metrics))
    assert [figure["id"] for figure in found["figures"]] == ["saliency", "share"]
    assert any("metrics.jsonl is missing" in line for line in found["missing"])
    assert any("recipe.toml" in line for line in found["missing"])
    cut = make_run(tmp_path / "cut", finished=False)
    for name in ("ledger.jsonl", "metrics.jsonl"):
        data = (cut / name).read_bytes()
        (cut / name).write_bytes(b"garbage\n" + data[: len(data) - 9])
    found = summarise(open_run(cut))
    text = " ".join(found["missing"])
    assert (
        text.count("skipped 1 line that could not be parsed") == 2 and text.count("ends with an incomplete line") == 2
    )
    assert len(found["figures"]) == 5 and found["architecture"] is not None


def test_empty_files_and_empty_runs(tmp_path: Path) -> None:
    for name in ("ledger.jsonl", "metrics.jsonl", "recipe.toml"):
        (tmp_path / name).touch()
    found = summarise(open_run(tmp_path))
    assert found["figures"] == [] and found["tiles"] == [] and found["status"] == "stopped"
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"has no recipe\.toml"):
        open_run(tmp_path / "empty")
    with pytest.raises(UserError, match="is not a directory"):
        open_run(tmp_path / "recipe.toml")


def test_names_of_sources() -> None:
    assert public_name("/home/someone/models/small/") == "small"
    assert public_name("org/name") == "org/name" and public_name("smollm2-135m") == "smollm2-135m"


def test_a_run_that_does_not_prune_misses_nothing(tmp_path: Path) -> None:
    first, run = tmp_path / "first", tmp_path / "tuned"
    (first / "model").mkdir(parents=True)
    for name in ("recipe.toml", "metrics.jsonl"):
        (first / name).touch()
    (run / "model").mkdir(parents=True)
    (run / "recipe.toml").write_text(f"[source]\nmodel = '{first / 'model'}'\n[prune]\nenabled = false\n")
    write_lines(run / "metrics.jsonl", [{"step": 1, "tokens": 64, "loss": 2.0, "learned_tokens": 30}])
    found = summarise(open_run(run))
    assert found["missing"] == [] and found["verdict"] == "A run of first."
    write_lines(run / "model" / "ledger.jsonl", [{"event": "source", "source": "first", "parameters": 1000}])
    (run / "model" / "config.json").write_text("{}")
    found = summarise(open_run(run))
    assert found["verdict"] == "first with 1k parameters, not pruned."
    assert found["missing"] == [] and found["architecture"] is None
    assert [figure["id"] for figure in found["figures"]] == ["loss"]
    (row,) = list_runs(run)
    assert (row.source, row.source_parameters, row.parameters) == ("first", 1000, 1000)


def test_a_trimmed_model_is_not_the_source(tmp_path: Path) -> None:
    """Its size, its tokens and what they cost, on the page and in the table of runs; nothing of it was pruned."""
    trimmed = dwindle.trim(merged_directory(tmp_path / "first"), 384, out=tmp_path / "fewer")
    run, quality = open_run(tmp_path / "fewer"), trimmed.quality
    found = summarise(run)
    before, after = trimmed.before.total, trimmed.after.total
    assert quality is not None and run.parameters_after == after
    share = f"{after / before:.1%} of its size: {format_count(after)} of {format_count(before)} parameters"
    assert found["verdict"] == (
        f"first at {share}, 384 of 640 tokens. On held-out text (pydoc:valid): {quality.bits()}."
    )
    assert [(tile["label"], tile["value"]) for tile in found["tiles"]] == [
        ("source", format_count(before)),
        ("result", format_count(after)),
        ("vocabulary", "384"),
        ("bits per byte", quality.bits().partition("(")[2][:-1]),
    ]
    assert (found["status_text"], found["architecture"], found["removed"]) == ("trimmed, not pruned", None, "")
    assert [(row.parameters, row.status) for row in list_runs(tmp_path / "fewer")] == [(after, "trimmed")]
    odd = ['"kept": 3, "parameters": 1', '"kept": [[0, 1e400]], "parameters": 1', '"kept": [], "parameters": NaN']
    with (tmp_path / "fewer" / "ledger.jsonl").open("a") as file:
        file.writelines(f'{{"event": "vocabulary", "rows": 640, {values}}}\n' for values in odd)
    (line,) = open_run(tmp_path / "fewer").missing()
    assert "skipped 3 lines of an unknown kind" in line
