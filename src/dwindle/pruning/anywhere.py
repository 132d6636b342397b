"""``selection = "global"``: at each event the group with the least mean saliency anywhere, in one layer or the stem.

EfficientLLM's continuous events with Adapt-Pruner's freedom: layers need not keep the same sizes. Groups are small (one
FFN channel of one layer), so events are many, and a step's candidates are sorted once for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import torch

from dwindle.anatomy import Anatomy, Group, Kind, Layer, Structure
from dwindle.errors import UserError
from dwindle.pruning.saliency import Scores
from dwindle.pruning.selection import Choice, SelectionOptions, reachable_floor, smallest
from dwindle.pruning.target import Shape, Target
from dwindle.sizes import format_count

Due = Callable[[int, int], bool]
"""Whether another group may leave, from the parameters left and the number of groups chosen so far."""


@dataclass(frozen=True, slots=True)
class _Candidate:
    saliency: float
    """Mean score of an element, or the sum, as ``SelectionOptions.compare`` says."""
    kind: Kind
    layer: int
    members: tuple[int, ...]


class GlobalSelector:
    """Chooses groups until a target; holds no state between steps."""

    def __init__(self, anatomy: Anatomy, target: Target, options: SelectionOptions) -> None:
        if target.shape is not None:
            raise UserError(
                "target: with selection global every layer gets its own sizes: give a size such as 100M or 60%"
            )
        if options.attention == "regular" and not all(la.is_regular for la in anatomy.source.layers):
            raise UserError("the source has cluster attention already: choose attention cluster")
        self.anatomy, self.target, self.options = anatomy, target, options
        source = Shape.of(anatomy.source)
        floor = Shape(
            options.min_hidden if "stem" in options.groups else source.hidden,
            options.min_heads if "attn" in options.groups else max(len(la.query_heads) for la in anatomy.source.layers),
            options.min_ffn if "ffn" in options.groups else max(len(la.ffn) for la in anatomy.source.layers),
        )
        least = anatomy.count(smallest(anatomy.source, reachable_floor(anatomy.source, floor, options))).total
        if least > target.num_parameters:
            raise UserError(
                f"target {format_count(target.num_parameters)} is below the smallest reachable model, {least:,} "
                "parameters: choose a larger target, lower floors or allow more groups"
            )

    def choose_while(self, scores: Scores, alive: Structure, due: Due) -> list[Choice]:
        """Groups from the same scores, weakest first, as long as they are due and the target is not reached.

        While the weakest group of any type still fits above the target, only those that fit are compared; the last
        group is the smallest. So the target is reached, and missed by less than that group.
        """
        pool = _Pool(self.anatomy, self.options, scores, alive)
        count, choices = self.anatomy.count(alive).total, list[Choice]()
        while count > self.target.num_parameters and due(count, len(choices)):
            candidates = pool.candidates(alive)
            if not candidates:
                break
            best, rest, left = self._best(candidates, alive, count)
            pool.remove(best, rest)
            alive, count = rest, left
            saliency = {candidate.kind: candidate.saliency for candidate in candidates}
            choices.append(Choice(_group(best, len(alive.layers)), saliency, alive, count))
        return choices

    def _best(self, candidates: list[_Candidate], alive: Structure, count: int) -> tuple[_Candidate, Structure, int]:
        excess = count - self.target.num_parameters
        outcomes = []
        for candidate in sorted(candidates, key=lambda c: c.saliency):
            rest = _without(alive, candidate)
            left = self.anatomy.count(rest).total
            if count - left <= excess:
                return candidate, rest, left
            outcomes.append((candidate, rest, left))
        return max(outcomes, key=lambda outcome: outcome[2])


class _Pool:
    """What may leave, kept sorted while groups leave; scores of one group ignore the others' leaving."""

    def __init__(self, anatomy: Anatomy, options: SelectionOptions, scores: Scores, alive: Structure) -> None:
        self.anatomy, self.options = anatomy, options
        self._heads = [
            dict(zip(la.query_heads, values.tolist(), strict=True))
            for la, values in zip(scores.structure.layers, scores.attn, strict=True)
        ]
        self._inputs = sum(len(la.query_heads) * anatomy.head_dim + len(la.ffn) for la in alive.layers)
        self._channels = self._sorted_channels(scores) if "ffn" in options.groups else iter(())
        self._next_channel: tuple[float, int, int] | None = None
        self._stem = self._sorted_stem(scores) if "stem" in options.groups else iter(())
        self._next_stem: tuple[float, int] | None = None
        self._attention: list[tuple[float, int, tuple[int, ...]]] = []
        if "attn" in options.groups:
            self._attention = [found for n in range(len(alive.layers)) if (found := self._weakest(n, alive.layers[n]))]
            heapify(self._attention)

    def candidates(self, alive: Structure) -> list[_Candidate]:
        """The weakest group of every type."""
        found: list[_Candidate] = []
        hidden, mean = len(alive.hidden), self.options.compare == "mean"
        if self._attention:
            value, layer, queries = self._attention[0]
            found.append(_Candidate(value / (hidden if mean else 1), "attn", layer, queries))
        if (channel := self._peek_channel(alive)) is not None:
            found.append(_Candidate(channel[0] / (hidden if mean else 1), "ffn", channel[1], (channel[2],)))
        if hidden > self.options.min_hidden and (stem := self._peek_stem()) is not None:
            found.append(_Candidate(stem[0] / (self._inputs if mean else 1), "stem", -1, (stem[1],)))
        return found

    def remove(self, chosen: _Candidate, rest: Structure) -> None:
        if chosen.kind == "stem":
            self._next_stem = None
        elif chosen.kind == "ffn":
            self._next_channel = None
            self._inputs -= 1
        else:
            heappop(self._attention)
            self._inputs -= len(chosen.members) * self.anatomy.head_dim
            if (found := self._weakest(chosen.layer, rest.layers[chosen.layer])) is not None:
                heappush(self._attention, found)

    def _weakest(self, number: int, layer: Layer) -> tuple[float, int, tuple[int, ...]] | None:
        """(score, layer, queries) of the weakest heads that may leave a layer together; with ``mean`` per column."""
        values, ways = self._heads[number], list[tuple[int, ...]]()
        if self.options.attention == "cluster":
            ways = [(query,) for query in layer.query_heads]
        else:
            ways = [layer.queries_of(kv) for kv in layer.kv_heads] if len(layer.kv_heads) > 1 else []
            if layer.queries_per_kv[0] > 1:  # one query of every key/value head: the layer stays regular
                ways.append(tuple(min(layer.queries_of(kv), key=values.__getitem__) for kv in layer.kv_heads))
        least = max(self.options.min_heads, 1)
        ways = [way for way in ways if len(layer.query_heads) - len(way) >= least]
        if not ways:
            return None
        width = self.anatomy.head_dim if self.options.compare == "mean" else 0
        return min((sum(values[q] for q in way) / (len(way) * width or 1), number, way) for way in ways)

    def _sorted_channels(self, scores: Scores) -> Iterator[tuple[float, int, int]]:
        flat = torch.cat(scores.ffn)
        order = flat.argsort(stable=True)
        owners = torch.cat([torch.full((len(values),), n) for n, values in enumerate(scores.ffn)])
        names = torch.cat([torch.tensor(la.ffn) for la in scores.structure.layers])
        for value, layer, channel in zip(
            flat[order].tolist(), owners[order].tolist(), names[order].tolist(), strict=True
        ):
            if value == float("inf"):  # dead
                return
            yield value, layer, channel

    def _peek_channel(self, alive: Structure) -> tuple[float, int, int] | None:
        """The weakest channel of a layer that is above its floor."""
        while self._next_channel is None or len(alive.layers[self._next_channel[1]].ffn) <= self.options.min_ffn:
            self._next_channel = next(self._channels, None)
            if self._next_channel is None:
                return None
        return self._next_channel

    def _sorted_stem(self, scores: Scores) -> Iterator[tuple[float, int]]:
        for place in scores.stem.argsort(stable=True).tolist():
            value = float(scores.stem[place])
            if value == float("inf"):
                return
            yield value, scores.structure.hidden[place]

    def _peek_stem(self) -> tuple[float, int] | None:
        if self._next_stem is None:
            self._next_stem = next(self._stem, None)
        return self._next_stem


def _without(alive: Structure, chosen: _Candidate) -> Structure:
    """As ``Structure.without``, but untouched layers stay the same objects."""
    if chosen.kind == "stem":
        return alive.without(Group("stem", (chosen.members,)))
    layer = alive.layers[chosen.layer]
    rest = layer.without(**{"ffn" if chosen.kind == "ffn" else "query_heads": chosen.members})
    return Structure(alive.hidden, (*alive.layers[: chosen.layer], rest, *alive.layers[chosen.layer + 1 :]))


def _group(chosen: _Candidate, num_layers: int) -> Group:
    if chosen.kind == "stem":
        return Group("stem", (chosen.members,))
    return Group(chosen.kind, tuple(chosen.members if n == chosen.layer else () for n in range(num_layers)))
