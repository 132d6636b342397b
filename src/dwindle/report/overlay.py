"""Several runs in one figure: loss and size against tokens (``dwindle plot A B``)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dwindle.core.errors import UserError
from dwindle.core.figure import Figure, Panel, Series
from dwindle.core.names import short_names
from dwindle.report.figures import SMOOTH_SHARE, line, size_steps, source_line
from dwindle.report.run import Run
from dwindle.report.settings import different_settings, settings_of, short_settings
from dwindle.report.thinning import moving_mean

MAX_RUNS = 8
"""As many as there are distinguishable colours."""
MIN_CURVE = 5
"""Validations of a run that make a curve."""
MAX_DOTS = 20
"""Validations that are drawn as points on it."""


def overlay(runs: Sequence[Run], names: Sequence[str] = ()) -> Figure:
    """One line per run; without ``names`` they are named after their folders, and a caption says how they differ."""
    if len(runs) > MAX_RUNS:
        raise UserError(f"plot: {len(runs)} runs: a figure can show at most {MAX_RUNS}: name fewer")
    folders = folder_names([run.folder for run in runs])
    given = [name or folder for name, folder in zip(names or folders, folders, strict=True)]
    panels = [
        Panel("validation loss, nats per token", "number", [], height=2.0),
        Panel("train loss, nats per token", "number", [], height=1.2),
        Panel("parameters", "count", [], zero=True, height=0.8, legend=False),
    ]
    for place, (run, name) in enumerate(zip(runs, given, strict=True)):
        for panel, series in zip(panels, _lines(run, name, f"task{place}"), strict=True):
            panel.series += series
    if all(len(series.x) >= MIN_CURVE for series in panels[0].series) and len(panels[0].series) == len(
        panels[1].series
    ):
        del panels[1]  # curves of held-out text say the same, and more
    if panels[0].series:
        _add_source(panels[0], runs)
    shown = [panel for panel in panels if panel.series]
    if not shown:
        raise UserError(f"{runs[0].folder}: nothing to draw yet: none of the runs has written a step")
    caption = "" if any(names) else _differences(runs, given)
    return Figure("overlay", "Loss and size of several runs", caption, "tokens", "count", shown, wide=True)


def _differences(runs: Sequence[Run], names: Sequence[str]) -> str:
    found = different_settings([settings_of(run.recipe, run.ledger.source) for run in runs])
    lines = [f"{name}: {short_settings(own)}" for name, own in zip(names, found, strict=True)]
    return "\n".join(lines) if any(found) else "All runs have the same settings."


def _add_source(panel: Panel, runs: Sequence[Run]) -> None:
    """The loss of the largest source as a line, and an upper limit that cuts off high beginnings of curves.

    A run that trains a pruned model has that model as its source, so the largest is the untouched one.
    """
    late = [y for series in panel.series for x, y in zip(series.x, series.y, strict=True) if 4 * x >= series.x[-1]]
    measured = [run for run in runs if run.source_loss is not None and run.parameters_before is not None]
    if measured:
        largest = max(measured, key=lambda run: run.parameters_before or 0)
        if (source := source_line(largest, "untouched source", "size")) is not None:
            panel.series.append(source)
            late += source.y
    highest = max(y for series in panel.series for y in series.y)
    roof = max(late) + 0.15 * (max(late) - min(late))
    panel.top = roof if highest > roof else None


def _lines(run: Run, name: str, color: str) -> tuple[list[Series], list[Series], list[Series]]:
    """Validation loss, train loss (smoothed if there are many steps) and size; each may be empty."""
    tokens = run.metrics.tokens
    loss, valid = run.metrics.column("loss"), run.metrics.column("valid_loss")
    mean = moving_mean(loss.values, len(loss) // SMOOTH_SHARE)
    sizes = size_steps(run)
    style = "dots" if len(valid) <= MAX_DOTS else "line"
    return (
        [line(name, color, tokens[valid.rows], valid.values, style=style)] if len(valid) else [],
        [line(name, color, tokens[loss.rows], mean)] if len(loss) else [],
        [line(name, color, *sizes, style="step")] if sizes is not None and len(tokens) else [],
    )


def folder_names(folders: Sequence[Path]) -> list[str]:
    """The shortest unique endings of the paths."""
    paths = [folder.resolve() for folder in folders]
    for path, folder in zip(paths, folders, strict=True):
        if paths.count(path) > 1:
            raise UserError(f"{folder}: is given twice: name each run once")
    return short_names(paths)
