"""``metrics.jsonl`` and ``ledger.jsonl`` as columns, tolerant of other versions and truncated files."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dwindle.report.jsonlines import GrowingJsonLines, Record, number

Floats = NDArray[np.float64]

KINDS = ("attn", "ffn", "stem", "layer")
MAX_DEPTH = 3
_MAX_HIDDEN = 1 << 20


@dataclass(frozen=True, slots=True)
class MetricColumn:
    """One metric and the rows in which it was written."""

    rows: NDArray[np.int64]
    values: Floats

    def __len__(self) -> int:
        return len(self.rows)


class MetricsLog:
    """All numbers of ``metrics.jsonl`` by name; nested ones as ``time.seconds``."""

    def __init__(self, path: Path) -> None:
        self.lines = GrowingJsonLines(path)
        self._clear()

    def _clear(self) -> None:
        self.num_rows = 0
        self.num_odd = 0
        """Records without a step or tokens."""
        self._parts: dict[str, list[MetricColumn]] = {}

    def refresh(self) -> None:
        restarted, records = self.lines.read()
        if restarted:
            self._clear()
        usable = [record for record in records if _has_place(record)]
        self.num_odd += len(records) - len(usable)
        self._add(usable, "")
        self.num_rows += len(usable)

    def _add(self, records: list[Record], prefix: str) -> None:
        """Column by column over all new records, which is much faster than record by record."""
        for key in dict.fromkeys(chain.from_iterable(records)):
            values = [record.get(key) for record in records]
            if dict in set(map(type, values)):
                if prefix.count(".") < MAX_DEPTH:
                    self._add([value if type(value) is dict else {} for value in values], f"{prefix}{key}.")
                continue
            numbers = _numbers(values)
            kept = np.flatnonzero(np.isfinite(numbers))
            if len(kept):
                self._parts.setdefault(prefix + key, []).append(MetricColumn(kept + self.num_rows, numbers[kept]))

    @property
    def names(self) -> list[str]:
        return list(self._parts)

    def column(self, name: str) -> MetricColumn:
        """Empty if nothing of that name was written."""
        parts = self._parts.get(name)
        if not parts:
            return MetricColumn(np.zeros(0, dtype=np.int64), np.zeros(0))
        if len(parts) > 1:
            rows, values = [part.rows for part in parts], [part.values for part in parts]
            parts[:] = [MetricColumn(np.concatenate(rows), np.concatenate(values))]
        return parts[0]

    @property
    def tokens(self) -> Floats:
        return self.column("tokens").values

    @property
    def steps(self) -> Floats:
        return self.column("step").values

    def last(self, name: str) -> float | None:
        values = self.column(name).values
        return float(values[-1]) if len(values) else None


def _has_place(record: Record) -> bool:
    return number(record.get("step")) is not None and number(record.get("tokens")) is not None


def _numbers(values: list[Any]) -> Floats:
    """Floats; NaN for everything that is not a number."""
    try:
        whole = np.array(values, dtype=np.float64)
        if whole.ndim != 1:  # every value is a list of numbers
            raise ValueError
        return whole
    except (TypeError, ValueError, OverflowError):
        found = [float(value) if isinstance(value, bool) else number(value) for value in values]
        return np.array(found, dtype=np.float64)


@dataclass(slots=True)
class Compaction:
    """A compaction: the model was rebuilt at these sizes."""

    step: int
    tokens: int
    sizes: dict[str, list[int]]
    """One number, or the smallest and largest if layers differ."""

    @property
    def text(self) -> str:
        return ", ".join(f"{name} {' to '.join(f'{n:,}' for n in size)}" for name, size in self.sizes.items())


class Trimmed(NamedTuple):
    """Tokens that were kept, those of the source, and the parameters that are left before anything is pruned."""

    kept: int
    rows: int
    parameters: float


@dataclass(slots=True)
class Prunes:
    """Prune events as columns; ``kinds`` are indices into KINDS, missing saliencies are NaN."""

    tokens: array[float] = field(default_factory=lambda: array("d"))
    kinds: array[int] = field(default_factory=lambda: array("q"))
    sizes: array[float] = field(default_factory=lambda: array("d"))
    """Heads or channels removed, over all layers."""
    parameters: array[float] = field(default_factory=lambda: array("d"))
    saliency: tuple[array[float], ...] = field(default_factory=lambda: tuple(array("d") for _ in KINDS))

    def __len__(self) -> int:
        return len(self.kinds)


class LedgerLog:
    """What was removed and when, with the removed indices of the source."""

    def __init__(self, path: Path) -> None:
        self.lines = GrowingJsonLines(path)
        self._clear()

    def _clear(self) -> None:
        self.source: Record = {}
        self.num_odd = 0
        """Events that this version does not understand."""
        self.compactions: list[Compaction] = []
        self.prunes = Prunes()
        self.allocations: list[list[float]] = []
        """Importance of every layer, per iteration (method adapt)."""
        self.trimmed: Trimmed | None = None
        """What is left if tokens were removed."""
        self.gone: dict[str, list[set[int]]] = {kind: [] for kind in KINDS}
        """Removed indices: a set per layer (attn, ffn; of layer 0 for attention, 1 for the FFN), or one set (stem)."""

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
        elif event == "rotate":  # the hidden channels that are left are the first ones
            hidden, of = record["hidden"], record["of"]
            if not 0 < hidden <= of <= _MAX_HIDDEN:
                return False
            self._prune(record | {"type": "stem", "indices": [list(range(hidden, of))]})
        elif event == "compact":
            found = {k: v if isinstance(v, list) else [v] for k, v in record.items() if k not in ("step", "tokens")}
            sizes = {k: v for k, v in found.items() if v and all(type(number) is int for number in v)}
            self.compactions.append(Compaction(int(record["step"]), int(record["tokens"]), sizes))
        elif event == "allocation":
            self.allocations.append([np.nan if value is None else float(value) for value in record["importance"]])
        elif event == "vocabulary":
            num_kept = sum(last - first + 1 for first, last in record["kept"])
            kept, rows, left = (number(value) for value in (num_kept, record["rows"], record["parameters"]))
            if kept is None or rows is None or left is None:
                return False
            self.trimmed = Trimmed(int(kept), int(rows), left)
        else:
            return event == "resume"  # settings that a resumed run changed
        return True

    def _prune(self, record: Record) -> None:
        kind = KINDS.index(record["type"])
        members: list[list[int]] = record["indices"]
        if not set(map(type, chain.from_iterable(members))) <= {int}:
            raise TypeError("indices are whole numbers")
        step, tokens, left = (number(record[key]) for key in ("step", "tokens", "parameters"))
        if step is None or tokens is None or left is None:
            raise TypeError("step, tokens and parameters are finite numbers")
        prunes, saliency = self.prunes, record.get("saliency")
        if not isinstance(saliency, dict):
            saliency = {}
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
        return number(self.source.get("parameters")) or None  # a damaged ledger may say 0

    def option(self, name: str) -> Any:
        options = self.source.get("options")
        return options.get(name) if isinstance(options, dict) else None


def text_of(value: Any) -> str:
    return value if isinstance(value, str) else ""
