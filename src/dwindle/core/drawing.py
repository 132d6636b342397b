"""Figures drawn by matplotlib, as PNG and SVG files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from dwindle.core.errors import UserError, install_hint
from dwindle.core.figure import Figure, Panel, Series
from dwindle.core.sizes import format_count

WIDTH_IN = 6.4

COLORS = {
    "attn": "#2563c9",
    "kv": "#16326b",
    "ffn": "#c2570a",
    "stem": "#0c7d62",
    "train": "#6b675f",
    "valid": "#8a2fb0",
    "source": "#2563c9",
    "size": "#1c1b19",
    "speed": "#2f6f86",
    "warn": "#b3261e",
    "lost": "#e4e1db",
}
_TASKS = ("attn", "ffn", "stem", "valid", "speed", "warn", "train", "size")


def write_figure(figure: Figure, folder: Path, *, dpi: int = 200) -> list[Path]:
    """Draw a figure to ``<id>.png`` and ``<id>.svg`` in ``folder``; returns the two paths."""
    folder.mkdir(parents=True, exist_ok=True)
    with pyplot_settings() as pyplot:
        save(pyplot, draw(pyplot, figure), folder, figure.id, dpi)
    return [folder / f"{figure.id}.{kind}" for kind in ("png", "svg")]


@contextmanager
def pyplot_settings() -> Iterator[Any]:
    """Yields pyplot without a display and with our settings; the caller's settings are restored afterwards."""
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


def save(pyplot: Any, drawn: Any, folder: Path, name: str, dpi: int) -> None:
    """Write a drawn figure as PNG and SVG, without dates in the files, and close it."""
    drawn.savefig(folder / f"{name}.png", dpi=dpi, bbox_inches="tight", metadata={"Software": "dwindle"})
    drawn.savefig(folder / f"{name}.svg", bbox_inches="tight", metadata={"Creator": "dwindle", "Date": None})
    pyplot.close(drawn)


def _color(name: str) -> str:
    return COLORS[_TASKS[int(name[4:]) % len(_TASKS)]] if name.startswith("task") else COLORS[name]


def draw(pyplot: Any, figure: Figure) -> Any:
    """The matplotlib figure: one panel below the other over a shared horizontal axis."""
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
        _draw_panel(axis, panel, named_at_ends=figure.id == "overlay")
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
    elif figure.x_unit == "percent":
        bottom.xaxis.set_major_formatter(lambda value, _: f"{value:g} %")
    if figure.id == "overlay" and figure.caption:
        drawn.supxlabel(figure.caption, x=0.01, ha="left", fontsize=8)
    drawn.suptitle(figure.title, x=0.01, ha="left", fontweight="bold")
    return drawn


def _whole_numbers(axis: Any) -> None:
    """Ticks at integers only: there is no layer 2.5."""
    axis.get_major_locator().set_params(integer=True, steps=[1, 2, 5, 10])
    axis.set_major_formatter(lambda value, _: format_count(value))


def _time_unit(seconds: float) -> tuple[str, float]:
    units = (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0))
    return next(((name, scale) for name, scale in units if seconds >= 2 * scale), ("seconds", 1.0))


def _some_minor_labels(limits: tuple[float, float]) -> Callable[[float, int], str]:
    """Labels at 2 and 5 as well if the axis spans about a decade, where the powers of ten alone are too few."""
    near = limits[1] < 30 * limits[0]
    return lambda value, _: f"{value:.3g}" if near and f"{value:e}"[0] in "25" else ""


def _draw_panel(axis: Any, panel: Panel, *, named_at_ends: bool) -> None:
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
    if panel.named and named_at_ends:
        _name_ends(axis, panel)
    elif panel.named:
        many = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)} if len(panel.named) > 6 else {"loc": "best"}
        axis.legend(frameon=False, fontsize=8, **many)


def _name_ends(axis: Any, panel: Panel) -> None:
    """Names to the right of line ends, spaced vertically: a legend would hide some of many lines."""
    low, high = axis.get_ylim()
    gap = (high - low) * 0.11 / panel.height
    free = low
    for series in sorted(panel.named, key=lambda one: one.y[-1]):
        place = max(series.y[-1], free)
        free = place + gap
        axis.text(
            1.01,
            place,
            series.name.split(" (")[0],
            color=_color(series.color),
            transform=axis.get_yaxis_transform(),
            verticalalignment="center",
            fontsize=8,
        )


def _draw_series(axis: Any, series: Series) -> None:
    color, faint = _color(series.color), series.style == "faint"
    label = None if faint else series.name.split(" (")[0]
    style = {"target": (0, (1, 2)), "dashed": "--"}.get(series.style, "-")
    is_marked = len(series.x) == 1 or (series.style in ("dots", "dashed") and len(series.x) <= 60)
    marker = ("s" if series.style == "dashed" else "o") if is_marked else None  # one point has no dashes
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
