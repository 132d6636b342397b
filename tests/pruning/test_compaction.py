"""Sizes to rebuild at: few, and hardly larger than what lives."""

from __future__ import annotations

import functools
import random
from typing import Any

from dwindle.anatomy.anatomy import Anatomy
from dwindle.anatomy.structure import Group
from dwindle.pruning.compaction import LayerShape, bucketed, few_shapes
from tiny import tiny_model


def test_buckets_are_few_and_hold_what_lives() -> None:
    """Eight layers; all kinds of head layouts that remain of four key/value heads with two queries each."""
    anatomy = Anatomy.of(tiny_model("llama", num_hidden_layers=8))
    source, widths = anatomy.source, [37, 40, 12, 13, 25, 26, 8, 39]
    removed = [(), (0, 1), (0, 2, 4, 6), (2, 3, 4, 5), (), (1, 3, 5, 7), (0, 1, 2, 3, 4, 5), (0, 1, 2, 3, 4, 7)]
    alive = source.without(Group("ffn", tuple(tuple(range(width, 40)) for width in widths)))
    alive = alive.without(Group("attn", tuple(removed)))
    for most in (1, 3, 8):
        keep = bucketed(anatomy, alive, source, 4, most)
        assert source.contains(keep) and keep.contains(alive)
        shapes = {(la.queries_per_kv, len(la.ffn)) for la in keep.layers}
        assert len(shapes) <= most and all(la.is_regular and len(la.ffn) % 4 == 0 for la in keep.layers)
    assert [len(la.ffn) for la in keep.layers] == [-(-width // 4) * 4 for width in widths]
    assert [la.query_heads for la in keep.layers] == [la.query_heads for la in alive.layers]
    assert bucketed(anatomy, alive, source, 4, 1).layers[6].query_heads == source.layers[6].query_heads
    # What was rebuilt before lacks channels and heads: then a layer's heads are not padded.
    again = bucketed(anatomy, alive, keep, 4, 1)
    assert keep.contains(again) and again.contains(alive)
    assert [la.query_heads for la in again.layers] == [la.query_heads for la in alive.layers]


def test_buckets_add_little() -> None:
    """Against every way to put layers together; an uneven layer only goes with those that have its heads."""
    generator = random.Random(1)
    for _ in range(20):
        kinds = [(1,), (2,), (2, 2), (1, 1, 1), (2, 2, 2)]
        shapes = [LayerShape(generator.choice(kinds), 4 * generator.randint(1, 20)) for _ in range(6)]
        size = lambda shape: 30 * sum(shape.queries) + 15 * len(shape.queries) + shape.ffn  # noqa: E731
        found = few_shapes(shapes, size, 3)
        assert len(set(found)) <= 3 and all(one.around(aim) == aim for one, aim in zip(shapes, found, strict=True))
        best = min(
            sum(size(functools.reduce(union_of, part)) * len(part) for part in parts) for parts in partitions(shapes, 3)
        )
        assert best <= sum(map(size, found)) <= 1.2 * best
    uneven = [LayerShape((2, 1), 8), LayerShape((2, 2), 8), LayerShape((2, 1), 12)]
    assert few_shapes(uneven, lambda shape: shape.ffn, 1) == [uneven[2], uneven[1], uneven[2]]


def union_of(one: LayerShape, other: LayerShape) -> LayerShape:
    both = one.around(other)
    assert both is not None
    return both


def partitions(items: list[Any], most: int) -> Any:
    """Every way to divide a list into at most so many parts."""
    if not items:
        yield []
        return
    for parts in partitions(items[1:], most):
        for place in range(len(parts)):
            yield [*parts[:place], [items[0], *parts[place]], *parts[place + 1 :]]
        if len(parts) < most:
            yield [[items[0]], *parts]
