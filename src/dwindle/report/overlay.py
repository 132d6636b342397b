"""Several runs in one figure: loss and size against tokens (``dwindle plot A B``)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dwindle.core.errors import UserError
from dwindle.core.figure import Figure, Panel, Series
from dwindle.core.names import short_names
from dwindle.report.figures import SMOOTH_SHARE, line, size_steps
from dwindle.report.run import Run
from dwindle.report.settings import different_settings, settings_of, short_settings
from dwindle.report.thinning import moving_mean

MAX_RUNS = 8
"""As many as there are distinguishable colours."""


def overlay(runs: Sequence[Run]) -> Figure:
    """One line per run, named after its folder; the caption lists the settings that differ."""
    if len(runs) > MAX_RUNS:
        raise UserError(f"plot: {len(runs)} runs: a figure can show at most {MAX_RUNS}: name fewer")
    names = folder_names([run.folder for run in runs])
    panels = [
        Panel("train loss, nats per token", "number", [], height=1.5),
        Panel("validation loss, nats per token", "number", [], height=1.2, legend=False),
        Panel("parameters", "count", [], zero=True, legend=False),
    ]
    for place, (run, name) in enumerate(zip(runs, names, strict=True)):
        for panel, series in zip(panels, _lines(run, name, f"task{place}"), strict=True):
            panel.series += series
    differences = different_settings([settings_of(run.recipe, run.ledger.source) for run in runs])
    lines = [f"{name}: {short_settings(own, with_off=True)}" for name, own in zip(names, differences, strict=True)]
    caption = "\n".join(lines) if any(differences) else "All runs have the same settings."
    shown = [panel for panel in panels if panel.series]
    if not shown:
        raise UserError(f"{runs[0].folder}: nothing to draw yet: none of the runs has written a step")
    return Figure("overlay", "Loss and size of several runs", caption, "tokens", "count", shown, wide=True)


def _lines(run: Run, name: str, color: str) -> tuple[list[Series], list[Series], list[Series]]:
    """Train loss (smoothed if there are many steps), validation loss and size; each may be empty."""
    tokens = run.metrics.tokens
    loss, valid = run.metrics.column("loss"), run.metrics.column("valid_loss")
    mean = moving_mean(loss.values, len(loss) // SMOOTH_SHARE)
    sizes = size_steps(run)
    return (
        [line(name, color, tokens[loss.rows], mean)] if len(loss) else [],
        [line(name, color, tokens[valid.rows], valid.values, style="dots")] if len(valid) else [],
        [line(name, color, *sizes, style="step")] if sizes is not None and len(tokens) else [],
    )


def folder_names(folders: Sequence[Path]) -> list[str]:
    """The shortest unique endings of the paths."""
    paths = [folder.resolve() for folder in folders]
    for path, folder in zip(paths, folders, strict=True):
        if paths.count(path) > 1:
            raise UserError(f"{folder}: is given twice: name each run once")
    return short_names(paths)
