"""Sizes at which a model is rebuilt on the way: round, and few different ones, so that few graphs are compiled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations

from dwindle.anatomy.anatomy import Anatomy, lost
from dwindle.anatomy.structure import Layer, Structure

MAX_SHAPES = 8
"""Different sizes that layers of different sizes are filled up to."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Queries of each key/value head, and FFN channels."""

    queries: tuple[int, ...]
    ffn: int

    def around(self, other: LayerShape) -> LayerShape | None:
        """The smallest that holds both; None when uneven heads make that unclear."""
        ffn = max(self.ffn, other.ffn)
        if self.queries == other.queries:
            return LayerShape(self.queries, ffn)
        if len({*self.queries}) > 1 or len({*other.queries}) > 1:
            return None
        return LayerShape((max(self.queries[0], other.queries[0]),) * max(len(self.queries), len(other.queries)), ffn)

    @property
    def layer(self) -> Layer:
        """A layer of these sizes, for counting."""
        kv_of_query = tuple(kv for kv, queries in enumerate(self.queries) for _ in range(queries))
        return Layer(tuple(range(len(kv_of_query))), kv_of_query, tuple(range(self.ffn)))


def bucketed(
    anatomy: Anatomy, alive: Structure, physical: Structure, multiple: int, max_shapes: int | None = None
) -> Structure:
    """The living parts, widths filled up to multiples with what is dead but still physically there.

    Layers are filled up to at most ``max_shapes`` different sizes, channels and heads; one that no longer has enough of
    them stays as it is.
    """
    hidden = -(-len(alive.hidden) // multiple) * multiple
    shapes = [LayerShape(la.queries_per_kv, -(-len(la.ffn) // multiple) * multiple) for la in alive.layers]

    @cache
    def size(shape: LayerShape) -> int:
        return anatomy.count_layer(0, hidden, shape.layer)

    aims = few_shapes(shapes, size, max_shapes or MAX_SHAPES)
    layers = tuple(
        _filled_layer(living, here, aim) for living, here, aim in zip(alive.layers, physical.layers, aims, strict=True)
    )
    return Structure(_filled(alive.hidden, physical.hidden, hidden), layers)


def few_shapes(shapes: Sequence[LayerShape], size: Callable[[LayerShape], int], most: int) -> list[LayerShape]:
    """For each shape one that holds it, at most so many different ones.

    As long as there are more, the two whose union adds least to all that have them become one.
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


def _filled_layer(living: Layer, here: Layer, aim: LayerShape) -> Layer:
    filled = replace(living, ffn=_filled(living.ffn, here.ffn, aim.ffn))
    if living.queries_per_kv == aim.queries:
        return filled
    each = aim.queries[0]
    heads = [*living.kv_heads, *lost(here.kv_heads, living.kv_heads)][: len(aim.queries)]
    chosen = [_filled(living.queries_of(kv), here.queries_of(kv), each) for kv in heads]
    if tuple(map(len, chosen)) != aim.queries:
        return filled
    queries = {query: kv for kv, own in zip(heads, chosen, strict=True) for query in own}
    return Layer(tuple(sorted(queries)), tuple(queries[query] for query in sorted(queries)), filled.ffn)


def _filled(living: tuple[int, ...], present: tuple[int, ...], width: int) -> tuple[int, ...]:
    """``living`` and as many of the dead as bring it to ``width``, or all that are there."""
    spare = lost(present, living)[: max(width - len(living), 0)]
    return tuple(sorted((*living, *spare)))
