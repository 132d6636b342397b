"""``metrics.jsonl`` and ``ledger.jsonl`` as columns, tolerant of what other versions wrote or a crash cut off."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dwindle.report.jsonlines import GrowingJsonLines, Record, number

Floats = NDArray[np.float64]

KINDS = ("attn", "ffn", "stem")


@dataclass(frozen=True, slots=True)
class Column:
    """One quantity over the steps at which it was written."""

    rows: NDArray[np.int64]
    values: Floats

    def __len__(self) -> int:
        return len(self.rows)


class MetricsLog:
    """Every number of ``metrics.jsonl``, by name; nested ones as ``time.seconds``."""

    def __init__(self, path: Path) -> None:
        self.lines = GrowingJsonLines(path)
        self._clear()

    def _clear(self) -> None:
        self.num_rows = 0
        self.num_odd = 0
        """Records without a step or tokens."""
        self._columns: dict[str, tuple[array[int], array[float]]] = {}

    def refresh(self) -> None:
        restarted, records = self.lines.read()
        if restarted:
            self._clear()
        for record in records:
            if number(record.get("step")) is None or number(record.get("tokens")) is None:
                self.num_odd += 1
                continue
            self._add(record, "")
            self.num_rows += 1

    def _add(self, record: Record, prefix: str) -> None:
        columns, row = self._columns, self.num_rows
        for key, value in record.items():
            kind = type(value)
            if kind is dict:
                if prefix.count(".") < 3:
                    self._add(value, f"{prefix}{key}.")
                continue
            if kind is bool:
                value = float(value)
            elif kind is not float and kind is not int:
                continue
            elif value - value != 0:  # NaN or infinite: other writers may leave them in
                continue
            name = prefix + key
            column = columns.get(name)
            if column is None:
                column = columns[name] = (array("q"), array("d"))
            column[0].append(row)
            column[1].append(value)

    @property
    def names(self) -> list[str]:
        return list(self._columns)

    def column(self, name: str) -> Column:
        """Empty where nothing of that name was written."""
        rows, values = self._columns.get(name, (array("q"), array("d")))
        return Column(np.array(rows, dtype=np.int64), np.array(values, dtype=np.float64))

    @property
    def tokens(self) -> Floats:
        return self.column("tokens").values

    @property
    def steps(self) -> Floats:
        return self.column("step").values

    def last(self, name: str) -> float | None:
        column = self._columns.get(name)
        return column[1][-1] if column else None


@dataclass(slots=True)
class Compaction:
    """The model was rebuilt at these sizes."""

    step: int
    tokens: int
    sizes: dict[str, int]

    @property
    def text(self) -> str:
        return ", ".join(f"{name} {size:,}" for name, size in self.sizes.items())


@dataclass(slots=True)
class Prunes:
    """The prune events as columns; ``kinds`` are places in KINDS, missing saliencies are NaN."""

    steps: array[float] = field(default_factory=lambda: array("d"))
    tokens: array[float] = field(default_factory=lambda: array("d"))
    kinds: array[int] = field(default_factory=lambda: array("q"))
    sizes: array[float] = field(default_factory=lambda: array("d"))
    """How many heads or channels left, over all layers."""
    parameters: array[float] = field(default_factory=lambda: array("d"))
    saliency: tuple[array[float], ...] = field(default_factory=lambda: tuple(array("d") for _ in KINDS))

    def __len__(self) -> int:
        return len(self.kinds)


class LedgerLog:
    """What left when, and which indices of the source are gone."""

    def __init__(self, path: Path) -> None:
        self.lines = GrowingJsonLines(path)
        self._clear()

    def _clear(self) -> None:
        self.source: Record = {}
        self.num_odd = 0
        """Events that this version does not understand."""
        self.compactions: list[Compaction] = []
        self.prunes = Prunes()
        self.gone: dict[str, list[set[int]]] = {kind: [] for kind in KINDS}
        """Removed indices: one set per layer (attn, ffn), one set in all (stem)."""

    def refresh(self) -> None:
        restarted, records = self.lines.read()
        if restarted:
            self._clear()
        for record in records:
            try:
                understood = self._take(record)
            except (KeyError, TypeError, ValueError, OverflowError):
                understood = False
            self.num_odd += not understood

    def _take(self, record: Record) -> bool:
        event = record.get("event")
        if event == "source":
            self.source = record
        elif event == "prune":
            self._prune(record)
        elif event == "compact":
            sizes = {k: int(v) for k, v in record.items() if k not in ("step", "tokens") and type(v) is int}
            self.compactions.append(Compaction(int(record["step"]), int(record["tokens"]), sizes))
        else:
            return False
        return True

    def _prune(self, record: Record) -> None:
        kind = KINDS.index(record["type"])
        members = [[int(index) for index in layer] for layer in record["indices"]]
        step, tokens, left = float(record["step"]), float(record["tokens"]), float(record["parameters"])
        prunes, saliency = self.prunes, record.get("saliency")
        if not isinstance(saliency, dict):
            saliency = {}
        prunes.steps.append(step)
        prunes.tokens.append(tokens)
        prunes.kinds.append(kind)
        prunes.sizes.append(sum(map(len, members)))
        prunes.parameters.append(left)
        for name, column in zip(KINDS, prunes.saliency, strict=True):
            value = number(saliency.get(name))
            column.append(np.nan if value is None else value)
        gone = self.gone[KINDS[kind]]
        gone.extend(set() for _ in range(len(members) - len(gone)))
        for removed, layer in zip(gone, members, strict=False):
            removed.update(layer)

    def num_gone(self, kind: str) -> int:
        return sum(map(len, self.gone[kind]))

    @property
    def source_name(self) -> str:
        return text_of(self.source.get("source"))

    @property
    def source_parameters(self) -> float | None:
        return number(self.source.get("parameters"))

    def option(self, name: str) -> Any:
        options = self.source.get("options")
        return options.get(name) if isinstance(options, dict) else None


def text_of(value: Any) -> str:
    return value if isinstance(value, str) else ""
