"""The content of the report page as one JSON object."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from dwindle import __version__
from dwindle.core.figure import plain
from dwindle.core.sizes import format_count, format_range
from dwindle.report.architecture import ArchitectureView
from dwindle.report.figures import NAMES, build_figures
from dwindle.report.results import result_tables
from dwindle.report.run import Run
from dwindle.report.tables import cost_of, cost_table
from dwindle.report.target import target_count


def summarise(run: Run) -> dict[str, Any]:
    """The page's data; contains no time stamps, so that an unchanged run gives the same object."""
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
    """The run in one sentence or two."""
    before, after = run.parameters_before, run.parameters_after
    source = run.source_name or "the source"
    if before is None or after is None:
        return f"A run of {source}." if run.source_name else ""
    tokens = run.metrics.last("tokens")
    trained = f" over {format_count(tokens)} tokens of training" if tokens else ""
    goal = target_count(run.recipe, run.ledger.source)
    sizes = f"from {format_count(before)} to {format_count(after)} parameters"
    parts = _what_was_removed(run)
    removed = f" Removed: {parts}." if parts else ""
    if goal is not None and after > goal and run.status != "finished":
        return f"{source}, pruned {sizes}{trained} so far; the target is {format_count(goal)}.{removed}"
    if after == before:
        return f"{source} with {format_count(after)} parameters, not pruned{trained}."
    missed = f" The target of {run.target} was missed." if run.target_missed else ""
    return f"{source}, pruned {sizes}{trained}.{removed}{missed}"


def _what_was_removed(run: Run) -> str:
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
        parts.append(f"{_rounded(ffn)} of {_rounded(view.total('ffn') / num)} FFN channels")
    alike = len({(la.queries_after, la.ffn_after) for la in view.layers}) == 1
    in_each = f"{_and(parts)} in {'each layer' if alike else 'each layer on average'}" if parts else ""
    stem = f"{hidden:,} of {view.hidden_before:,} hidden channels" if hidden else ""
    return " and ".join(part for part in (in_each, stem) if part)


def _rounded(value: float) -> str:
    return f"{value:,.1f}".removesuffix(".0")


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
    """Such as ``3 d 4 h``, ``2 h 05 min`` or ``41 s``."""
    minutes, hours = divmod(round(seconds), 60)[0], round(seconds) // 3600
    if hours >= 48:
        return f"{hours // 24} d {hours % 24} h"
    if hours:
        return f"{hours} h {minutes % 60:02d} min"
    return f"{minutes} min {round(seconds) % 60:02d} s" if minutes else f"{seconds:.3g} s"


def _architecture(view: ArchitectureView) -> dict[str, Any]:
    layers = view.layers
    queries = [len(la.kv_of_query) for la in layers], [la.queries_after for la in layers]
    ffn = [la.ffn_before for la in layers], [la.ffn_after for la in layers]
    kv_before: list[int] = [la.kv_before for la in layers if la.kv_before is not None]
    kv_after = [la.kv_after for la in layers]
    known = len(kv_before) == len(layers)
    totals = [
        ["hidden channels", f"{view.hidden_before:,}", f"{view.hidden_after:,}"],
        ["query heads per layer", format_range(queries[0]), format_range(queries[1])],
        ["key/value heads per layer", format_range(kv_before) if known else "unknown", format_range(kv_after)],
        ["FFN channels per layer", format_range(ffn[0]), format_range(ffn[1])],
    ]
    if known and any(kv_before):
        totals.append(["key/value cache", "100%", f"{sum(kv_after) / sum(kv_before):.0%}"])
    return {
        **view.to_json(),
        "regular": all(la.is_regular for la in layers),
        "totals": totals,
        "found_in": view.found_in,
    }
