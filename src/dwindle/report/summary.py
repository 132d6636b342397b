"""The content of the report page as one JSON object."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from typing import Any

from dwindle import __version__
from dwindle.core.run_directory import MODELS
from dwindle.core.sizes import format_range
from dwindle.report.architecture import ArchitectureView
from dwindle.report.figures import build_figures
from dwindle.report.results import result_tables
from dwindle.report.run import Run
from dwindle.report.tables import cost_table
from dwindle.report.verdict import removed, tiles, verdict


def summarise(run: Run, *, published: bool = False) -> dict[str, Any]:
    """The page's data; contains no time stamps, so that an unchanged run gives the same object.

    ``published`` adds the run's cost beside that of the paper.
    """
    view, is_whole = run.architecture, run.never_prunes or (run.status in MODELS and not len(run.ledger.prunes))
    cost = cost_table(run) if published else None
    quality = run.quality
    return {
        "format": 2,
        "version": __version__,
        "name": run.name,
        "status": "missed" if run.target_missed else run.status,
        "status_text": _status_text(run),
        "verdict": verdict(run),
        "tiles": [asdict(tile) for tile in tiles(run)],
        "samples": [] if quality is None else [asdict(sample) for sample in quality.samples if sample.source],
        "removed": removed(run),
        "missing": run.missing(),
        "figures": [asdict(figure) for figure in build_figures(run)],
        "architecture": None if view is None or is_whole else _architecture(view),
        "tables": [asdict(table) for table in result_tables(run)],
        "cost": None if cost is None else asdict(cost),
        "recipe": run.recipe_text,
    }


def encode(summary: dict[str, Any]) -> bytes:
    """Compact JSON."""
    return json.dumps(summary, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def fingerprint(encoded: bytes) -> str:
    return hashlib.sha256(encoded).hexdigest()[:32]


def _status_text(run: Run) -> str:
    if run.status == "pruned" and run.ledger.trimmed is not None and not len(run.ledger.prunes):
        return "trimmed, not pruned"
    if run.status == "pruned":
        return "model of a run" if any(run.ledger.prunes.tokens) else "pruned without training"
    if run.status == "unpruned":
        return "not pruned"
    if run.target_missed:
        return "finished, target missed"
    return "stopped, can be resumed" if run.status == "stopped" else run.status


def _architecture(view: ArchitectureView) -> dict[str, Any]:
    layers = view.layers
    left = [la for la in layers if "attn" not in la.absent], [la for la in layers if "mlp" not in la.absent]
    queries = [len(la.kv_of_query) for la in layers], [la.queries_after for la in left[0]] or [0]
    ffn = [la.ffn_before for la in layers], [la.ffn_after for la in left[1]] or [0]
    kv = [la.kv_before for la in layers], [la.kv_after for la in left[0]] or [0]
    totals = [
        ["hidden channels", f"{view.hidden_before:,}", f"{view.hidden_after:,}"],
        ["query heads per layer", format_range(queries[0]), format_range(queries[1])],
        ["key/value heads per layer", format_range(kv[0]), format_range(kv[1])],
        ["FFN channels per layer", format_range(ffn[0]), format_range(ffn[1])],
    ]
    if any(la.absent for la in layers):
        totals.append(["layers", f"{len(layers)}", f"{sum(not la.is_gone for la in layers)}"])
        if partly := sum(len(la.absent) == 1 for la in layers):
            totals.append(["of these without attention or FFN", "0", f"{partly}"])
    if any(kv[0]):
        totals.append(["key/value cache", "100%", f"{sum(kv[1]) / sum(kv[0]):.0%}"])
    return {
        **view.to_json(),
        "regular": all(la.is_regular for la in layers),
        "totals": totals,
    }
