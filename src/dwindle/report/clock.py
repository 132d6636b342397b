"""Running time of a run: its steps and their overhead, without the time between a stop and a resume."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dwindle.report.jsonlines import number
from dwindle.report.logs import Floats
from dwindle.report.run import Run, setting

PLAIN_S = 2.0
"""Longest plausible pause between two plain steps; starting a process takes longer."""
BUSY_S = 10.0
"""Added to ten times the usual pause of records with validation, tasks or a checkpoint."""
RARE_S = 60.0
"""Longest plausible pause for kinds of records that are too rare to estimate."""
USUAL_ROWS = 4


@dataclass(slots=True)
class Clock:
    """The end of each step, in seconds of running time."""

    seconds: Floats
    stops: list[float]
    """Times at which the run was stopped and resumed."""


def running_clock(run: Run) -> Clock | None:
    """Accumulated time of steps and pauses; a pause longer than its kind of record explains is a stop."""
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
    """Pauses that the metrics record: compactions, tasks, and other entries in seconds."""
    rates = {"time.tokens_per_s", "time.wall", "time.seconds", "time.mfu", "time.devices"}
    total = np.zeros(run.metrics.num_rows)
    for name in run.metrics.names:
        if name.startswith("time.") and name not in rates:
            column = run.metrics.column(name)
            total[column.rows] += np.maximum(column.values, 0)
    return total


def _longest_s(run: Run, rest: Floats) -> Floats:
    """For each record but the first, the longest pause before it that is not a stop."""
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
    """A bit set of what else happened at each record (0: nothing), with a bit for every rarely written column."""
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
