"""The cost of a run, and a table of it beside published costs."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from dwindle.core.sizes import counted, format_count, format_duration
from dwindle.report.clock import running_clock
from dwindle.report.run import Run


@dataclass(slots=True)
class Table:
    """A table of text cells; ``strong`` lists the rows of this run among others."""

    id: str
    title: str
    note: str
    columns: list[str]
    rows: list[list[str]]
    strong: list[int] = field(default_factory=list)


# EfficientLLM, author feedback, Table 3: measured by its authors on their machines.
PUBLISHED_COST = (
    ("Qwen2.5-0.5B", "17T", "199,467 h", "–", "–", "–", "–", "199,467 h"),
    ("EfficientLLM-457M", "–", "–", "72.1B", "2,166 h", "50B", "1,018 h", "3,184 h"),
    ("EfficientLLM-457M", "–", "–", "72.1B", "2,166 h", "500B", "10,178 h", "12,344 h"),
)


@dataclass(slots=True)
class Cost:
    """Device hours and tokens, until the last prune event and after it."""

    num_devices: int
    pruning_tokens: float
    pruning_hours: float
    later_tokens: float
    later_hours: float

    @property
    def hours(self) -> float:
        return self.pruning_hours + self.later_hours


def cost_of(run: Run) -> Cost | None:
    """Running time (training, validation, compaction pauses) × devices; None without timed metrics."""
    clock = running_clock(run.metrics)
    if clock is None:
        return None
    tokens = run.metrics.tokens
    prunes = run.ledger.prunes.tokens
    until = prunes[-1] if prunes else 0.0
    last = int(np.searchsorted(tokens, until, side="right")) - 1 if until > 0 else -1
    devices = run.metrics.last("time.devices") or 1.0
    pruning_s = float(clock.seconds[last]) if last >= 0 else 0.0
    scale = devices / 3600
    return Cost(
        num_devices=int(devices),
        pruning_tokens=until,
        pruning_hours=pruning_s * scale,
        later_tokens=max(float(tokens[-1]) - until, 0.0),
        later_hours=(float(clock.seconds[-1]) - pruning_s) * scale,
    )


def cost_table(run: Run) -> Table | None:
    """This run in the columns of the published table, followed by the published rows."""
    cost = cost_of(run)
    if cost is None:
        return None
    left = run.parameters_after
    name = f"{run.name} ({format_count(left)})" if left else run.name
    own = [
        name,
        "–",
        "–",
        format_count(cost.pruning_tokens) if cost.pruning_tokens else "–",
        _device_time(cost.pruning_hours) if cost.pruning_tokens else "–",
        format_count(cost.later_tokens),
        _device_time(cost.later_hours),
        _device_time(cost.hours),
    ]
    columns = ["model", "pretraining tokens", "time", "pruning tokens", "time", "continued tokens", "time", "total"]
    note = (
        f"Times of this run are device time on {counted(cost.num_devices, 'device')}, including validation and "
        "pauses. The other rows are published GPU hours (EfficientLLM, author feedback, Table 3) on other devices, not "
        "measured here."
    )
    rows = [own, *(["published: " + row[0], *row[1:]] for row in PUBLISHED_COST)]
    return Table("cost", "Cost", note, columns, rows, [0])


def _device_time(hours: float) -> str:
    """In hours, as in the published table, unless that would be a small fraction."""
    return f"{hours:,.0f} h" if hours >= 100 else f"{hours:.3g} h" if hours >= 1 else format_duration(hours * 3600)
