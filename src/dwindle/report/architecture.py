"""The model before and after, layer by layer, from the ledger and one structure of the way.

What the source had is never stored by itself: it is what some structure of the run still has, together with
everything that the ledger says has left.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dwindle.report.jsonlines import read_json
from dwindle.report.logs import LedgerLog


@dataclass(slots=True)
class LayerView:
    """One layer of the source and what is left of it."""

    kv_of_query: list[int | None]
    """For every query head of the source the key/value head it reads; None where no file says it."""
    gone_queries: list[int]
    ffn_before: int
    ffn_after: int

    @property
    def queries_after(self) -> int:
        return len(self.kv_of_query) - len(self.gone_queries)

    @property
    def kv_before(self) -> int:
        return len({kv for kv in self.kv_of_query if kv is not None})

    @property
    def kv_after(self) -> int:
        gone = set(self.gone_queries)
        return len({kv for query, kv in enumerate(self.kv_of_query) if kv is not None and query not in gone})


@dataclass(slots=True)
class ArchitectureView:
    """The whole model, before and after."""

    hidden_before: int
    hidden_after: int
    layers: list[LayerView]
    found_in: str
    """The file that said what is left, relative to the run."""

    def total(self, kind: str) -> int:
        """How many heads, channels or hidden indices the source had, over all layers."""
        if kind == "stem":
            return self.hidden_before
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


def find_architecture(run: Path, ledger: LedgerLog) -> ArchitectureView | None:
    """From the first structure that can be read and fits the ledger; None when there is none."""
    for name, structure in _structures(run, ledger):
        try:
            return _view(structure, ledger, name)
        except (KeyError, TypeError, ValueError, IndexError):
            continue
    return None


def _structures(run: Path, ledger: LedgerLog) -> Iterator[tuple[str, Any]]:
    own = ledger.source.get("structure")
    if isinstance(own, dict):
        yield "ledger.jsonl", own
    for name in ("structure.json", "model/structure.json"):
        if (found := read_json(run / name)) is not None:
            yield name, found
    for path in sorted((run / "milestones").glob("*/structure.json")):
        if (found := read_json(path)) is not None:
            yield path.relative_to(run).as_posix(), found
    for path in sorted((run / "checkpoints").glob("step-*/state.json"), reverse=True):
        state = read_json(path)
        try:
            yield path.relative_to(run).as_posix(), state["callbacks"]["Pruner"]["alive"]
        except (KeyError, TypeError):
            continue


def _view(structure: dict[str, Any], ledger: LedgerLog, name: str) -> ArchitectureView:
    """``structure`` is of any moment of the run: what left before it is in the ledger, the rest is in it."""
    gone = ledger.gone
    layers = structure["layers"]
    hidden = set(map(int, structure["hidden"])).union(*gone["stem"])
    if any(len(gone[kind]) not in (0, len(layers)) for kind in ("attn", "ffn")):
        raise ValueError("the ledger is of a model with another number of layers")
    pairs = [dict(zip(map(int, la["query_heads"]), map(int, la["kv_of_query"]), strict=True)) for la in layers]
    views = []
    group = _queries_per_kv(pairs)
    for place, layer in enumerate(layers):
        gone_queries = gone["attn"][place] if gone["attn"] else set()
        gone_ffn = gone["ffn"][place] if gone["ffn"] else set()
        num_queries = 1 + max(gone_queries.union(pairs[place]))
        ffn = set(map(int, layer["ffn"])) | gone_ffn
        kv: list[int | None] = [
            pairs[place].get(query, None if group is None else query // group) for query in range(num_queries)
        ]
        views.append(LayerView(kv, sorted(gone_queries), len(ffn), len(ffn - gone_ffn)))
    left = hidden.difference(*gone["stem"])
    return ArchitectureView(len(hidden), len(left), views, name)


def _queries_per_kv(pairs: list[dict[int, int]]) -> int | None:
    """How many neighbouring queries share a key/value head in a regular source; None if no number fits.

    Heads that left are no longer in the map, but the ones that stayed leave few choices: the largest group that
    agrees with all of them.
    """
    known = {item for layer in pairs for item in layer.items()}
    most = 1 + max((query for query, _ in known), default=0)
    fitting = [group for group in range(1, most + 1) if all(query // group == kv for query, kv in known)]
    return fitting[-1] if fitting else None
