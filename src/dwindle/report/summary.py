"""Everything the page says about a run, as one JSON object; the page only draws it."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from dwindle import __version__
from dwindle.core.figure import plain
from dwindle.core.sizes import format_count
from dwindle.report.architecture import ArchitectureView
from dwindle.report.figures import NAMES, build_figures
from dwindle.report.results import result_tables
from dwindle.report.run import Run
from dwindle.report.tables import cost_of, cost_table
from dwindle.report.target import target_count


def summarise(run: Run) -> dict[str, Any]:
    """The page's data; free of the time of day, so that an unchanged run gives the same object."""
    view = run.architecture
    cost = cost_table(run)
    return {
        "format": 1,
        "version": __version__,
        "name": run.name,
        "status": "missed" if run.target_missed else run.status,
        "status_text": _status_text(run),
        "story": _story(run),
        "tiles": _tiles(run),
        "missing": run.missing(),
        "figures": [plain(figure) for figure in build_figures(run)],
        "architecture": None if view is None else _architecture(view),
        "tables": [plain(table) for table in result_tables(run)],
        "cost": None if cost is None else plain(cost),
        "recipe": run.recipe_text,
    }


def encode(summary: dict[str, Any]) -> bytes:
    """Compact JSON."""
    return json.dumps(summary, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def fingerprint(encoded: bytes) -> str:
    return hashlib.sha256(encoded).hexdigest()[:32]


def _status_text(run: Run) -> str:
    if run.status == "pruned":
        return "model of a run" if any(run.ledger.prunes.tokens) else "pruned without training"
    if run.status == "unpruned":
        return "not pruned"
    if run.target_missed:
        return "finished, target missed"
    return "stopped, can be resumed" if run.status == "stopped" else run.status


def _story(run: Run) -> str:
    """The run in one or two sentences."""
    before, after = run.parameters_before, run.parameters_after
    source = run.source_name or "the source"
    if before is None or after is None:
        return f"A run of {source}." if run.source_name else ""
    tokens = run.metrics.last("tokens")
    trained = f" {format_count(tokens)} tokens of training" if tokens else ""
    goal = target_count(run.recipe, run.ledger.source)
    start = f"The {format_count(before)} parameters of {source}"
    parts = _what_left(run)
    removed = f": {parts} were removed." if parts else "."
    if goal is not None and after > goal and run.status != "finished":
        so_far = f"{format_count(after)} are left" + (f" after{trained}" if trained else "")
        return f"{start} are on their way to {format_count(goal)}; {so_far}{removed}"
    missed = f" The target of {run.target} was missed." if run.target_missed else ""
    return f"{start} became {format_count(after)}" + (f" over{trained}" if trained else "") + removed + missed


def _what_left(run: Run) -> str:
    view = run.architecture
    if view is None or not view.layers:
        parts = [f"{n:,} {NAMES[kind]}" for kind in NAMES if (n := run.ledger.num_gone(kind))]
        return _and(parts)
    num = len(view.layers)
    heads, ffn = run.ledger.num_gone("attn") / num, run.ledger.num_gone("ffn") / num
    hidden = run.ledger.num_gone("stem")
    parts = []
    if heads:
        parts.append(f"{heads:.3g} of {view.total('attn') / num:.4g} attention heads")
    if ffn:
        parts.append(f"{_whole(ffn)} of {_whole(view.total('ffn') / num)} FFN channels")
    alike = len({(la.queries_after, la.ffn_after) for la in view.layers}) == 1
    in_each = f"{_and(parts)} in {'each layer' if alike else 'a layer on average'}" if parts else ""
    stem = f"{hidden:,} of {view.hidden_before:,} hidden channels" if hidden else ""
    return " and ".join(part for part in (in_each, stem) if part)


def _whole(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:,.1f}"


def _and(parts: list[str]) -> str:
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def _tiles(run: Run) -> list[dict[str, str]]:
    tiles = []
    before, after = run.parameters_before, run.parameters_after
    if before and after:
        note = f"{after / before:.1%} of {format_count(before)}"
        if run.target:
            note += f", target {run.target}"
        tiles.append({"label": "parameters", "value": format_count(after), "note": note})
    tokens, step = run.metrics.last("tokens"), run.metrics.last("step")
    if tokens is not None and step is not None:
        tiles.append({"label": "tokens", "value": format_count(tokens), "note": f"{step:,.0f} steps"})
    events = len(run.ledger.prunes)
    if events:
        compactions = len(run.ledger.compactions)
        note = f"{compactions} compaction{'' if compactions == 1 else 's'}"
        tiles.append({"label": "prune events", "value": f"{events:,}", "note": note})
    loss, valid = run.metrics.last("loss"), run.metrics.last("valid_loss")
    if valid is not None:
        note = "" if loss is None else f"train {loss:.4f}"
        tiles.append({"label": "validation loss", "value": f"{valid:.4f}", "note": note})
    elif loss is not None:
        tiles.append({"label": "train loss", "value": f"{loss:.4f}", "note": "nats per token"})
    cost = cost_of(run)
    if cost is not None:
        devices = "1 device" if cost.num_devices == 1 else f"{cost.num_devices} devices"
        tiles.append(
            {"label": "running time", "value": duration(cost.hours * 3600 / cost.num_devices), "note": devices}
        )
    return tiles


def duration(seconds: float) -> str:
    """``3 d 4 h``, ``2 h 05 min``, ``41 s``."""
    minutes, hours = divmod(round(seconds), 60)[0], round(seconds) // 3600
    if hours >= 48:
        return f"{hours // 24} d {hours % 24} h"
    if hours:
        return f"{hours} h {minutes % 60:02d} min"
    return f"{minutes} min {round(seconds) % 60:02d} s" if minutes else f"{seconds:.3g} s"


def _architecture(view: ArchitectureView) -> dict[str, Any]:
    layers = view.layers
    queries = [len(la.kv_of_query) for la in layers], [la.queries_after for la in layers]
    kv_before: list[int] = [la.kv_before for la in layers if la.kv_before is not None]
    kv_after = [la.kv_after for la in layers]
    known = len(kv_before) == len(layers)
    totals = [
        ["hidden channels", f"{view.hidden_before:,}", f"{view.hidden_after:,}"],
        ["query heads in a layer", _span(queries[0]), _span(queries[1])],
        ["key/value heads in a layer", _span(kv_before) if known else "?", _span(kv_after)],
        ["FFN channels in a layer", _span([la.ffn_before for la in layers]), _span([la.ffn_after for la in layers])],
    ]
    if known:
        totals.append(["key/value cache", "100%", f"{sum(kv_after) / sum(kv_before):.0%}"])
    return {
        **view.to_json(),
        "regular": all(la.is_regular for la in layers),
        "totals": totals,
        "found_in": view.found_in,
    }


def _span(values: list[int]) -> str:
    """One number where all layers agree, else from the least to the most."""
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
