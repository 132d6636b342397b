"""``selection = "global"``: each event removes the least salient group of the whole model, of one layer or the stem.

EfficientLLM's continuous events, but layers need not keep equal sizes (as in Adapt-Pruner). Groups are small (one FFN
channel of one layer), so events are many, and the candidates of a step are sorted once for all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dwindle.anatomy.anatomy import Anatomy
from dwindle.anatomy.structure import BLOCKS, Group, Kind, Layer, Structure
from dwindle.core.errors import UserError
from dwindle.core.sizes import format_count
from dwindle.pruning.config import PruneConfig
from dwindle.pruning.event_bounds import EventRange, global_events
from dwindle.pruning.layouts import rounding_floors, shallower
from dwindle.pruning.pacing import Pacing
from dwindle.pruning.saliency import Scores
from dwindle.pruning.strategies.base import Choice, GroupScores, Strategy, Trail
from dwindle.pruning.target import Target

_Ranked = tuple[NDArray[np.float64], NDArray[np.int64]]
"""Saliencies, ascending, and their channels."""


@dataclass(frozen=True, slots=True)
class _Candidate:
    saliency: float
    """Mean saliency of an element, the sum and so on, as ``PruneConfig.compare`` says."""
    kind: Kind
    layer: int
    members: tuple[int, ...]


class GlobalStrategy(Strategy):
    """Removes the least salient group of the whole model; holds no state between steps.

    With ``round_to``, channels are removed in blocks that keep widths multiples; a source's width that is not a
    multiple is rounded down before anything else is removed. A group of kind ``layer`` is the attention or the FFN of a
    layer, or both; it is compared like any other, by the saliency of what is left of it.
    """

    def __init__(self, anatomy: Anatomy, target: Target, config: PruneConfig) -> None:
        if target.shape is not None:
            raise UserError(
                "target: with selection global every layer gets its own sizes: give a size such as 100M or 60%"
            )
        super().__init__(anatomy, target, rounding_floors(config))
        check_round_widths(anatomy, target, config)
        least = anatomy.count(at_floors(anatomy, self.config)).total
        if least > target.num_parameters:
            raise UserError(
                f"target {format_count(target.num_parameters)} is below the smallest reachable model, {least:,} "
                "parameters: choose a larger target, lower minimum sizes or make more groups prunable"
            )

    def choose(
        self, scores: GroupScores, alive: Structure, pacing: Pacing, step: int, num_events: int
    ) -> Iterator[Choice]:
        """The least salient groups, as long as groups are due and the goal is not reached.

        While the candidate of any kind still fits above the goal, only those that fit are compared; the last group is
        the smallest. So the result lands at most one minimal group below the goal.
        """
        goal = self.goal(pacing, step)
        pool, trail = _Pool(self.anatomy, self.config, scores.current, alive), Trail(alive)
        alive = alive.sized()
        count, chosen = self.anatomy.count(alive).total, 0
        while count > goal and pacing.due(step, count, num_events + chosen):
            candidates = pool.candidates(alive, count - goal)
            if not candidates:
                break
            best, alive, count = self._best(candidates, alive, count, goal)
            pool.remove(best, alive)
            chosen += 1
            saliency = {candidate.kind: candidate.saliency for candidate in candidates}
            yield trail.choice(_group(best, len(alive.layers)), saliency, count)

    def _best(
        self, candidates: list[_Candidate], alive: Structure, count: int, goal: int
    ) -> tuple[_Candidate, Structure, int]:
        outcomes = []
        for candidate in sorted(candidates, key=lambda c: c.saliency):
            rest = _without(alive, candidate)
            left = count - _saved(self.anatomy, alive, rest, candidate.layer)
            if left >= goal:
                return candidate, rest, left
            outcomes.append((candidate, rest, left))
        return max(outcomes, key=lambda outcome: outcome[2])

    def event_bounds(self, pacing: Pacing) -> EventRange:
        return global_events(self.anatomy, self.target, self.config)


class _Pool:
    """The prunable groups, kept sorted while some are removed; saliencies of the others are not updated."""

    def __init__(self, anatomy: Anatomy, config: PruneConfig, scores: Scores, alive: Structure) -> None:
        self.anatomy, self.config, self._scores = anatomy, config, scores
        self._hidden = len(alive.hidden)
        self._heads = [
            dict(zip(la.query_heads, values.tolist(), strict=True))
            for la, values in zip(scores.structure.layers, scores.attn, strict=True)
        ]
        self._inputs = anatomy.num_output_columns(alive)
        layers, groups = scores.structure.layers, config.effective_groups
        mean = config.compare in ("mean", "zscore")

        def moments(unit: str, layer: int | None) -> tuple[float, float]:
            return scores.moments(unit, layer, alive, anatomy.source) if config.compare == "zscore" else (0.0, 1.0)

        self._moments = [moments("query", number) for number in range(len(layers))]
        """Mean and deviation of the heads of each layer."""
        channels = [
            _by_score(values, here.ffn, left.ffn, *moments("ffn", number))
            for number, (values, here, left) in enumerate(zip(scores.ffn, layers, alive.layers, strict=True))
        ]
        hidden = [_by_score(scores.stem, scores.structure.hidden, alive.hidden, *moments("hidden", None))]
        self._channels = _Blocks(channels if "ffn" in groups else [], config.round_to, config.min_ffn, mean)
        self._stem = _Blocks(hidden if "stem" in groups else [], config.round_to, config.min_hidden, mean)
        self._attention: list[tuple[float, int, tuple[int, ...], float]] = []
        if "attn" in groups:
            self._rank_attention(alive)
        self._has_blocks = "layer" in groups
        self._removable = _by_layer(anatomy.removable_blocks(alive)) if self._has_blocks else {}
        self._blocks: dict[int, list[_Candidate]] = {}
        self._block_sizes: dict[int, dict[tuple[int, ...], int]] = {}
        """Parameters saved by removing blocks of a layer, as long as nothing changes them."""
        self._compare_blocks(alive, self._removable)

    def candidates(self, alive: Structure, room: int) -> list[_Candidate]:
        """The least salient group of every kind; while some widths are not multiples, only groups that round them.

        ``room``: how many parameters may still be removed. Blocks differ in size, so the least salient one that fits is
        taken.
        """
        found: list[_Candidate] = []
        compare = self.config.compare
        column, row = (len(alive.hidden), self._inputs) if compare == "mean" else (1, 1)
        if self._attention:
            value, layer, queries, total = self._attention[0]
            found.append(_Candidate(total if compare in ("sum", "saved") else value / column, "attn", layer, queries))
        if (block := self._channels.least_salient) is not None:
            found.append(_Candidate(block.saliency / column, "ffn", block.layer, block.members))
        if (block := self._stem.least_salient) is not None:
            found.append(_Candidate(block.saliency / row, "stem", -1, block.members))
        if compare == "saved":
            found = [replace(one, saliency=one.saliency / self._saved(alive, one)) for one in found]
        found += self._least_salient_block(alive, room)
        odd = {"ffn": self._channels.has_odd, "stem": self._stem.has_odd}
        return [one for one in found if odd.get(one.kind)] or found

    def _least_salient_block(self, alive: Structure, room: int) -> list[_Candidate]:
        """The attention, FFN or whole layer with the least saliency per element, per parameter saved, or in sum.

        Among those that fit; if none does, the smallest.
        """
        smallest: tuple[int, _Candidate] | None = None
        divisor = self._hidden if self.config.compare == "mean" else 1
        for one in sorted((one for blocks in self._blocks.values() for one in blocks), key=attrgetter("saliency")):
            size = self._block_size(alive, one)
            if smallest is None or size < smallest[0]:
                smallest = size, one
            if size <= room:
                break
        return [] if smallest is None else [replace(smallest[1], saliency=smallest[1].saliency / divisor)]

    def _block_size(self, alive: Structure, one: _Candidate) -> int:
        sizes = self._block_sizes.setdefault(one.layer, {})
        if one.members not in sizes:
            sizes[one.members] = self._saved(alive, one)
        return sizes[one.members]

    def _compare_blocks(self, alive: Structure, layers: Iterable[int]) -> None:
        """Update the saliencies of whole blocks of these layers; with ``mean``, that of a column."""
        for number in layers:
            found = list[_Candidate]()
            for places in self._removable.get(number, ()):
                saliency = float(self._scores.blocks[number][2 if len(places) > 1 else places[0]])
                one = _Candidate(saliency, "layer", number, places)
                size = 1
                if self.config.compare == "mean":
                    size = self.anatomy.layer_columns(number, [BLOCKS[place] for place in places], alive)
                elif self.config.compare == "saved":
                    size = self._block_size(alive, one)
                found.append(replace(one, saliency=one.saliency / size))
            self._blocks.pop(number, None)
            if found:
                self._blocks[number] = found

    def _update_blocks(self, chosen: _Candidate, rest: Structure) -> None:
        """Update after a removal."""
        self._scores.remove(_group(chosen, len(rest.layers)))
        if chosen.kind == "stem":
            self._block_sizes.clear()
        else:
            self._block_sizes.pop(chosen.layer, None)
        layers: Iterable[int] = () if chosen.kind == "stem" and self.config.compare != "saved" else self._removable
        if chosen.kind == "layer":
            self._removable = _by_layer(self.anatomy.removable_blocks(rest))
            layers = range(len(rest.layers))
        elif chosen.kind != "stem":
            layers = [chosen.layer]
        self._compare_blocks(rest, layers)

    def _remove_whole(self, chosen: _Candidate, rest: Structure) -> None:
        self._inputs, left = self.anatomy.num_output_columns(rest), rest.layers[chosen.layer]
        if "attn" in left.absent:
            self._attention = [entry for entry in self._attention if entry[1] != chosen.layer]
            heapify(self._attention)
        if "mlp" in left.absent:
            self._channels.remove_layer(chosen.layer)

    def remove(self, chosen: _Candidate, rest: Structure) -> None:
        if chosen.kind == "layer":
            self._remove_whole(chosen, rest)
        elif chosen.kind == "stem":
            self._stem.remove_least_salient()
            self._hidden = len(rest.hidden)
            self._inputs = self.anatomy.num_output_columns(rest)
            if self._attention and self.config.compare == "saved":  # every head saves less than before
                self._rank_attention(rest)
        elif chosen.kind == "ffn":
            self._channels.remove_least_salient()
            self._inputs -= len(chosen.members)
        else:
            heappop(self._attention)
            self._inputs -= len(chosen.members) * self.anatomy.head_dim
            if (found := self._least_salient(chosen.layer, rest.layers[chosen.layer])) is not None:
                heappush(self._attention, found)
        if self._has_blocks:
            self._update_blocks(chosen, rest)

    def _rank_attention(self, alive: Structure) -> None:
        """The heads of every layer that are removed first."""
        candidates = (self._least_salient(number, layer) for number, layer in enumerate(alive.layers))
        self._attention = [found for found in candidates if found is not None]
        heapify(self._attention)

    def _least_salient(self, number: int, layer: Layer) -> tuple[float, int, tuple[int, ...], float] | None:
        """(saliency, layer, queries, sum) of the heads of a layer to remove together.

        The saliency orders layers: with ``mean`` it is that of a column, with ``saved`` that of a parameter, with
        ``zscore`` that of a head, as its z-score.
        """
        if not layer.query_heads:
            return None
        values, ways = self._heads[number], list[tuple[tuple[int, ...], float]]()
        if self.config.attention == "cluster":
            ways = [((query,), values[query]) for query in layer.query_heads]
        else:
            for kv in layer.kv_heads if len(layer.kv_heads) > 1 else ():
                queries = layer.queries_of(kv)
                ways.append((queries, self._scores.of_kv_head(number, kv, [values[q] for q in queries])))
            if layer.queries_per_kv[0] > 1:  # one query of every key/value head keeps the layer regular
                each = tuple(min(layer.queries_of(kv), key=values.__getitem__) for kv in layer.kv_heads)
                ways.append((each, sum(values[q] for q in each)))
        least = self.config.min_heads
        ways = [(way, total) for way, total in ways if len(layer.query_heads) - len(way) >= least]
        if not ways:
            return None
        return min((self._value(number, layer, way, total), number, way, total) for way, total in ways)

    def _value(self, number: int, layer: Layer, queries: tuple[int, ...], total: float) -> float:
        """The saliency of heads, for the comparison of layers and of ways to remove heads."""
        if self.config.compare == "zscore":
            mean, deviation = self._moments[number]
            return (total / len(queries) - mean) / deviation
        return total / self._size(number, layer, queries)

    def _size(self, number: int, layer: Layer, queries: tuple[int, ...]) -> int:
        """The divisor of a sum over heads."""
        if self.config.compare == "mean":
            return len(queries) * self.anatomy.head_dim
        if self.config.compare == "sum":
            return 1
        count = self.anatomy.count_layer
        return count(number, self._hidden, layer) - count(number, self._hidden, layer.without(query_heads=queries))

    def _saved(self, alive: Structure, one: _Candidate) -> int:
        """Parameters saved by removing a candidate."""
        return _saved(self.anatomy, alive, _without(alive, one), one.layer)


class _Block(NamedTuple):
    """Channels that are removed together; those that round a width sort first, then the least salient."""

    is_round: bool
    saliency: float
    """Mean saliency of a channel, or the sum of all."""
    layer: int
    members: tuple[int, ...]


class _Blocks:
    """Channels of layers (or of the stem), least salient first, in blocks that keep widths multiples."""

    def __init__(self, alive: list[_Ranked], multiple: int, floor: int, mean: bool) -> None:
        self._alive, self._num_removed = alive, [0] * len(alive)
        self._multiple, self._floor, self._mean = multiple, floor, mean
        self._next = [block for layer in range(len(alive)) if (block := self._block(layer))]
        heapify(self._next)

    @property
    def least_salient(self) -> _Block | None:
        return self._next[0] if self._next else None

    @property
    def has_odd(self) -> bool:
        """Whether the first block rounds a width that is not a multiple."""
        return bool(self._next) and not self._next[0].is_round

    def remove_least_salient(self) -> None:
        block = heappop(self._next)
        self._num_removed[block.layer] += len(block.members)
        if (after := self._block(block.layer)) is not None:
            heappush(self._next, after)

    def remove_layer(self, layer: int) -> None:
        """All channels of a layer."""
        self._next = [block for block in self._next if block.layer != layer]
        heapify(self._next)

    def _block(self, layer: int) -> _Block | None:
        """The next block of a layer; None at its minimum size."""
        scores, names = self._alive[layer]
        start = self._num_removed[layer]
        width = len(scores) - start
        odd = width % self._multiple
        size = odd or self._multiple
        if width - size < self._floor:
            return None
        total = float(scores[start : start + size].sum() if size > 1 else scores[start])
        members = tuple(sorted(names[start : start + size].tolist()))
        return _Block(not odd, total / size if self._mean else total, layer, members)


def _by_layer(removable: list[tuple[int, tuple[int, ...]]]) -> dict[int, list[tuple[int, ...]]]:
    found: dict[int, list[tuple[int, ...]]] = {}
    for number, places in removable:
        found.setdefault(number, []).append(places)
    return found


def _by_score(values: Tensor, names: Sequence[int], alive: Sequence[int], mean: float, deviation: float) -> _Ranked:
    """The alive channels by ascending saliency, and how far it is from the mean, in standard deviations."""
    alive_names = np.asarray(alive, dtype=np.int64)
    scores = (values.double().numpy()[np.searchsorted(names, alive_names)] - mean) / deviation
    order = scores.argsort(kind="stable")
    return scores[order], alive_names[order]


def at_floors(anatomy: Anatomy, config: PruneConfig) -> Structure:
    """The largest structure from which nothing more can be removed: smaller targets may not be reachable."""
    source = anatomy.source
    hidden = source.hidden[: config.min_hidden] if "stem" in config.effective_groups else source.hidden
    layers = list[Layer]()
    for number, layer in enumerate(source.layers):
        ffn = layer.ffn[: config.min_ffn] if "ffn" in config.effective_groups else layer.ffn
        ends = [Layer(layer.query_heads[: len(kv)], kv, ffn, layer.absent) for kv in _last_heads(layer, config)]
        layers.append(max(ends, key=lambda end: anatomy.count_layer(number, len(hidden), end)))
    smallest = Structure(hidden, tuple(layers))
    return shallower(anatomy, smallest, 1) if "layer" in config.effective_groups else smallest


def _last_heads(layer: Layer, config: PruneConfig) -> list[tuple[int, ...]]:
    """Head layouts from which nothing more can be removed: the key/value head of each query."""
    heads, kv = len(layer.query_heads), len(layer.kv_heads)
    if "attn" not in config.effective_groups or not heads:
        return [layer.kv_of_query]
    least = min(config.min_heads, heads)
    if config.attention == "cluster":  # in the worst case all of different key/value heads
        return [tuple(query % min(kv, least) for query in range(least))]
    ends = [
        (x, y)
        for x in range(1, kv + 1)
        for y in range(1, heads // kv + 1)
        if x * y >= least and max((x - 1) * y, x * (y - 1)) < least
    ]
    return [tuple(query // y for query in range(x * y)) for x, y in ends]


def check_round_widths(anatomy: Anatomy, target: Target, config: PruneConfig) -> None:
    """Raise if a width cannot be such a multiple, or if rounding alone takes the source below the target."""
    multiple = config.round_to
    if multiple <= 1:
        return
    source, least, groups = anatomy.source, rounding_floors(config), config.effective_groups
    hidden = source.hidden[: len(source.hidden) // multiple * multiple] if "stem" in groups else source.hidden
    layers = source.layers
    if "ffn" in groups:
        layers = tuple(replace(la, ffn=la.ffn[: len(la.ffn) // multiple * multiple]) for la in layers)
    cut = [(len(source.hidden), len(hidden), least.min_hidden)]
    cut += [(len(la.ffn), len(rest.ffn), least.min_ffn) for la, rest in zip(source.layers, layers, strict=True)]
    if any(floor > left < width for width, left, floor in cut):
        raise UserError(
            f"round_to {multiple}: no multiple lies between the minimum sizes ({config.min_hidden} hidden, "
            f"{config.min_ffn} FFN channels) and the source's sizes: choose a smaller multiple, or 1 for exact sizes"
        )
    most = anatomy.count(Structure(hidden, layers)).total
    if most < target.num_parameters:
        raise UserError(
            f"round_to {multiple}: the largest model with such widths has {most:,} parameters, the target is "
            f"{target.num_parameters:,}: choose a smaller multiple, or a target of at most that"
        )


def _without(alive: Structure, chosen: _Candidate) -> Structure:
    """``alive`` is ``sized``; unchanged layers remain the same objects."""
    if chosen.kind == "stem":
        return alive.shrunk(Group("stem", (chosen.members,)))
    layer = alive.layers[chosen.layer]
    if chosen.kind == "layer":
        rest = layer.without_blocks(BLOCKS[place] for place in chosen.members)
    elif chosen.kind == "ffn":
        rest = layer.narrowed(len(layer.ffn) - len(chosen.members))
    else:
        rest = layer.without(query_heads=chosen.members)
    return Structure(alive.hidden, (*alive.layers[: chosen.layer], rest, *alive.layers[chosen.layer + 1 :]))


def _saved(anatomy: Anatomy, before: Structure, after: Structure, layer: int) -> int:
    """Parameters by which two structures differ, in one layer or (-1) everywhere."""
    if layer < 0:
        return anatomy.count(before).total - anatomy.count(after).total
    hidden = len(before.hidden)
    full, left = (anatomy.count_layer(layer, hidden, structure.layers[layer]) for structure in (before, after))
    return full - left


def _group(chosen: _Candidate, num_layers: int) -> Group:
    if chosen.kind == "stem":
        return Group("stem", (chosen.members,))
    return Group.of_layer(chosen.kind, chosen.layer, chosen.members, num_layers)
