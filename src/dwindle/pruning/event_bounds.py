"""How many events a target takes: that depends on the gradients of a run, but within limits that sizes set."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from dwindle.anatomy import Anatomy, Layer, Structure
from dwindle.core.errors import UserError
from dwindle.pruning.pacing import Stages
from dwindle.pruning.strategies.coupled import (
    KvCount,
    Layout,
    SelectionOptions,
    fewest_kv,
    layouts,
    layouts_of,
    most_kv,
    round_widths,
    rounding_floors,
    with_sizes,
)
from dwindle.pruning.target import Shape, Target

Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class EventRange:
    """No order of events needs fewer, or can take more."""

    fewest: int
    most: int


def coupled_events(anatomy: Anatomy, target: Target, options: SelectionOptions, round_to: int = 1) -> EventRange:
    """Events that remove the same group from every layer, or a hidden channel everywhere.

    The parameters of a result follow from its sizes alone, and so does the number of events, in whatever order.
    """
    source, end, size = anatomy.source, target.shape, target.num_parameters
    now, heads = Shape.of(source), layouts(source, options)
    if end is not None:
        widths = now.hidden - end.hidden + now.ffn - end.ffn
        few = many = [layout.num_events + widths for layout in layouts_of(source, options, end.heads)]
    elif round_to > 1:
        round_results = (_Grid(anatomy, layout, options, most_kv).until_round(size, round_to) for layout in heads)
        few = many = [events for found in round_results for events in found]
    else:
        low, high = ([_Grid(anatomy, layout, options, kv) for layout in heads] for kv in (fewest_kv, most_kv))
        few = [events for pair in zip(low, high, strict=True) for events in _ends(*pair, low, size)]
        many = [events for grid in high for events in grid.while_above(size)]
    return EventRange(min(few), max(many))


def _ends(low: _Grid, high: _Grid, all_low: list[_Grid], size: int) -> list[int]:
    """Events until the target, for each hidden size before the last event or at a target that is met exactly.

    Only the smallest group goes below the target, when no other fits (``Selector.choose``): so the last event is the
    first from which whatever may leave next would go below. Where the key/value heads are not known, both counts that
    are possible say so together.
    """
    j = np.minimum(low.below(size) - 1, low.most_j).clip(0)
    j = np.maximum(j, np.append(low.below(size)[1:], 0))
    after = [grid.below(size) for grid in all_low if grid.layout.follows(low.layout)]
    if after:
        j = np.maximum(j, np.min(after, axis=0))
    last = (j <= low.most_j) & (high.a - j * high.b > size)
    last[-1] &= bool(after) or j[-1] < low.most_j  # else nothing is left that could leave
    hit = low.least_j(size)
    met = (hit <= low.most_j) & (high.a - hit * high.b >= size)
    return [*(low.events + j + 1)[last].tolist(), *(low.events + hit)[met].tolist()]


class _Grid:
    """Parameters over the hidden size and the FFN width, for one number of heads.

    Tensors have at most one axis of each, so removing i hidden and j FFN channels leaves a[i] − j·b[i].
    """

    def __init__(self, anatomy: Anatomy, layout: Layout, options: SelectionOptions, kv_count: KvCount) -> None:
        self.now = now = Shape.of(anatomy.source)
        self.layout, self.options = layout, options

        def count(hidden: int, ffn: int) -> int:
            shape = Shape(now.hidden - hidden, layout.heads, now.ffn - ffn)
            return anatomy.count(with_sizes(anatomy.source, shape, layout.kv_count(kv_count))).total

        full, stem, ffn = count(0, 0), count(0, 0) - count(1, 0), count(0, 0) - count(0, 1)
        both = count(1, 0) - count(1, 1)
        self.i = _gone_hidden(anatomy.source, options)
        self.a: Counts = full - self.i * stem
        self.b: Counts = ffn - self.i * (ffn - both)
        self.most_j = max(now.ffn - options.min_ffn, 0) if "ffn" in options.groups else 0
        self.events = layout.num_events + self.i

    def least_j(self, num_parameters: int) -> Counts:
        """FFN channels after which the count is at most a size; more than there are where that cannot be."""
        return (-((num_parameters - self.a) // self.b)).clip(0)

    def below(self, num_parameters: int) -> Counts:
        """FFN channels after which the count is below a size."""
        return ((self.a - num_parameters) // self.b + 1).clip(0)

    def while_above(self, num_parameters: int) -> list[int]:
        """The most events after which a size is not reached, and the one that reaches it."""
        above = self.a > num_parameters
        j = np.minimum(self.least_j(num_parameters) - 1, self.most_j)
        passed = (self.events + j)[above]
        return [int(passed.max()) + 1] if len(passed) else []

    def until_round(self, num_parameters: int, multiple: int) -> list[int]:
        """Events until each result with round widths."""
        hiddens, widths = round_widths(self.now, self.options, multiple)
        widest, found = self.now.ffn - self.least_j(num_parameters), list[int]()
        for hidden in hiddens:
            gone = self.now.hidden - hidden
            fitting = bisect_right(widths, int(widest[gone]))
            if fitting:
                found.append(int(self.events[gone]) + self.now.ffn - widths[fitting - 1])
        return found


def global_events(anatomy: Anatomy, target: Target, options: SelectionOptions, round_to: int = 1) -> EventRange:
    """Events that remove one group of one layer, or hidden channels everywhere.

    Limits: every group is taken to be as large (small) as the largest (smallest) of its type in any layer at any time.
    """
    source, options = anatomy.source, rounding_floors(options, round_to)
    i = _gone_hidden(source, options)
    full = _line(i, len(source.hidden), lambda n: anatomy.count(replace(source, hidden=source.hidden[:n])).total)
    excess: Counts = full - target.num_parameters
    fewest, left = -(-i // round_to), excess.clip(0)
    for number, size in sorted(_kinds(anatomy, options, i, np.max, round_to), key=lambda kind: -kind[1][0]):
        taken: Counts = np.minimum(-(-left // size), number)
        fewest, left = fewest + taken, (left - taken * size).clip(0)
    most, room = -(-i // round_to) + 1, excess - 1
    for number, size in sorted(_kinds(anatomy, options, i, np.min, round_to), key=lambda kind: kind[1][0]):
        taken = np.minimum(room.clip(0) // size, number)
        most, room = most + taken, room - taken * size
    limit = int(most[excess > 0].max())
    return EventRange(min(fewest[left == 0].tolist(), default=limit), limit)


def check_rounds(rounds: int, events: EventRange, few: int) -> None:
    """Refuse rounds in most of which nothing could leave: each costs a calibration. Up to ``few`` always pass."""
    if rounds > max(events.most, few):
        raise UserError(
            f"rounds {rounds:,}: at most {events.most:,} groups leave on the way to this target, and a round without "
            f"one only takes time: give at most {max(events.most, few):,}"
        )


def staged_events(anatomy: Anatomy, stages: Stages, options: SelectionOptions) -> EventRange:
    """A stage removes heads, channels or both, each in one event; it may be empty if it falls by less than a group."""
    largest = max(int(size[0]) for _, size in _kinds(anatomy, options, np.arange(1), np.max))
    falls = [before - after for before, after in pairwise([stages.start_count, *stages.sizes()])]
    return EventRange(max(sum(fall >= largest for fall in falls), 1), len(options.groups) * stages.num_stages)


def _gone_hidden(source: Structure, options: SelectionOptions) -> Counts:
    """All numbers of hidden channels that can leave."""
    return np.arange(max(len(source.hidden) - options.min_hidden, 0) + 1 if "stem" in options.groups else 1)


def _line(i: Counts, hidden: int, count: Callable[[int], int]) -> Counts:
    """What is counted with each of ``i`` hidden channels gone: every tensor has at most one hidden axis."""
    full = count(hidden)
    return full - i * (full - count(hidden - 1))


def _kinds(
    anatomy: Anatomy, options: SelectionOptions, i: Counts, pick: Callable[..., Counts], round_to: int = 1
) -> list[tuple[int, Counts]]:
    """Heads and channels of single layers: how many groups can leave, and ``pick`` of their sizes for each of ``i``."""
    source, kinds = anatomy.source, list[tuple[int, Counts]]()
    layers = {(len(la.query_heads), len(la.kv_heads), len(la.ffn)): n for n, la in enumerate(source.layers)}

    def add(number: int, steps_of: Callable[[Layer], list[tuple[Layer, Layer]]]) -> None:
        sizes = list[Counts]()
        for layer in layers.values():
            for steps in steps_of(source.layers[layer]):
                lines = [_line(i, len(source.hidden), partial(anatomy.count_layer, layer, layer=la)) for la in steps]
                sizes.append(lines[0] - lines[1])
        if number:
            kinds.append((number, pick(sizes, axis=0)))

    if "attn" in options.groups:
        alone = [replace(source, layers=(la,)) for la in source.layers]
        number = sum(max(layout.num_events for layout in layouts(one, options)) for one in alone)
        add(number, lambda la: _head_steps(la, options))
    if "ffn" in options.groups:
        number = sum(max(-(-(len(la.ffn) - options.min_ffn) // round_to), 0) for la in source.layers)
        add(number, lambda la: [(la, la.without(ffn=la.ffn[:n])) for n in {round_to, len(la.ffn) % round_to} - {0}])
    return kinds


def _head_steps(layer: Layer, options: SelectionOptions) -> list[tuple[Layer, Layer]]:
    """A layer before and after a group of heads leaves it, by sizes, in every way that differs in what is removed."""

    def sized(heads: int, kv: int) -> Layer:
        return Layer(tuple(range(heads)), tuple(q * kv // heads for q in range(heads)), layer.ffn)

    heads, kv = len(layer.query_heads), len(layer.kv_heads)
    if options.attention == "cluster":
        left = [(heads - 1, kv)] if heads > kv else []
        left += [(heads - 1, kv - 1)] if kv > 1 else []
        return [(sized(heads, kv), sized(*sizes)) for sizes in left]
    steps, least = list[tuple[Layer, Layer]](), min(max(options.min_heads, 1), heads)
    for a in range(1, kv + 1):
        for b in range(1, heads // kv + 1):
            left = [(x * y, x) for x, y in ((a - 1, b), (a, b - 1)) if x * y >= least]
            steps += [(sized(a * b, a), sized(*sizes)) for sizes in left]
    return steps
