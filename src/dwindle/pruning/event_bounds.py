"""Bounds on the number of events until a target: saliencies decide the number, sizes alone bound it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from dwindle.anatomy.anatomy import Anatomy
from dwindle.anatomy.structure import BLOCKS, Layer, Structure
from dwindle.core.errors import UserError
from dwindle.pruning.config import PruneConfig
from dwindle.pruning.layouts import (
    KvCount,
    Layout,
    fewest_kv,
    layouts,
    layouts_of,
    most_kv,
    round_widths,
    rounding_floors,
    shallower,
    with_sizes,
)
from dwindle.pruning.pacing import Stages
from dwindle.pruning.target import Shape, Target

Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class EventRange:
    """The fewest and the most events, over all orders of removal."""

    fewest: int
    most: int


def coupled_events(anatomy: Anatomy, target: Target, config: PruneConfig) -> EventRange:
    """Bounds for events that remove one head or FFN channel of every layer, or one hidden channel.

    The sizes of a result determine its parameters and the number of events, in any order.
    """
    source, end, size = anatomy.source, target.shape, target.num_parameters
    now, heads = Shape.of(source), layouts(source, config)
    if end is None and "layer" in config.effective_groups:
        return _with_layers(anatomy, size, config)
    if end is not None:
        widths = now.hidden - end.hidden + now.ffn - end.ffn + now.layers - end.layers
        few = many = [layout.num_events + widths for layout in layouts_of(source, config, end.heads)]
    elif config.round_to > 1:
        round_results = (_Grid(anatomy, layout, config, most_kv).until_round(size) for layout in heads)
        few = many = [events for found in round_results for events in found]
    else:
        low, high = ([_Grid(anatomy, layout, config, kv) for layout in heads] for kv in (fewest_kv, most_kv))
        few = [events for pair in zip(low, high, strict=True) for events in _ends(*pair, low, size)]
        many = [events for grid in high for events in grid.while_above(size)]
    return EventRange(min(few), max(many))


def _with_layers(anatomy: Anatomy, size: int, config: PruneConfig) -> EventRange:
    """Bounds if whole layers are groups, too: as few as if all groups were the largest, as many as without layers."""
    source, most = anatomy.source, 1
    for removed in range(len(anatomy.removable_layers(source)) + 1):
        start = shallower(anatomy, source, len(source.places) - removed)
        for layout in layouts(source, config):
            most = max(
                most, *(removed + n for n in _Grid(anatomy, layout, config, most_kv, start).while_above(size)), 1
            )
    narrower = anatomy.count(replace(source, hidden=source.hidden[1:])).total
    of_layers = sum(int(size[0]) for _, size in _kinds(anatomy, config, np.arange(1), np.max)) * anatomy.num_layers
    total = anatomy.count(source).total
    largest = max(*anatomy.layer_counts(source), of_layers, total - narrower)
    return EventRange(max(-(-(total - size) // largest), 1), most + 1)


def _ends(low: _Grid, high: _Grid, all_low: list[_Grid], size: int) -> list[int]:
    """Events until the target, for each hidden size before the last event or at a target that is met exactly.

    Only the smallest group goes below the target, if no other fits above it (``Selector.step``): so before the last
    event every removal would go below. Where the number of key/value heads is not determined, both
    possible counts must agree.
    """
    j = np.minimum(low.below(size) - 1, low.most_j).clip(0)
    j = np.maximum(j, np.append(low.below(size)[1:], 0))
    after = [grid.below(size) for grid in all_low if grid.layout.follows(low.layout)]
    if after:
        j = np.maximum(j, np.min(after, axis=0))
    last = (j <= low.most_j) & (high.a - j * high.b > size)
    last[-1] &= bool(after) or j[-1] < low.most_j  # else nothing prunable is left
    hit = low.least_j(size)
    met = (hit <= low.most_j) & (high.a - hit * high.b >= size)
    return [*(low.events + j + 1)[last].tolist(), *(low.events + hit)[met].tolist()]


class _Grid:
    """Parameter counts by hidden size and FFN width, for one layout of heads.

    Tensors have at most one axis of each, so the count without i hidden and j FFN channels is a[i] − j·b[i].
    """

    def __init__(
        self, anatomy: Anatomy, layout: Layout, config: PruneConfig, kv_count: KvCount, start: Structure | None = None
    ) -> None:
        start = start or anatomy.source
        self.now = now = Shape.of(start)
        self.layout, self.config = layout, config

        def count(hidden: int, ffn: int) -> int:
            shape = replace(now, hidden=now.hidden - hidden, heads=layout.heads, ffn=now.ffn - ffn)
            return anatomy.count(with_sizes(start, shape, layout.kv_count(kv_count))).total

        ffn = count(0, 0) - count(0, 1)
        both = count(1, 0) - count(1, 1)
        self.i = _removable_hidden(anatomy.source, config)
        self.a: Counts = _curve(self.i, now.hidden, lambda hidden: count(now.hidden - hidden, 0))
        self.b: Counts = ffn - self.i * (ffn - both)
        self.most_j = max(now.ffn - config.min_ffn, 0) if "ffn" in config.effective_groups else 0
        self.events = layout.num_events + self.i

    def least_j(self, num_parameters: int) -> Counts:
        """FFN channels to remove until the count is at most ``num_parameters``; may be more than there are."""
        return (-((num_parameters - self.a) // self.b)).clip(0)

    def below(self, num_parameters: int) -> Counts:
        """FFN channels to remove until the count is below ``num_parameters``."""
        return ((self.a - num_parameters) // self.b + 1).clip(0)

    def while_above(self, num_parameters: int) -> list[int]:
        """The most events that keep the count above ``num_parameters``, plus the one that reaches it."""
        above = self.a > num_parameters
        j = np.minimum(self.least_j(num_parameters) - 1, self.most_j)
        passed = (self.events + j)[above]
        return [int(passed.max()) + 1] if len(passed) else []

    def until_round(self, num_parameters: int) -> list[int]:
        """Events until each result whose widths are multiples of ``round_to``."""
        hiddens, widths = round_widths(self.now, self.config)
        widest, found = self.now.ffn - self.least_j(num_parameters), list[int]()
        for hidden in hiddens:
            removed = self.now.hidden - hidden
            fitting = bisect_right(widths, int(widest[removed]))
            if fitting:
                found.append(int(self.events[removed]) + self.now.ffn - widths[fitting - 1])
        return found


def global_events(anatomy: Anatomy, target: Target, config: PruneConfig) -> EventRange:
    """Bounds for events that remove one group of one layer, or hidden channels.

    They assume that every group is as large (small) as the largest (smallest) of its kind in any layer at any time.
    """
    source, config, round_to = anatomy.source, rounding_floors(config), config.round_to
    i = _removable_hidden(source, config)
    full = _curve(i, len(source.hidden), lambda n: anatomy.count(replace(source, hidden=source.hidden[:n])).total)
    excess: Counts = full - target.num_parameters
    fewest, left = -(-i // round_to), excess.clip(0)
    largest = _kinds(anatomy, config, i, np.max)
    if "layer" in config.effective_groups:  # no layer is larger than at the start
        largest.append((anatomy.num_layers, np.full(len(i), max(anatomy.layer_counts(source)), dtype=np.int64)))
    for number, size in sorted(largest, key=lambda kind: -kind[1][0]):
        taken: Counts = np.minimum(-(-left // size), number)
        fewest, left = fewest + taken, (left - taken * size).clip(0)
    most, room = -(-i // round_to) + 1, excess - 1
    for number, size in sorted(_kinds(anatomy, config, i, np.min), key=lambda kind: kind[1][0]):
        taken = np.minimum(room.clip(0) // size, number)
        most, room = most + taken, room - taken * size
    limit = int(most[excess > 0].max()) + (
        len(BLOCKS) * anatomy.num_layers if "layer" in config.effective_groups else 0
    )
    return EventRange(min(fewest[left == 0].tolist(), default=limit), limit)


def check_rounds(rounds: int, events: EventRange, few: int) -> None:
    """Raise if there are more rounds than events, as each costs a calibration; up to ``few`` are always allowed."""
    if rounds > max(events.most, few):
        raise UserError(
            f"rounds {rounds:,}: this target takes at most {events.most:,} events, and a round without one only costs "
            f"time: give at most {max(events.most, few):,}"
        )


def staged_events(anatomy: Anatomy, stages: Stages, config: PruneConfig) -> EventRange:
    """Bounds for stages: each removes heads, channels or both, one event each; none if it is smaller than a group."""
    largest = max(int(size[0]) for _, size in _kinds(anatomy, config, np.arange(1), np.max))
    if config.method == "uniform":  # its groups span all layers
        largest *= anatomy.num_layers
    falls = [before - after for before, after in pairwise([stages.start_count, *stages.sizes()])]
    return EventRange(max(sum(fall >= largest for fall in falls), 1), len(config.effective_groups) * stages.num_stages)


def _removable_hidden(source: Structure, config: PruneConfig) -> Counts:
    """All possible numbers of removed hidden channels."""
    return np.arange(max(len(source.hidden) - config.min_hidden, 0) + 1 if "stem" in config.effective_groups else 1)


def _curve(i: Counts, hidden: int, count: Callable[[int], int]) -> Counts:
    """The count for each number ``i`` of removed hidden channels, a quadratic: tensors have up to two hidden axes."""
    full, once, twice = (count(max(hidden - removed, 0)) for removed in range(3))
    return full - i * (full - once) + i * (i - 1) // 2 * (full - 2 * once + twice)


def _kinds(anatomy: Anatomy, config: PruneConfig, i: Counts, pick: Callable[..., Counts]) -> list[tuple[int, Counts]]:
    """For heads and channels of single layers: number of prunable groups, and ``pick`` of their sizes per ``i``."""
    source, kinds, round_to = anatomy.source, list[tuple[int, Counts]](), config.round_to
    layers = {(len(la.query_heads), len(la.kv_heads), len(la.ffn)): n for n, la in enumerate(source.layers)}

    def add(number: int, steps_of: Callable[[Layer], list[tuple[Layer, Layer]]]) -> None:
        sizes = list[Counts]()
        for layer in layers.values():
            for steps in steps_of(source.layers[layer]):
                lines = [_curve(i, len(source.hidden), partial(anatomy.count_layer, layer, layer=la)) for la in steps]
                sizes.append(lines[0] - lines[1])
        if number:
            kinds.append((number, pick(sizes, axis=0)))

    if "attn" in config.effective_groups:
        alone = [replace(source, layers=(la,)) for la in source.layers if la.query_heads]
        number = sum(max(layout.num_events for layout in layouts(one, config)) for one in alone)
        add(number, lambda la: _head_steps(la, config))
    if "ffn" in config.effective_groups:
        number = sum(max(-(-(len(la.ffn) - config.min_ffn) // round_to), 0) for la in source.layers if la.ffn)

        def channel_steps(layer: Layer) -> list[tuple[Layer, Layer]]:
            sizes = {round_to, len(layer.ffn) % round_to} - {0} if layer.ffn else set()
            return [(layer, layer.without(ffn=layer.ffn[:n])) for n in sizes]

        add(number, channel_steps)
    return kinds


def _head_steps(layer: Layer, config: PruneConfig) -> list[tuple[Layer, Layer]]:
    """(before, after) of a layer, by sizes, for every possible removal of a group of heads."""

    def sized(heads: int, kv: int) -> Layer:
        return Layer(tuple(range(heads)), tuple(q * kv // heads for q in range(heads)), layer.ffn)

    heads, kv = len(layer.query_heads), len(layer.kv_heads)
    if config.attention == "cluster":
        left = [(heads - 1, kv)] if heads > kv else []
        left += [(heads - 1, kv - 1)] if kv > 1 else []
        return [(sized(heads, kv), sized(*sizes)) for sizes in left]
    steps, least = list[tuple[Layer, Layer]](), min(config.min_heads, heads)
    for a in range(1, kv + 1):
        for b in range(1, heads // kv + 1):
            left = [(x * y, x) for x, y in ((a - 1, b), (a, b - 1)) if x * y >= least]
            steps += [(sized(a * b, a), sized(*sizes)) for sizes in left]
    return steps
