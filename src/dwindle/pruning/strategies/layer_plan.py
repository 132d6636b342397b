"""One layer's heads and channels in the order in which they would leave, and how much must be gone before each does."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from dwindle.anatomy import Layer
from dwindle.pruning.strategies.coupled import SelectionOptions

Balance = Literal["score", "ratio"]
"""What leaves a layer first: the weakest group, heads or channels (``score``), or equal shares of both (``ratio``)."""


@dataclass(slots=True)
class LayerPlan:
    """Axis 0 are groups of query heads, axis 1 are FFN channels; both weakest first."""

    layer: Layer
    units: list[tuple[int, ...]]
    channels: list[int]
    scores: tuple[list[float], list[float]]
    """The mean over the columns of each, so that both axes can be compared; still summed over the hidden rows."""
    full: tuple[int, int]
    """Groups of query heads and channels in the source."""
    floor: tuple[int, int]
    thresholds: list[float]
    """The sparsities at which the next one leaves, ascending."""
    axes: list[int]
    """What leaves there."""

    @property
    def here(self) -> tuple[int, int]:
        return len(self.units), len(self.channels)

    def left_at(self, sparsity: float) -> tuple[int, int]:
        """Groups of heads and channels that stay at this sparsity of the layer."""
        gone = self.axes[: bisect_right(self.thresholds, sparsity)]
        channels = sum(gone)
        return len(self.units) - (len(gone) - channels), len(self.channels) - channels

    def cut_to(self, left: tuple[int, int]) -> Layer:
        """What stays, for counting: its sizes are exact, which channels are in it is not."""
        heads = [q for unit in self.units[: len(self.units) - left[0]] for q in unit]
        rest = self.layer.without(query_heads=heads) if heads else self.layer
        return Layer(rest.query_heads, rest.kv_of_query, self.layer.ffn[: left[1]])

    def next_score(self, left: tuple[int, int], axis: int) -> float:
        """Of the weakest group of one axis that is among ``left``."""
        return self.scores[axis][self.here[axis] - left[axis]]


def units_of(layer: Layer, options: SelectionOptions) -> list[tuple[int, ...]]:
    """What leaves of the attention at once: a key/value head with its queries, or (cluster) a query head."""
    if options.attention == "cluster":
        return [(query,) for query in layer.query_heads]
    return [layer.queries_of(kv) for kv in layer.kv_heads]


def floors_of(source: Layer, options: SelectionOptions) -> tuple[int, int]:
    """Groups of heads and channels that always stay, also of a type that may not leave."""
    units = units_of(source, options)
    heads = max(-(-options.min_heads // max(map(len, units))), 1)
    attn = min(heads, len(units)) if "attn" in options.groups else len(units)
    ffn = min(max(options.min_ffn, 1), len(source.ffn)) if "ffn" in options.groups else len(source.ffn)
    return attn, ffn


def plan_layer(
    layer: Layer,
    source: Layer,
    scored: Layer,
    heads: Tensor,
    channels: Tensor,
    *,
    head_dim: int,
    options: SelectionOptions,
    balance: Balance,
    count: Callable[[Layer], int],
) -> LayerPlan:
    """``heads`` and ``channels`` are the scores of ``scored``'s; ``count`` gives a layer's parameters."""
    by_head = dict(zip(scored.query_heads, heads.tolist(), strict=True))
    means = {unit: sum(by_head[q] for q in unit) / len(unit) / head_dim for unit in units_of(layer, options)}
    units = sorted(means, key=means.__getitem__)
    order = channels.argsort(stable=True)[: len(layer.ffn)]  # what is dead has an infinite score
    names = [scored.ffn[place] for place in order.tolist()]
    full = (len(units_of(source, options)), len(source.ffn))
    scores = ([means[unit] for unit in units], channels[order].tolist())
    plan = LayerPlan(layer, units, names, scores, full, floors_of(source, options), [], [])
    steps = _by_ratio(plan) if balance == "ratio" else _by_score(plan, count, count(source))
    plan.thresholds, plan.axes = [threshold for threshold, _ in steps], [axis for _, axis in steps]
    return plan


def _by_ratio(plan: LayerPlan) -> list[tuple[float, int]]:
    """Each axis loses its n-th group when the sparsity is nearer to n groups than to n − 1."""
    steps = []
    for axis, (full, here, floor) in enumerate(zip(plan.full, plan.here, plan.floor, strict=True)):
        steps += [((full - left + 0.5) / full, axis) for left in range(here, floor, -1)]
    return sorted(steps)


def _by_score(plan: LayerPlan, count: Callable[[Layer], int], full: int) -> list[tuple[float, int]]:
    """The weakest group first, whatever it is; it leaves when the sparsity is nearer to having lost it than not."""
    units, channels = (here - floor for here, floor in zip(plan.here, plan.floor, strict=True))  # that may leave
    order = torch.tensor(plan.scores[0][:units] + plan.scores[1][:channels], dtype=torch.float64).argsort(stable=True)
    axes = (order >= units).long()
    left = [count(plan.cut_to((plan.here[0] - gone, plan.here[1]))) for gone in range(units + 1)]
    sizes = torch.zeros(len(order), dtype=torch.float64)
    sizes[axes == 0] = torch.tensor([a - b for a, b in pairwise(left)], dtype=torch.float64)
    if channels:
        sizes[axes == 1] = float(left[0] - count(plan.cut_to((plan.here[0], plan.here[1] - 1))))
    gone = full - left[0] + sizes.cumsum(0) - sizes / 2
    return list(zip((gone / full).tolist(), axes.tolist(), strict=True))
