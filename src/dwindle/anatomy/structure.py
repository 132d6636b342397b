"""Which heads, channels and hidden indices a model has, in the numbering of its source."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, Literal, Self, cast

from dwindle.core.errors import UserError
from dwindle.core.names import public_name

Kind = Literal["attn", "ffn", "stem", "layer"]
KINDS: tuple[Kind, ...] = ("attn", "ffn", "stem")
"""Kinds that make a model narrower: what is pruned where nothing else is asked for."""
ALL_KINDS: tuple[Kind, ...] = (*KINDS, "layer")
"""With whole blocks and layers."""
UNIT_OF: dict[Kind, str] = {"attn": "query", "ffn": "ffn", "stem": "hidden"}
"""What groups of a kind remove, as the axes of an anatomy table name it."""
KIND_OF = {unit: kind for kind, unit in UNIT_OF.items()}
Block = Literal["attn", "mlp"]
BLOCKS: tuple[Block, ...] = ("attn", "mlp")
"""The blocks of a layer: attention (or what stands in its place, such as a convolution), then the FFN."""

FORMAT = 1
_FEW = 8


@dataclass(frozen=True)
class Layer:
    """One decoder layer: its query heads, the key/value head that each of them reads, its FFN channels."""

    query_heads: tuple[int, ...]
    kv_of_query: tuple[int, ...]
    ffn: tuple[int, ...]
    absent: tuple[Block, ...] = ()
    """Blocks that were removed whole, with their norms."""

    @property
    def is_gone(self) -> bool:
        """Whether the whole layer was removed."""
        return len(self.absent) == len(BLOCKS)

    @property
    def block_places(self) -> tuple[int, ...]:
        """The places in ``BLOCKS`` of its blocks."""
        return tuple(place for place, block in enumerate(BLOCKS) if block not in self.absent)

    @cached_property
    def kv_heads(self) -> tuple[int, ...]:
        """A key/value head is kept while one of its query heads is."""
        return tuple(sorted(set(self.kv_of_query)))

    @property
    def queries_per_kv(self) -> tuple[int, ...]:
        return tuple(self.kv_of_query.count(kv) for kv in self.kv_heads)

    def queries_of(self, kv_head: int) -> tuple[int, ...]:
        """The query heads that read a key/value head."""
        return tuple(q for q, kv in zip(self.query_heads, self.kv_of_query, strict=True) if kv == kv_head)

    @property
    def is_regular(self) -> bool:
        """Whether stock grouped-query attention (equal, contiguous groups) computes this layer; true without heads."""
        return len(set(self.queries_per_kv)) <= 1 and tuple(sorted(self.kv_of_query)) == self.kv_of_query

    def without_blocks(self, blocks: Iterable[Block]) -> Layer:
        """The layer without whole blocks."""
        gone = {*self.absent, *blocks}
        heads = ((), ()) if "attn" in gone else (self.query_heads, self.kv_of_query)
        return Layer(*heads, () if "mlp" in gone else self.ffn, tuple(block for block in BLOCKS if block in gone))

    def narrowed(self, width: int) -> Layer:
        """The layer with so many FFN channels, for counting: its indices are not those that are left."""
        layer = Layer(self.query_heads, self.kv_of_query, _upto(width), self.absent)
        layer.__dict__["kv_heads"] = self.kv_heads  # the cached one
        return layer

    def without(self, *, query_heads: Iterable[int] = (), ffn: Collection[int] = ()) -> Layer:
        """The remaining layer; unchanged parts stay the same objects, which makes differences cheap to find."""
        gone = set(query_heads)
        heads, kv_of_query = self.query_heads, self.kv_of_query
        if gone:
            kept = [place for place, q in enumerate(heads) if q not in gone]
            heads = tuple(self.query_heads[place] for place in kept)
            kv_of_query = tuple(self.kv_of_query[place] for place in kept)
        channels = _drop(self.ffn, ffn)
        if heads is self.query_heads and channels is self.ffn:
            return self
        return Layer(heads, kv_of_query, channels, self.absent)

    def unit(self, name: str) -> tuple[int, ...]:
        """The indices of one unit of an anatomy table."""
        return {"query": self.query_heads, "head": self.query_heads, "kv": self.kv_heads, "ffn": self.ffn}[name]


def _upto(width: int) -> tuple[int, ...]:
    """Indices for counting only: nothing is stored, so that sizes of wide layers cost nothing to change."""
    return cast(tuple[int, ...], range(width))


def lost(before: tuple[int, ...], after: tuple[int, ...]) -> list[int]:
    """The indices of ``before`` that are not in ``after``."""
    if before is after or len(before) == len(after):
        return []
    missing = len(before) - len(after)
    if 32 * missing > len(before):
        kept = set(after)
        return [index for index in before if index not in kept]
    gone: list[int] = []  # few of many, as in an event: binary search for each position where the two tuples diverge
    low = 0
    while len(gone) < missing:
        high = len(after) + len(gone)
        while low < high:
            middle = (low + high) // 2
            if before[middle] == after[middle - len(gone)]:
                low = middle + 1
            else:
                high = middle
        gone.append(before[low])
        low += 1
    return gone


def _is_part(some: tuple[int, ...], of: tuple[int, ...]) -> bool:
    """Both sorted."""
    return some is of or _drop(of, lost(of, some)) == some


def _drop(indices: tuple[int, ...], gone: Collection[int]) -> tuple[int, ...]:
    """Sorted indices without some of them; for few indices of a wide layer, slices are faster than a set."""
    if len(gone) > _FEW:
        lost = set(gone)
        return tuple(index for index in indices if index not in lost)
    for index in gone:
        place = bisect_left(indices, index)
        if place < len(indices) and indices[place] == index:
            indices = indices[:place] + indices[place + 1 :]
    return indices


@dataclass(frozen=True, slots=True)
class Group:
    """Heads, channels, hidden indices or whole blocks that are removed together in one event.

    ``attn`` and ``ffn``: ``members[l]`` are the query heads (channels) of layer l;
    ``stem``: ``members[0]`` are the hidden indices, the same in every tensor;
    ``layer``: ``members[l]`` are places in ``BLOCKS``, both for the whole layer l.
    """

    kind: Kind
    members: tuple[tuple[int, ...], ...]

    @classmethod
    def of_layer(cls, kind: Kind, layer: int, members: tuple[int, ...], num_layers: int) -> Group:
        """A group with members in a single layer."""
        return cls(kind, tuple(members if number == layer else () for number in range(num_layers)))


@dataclass(frozen=True)
class Structure:
    """The hidden indices and layers of a model; immutable, all indices sorted and in the source's numbering."""

    hidden: tuple[int, ...]
    layers: tuple[Layer, ...]

    @classmethod
    def full(
        cls,
        *,
        hidden: int,
        ffn: list[int],
        kv_of_query: list[list[int]],
        absent: Sequence[tuple[Block, ...]] | None = None,
    ) -> Structure:
        """A model with nothing removed; irregular key/value maps and absent blocks (pruned earlier) are allowed."""
        upto = cache(lambda n: tuple(range(n)))  # equal layers share their indices, so that wide models stay small
        heads = {tuple(kv): tuple(kv) for kv in kv_of_query}
        layers = tuple(
            Layer(upto(len(kv)), heads[tuple(kv)], upto(n), gone)
            for kv, n, gone in zip(kv_of_query, ffn, absent or [()] * len(ffn), strict=True)
        )
        return cls(upto(hidden), layers)

    @cached_property
    def places(self) -> dict[int, int]:
        """The place in the model of every remaining layer."""
        present = (number for number, layer in enumerate(self.layers) if not layer.is_gone)
        return {number: place for place, number in enumerate(present)}

    @property
    def present(self) -> tuple[Layer, ...]:
        """The remaining layers."""
        return tuple(layer for layer in self.layers if not layer.is_gone)

    @property
    def is_uniform(self) -> bool:
        """Whether all layers have the same sizes and regular grouped-query attention, as in a stock model.

        Layers without heads (convolutions, linear attention) may stand between those with heads; whole layers may be
        missing, but not a single block of a layer.
        """
        layers = self.present
        heads = {(len(la.query_heads), len(la.kv_heads)) for la in layers if la.query_heads}
        widths = {len(la.ffn) for la in layers}
        return len(heads) <= 1 and len(widths) == 1 and all(la.is_regular and not la.absent for la in layers)

    @property
    def with_heads(self) -> Layer:
        """The first layer that has heads; the first one if none has."""
        return next((layer for layer in self.layers if layer.query_heads), self.present[0])

    def without(self, group: Group) -> Structure:
        """The structure after removing one group."""
        if group.kind == "stem":
            return replace(self, hidden=_drop(self.hidden, group.members[0]))
        if group.kind == "layer":
            pairs = zip(self.layers, group.members, strict=True)
            return replace(
                self, layers=tuple(la.without_blocks(BLOCKS[n] for n in gone) if gone else la for la, gone in pairs)
            )
        key = "query_heads" if group.kind == "attn" else "ffn"
        layers = tuple(la.without(**{key: gone}) for la, gone in zip(self.layers, group.members, strict=True))
        return replace(self, layers=layers)

    def without_all(self, groups: Iterable[Group]) -> Structure:
        """The structure after removing many groups; each index is looked at once."""
        hidden, heads, channels = list[int](), *([list[int]() for _ in self.layers] for _ in range(2))
        blocks = [set[Block]() for _ in self.layers]
        for group in groups:
            if group.kind == "stem":
                hidden += group.members[0]
                continue
            for number, members in enumerate(group.members):
                if not members:
                    continue
                if group.kind == "layer":
                    blocks[number].update(BLOCKS[place] for place in members)
                else:
                    (heads if group.kind == "attn" else channels)[number].extend(members)
        layers = list[Layer]()
        for layer, queries, ffn, gone in zip(self.layers, heads, channels, blocks, strict=True):
            rest = layer.without(query_heads=queries, ffn=ffn)
            layers.append(rest.without_blocks(gone) if gone else rest)
        return Structure(_drop(self.hidden, hidden), tuple(layers))

    def sized(self) -> Structure:
        """The same sizes, for counting: only the heads are those of this structure."""
        return Structure(_upto(len(self.hidden)), tuple(layer.narrowed(len(layer.ffn)) for layer in self.layers))

    def shrunk(self, group: Group) -> Structure:
        """``without``, of a ``sized`` structure."""
        if group.kind == "stem":
            return Structure(_upto(len(self.hidden) - len(group.members[0])), self.layers)
        if group.kind != "ffn":
            return self.without(group)
        pairs = zip(self.layers, group.members, strict=True)
        return Structure(self.hidden, tuple(la.narrowed(len(la.ffn) - len(ffn)) if ffn else la for la, ffn in pairs))

    def unit(self, name: str, layer: int | None) -> tuple[int, ...]:
        """The indices of one unit of an anatomy table, in one layer or (hidden) in the whole model."""
        if name == "hidden":
            return self.hidden
        assert layer is not None, name
        return self.layers[layer].unit(name)

    def contains(self, other: Structure) -> bool:
        """Whether ``other`` is a substructure of this one."""
        return (
            len(self.layers) == len(other.layers)
            and _is_part(other.hidden, self.hidden)
            and all(
                a is b
                or (_is_part(b.query_heads, a.query_heads) and _is_part(b.ffn, a.ffn) and {*a.absent} <= {*b.absent})
                for a, b in zip(self.layers, other.layers, strict=True)
            )
        )

    def to_json(self, source: str) -> dict[str, Any]:
        layers = [
            {
                "query_heads": list(la.query_heads),
                "kv_heads": list(la.kv_heads),
                "kv_of_query": list(la.kv_of_query),
                "ffn": list(la.ffn),
                **({"absent": list(la.absent)} if la.absent else {}),
            }
            for la in self.layers
        ]
        return {"format": FORMAT, "source": public_name(source), "hidden": list(self.hidden), "layers": layers}

    @classmethod
    def from_json(cls, data: Mapping[str, Any], where: str = "structure") -> Self:
        if data.get("format") != FORMAT:
            raise UserError(f"{where}: format {data.get('format')!r} is not {FORMAT}: written by another version?")
        layers = tuple(
            Layer(tuple(la["query_heads"]), tuple(la["kv_of_query"]), tuple(la["ffn"]), tuple(la.get("absent", ())))
            for la in data["layers"]
        )
        for layer in layers:
            if layer.absent and layer != layer.without_blocks(layer.absent):
                raise UserError(f"{where}: absent is {list(layer.absent)!r:.60}, which the layer's sizes do not fit")
        return cls(tuple(data["hidden"]), layers)


def head_dim_of(config: Any) -> int:
    """The head size, also for configurations that leave it implicit."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
