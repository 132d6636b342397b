"""Running time: the steps and what belongs to them, without the time between a stop and the resume."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dwindle.report.jsonlines import number
from dwindle.report.logs import Floats
from dwindle.report.run import Run, setting

PLAIN_S = 2.0
"""Between two steps nothing happens but a line of metrics. A process alone takes longer to start."""
BUSY_S = 10.0
"""Over ten times what is usual for a record of its kind, which validation, tasks or a checkpoint make long."""
RARE_S = 60.0
"""Where there are too few records of a kind to say what is usual."""
USUAL_ROWS = 4


@dataclass(slots=True)
class Clock:
    """When each step ended, in seconds of running time."""

    seconds: Floats
    stops: list[float]
    """Where the run was stopped and resumed."""


def running_clock(run: Run) -> Clock | None:
    """The sum of the steps' seconds and of the pauses between them; a pause longer than its kind explains is a stop."""
    wall, took = run.metrics.column("time.wall"), run.metrics.column("time.seconds")
    if not len(took) or len(took) != run.metrics.num_rows:
        return None
    own = took.values + _named_pauses_s(run)
    gaps = took.values.copy()
    stops: list[int] = []
    if len(wall) == len(took):
        between = np.diff(wall.values)
        rest = np.maximum(between - own[1:], 0.0)
        idle = rest > _longest_s(run, rest) + 2 * float(np.median(took.values))
        stops = (1 + np.flatnonzero(idle)).tolist()
        gaps[1:] = np.where(idle, own[1:], np.maximum(between, took.values[1:]))
    seconds = np.cumsum(gaps)
    return Clock(seconds, [float(seconds[place - 1]) for place in stops])


def _named_pauses_s(run: Run) -> Floats:
    """Pauses that the metrics name: compactions, tasks, and whatever else is measured in seconds."""
    rates = {"time.tokens_per_s", "time.wall", "time.seconds", "time.utilisation", "time.mfu", "time.devices"}
    total = np.zeros(run.metrics.num_rows)
    for name in run.metrics.names:
        if name.startswith("time.") and name not in rates:
            column = run.metrics.column(name)
            total[column.rows] += np.maximum(column.values, 0)
    return total


def _longest_s(run: Run, rest: Floats) -> Floats:
    """For each record but the first: how long the pause before it may be."""
    kinds = _kinds(run)[1:]
    longest = np.empty(len(rest))
    for kind in np.unique(kinds):
        own = kinds == kind
        usual = float(np.quantile(rest[own], 0.25))
        if kind == 0:
            longest[own] = PLAIN_S + 10 * usual
        elif own.sum() < USUAL_ROWS or kind & _MILESTONE:
            longest[own] = RARE_S
        else:
            longest[own] = BUSY_S + 10 * usual
    return longest


_CHECKPOINT, _MILESTONE, _FIRST_COLUMN = 1, 2, 4


def _kinds(run: Run) -> NDArray[np.int64]:
    """A number for what else happened at a record; 0: nothing. Each column that few records have is a bit of it."""
    metrics = run.metrics
    kinds = np.zeros(metrics.num_rows, dtype=np.int64)
    every = number(setting(run.recipe, "checkpoint", "every"))
    if every:
        kinds[1:] |= _CHECKPOINT * (metrics.steps[:-1] % every == 0)
    if setting(run.recipe, "prune", "milestones"):
        events = metrics.column("events")
        kinds[events.rows] |= _MILESTONE * (events.values > 0)
    bit = _FIRST_COLUMN
    for name in metrics.names:
        column = metrics.column(name)
        if 2 * len(column) < metrics.num_rows and bit < 1 << 60:
            kinds[column.rows] |= bit
            bit <<= 1
    return kinds
