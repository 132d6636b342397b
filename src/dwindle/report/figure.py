"""What a figure is: panels over one horizontal axis, with marks (compactions) and a rug (one tick per event)."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal

Unit = Literal["count", "number", "percent", "seconds", "scientific"]


@dataclass(slots=True)
class Series:
    """One line; ``color`` names a role of the palette, ``style`` how it is drawn."""

    name: str
    color: str
    x: list[float | int]
    y: list[float | int]
    style: Literal["line", "faint", "step", "dots", "target"] = "line"


@dataclass(slots=True)
class Panel:
    """One vertical axis."""

    label: str
    unit: Unit
    series: list[Series]
    log: bool = False
    zero: bool = False
    """Whether the axis begins at zero."""
    top: float | None = None
    """Where the axis ends if a few spikes would flatten everything else."""
    height: float = 1.0
    legend: bool = True
    """Whether its lines are named where that is needed; False where another panel names the same ones."""

    @property
    def named(self) -> list[Series]:
        """The lines to name: all but the faint ones; a line that is alone and called like its panel needs none."""
        shown = [series for series in self.series if series.style != "faint"]
        alone = len(shown) == 1 and shown[0].name.split(" (")[0] in self.label
        return [] if alone or not self.legend else shown


@dataclass(slots=True)
class Mark:
    """A vertical line with a text: a compaction, a stop."""

    x: float
    text: str
    kind: Literal["compaction", "stop"] = "compaction"


@dataclass(slots=True)
class Rug:
    """Small ticks along the horizontal axis, one for each event."""

    name: str
    color: str
    x: list[float | int]


@dataclass(slots=True)
class Figure:
    """``id`` is also the name of its files."""

    id: str
    title: str
    caption: str
    x_label: str
    x_unit: Unit
    panels: list[Panel]
    marks: list[Mark] = field(default_factory=list)
    rugs: list[Rug] = field(default_factory=list)
    wide: bool = False


def plain(value: Any) -> Any:
    """Dataclasses as dictionaries; lists of numbers are not copied."""
    if is_dataclass(value):
        return {item.name: plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, list) and value and is_dataclass(value[0]):
        return [plain(item) for item in value]
    return value
