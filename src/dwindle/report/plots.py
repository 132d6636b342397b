"""``dwindle plot``: the figures of a report as PNG and SVG files."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from dwindle.core.drawing import COLORS, WIDTH_IN, draw, pyplot_settings, save
from dwindle.core.errors import UserError
from dwindle.core.figure import Figure, plain
from dwindle.core.files import atomic_directory
from dwindle.core.progress import track
from dwindle.report.architecture import ArchitectureView, LayerView
from dwindle.report.figures import build_figures
from dwindle.report.overlay import overlay
from dwindle.report.run import Run

MARKER = "figures.json"


def write_plots(run: Run, out: str | os.PathLike[str], *, dpi: int = 200, overwrite: bool = False) -> list[str]:
    """Every figure of the run as ``<name>.png`` and ``<name>.svg``; the data of all of them in ``figures.json``."""
    figures = build_figures(run)
    if not figures and run.architecture is None:
        raise UserError(f"{run.folder}: nothing to draw yet: neither steps nor prune events were written")
    return _write(figures, run.architecture, out, dpi, overwrite)


def write_overlay(
    runs: Sequence[Run], out: str | os.PathLike[str], *, dpi: int = 200, overwrite: bool = False
) -> list[str]:
    """Several runs in one figure, ``overlay``, with the settings that differ below it."""
    return _write([overlay(runs)], None, out, dpi, overwrite)


def _write(
    figures: list[Figure], view: ArchitectureView | None, out: str | os.PathLike[str], dpi: int, overwrite: bool
) -> list[str]:
    if not 30 <= dpi <= 1200:
        raise UserError(f"--dpi {dpi}: must be between 30 and 1200")
    with pyplot_settings() as pyplot, atomic_directory(Path(out), marker=MARKER, overwrite=overwrite) as folder:
        for figure in track(figures, "drawing figures", len(figures)):
            save(pyplot, draw(pyplot, figure), folder, figure.id, dpi)
        if view is not None:
            save(pyplot, _draw_architecture(pyplot, view), folder, "architecture", dpi)
        data = {figure.id: plain(figure) for figure in figures}
        data |= {} if view is None else {"architecture": view.to_json()}
        (folder / MARKER).write_text(json.dumps(data), encoding="utf-8")
        return sorted(path.name for path in folder.iterdir())


def _draw_architecture(pyplot: Any, view: ArchitectureView) -> Any:
    """Query heads grouped by key/value head on the left, FFN widths on the right, a row per layer."""
    layers = view.layers
    drawn, (left, right) = pyplot.subplots(
        1, 2, sharey=True, figsize=(WIDTH_IN, 1.3 + 0.17 * len(layers)), width_ratios=(1.2, 1), layout="constrained"
    )
    for place, layer in enumerate(layers):
        _draw_heads(left, layer, place)
    rows = list(range(len(layers)))
    right.barh(rows, [la.ffn_before for la in layers], color=COLORS["lost"], height=0.7, label="removed")
    right.barh(rows, [la.ffn_after for la in layers], color=COLORS["ffn"], height=0.7, label="kept")
    right.set_title("FFN channels", loc="left", fontsize=9)
    left.set_title("query heads, grouped by key/value head", loc="left", fontsize=9)
    left.set_ylabel("layer")
    left.set_ylim(len(layers) - 0.4, -0.6)
    left.set_xticks([])
    for axis in (left, right):
        axis.grid(visible=False)
    title = f"Architecture before and after: hidden {view.hidden_before:,} → {view.hidden_after:,}"
    drawn.suptitle(title, x=0.01, ha="left", fontweight="bold")
    return drawn


def _draw_heads(axis: Any, layer: LayerView, place: int) -> None:
    rectangle = import_module("matplotlib.patches").Rectangle
    gone = set(layer.gone_queries)
    x, last = 0.0, layer.kv_of_query[0] if layer.kv_of_query else None
    starts: dict[int | None, list[float]] = {}
    alive: set[int | None] = set()
    for query, kv in enumerate(layer.kv_of_query):
        x += 0.4 if kv != last else 0.0
        last = kv
        kept = query not in gone
        face: dict[str, Any] = {"facecolor": COLORS["attn"]}
        if not kept:
            face = {"facecolor": "none", "edgecolor": "#a8a49b", "linewidth": 0.6}
        axis.add_patch(rectangle((x + 0.08, place - 0.38), 0.84, 0.56, **face))
        starts.setdefault(kv, []).append(x)
        if kept:
            alive.add(kv)
        x += 1.0
    for kv, places in starts.items():
        color = COLORS["kv"] if kv in alive else COLORS["lost"]
        axis.plot([places[0] + 0.08, places[-1] + 0.92], [place + 0.33] * 2, color=color, linewidth=1.6)
    axis.set_xlim(-0.3, max(x + 0.3, axis.get_xlim()[1]))
