"""The page's figures as PNG and SVG files, drawn by matplotlib from the same data."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from dwindle.core.directories import atomic_directory
from dwindle.core.errors import UserError, install_hint
from dwindle.core.progress import track
from dwindle.core.sizes import format_count
from dwindle.report.architecture import ArchitectureView, LayerView
from dwindle.report.figure import Figure, Panel, Series, plain
from dwindle.report.figures import build_figures
from dwindle.report.overlay import overlay
from dwindle.report.run import Run

MARKER = "figures.json"
WIDTH_IN = 6.4

COLORS = {
    "attn": "#2563c9",
    "kv": "#16326b",
    "ffn": "#c2570a",
    "stem": "#0c7d62",
    "train": "#6b675f",
    "valid": "#8a2fb0",
    "size": "#1c1b19",
    "speed": "#2f6f86",
    "warn": "#b3261e",
    "lost": "#e4e1db",
}
_TASKS = ("attn", "ffn", "stem", "valid", "speed", "warn", "train", "size")


def write_plots(run: Run, out: str | os.PathLike[str], *, dpi: int = 200, overwrite: bool = False) -> list[str]:
    """Every figure of the run as ``<name>.png`` and ``<name>.svg``; the data of all of them in ``figures.json``."""
    figures = build_figures(run)
    if not figures and run.architecture is None:
        raise UserError(f"{run.folder}: there is nothing to draw yet: no steps and no prune events were written")
    return _write(figures, run.architecture, out, dpi, overwrite)


def write_overlay(
    runs: Sequence[Run], out: str | os.PathLike[str], *, dpi: int = 200, overwrite: bool = False
) -> list[str]:
    """Several runs in one figure, ``overlay``; its caption, what makes them different, is drawn under it."""
    return _write([overlay(runs)], None, out, dpi, overwrite)


def _write(
    figures: list[Figure], view: ArchitectureView | None, out: str | os.PathLike[str], dpi: int, overwrite: bool
) -> list[str]:
    if not 30 <= dpi <= 1200:
        raise UserError(f"--dpi {dpi}: choose from 30 to 1200")
    with _matplotlib() as pyplot, atomic_directory(Path(out), marker=MARKER, overwrite=overwrite) as folder:
        for figure in track(figures, "drawing figures", len(figures)):
            _save(pyplot, _draw(pyplot, figure), folder, figure.id, dpi)
        if view is not None:
            _save(pyplot, _draw_architecture(pyplot, view), folder, "architecture", dpi)
        data = {figure.id: plain(figure) for figure in figures}
        data |= {} if view is None else {"architecture": view.to_json()}
        (folder / MARKER).write_text(json.dumps(data), encoding="utf-8")
        return sorted(path.name for path in folder.iterdir())


def write_figure(figure: Figure, folder: Path, *, dpi: int = 200) -> list[Path]:
    """One figure that is not of a single run, such as a study's, as PNG and SVG."""
    folder.mkdir(parents=True, exist_ok=True)
    with _matplotlib() as pyplot:
        _save(pyplot, _draw(pyplot, figure), folder, figure.id, dpi)
    return [folder / f"{figure.id}.{kind}" for kind in ("png", "svg")]


@contextmanager
def _matplotlib() -> Iterator[Any]:
    """pyplot without a display and with our settings; the caller's settings come back afterwards."""
    try:
        matplotlib = import_module("matplotlib")
        matplotlib.use("Agg")
        pyplot = import_module("matplotlib.pyplot")
    except ImportError:
        raise UserError(f"matplotlib is not installed: {install_hint('plots')}") from None
    settings = {
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": "#e8e5df",
        "grid.linewidth": 0.8,
        "axes.edgecolor": "#8f8b83",
        "svg.hashsalt": "dwindle",
        "svg.fonttype": "none",
        "text.parse_math": False,
    }
    with matplotlib.rc_context(settings):
        yield pyplot


def _save(pyplot: Any, drawn: Any, folder: Path, name: str, dpi: int) -> None:
    drawn.savefig(folder / f"{name}.png", dpi=dpi, bbox_inches="tight", metadata={"Software": "dwindle"})
    drawn.savefig(folder / f"{name}.svg", bbox_inches="tight", metadata={"Creator": "dwindle", "Date": None})
    pyplot.close(drawn)


def _color(name: str) -> str:
    return COLORS[_TASKS[int(name[4:]) % len(_TASKS)]] if name.startswith("task") else COLORS[name]


