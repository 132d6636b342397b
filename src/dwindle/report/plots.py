"""``dwindle plot``: the figures of a report as PNG and SVG files."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

from dwindle.core.drawing import COLORS, WIDTH_IN, draw, pyplot_settings, save
from dwindle.core.errors import UserError
from dwindle.core.figure import Figure
from dwindle.core.files import atomic_directory
from dwindle.core.progress import track
from dwindle.report.architecture import ArchitectureView, LayerView
from dwindle.report.figures import build_figures
from dwindle.report.overlay import overlay
from dwindle.report.run import Run, open_run

MARKER = "figures.json"


def write_plots(run: Run, out: str | os.PathLike[str], *, dpi: int = 200, overwrite: bool = False) -> list[str]:
    """Every figure of the run as ``<name>.png`` and ``<name>.svg``; the data of all of them in ``figures.json``."""
    figures = build_figures(run)
    if not figures and run.architecture is None:
        raise UserError(f"{run.folder}: nothing to draw yet: neither steps nor prune events were written")
    return _write(figures, run.architecture, out, dpi, overwrite)


def write_overlay(
    runs: Sequence[Run], out: str | os.PathLike[str], *, names: Sequence[str], dpi: int, overwrite: bool
) -> list[str]:
    """Several runs in one figure, ``overlay``; without names, the settings that differ stand below it."""
    return _write([overlay(runs, names)], None, out, dpi, overwrite)


def open_named(argument: str) -> tuple[str, Run]:
    """Name and run of ``NAME=RUN``, or of ``RUN`` (without a name); an existing directory may have such a name."""
    name, equals, place = argument.partition("=")
    if equals and not Path(argument).is_dir():
        return name, open_run(place)
    return "", open_run(argument)


def _write(
    figures: list[Figure], view: ArchitectureView | None, out: str | os.PathLike[str], dpi: int, overwrite: bool
) -> list[str]:
    if not 30 <= dpi <= 1200:
        raise UserError(f"--dpi {dpi}: must be between 30 and 1200")
    if Path(out).suffix in (".png", ".svg"):
        raise UserError(f"--out {out}: give a directory: every figure is written as PNG and SVG")
    with pyplot_settings() as pyplot, atomic_directory(Path(out), marker=MARKER, overwrite=overwrite) as folder:
        for figure in track(figures, "drawing figures", len(figures)):
            save(pyplot, draw(pyplot, figure), folder, figure.id, dpi)
        if view is not None:
            save(pyplot, _draw_architecture(pyplot, view), folder, "architecture", dpi)
        data = {figure.id: asdict(figure) for figure in figures}
        data |= {} if view is None else {"architecture": view.to_json()}
        (folder / MARKER).write_text(json.dumps(data), encoding="utf-8")
        return sorted(path.name for path in folder.iterdir())


def _draw_architecture(pyplot: Any, view: ArchitectureView) -> Any:
    """A column per layer: query heads above, grouped by key/value head, and FFN widths below."""
    layers = view.layers
    drawn, (top, bottom) = pyplot.subplots(2, 1, sharex=True, figsize=(WIDTH_IN, 3.0), layout="constrained")
    for place, layer in enumerate(layers):
        _draw_heads(top, layer, place)
    columns = list(range(len(layers)))
    bottom.bar(columns, [la.ffn_before for la in layers], color=COLORS["lost"], width=0.8)
    bottom.bar(columns, [la.ffn_after for la in layers], color=COLORS["ffn"], width=0.8)
    top.set_title("query heads, grouped by key/value head", loc="left", fontsize=9)
    top.set_yticks([])
    top.tick_params(axis="x", length=0)
    bottom.set_title("FFN channels", loc="left", fontsize=9)
    bottom.set_xlabel("layer")
    bottom.set_xlim(-0.6, len(layers) - 0.4)
    bottom.xaxis.get_major_locator().set_params(integer=True)
    for axis in (top, bottom):
        axis.grid(visible=False)
    same = view.hidden_before == view.hidden_after
    hidden = f"hidden size {view.hidden_before:,}" + ("" if same else f" → {view.hidden_after:,}")
    drawn.suptitle(f"What was kept of every layer (filled); {hidden}", x=0.01, ha="left", fontweight="bold")
    return drawn


def _draw_heads(axis: Any, layer: LayerView, place: int) -> None:
    """Heads from the top down; a bar at the left of each group is its key/value head."""
    rectangle = import_module("matplotlib.patches").Rectangle
    gone = set(layer.gone_queries)
    y, last = 0.0, layer.kv_of_query[0] if layer.kv_of_query else None
    starts: dict[int, list[float]] = {}
    alive: set[int] = set()
    for query, kv in enumerate(layer.kv_of_query):
        y += 0.5 if kv != last else 0.0
        last = kv
        kept = query not in gone
        face: dict[str, Any] = {"facecolor": COLORS["attn"]}
        if not kept:
            face = {"facecolor": "none", "edgecolor": "#a8a49b", "linewidth": 0.6}
        axis.add_patch(rectangle((place - 0.26, y + 0.1), 0.66, 0.8, **face))
        starts.setdefault(kv, []).append(y)
        if kept:
            alive.add(kv)
        y += 1.0
    for kv, places in starts.items():
        color = COLORS["kv"] if kv in alive else COLORS["lost"]
        axis.plot([place - 0.36] * 2, [places[0] + 0.1, places[-1] + 0.9], color=color, linewidth=1.6)
    axis.set_ylim(max(y + 0.2, axis.get_ylim()[0]), -0.2)
