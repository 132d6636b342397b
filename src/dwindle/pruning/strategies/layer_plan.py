"""One layer's heads and channels in the order of removal, and the sparsity at which each is removed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from dwindle.anatomy.structure import Layer
from dwindle.pruning.config import PruneConfig
from dwindle.pruning.saliency import Scores

Floats = NDArray[np.float64]
Places = NDArray[np.int64]


@dataclass(slots=True)
class LayerPlan:
    """The order of removal in one layer. Axis 0: groups of query heads, axis 1: FFN channels; least salient first."""

    layer: Layer
    units: list[tuple[int, ...]]
    channels: Places
    scores: tuple[list[float], list[float]]
    """Saliency per column, so that both axes are comparable; summed over the hidden rows."""
    full: tuple[int, int]
    """Groups of query heads and channels in the source."""
    floor: tuple[int, int]
    thresholds: Floats = field(default_factory=lambda: np.zeros(0))
    """The sparsities at which one more group is removed, ascending."""
    num_channels: Places = field(default_factory=lambda: np.zeros(1, dtype=np.int64))
    """How many of the first groups that are removed are channels."""
    _heads: dict[int, Layer] = field(default_factory=dict)
    """The layer with so many groups of query heads."""

    @property
    def here(self) -> tuple[int, int]:
        return len(self.units), len(self.channels)

    def kept_at(self, sparsity: float) -> tuple[int, int]:
        """Numbers of head groups and channels that are kept at a sparsity of the layer."""
        removed = int(self.thresholds.searchsorted(sparsity, side="right"))
        channels = int(self.num_channels[removed])
        return len(self.units) - (removed - channels), len(self.channels) - channels

    def cut_to(self, kept: tuple[int, int]) -> Layer:
        """The pruned layer, for counting: its sizes are exact, its channel indices are not."""
        if kept[0] not in self._heads:
            heads = [q for unit in self.units[: len(self.units) - kept[0]] for q in unit]
            self._heads[kept[0]] = self.layer.without(query_heads=heads)
        return self._heads[kept[0]].narrowed(kept[1])

    def next_score(self, kept: tuple[int, int], axis: int) -> float:
        """Saliency of the least salient group of one axis among those kept."""
        return self.scores[axis][self.here[axis] - kept[axis]]


def units_of(layer: Layer, config: PruneConfig) -> list[tuple[int, ...]]:
    """Minimal groups of query heads: all queries of a key/value head, or (cluster) a single one."""
    if config.attention == "cluster":
        return [(query,) for query in layer.query_heads]
    return [layer.queries_of(kv) for kv in layer.kv_heads]


def floors_of(source: Layer, config: PruneConfig) -> tuple[int, int]:
    """Minimum groups of heads and channels; all of them for a kind that is not prunable."""
    units = units_of(source, config)
    heads = max(-(-config.min_heads // max(map(len, units), default=1)), 1)
    attn = min(heads, len(units)) if "attn" in config.effective_groups else len(units)
    ffn = min(config.min_ffn, len(source.ffn)) if "ffn" in config.effective_groups else len(source.ffn)
    return attn, ffn


def plan_layer(
    number: int,
    layer: Layer,
    source: Layer,
    scores: Scores,
    *,
    head_dim: int,
    config: PruneConfig,
    count: Callable[[Layer], int],
    spared: bool,
) -> LayerPlan:
    """The plan of ``layer``, the alive part of ``source``; ``count`` gives a layer's parameters.

    A ``spared`` layer stays whole.
    """
    scored, channels = scores.structure.layers[number], scores.ffn[number]
    by_head = dict(zip(scored.query_heads, scores.attn[number].tolist(), strict=True))
    kv_of = dict(zip(layer.query_heads, layer.kv_of_query, strict=True))
    means: dict[tuple[int, ...], float] = {}
    for unit in units_of(layer, config):
        own = [by_head[query] for query in unit]
        total = own[0] if config.attention == "cluster" else scores.of_kv_head(number, kv_of[unit[0]], own)
        means[unit] = total / len(unit) / head_dim
    units = sorted(means, key=means.__getitem__)
    order = channels.argsort(stable=True)[: len(layer.ffn)]  # what is pruned has an infinite score
    names = np.asarray(scored.ffn, dtype=np.int64)[order.numpy()]
    full = (len(units_of(source, config)), len(source.ffn))
    ranked = ([means[unit] for unit in units], channels[order].tolist())
    floor = full if spared else floors_of(source, config)
    plan = LayerPlan(layer, units, names, ranked, full, floor)
    plan.thresholds, axes = _by_ratio(plan) if config.balance == "ratio" else _by_score(plan, count, count(source))
    plan.num_channels = np.concatenate([[0], axes.cumsum()])
    return plan


def _by_ratio(plan: LayerPlan) -> tuple[Floats, Places]:
    """(threshold, axis): the n-th group of an axis is removed when the sparsity is nearer to n groups than to n − 1."""
    left = [np.arange(here, floor, -1) for here, floor in zip(plan.here, plan.floor, strict=True)]
    steps = np.concatenate([(full - n + 0.5) / full for full, n in zip(plan.full, left, strict=True) if len(n)] or left)
    axes = np.repeat([0, 1], [len(n) for n in left])
    order = np.lexsort((axes, steps))
    return steps[order], axes[order]


def _by_score(plan: LayerPlan, count: Callable[[Layer], int], full: int) -> tuple[Floats, Places]:
    """(threshold, axis): least salient first over both axes; a group is removed when half of its size is due."""
    units, channels = (here - floor for here, floor in zip(plan.here, plan.floor, strict=True))  # prunable
    order = torch.tensor(plan.scores[0][:units] + plan.scores[1][:channels], dtype=torch.float64).argsort(stable=True)
    axes = (order >= units).long()
    left = [count(plan.cut_to((plan.here[0] - removed, plan.here[1]))) for removed in range(units + 1)]
    sizes = torch.zeros(len(order), dtype=torch.float64)
    sizes[axes == 0] = torch.tensor([a - b for a, b in pairwise(left)], dtype=torch.float64)
    if channels:
        sizes[axes == 1] = float(left[0] - count(plan.cut_to((plan.here[0], plan.here[1] - 1))))
    saved = full - left[0] + sizes.cumsum(0) - sizes / 2
    return (saved / full).numpy(), axes.numpy()
