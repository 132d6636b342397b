"""A figure as data: panels over one horizontal axis, with marks (vertical lines) and rugs (a tick per event)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Unit = Literal["count", "number", "percent", "seconds", "scientific"]


@dataclass(slots=True)
class Series:
    """One line; ``color`` is a role in the palette."""

    name: str
    color: str
    x: list[float | int]
    y: list[float | int]
    style: Literal["line", "faint", "step", "dots", "dashed", "target"] = "line"


@dataclass(slots=True)
class Panel:
    """One vertical axis."""

    label: str
    unit: Unit
    series: list[Series]
    log: bool = False
    zero: bool = False
    """Whether the axis starts at zero."""
    top: float | None = None
    """The upper limit of the axis, set where a few spikes would flatten everything else."""
    height: float = 1.0
    legend: bool = True
    """False if another panel's legend names the same lines."""

    @property
    def named(self) -> list[Series]:
        """The lines in the legend: all but the faint ones, and none if the panel's label names its only line."""
        shown = [series for series in self.series if series.style != "faint"]
        alone = len(shown) == 1 and shown[0].name.split(" (")[0] in self.label
        return [] if alone or not self.legend else shown


@dataclass(slots=True)
class Mark:
    """A vertical line with a text, such as a compaction."""

    x: float
    text: str
    kind: Literal["compaction", "stop"] = "compaction"


@dataclass(slots=True)
class Rug:
    """Small ticks along the horizontal axis, one per event."""

    name: str
    color: str
    x: list[float | int]


@dataclass(slots=True)
class Figure:
    """Panels with a title and a caption; ``id`` is also the file name."""

    id: str
    title: str
    caption: str
    x_label: str
    x_unit: Unit
    panels: list[Panel]
    marks: list[Mark] = field(default_factory=list)
    rugs: list[Rug] = field(default_factory=list)
    wide: bool = False
