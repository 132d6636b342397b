"""Sizes of rebuilt models: multiples, and few different ones, so that few graphs are compiled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations

from dwindle.anatomy.anatomy import Anatomy, lost
from dwindle.anatomy.structure import Block, Layer, Structure

MAX_SHAPES = 8
"""Default maximum number of different layer shapes in a rebuilt model."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Query heads per key/value head, FFN channels, and blocks that are absent."""

    queries: tuple[int, ...]
    ffn: int
    absent: tuple[Block, ...] = ()

    def around(self, other: LayerShape) -> LayerShape | None:
        """The smallest shape that contains both; None if their query heads are unevenly distributed and differ.

        None also if only one of them has heads, or a block that the other lacks.
        """
        ffn = max(self.ffn, other.ffn)
        if self.absent != other.absent:
            return None
        if self.queries == other.queries:
            return LayerShape(self.queries, ffn, self.absent)
        if len({*self.queries}) != 1 or len({*other.queries}) != 1:
            return None
        queries = (max(self.queries[0], other.queries[0]),) * max(len(self.queries), len(other.queries))
        return LayerShape(queries, ffn, self.absent)

    @property
    def layer(self) -> Layer:
        """A layer of this shape, for counting parameters."""
        kv_of_query = tuple(kv for kv, queries in enumerate(self.queries) for _ in range(queries))
        return Layer(tuple(range(len(kv_of_query))), kv_of_query, tuple(range(self.ffn)), self.absent)


def bucketed(
    anatomy: Anatomy, alive: Structure, physical: Structure, multiple: int, max_shapes: int | None = None
) -> Structure:
    """The structure to compact to: the alive parts, with widths padded to multiples by pruned but still physical ones.

    Heads and channels of layers are padded to at most ``max_shapes`` different shapes; the heads of a layer that does
    not have enough of them are not padded. Removed blocks and layers are never kept.
    """
    hidden = -(-len(alive.hidden) // multiple) * multiple
    shapes = [LayerShape(la.queries_per_kv, -(-len(la.ffn) // multiple) * multiple, la.absent) for la in alive.layers]

    @cache
    def size(shape: LayerShape) -> int:
        return anatomy.count_layer(0, hidden, shape.layer)

    aims = few_shapes(shapes, size, max_shapes or MAX_SHAPES)
    layers = tuple(
        _padded_layer(layer, here, aim) for layer, here, aim in zip(alive.layers, physical.layers, aims, strict=True)
    )
    return Structure(_padded(alive.hidden, physical.hidden, hidden), layers)


def few_shapes(shapes: Sequence[LayerShape], size: Callable[[LayerShape], int], most: int) -> list[LayerShape]:
    """For each shape one that contains it, with at most ``most`` different ones.

    Greedy: while there are more, the two shapes whose union adds the fewest parameters are merged.
    """
    aim = {shape: shape for shape in shapes}
    number = Counter(shapes)
    while len(number) > most:
        unions = [
            (size(both) * (number[a] + number[b]) - size(a) * number[a] - size(b) * number[b], place, a, b, both)
            for place, (a, b) in enumerate(combinations(number, 2))
            if (both := a.around(b)) is not None
        ]
        if not unions:
            break
        _, _, a, b, both = min(unions, key=lambda union: union[:2])
        together = number.pop(a) + number.pop(b)
        number[both] += together
        aim = {shape: both if now in (a, b) else now for shape, now in aim.items()}
    return [aim[shape] for shape in shapes]


def _padded_layer(alive: Layer, here: Layer, aim: LayerShape) -> Layer:
    padded = replace(alive, ffn=_padded(alive.ffn, here.ffn, aim.ffn))
    if alive.queries_per_kv == aim.queries:
        return padded
    each = aim.queries[0]
    heads = [*alive.kv_heads, *lost(here.kv_heads, alive.kv_heads)][: len(aim.queries)]
    chosen = [_padded(alive.queries_of(kv), here.queries_of(kv), each) for kv in heads]
    if tuple(map(len, chosen)) != aim.queries:
        return padded
    queries = {query: kv for kv, own in zip(heads, chosen, strict=True) for query in own}
    return replace(padded, query_heads=tuple(sorted(queries)), kv_of_query=tuple(queries[q] for q in sorted(queries)))


def _padded(alive: tuple[int, ...], present: tuple[int, ...], width: int) -> tuple[int, ...]:
    """``alive`` padded to ``width`` with pruned indices, or with all of them if there are fewer."""
    spare = lost(present, alive)[: max(width - len(alive), 0)]
    return tuple(sorted((*alive, *spare)))
