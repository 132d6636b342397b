"""The model before and after pruning, layer by layer, from the ledger: its first line has the source's sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dwindle.core.limits import MAX_CHANNELS
from dwindle.report.jsonlines import Record
from dwindle.report.logs import LedgerLog


@dataclass(slots=True)
class LayerView:
    """One layer of the source and what was kept of it."""

    kv_of_query: list[int]
    """For every query head of the source the key/value head it reads."""
    gone_queries: list[int]
    ffn_before: int
    ffn_after: int
    absent: tuple[str, ...] = ()
    """Blocks that were removed whole: attn, mlp."""

    @property
    def is_gone(self) -> bool:
        return len(self.absent) == 2

    @property
    def queries_after(self) -> int:
        return len(self.kv_of_query) - len(self.gone_queries)

    @property
    def kv_before(self) -> int:
        return len(set(self.kv_of_query))

    @property
    def kv_after(self) -> int:
        return len(set(self._kv_left))

    @property
    def is_regular(self) -> bool:
        """Whether all remaining key/value heads serve the same number of queries."""
        left = self._kv_left
        return len({left.count(kv) for kv in set(left)}) <= 1

    @property
    def _kv_left(self) -> list[int]:
        gone = set(self.gone_queries)
        return [kv for query, kv in enumerate(self.kv_of_query) if query not in gone]


@dataclass(slots=True)
class ArchitectureView:
    """The whole model before and after pruning."""

    hidden_before: int
    hidden_after: int
    layers: list[LayerView]
    parameters: list[tuple[int, int]]
    """(before, after) of every layer; empty until the result is written."""

    def total(self, kind: str) -> int:
        """Number of heads, FFN channels, hidden channels or blocks in the source, over all layers."""
        if kind == "stem":
            return self.hidden_before
        if kind == "layer":
            return 2 * len(self.layers)
        return sum(len(la.kv_of_query) if kind == "attn" else la.ffn_before for la in self.layers)

    def to_json(self) -> dict[str, Any]:
        return {
            "hidden": [self.hidden_before, self.hidden_after],
            "layers": [
                {
                    "kv_of_query": la.kv_of_query,
                    "gone_queries": la.gone_queries,
                    "kv": [la.kv_before, la.kv_after],
                    "ffn": [la.ffn_before, la.ffn_after],
                }
                for la in self.layers
            ],
        }


def architecture_of(ledger: LedgerLog, structure: Record) -> ArchitectureView | None:
    """None if the ledger's first line is missing or damaged; ``structure`` is that of the result."""
    try:
        return _view(ledger, structure)
    except (KeyError, TypeError, ValueError):
        return None


def _view(ledger: LedgerLog, structure: Record) -> ArchitectureView:
    source, gone = ledger.source, ledger.gone
    maps, widths = source["layer_kv_of_query"], source["layer_ffn"]
    removed = [gone[kind] or [set()] * len(maps) for kind in ("attn", "ffn", "layer")]
    layers = [_layer(*layer) for layer in zip(maps, widths, *removed, strict=True)]
    weights: list[Any] = [source["layer_parameters"], structure.get("layer_parameters")]
    weighed = all(isinstance(own, list) and len(own) == len(layers) for own in weights)
    parameters = [(int(before), int(after)) for before, after in zip(*weights, strict=True)] if weighed else []
    hidden = _size(source["hidden"])
    return ArchitectureView(hidden, _size(hidden - ledger.num_gone("stem")), layers, parameters)


def _layer(kv_of_query: Any, width: Any, queries: set[int], channels: set[int], blocks: set[int]) -> LayerView:
    absent = tuple(block for place, block in enumerate(("attn", "mlp")) if place in blocks)
    gone = {*range(len(kv_of_query))} if "attn" in absent else queries
    if not gone <= {*range(len(kv_of_query))}:
        raise ValueError("the source has no such head")
    left = 0 if "mlp" in absent else width - len(channels)
    return LayerView([_size(kv) for kv in kv_of_query], sorted(gone), _size(width), _size(left), absent)


def _size(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= MAX_CHANNELS:
        raise ValueError("not a size of a model")
    return value
