"""Sizes at which a model is rebuilt on the way: round, and few different ones, so that few graphs are compiled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from dwindle.anatomy import Structure
from dwindle.anatomy.anatomy import lost

MAX_WIDTHS = 4
"""Different FFN widths that layers of different sizes are filled up to."""


def bucketed(alive: Structure, physical: Structure, multiple: int, max_widths: int = MAX_WIDTHS) -> Structure:
    """The living parts, widths filled up to multiples with dead channels that are still physically there.

    FFN widths of all layers are filled up to at most ``max_widths`` different ones (a layer that no longer has enough
    channels stays as wide as it is); heads are not filled up, since there are only ever a few numbers of them.
    """
    widths = [len(layer.ffn) for layer in alive.layers]
    levels = bucket_levels(widths, multiple, max_widths)
    layers = tuple(
        replace(living, ffn=_filled(living.ffn, here.ffn, min(level for level in levels if level >= len(living.ffn))))
        for living, here in zip(alive.layers, physical.layers, strict=True)
    )
    hidden = -(-len(alive.hidden) // multiple) * multiple
    return Structure(_filled(alive.hidden, physical.hidden, hidden), layers)


def bucket_levels(widths: Sequence[int], multiple: int, max_levels: int) -> list[int]:
    """At most so many multiples, such that filling every width up to the next one adds least."""
    sizes = sorted({-(-width // multiple) * multiple for width in widths})
    ordered = sorted(widths)

    @cache
    def best(first: int, levels: int) -> tuple[int, tuple[int, ...]]:
        """(cost, levels) for the sizes from ``first`` on."""
        below = sizes[first - 1] if first else 0
        choices: list[tuple[int, tuple[int, ...]]] = []
        for last in range(first, len(sizes)):
            if levels == 1 and last < len(sizes) - 1:
                continue
            cost = sum(sizes[last] - width for width in ordered if below < width <= sizes[last])
            if last == len(sizes) - 1:
                choices.append((cost, (sizes[last],)))
            else:
                rest, chosen = best(last + 1, levels - 1)
                choices.append((cost + rest, (sizes[last], *chosen)))
        return min(choices)

    return list(best(0, max_levels)[1])


def _filled(living: tuple[int, ...], present: tuple[int, ...], width: int) -> tuple[int, ...]:
    """``living`` and as many of the dead as bring it to ``width``, or all that are there."""
    spare = lost(present, living)[: max(width - len(living), 0)]
    return tuple(sorted((*living, *spare)))
