"""Scores for tests of selection."""

from __future__ import annotations

import torch

from dwindle.anatomy.structure import Structure
from dwindle.pruning.saliency import Scores


def drawn_scores(alive: Structure, source: Structure, seed: int) -> Scores:
    """Random scores with the source's indices; infinite for pruned ones."""
    generator = torch.Generator().manual_seed(seed)

    def draw(full: tuple[int, ...], kept: tuple[int, ...]) -> torch.Tensor:
        values = torch.rand(len(full), generator=generator, dtype=torch.float64)
        values[[place for place, index in enumerate(full) if index not in kept]] = float("inf")
        return values

    pairs = list(zip(source.layers, alive.layers, strict=True))
    return Scores(
        source,
        [draw(full.query_heads, kept.query_heads) for full, kept in pairs],
        [draw(full.ffn, kept.ffn) for full, kept in pairs],
        draw(source.hidden, alive.hidden),
    )
