"""Running time of a run: that of all its processes, without the time between a stop and a resume."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dwindle.report.logs import Floats, MetricsLog


@dataclass(slots=True)
class Clock:
    """The end of each step, in seconds of running time."""

    seconds: Floats
    stops: list[float]
    """Times at which the run was stopped and resumed."""


def running_clock(metrics: MetricsLog) -> Clock | None:
    """Accumulated time of the processes, each of which says when it began to train; None if steps do not."""
    began, running = metrics.column("time.began").values, metrics.column("time.running").values
    if not metrics.num_rows or {len(began), len(running)} != {metrics.num_rows}:
        return None
    resumed = 1 + np.flatnonzero(np.diff(began))
    took = np.diff(running, prepend=0.0)
    took[resumed] = running[resumed]
    seconds = np.cumsum(np.maximum(took, 0.0))
    return Clock(seconds, [float(seconds[place - 1]) for place in resumed])
