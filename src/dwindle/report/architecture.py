"""The model before and after pruning, layer by layer, from the ledger and one structure of the run.

The source's own structure is not stored: it is what some later structure still has, plus everything that the ledger
records as removed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dwindle.core.run_directory import RunDirectory
from dwindle.report.jsonlines import read_json
from dwindle.report.logs import LedgerLog


@dataclass(slots=True)
class LayerView:
    """One layer of the source and what was kept of it."""

    kv_of_query: list[int | None]
    """For every query head of the source the key/value head it reads; None if no file says so."""
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
    def kv_before(self) -> int | None:
        return None if None in self.kv_of_query else len(set(self.kv_of_query))

    @property
    def kv_after(self) -> int:
        gone = set(self.gone_queries)
        return len({kv for query, kv in enumerate(self.kv_of_query) if query not in gone})

    @property
    def is_regular(self) -> bool:
        """Whether all remaining key/value heads serve the same number of queries."""
        gone = set(self.gone_queries)
        left = [kv for query, kv in enumerate(self.kv_of_query) if query not in gone]
        return len({left.count(kv) for kv in set(left)}) <= 1


@dataclass(slots=True)
class ArchitectureView:
    """The whole model before and after pruning."""

    hidden_before: int
    hidden_after: int
    layers: list[LayerView]
    parameters: list[tuple[int, int]]
    """(before, after) of every layer; empty if the files do not say so."""
    found_in: str
    """The file that the structure was read from, relative to the run."""

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


def find_architecture(run: RunDirectory, ledger: LedgerLog) -> ArchitectureView | None:
    """From the first readable structure that fits the ledger; None if there is none."""
    for name, structure in _structures(run, ledger):
        try:
            return _view(structure, ledger, name)
        except (KeyError, TypeError, ValueError, IndexError):
            continue
    return None


def _structures(run: RunDirectory, ledger: LedgerLog) -> Iterator[tuple[str, Any]]:
    own = ledger.source.get("structure")
    if isinstance(own, dict):
        yield run.ledger.name, own
    for path in run.structure_files():
        if (found := read_json(path)) is not None:
            yield path.relative_to(run.path).as_posix(), found
    for path in run.state_files():
        state = read_json(path)
        try:
            yield path.relative_to(run.path).as_posix(), state["callbacks"]["Pruner"]["alive"]
        except (KeyError, TypeError):
            continue


def _view(structure: dict[str, Any], ledger: LedgerLog, name: str) -> ArchitectureView:
    """``structure`` may be of any step: what was removed before it is in the ledger, the rest is in it."""
    gone, layers = ledger.gone, structure["layers"]
    if any(len(gone[kind]) not in (0, len(layers)) for kind in ("attn", "ffn", "layer")):
        raise ValueError("the ledger has another number of layers")
    gone_queries = gone["attn"] or [set() for _ in layers]
    gone_ffn = gone["ffn"] or [set() for _ in layers]
    blocks = [tuple(layer.get("absent", ())) for layer in layers]
    if gone["layer"]:  # the structure may be older than the ledger
        blocks = [tuple(b for n, b in enumerate(("attn", "mlp")) if n in removed) for removed in gone["layer"]]
    maps = [_kv_map(layer) for layer in layers]
    counts = [1 + max(removed.union(known), default=-1) for removed, known in zip(gone_queries, maps, strict=True)]
    counts = [max(counts) if "attn" in absent else count for count, absent in zip(counts, blocks, strict=True)]
    widths = [_before_after(layer["ffn"], removed) for layer, removed in zip(layers, gone_ffn, strict=True)]
    widest = max(before for before, _ in widths)
    group = _queries_per_kv(maps, counts)
    views = []
    for place in range(len(layers)):
        kv = [maps[place].get(q, None if group is None else q // group) for q in range(counts[place])]
        lost = gone_queries[place].union(q for q in range(counts[place]) if q not in maps[place])
        absent = blocks[place]
        lost = {*range(counts[place])} if "attn" in absent else lost
        width = (widest, 0) if "mlp" in absent else widths[place]
        views.append(LayerView(kv, sorted(lost), *width, absent))
    before, after = _before_after(structure["hidden"], set().union(*gone["stem"]))
    weights: list[Any] = [ledger.source.get("layer_parameters"), structure.get("layer_parameters")]
    weighed = all(isinstance(own, list) and len(own) == len(layers) for own in weights)
    parameters = [(int(b), int(a)) for b, a in zip(*weights, strict=True)] if weighed else []
    return ArchitectureView(before, after, views, parameters, name)


def _before_after(there: Any, gone: set[int]) -> tuple[int, int]:
    """Counts (before, after); the highest index gives the first, even if lines of the ledger are lost."""
    known = _indices(there)
    return 1 + max(known | gone, default=-1), len(known - gone)


def _indices(value: Any) -> set[int]:
    """From a list of indices, or from their number."""
    return set(range(value)) if isinstance(value, int) else {int(index) for index in value}


def _kv_map(layer: dict[str, Any]) -> dict[int, int]:
    kv = [int(index) for index in layer["kv_of_query"]]
    return dict(zip(map(int, layer.get("query_heads", range(len(kv)))), kv, strict=True))


def _queries_per_kv(maps: list[dict[int, int]], counts: list[int]) -> int | None:
    """Queries per key/value head in the source; None unless exactly one number fits.

    Removed heads are in no map, but those kept in some layer nearly always determine it.
    """
    known = {pair for layer in maps for pair in layer.items()}
    fitting = [
        group
        for group in range(1, max(counts) + 1)
        if all(count % group == 0 for count in counts) and all(query // group == kv for query, kv in known)
    ]
    return fitting[0] if len(fitting) == 1 else None