def _draw(pyplot: Any, figure: Figure) -> Any:
    heights = [panel.height for panel in figure.panels]
    drawn, axes = pyplot.subplots(
        len(heights),
        1,
        sharex=True,
        squeeze=False,
        figsize=(WIDTH_IN, 1.1 + 1.5 * sum(heights)),
        height_ratios=heights,
        layout="constrained",
    )
    column = [row[0] for row in axes]
    for axis, panel in zip(column, figure.panels, strict=True):
        _draw_panel(axis, panel)
        for mark in figure.marks:
            color = COLORS["warn"] if mark.kind == "stop" else "#5d5a54"
            axis.axvline(mark.x, color=color, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
    bottom = column[-1]
    for place, rug in enumerate(figure.rugs):
        low = -0.04 * (place + 1)
        bottom.vlines(
            rug.x,
            low,
            low + 0.03,
            color=_color(rug.color),
            linewidth=0.6,
            transform=bottom.get_xaxis_transform(),
            clip_on=False,
        )
    if figure.rugs:
        bottom.tick_params(axis="x", pad=4 + 4 * len(figure.rugs))
    name, scale = _time_unit(bottom.get_xlim()[1]) if figure.x_unit == "seconds" else ("", 1.0)
    bottom.set_xlabel(figure.x_label + (f", {name}" if name else ""))
    if name:
        low, high = bottom.get_xlim()
        round_times = pyplot.MaxNLocator(nbins=8, steps=[1, 2, 5, 10]).tick_values(low / scale, high / scale)
        bottom.set_xticks([value * scale for value in round_times if low <= value * scale <= high])
        bottom.xaxis.set_major_formatter(lambda value, _: f"{value / scale:.3g}")
    elif figure.x_unit == "count":
        _whole_numbers(bottom.xaxis)
    if figure.id == "overlay":
        drawn.supxlabel(figure.caption, x=0.01, ha="left", fontsize=8)
    drawn.suptitle(figure.title, x=0.01, ha="left", fontweight="bold")
    return drawn


def _whole_numbers(axis: Any) -> None:
    """Ticks at whole numbers only: there is no layer 2.5."""
    axis.get_major_locator().set_params(integer=True, steps=[1, 2, 5, 10])
    axis.set_major_formatter(lambda value, _: format_count(value))


def _time_unit(seconds: float) -> tuple[str, float]:
    units = (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0))
    return next(((name, scale) for name, scale in units if seconds >= 2 * scale), ("seconds", 1.0))


def _some_minor_labels(limits: tuple[float, float]) -> Callable[[float, int], str]:
    """Within about one decade the powers of ten alone would leave an axis without numbers."""
    near = limits[1] < 30 * limits[0]
    return lambda value, _: f"{value:.3g}" if near and f"{value:e}"[0] in "25" else ""


def _draw_panel(axis: Any, panel: Panel) -> None:
    for series in panel.series:
        _draw_series(axis, series)
    if panel.log:
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:.3g}")
        axis.yaxis.set_minor_formatter(_some_minor_labels(axis.get_ylim()))
    if panel.zero:
        axis.set_ylim(bottom=0)
    if panel.top is not None:
        axis.set_ylim(top=panel.top)
    if panel.unit == "percent":
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:g} %")
    elif panel.unit == "count":
        axis.yaxis.set_major_formatter(lambda value, _: format_count(value))
    axis.set_title(panel.label, loc="left", fontsize=9)
    if panel.named:
        axis.legend(frameon=False, fontsize=8, loc="best")


def _draw_series(axis: Any, series: Series) -> None:
    color, faint = _color(series.color), series.style == "faint"
    label = None if faint else series.name.split(" (")[0]
    style = {"target": (0, (1, 2))}.get(series.style, "-")
    marker = "o" if len(series.x) == 1 or (series.style == "dots" and len(series.x) <= 60) else None
    steps = "steps-post" if series.style == "step" else "default"
    axis.plot(
        series.x,
        series.y,
        color=color,
        linewidth=0.6 if faint else 1.5,
        alpha=0.4 if faint else 1.0,
        linestyle=style,
        marker=marker,
        markersize=3,
        drawstyle=steps,
        label=label,
    )


def _draw_architecture(pyplot: Any, view: ArchitectureView) -> Any:
    """Heads by key/value head on the left, FFN widths on the right, a row for each layer."""
    layers = view.layers
    drawn, (left, right) = pyplot.subplots(
        1, 2, sharey=True, figsize=(WIDTH_IN, 1.3 + 0.17 * len(layers)), width_ratios=(1.2, 1), layout="constrained"
    )
    for place, layer in enumerate(layers):
        _draw_heads(left, layer, place)
    rows = list(range(len(layers)))
    right.barh(rows, [la.ffn_before for la in layers], color=COLORS["lost"], height=0.7, label="removed")
    right.barh(rows, [la.ffn_after for la in layers], color=COLORS["ffn"], height=0.7, label="left")
    right.set_title("FFN channels", loc="left", fontsize=9)
    left.set_title("query heads over their key/value heads", loc="left", fontsize=9)
    left.set_ylabel("layer")
    left.set_ylim(len(layers) - 0.4, -0.6)
    left.set_xticks([])
    for axis in (left, right):
        axis.grid(visible=False)
    title = f"Before and after: hidden {view.hidden_before:,} → {view.hidden_after:,}"
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
