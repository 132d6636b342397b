"""Sizes of rebuilt models: multiples, which are faster than odd widths."""

from __future__ import annotations

from dataclasses import replace

from dwindle.anatomy.structure import Structure, lost


def rounded_up(alive: Structure, physical: Structure, multiple: int) -> Structure:
    """The structure to compact to: the alive parts, with widths padded to multiples by pruned but still physical ones.

    Heads, removed blocks and layers are never kept: the head size is a round number already.
    """
    layers = tuple(
        replace(layer, ffn=_padded(layer.ffn, here.ffn, multiple))
        for layer, here in zip(alive.layers, physical.layers, strict=True)
    )
    return Structure(_padded(alive.hidden, physical.hidden, multiple), layers)


def _padded(alive: tuple[int, ...], present: tuple[int, ...], multiple: int) -> tuple[int, ...]:
    """``alive`` padded with pruned indices to the next multiple, or with all of them if there are fewer."""
    spare = lost(present, alive)[: -len(alive) % multiple]
    return tuple(sorted((*alive, *spare)))
