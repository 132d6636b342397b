"""Which group leaves next: couple the weakest head or channel of every layer, compare the types, take the least."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import log
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dwindle.anatomy import KINDS, Anatomy, Group, Kind, Layer, Structure
from dwindle.core.errors import UserError
from dwindle.core.sizes import format_count
from dwindle.pruning.saliency import Scores
from dwindle.pruning.target import Shape, Target

DEFAULT_MIN_WIDTH = 8

Values = NDArray[np.float64]
"""Scores of the living query heads of a layer, in their order."""
Way = Callable[[Layer, Values], list[int]]
"""Which of them leave together: their places."""
KvCount = Callable[[Layer, int], int]
"""How many key/value heads a layer has when so many of its query heads are left."""


@dataclass(kw_only=True, slots=True, frozen=True)
class SelectionOptions:
    groups: tuple[Kind, ...] = KINDS
    """The types that may leave."""
    attention: Literal["cluster", "regular"] = "regular"
    """``regular``: every key/value head keeps equally many queries, a stock model; ``cluster``: the paper's."""
    compare: Literal["mean", "sum"] = "mean"
    """How the three types are compared: mean score of an element, or the group's sum."""
    min_heads: int = 1
    """At least this many query heads stay in every layer."""
    min_ffn: int = DEFAULT_MIN_WIDTH
    """At least this many FFN channels stay in every layer."""
    min_hidden: int = DEFAULT_MIN_WIDTH
    """At least this many hidden channels stay."""

    def __post_init__(self) -> None:
        unknown = [g for g in self.groups if g not in KINDS]
        if unknown or not self.groups:
            raise UserError(f"groups {','.join(unknown) or '(none)'}: choose among {', '.join(KINDS)}")
        if self.attention not in ("cluster", "regular"):
            raise UserError(f"attention {self.attention!r}: choose cluster or regular")
        if self.compare not in ("mean", "sum"):
            raise UserError(f"compare {self.compare!r}: choose mean or sum")


@dataclass(frozen=True, slots=True)
class Choice:
    """The group that leaves, what each type would have cost, and what remains."""

    group: Group
    saliency: dict[Kind, float]
    rest: Structure
    num_parameters: int


@dataclass(slots=True)
class _Candidate:
    group: Group
    saliency: float
    rest: Structure = field(init=False)
    num_parameters: int = field(init=False)


class Selector:
    """Chooses groups until a target; holds no state between events.

    A target with a shape and a number of parameters is on the way to that shape: at most those parameters are left.
    With regular attention ``kv_heads`` says how many key/value heads the heads of a shape have; None leaves it open.
    """

    def __init__(
        self, anatomy: Anatomy, target: Target, options: SelectionOptions, kv_heads: int | None = None
    ) -> None:
        self.anatomy = anatomy
        self.options = options
        self.target = target
        self.kv_heads = kv_heads
        source = Shape.of(anatomy.source)
        floor = Shape(options.min_hidden, options.min_heads, options.min_ffn)
        if options.attention == "regular" and not all(la.is_regular for la in anatomy.source.layers):
            raise UserError("the source has cluster attention already: choose attention cluster")
        if target.shape is not None:
            floor = self._exact_floor(target.shape, source)
        self.floor = Shape(
            floor.hidden if "stem" in options.groups else source.hidden,
            floor.heads if "attn" in options.groups else source.heads,
            floor.ffn if "ffn" in options.groups else source.ffn,
        )
        if target.shape is None:
            self._check_reachable()

    def choose(self, scores: Scores, alive: Structure) -> Choice | None:
        """The next group, or None when the target is reached.

        While any type still fits above the target, only those that fit are compared; the last group is the smallest.
        So the result never exceeds the target and is never more than one smallest group below it.
        """
        count = self.anatomy.count(alive).total
        excess = count - self.target.num_parameters
        candidates = self.candidates(scores, alive)
        if excess <= 0 or not candidates:
            return None
        for candidate in candidates.values():
            candidate.rest = alive.without(candidate.group)
            candidate.num_parameters = self.anatomy.count(candidate.rest).total
        fitting = [c for c in candidates.values() if count - c.num_parameters <= excess]
        if fitting:
            best = min(fitting, key=lambda c: c.saliency)
        else:
            best = max(candidates.values(), key=lambda c: c.num_parameters)
        saliency = {kind: c.saliency for kind, c in candidates.items()}
        return Choice(best.group, saliency, best.rest, best.num_parameters)

    def candidates(self, scores: Scores, alive: Structure) -> dict[Kind, _Candidate]:
        """The weakest group of every type that may still leave."""
        found: dict[Kind, _Candidate] = {}
        now = Shape.of(alive)
        makers: dict[Kind, Callable[[], _Candidate | None]] = {
            "attn": lambda: self._attn(scores, alive) if now.heads > self.floor.heads else None,
            "ffn": lambda: self._ffn(scores, alive) if now.ffn > self.floor.ffn else None,
            "stem": lambda: self._stem(scores, alive) if now.hidden > self.floor.hidden else None,
        }
        for kind in KINDS:
            candidate = makers[kind]() if kind in self.options.groups else None
            if candidate is not None:
                found[kind] = candidate
        return found

    def _candidate(self, group: Group, total: float, elements: int) -> _Candidate:
        return _Candidate(group, total / elements if self.options.compare == "mean" else total)

    def _ffn(self, scores: Scores, alive: Structure) -> _Candidate:
        values = [s.numpy() for s in scores.ffn]  # many small arrays: numpy's calls cost a tenth of torch's
        weakest = [int(v.argmin()) for v in values]
        members = tuple((la.ffn[p],) for la, p in zip(scores.structure.layers, weakest, strict=True))
        total = sum(float(v[p]) for v, p in zip(values, weakest, strict=True))
        return self._candidate(Group("ffn", members), total, len(weakest) * len(alive.hidden))

    def _stem(self, scores: Scores, alive: Structure) -> _Candidate:
        weakest = int(scores.stem.argmin())
        inputs = sum(len(la.query_heads) * self.anatomy.head_dim + len(la.ffn) for la in alive.layers)
        group = Group("stem", ((scores.structure.hidden[weakest],),))
        return self._candidate(group, float(scores.stem[weakest]), inputs)

    def _attn(self, scores: Scores, alive: Structure) -> _Candidate | None:
        """Cluster: the weakest query of every layer. Regular: one query of every key/value head, or a whole one."""
        ways = [_one_query] if self.options.attention == "cluster" else self._regular_ways(alive)
        best: _Candidate | None = None
        for way in ways:
            members, total, heads = [], 0.0, 0
            for here, living, score in zip(scores.structure.layers, alive.layers, scores.attn, strict=True):
                values = score.numpy()
                if living.query_heads is not here.query_heads:
                    values = values[np.searchsorted(here.query_heads, living.query_heads)]
                chosen = way(living, values)
                members.append(tuple(living.query_heads[place] for place in chosen))
                total += sum(values[chosen].tolist())
                heads += len(chosen)
            elements = heads * self.anatomy.head_dim * len(alive.hidden)
            candidate = self._candidate(Group("attn", tuple(members)), total, elements)
            if best is None or candidate.saliency < best.saliency:
                best = candidate
        return best

    def _regular_ways(self, alive: Structure) -> list[Way]:
        """Both keep every layer regular; only ways from which the wanted number of heads can still be reached."""
        kv, per_kv = len(alive.layers[0].kv_heads), alive.layers[0].queries_per_kv[0]
        wanted = self.floor.heads
        exact = self.target.shape is not None and "attn" in self.options.groups

        def allowed(kv_heads: int, queries: int) -> bool:
            if kv_heads < 1 or queries < 1 or kv_heads * queries < wanted:
                return False
            if self.kv_heads is not None:
                return kv_heads >= self.kv_heads and queries * self.kv_heads >= wanted
            return not exact or _splits(wanted, kv_heads, queries)

        ways: list[Way] = []
        if allowed(kv, per_kv - 1):
            ways.append(_one_query_each)
        if allowed(kv - 1, per_kv):
            ways.append(_one_kv_head)
        return ways

    def _exact_floor(self, shape: Shape, source: Shape) -> Shape:
        for kind, key in (("attn", "heads"), ("ffn", "ffn"), ("stem", "hidden")):
            if kind not in self.options.groups and getattr(shape, key) != getattr(source, key):
                raise UserError(f"target {key}={getattr(shape, key)} needs the group {kind}: add it to the groups")
        layer = self.anatomy.source.layers[0]
        kv, per_kv = len(layer.kv_heads), layer.queries_per_kv[0]
        if self.options.attention == "regular" and not _splits(shape.heads, kv, per_kv):
            reachable = sorted({a * b for a in range(1, kv + 1) for b in range(1, per_kv + 1)})
            raise UserError(
                f"target heads={shape.heads}: with regular attention the heads can be {reachable}: "
                "choose one of these, or attention cluster"
            )
        return shape

    def _check_reachable(self) -> None:
        source, floor = self.anatomy.source, self.floor
        least = min(
            self.anatomy.count(
                with_sizes(source, Shape(floor.hidden, layout.heads, floor.ffn), layout.kv_count(fewest_kv))
            ).total
            for layout in layouts(source, self.options)
        )
        if least > self.target.num_parameters:
            raise UserError(
                f"target {format_count(self.target.num_parameters)} is below the smallest reachable model, "
                f"{least:,} parameters (at least {self.floor.heads} heads, {self.floor.ffn} FFN and "
                f"{self.floor.hidden} hidden channels): choose a larger target or allow more groups"
            )


def smallest(source: Structure, floor: Shape) -> Structure:
    """A structure at the floors, by index (for counting)."""
    layers = tuple(
        Layer(la.query_heads[: floor.heads], la.kv_of_query[: floor.heads], la.ffn[: floor.ffn]) for la in source.layers
    )
    return Structure(source.hidden[: floor.hidden], layers)


def final_count(anatomy: Anatomy, target: Target) -> int:
    """Parameters at a target; for an exact shape, an estimate while the key/value heads are not known."""
    if target.shape is None:
        return target.num_parameters
    return anatomy.count(smallest(anatomy.source, target.shape)).total


def largest_count(anatomy: Anatomy, target: Target, options: SelectionOptions) -> int:
    """The most parameters that a result can have; an exact shape may leave open with how many key/value heads."""
    shape = target.shape
    if shape is None:
        return target.num_parameters
    found = layouts_of(anatomy.source, options, shape.heads)
    return max(anatomy.count(with_sizes(anatomy.source, shape, la.kv_count(most_kv))).total for la in found)


@dataclass(frozen=True, slots=True)
class Layout:
    """Heads that every layer can be left with."""

    heads: int
    kv_heads: int | None
    """None: not known (cluster attention), or as they are."""
    num_events: int
    """Events until then."""

    def follows(self, other: Layout) -> bool:
        """Whether one event leads from the other to this."""
        if self.kv_heads is None or other.kv_heads is None:
            return self.heads == other.heads - 1
        kv, per_kv = other.kv_heads, other.heads // other.kv_heads
        return (self.heads, self.kv_heads) in ((per_kv * (kv - 1), kv - 1), ((per_kv - 1) * kv, kv))

    def kv_count(self, otherwise: KvCount) -> KvCount:
        known = self.kv_heads
        return otherwise if known is None else lambda layer, heads: known


def layouts(structure: Structure, options: SelectionOptions) -> list[Layout]:
    """What is there, and all that can be reached from it."""
    heads = Shape.of(structure).heads
    if "attn" not in options.groups:
        return [Layout(heads, None, 0)]
    least = min(max(options.min_heads, 1), heads)
    if options.attention == "cluster":
        return [Layout(n, None, heads - n) for n in range(heads, least - 1, -1)]
    layer = structure.layers[0]
    kv, per_kv = len(layer.kv_heads), layer.queries_per_kv[0]
    pairs = ((a, b) for a in range(kv, 0, -1) for b in range(per_kv, 0, -1))
    return [Layout(a * b, a, kv - a + per_kv - b) for a, b in pairs if a * b >= least]


def layouts_of(structure: Structure, options: SelectionOptions, heads: int) -> list[Layout]:
    """Those with so many heads, whatever the floor."""
    return [layout for layout in layouts(structure, replace(options, min_heads=heads)) if layout.heads == heads]


def most_kv(layer: Layer, heads: int) -> int:
    """Queries of as many different key/value heads as possible stay."""
    return min(len(layer.kv_heads), heads)


def fewest_kv(layer: Layer, heads: int) -> int:
    """Those of the fewest key/value heads stay."""
    held = np.cumsum(sorted(layer.queries_per_kv, reverse=True))
    return int(np.searchsorted(held, heads)) + 1


def with_sizes(structure: Structure, shape: Shape, kv_count: KvCount) -> Structure:
    """By sizes alone, for counting: every layer loses as much as the smallest must."""
    now, layers = Shape.of(structure), list[Layer]()
    for layer in structure.layers:
        heads = len(layer.query_heads) - now.heads + shape.heads
        kv = kv_count(layer, heads)
        kv_of_query = tuple(query * kv // heads for query in range(heads))
        layers.append(Layer(layer.query_heads[:heads], kv_of_query, layer.ffn[: len(layer.ffn) - now.ffn + shape.ffn]))
    return Structure(structure.hidden[: shape.hidden], tuple(layers))


@dataclass(frozen=True, slots=True)
class Rounded:
    """A shape with round widths, and with how many key/value heads it fits (None: with any number)."""

    shape: Shape
    kv_heads: int | None


def rounded_shape(
    anatomy: Anatomy, natural: Structure, alive: Structure, target: Target, options: SelectionOptions, multiple: int
) -> Rounded:
    """The shape nearest to a natural result whose widths are multiples and that fits the target for certain.

    It must be reachable from ``alive``. Widths of types that may not leave stay as they are. Nearest: least change of
    the logarithms of the sizes; further hidden sizes, and other numbers of heads, only where nothing else fits.
    """
    own, every = Shape.of(natural), layouts(alive, options)
    kv_heads = len(natural.layers[0].kv_heads)
    same = [layout for layout in every if layout.heads == own.heads and layout.kv_heads in (None, kv_heads)]
    hiddens, widths = round_widths(Shape.of(alive), options, multiple)
    down = own.hidden // multiple * multiple
    near = [hidden for hidden in hiddens if hidden in (down, down + multiple)] or hiddens

    def distance(found: Rounded) -> float:
        new = found.shape
        return abs(log(new.hidden / own.hidden)) + abs(log(new.ffn / own.ffn)) + abs(log(new.heads / own.heads))

    for heads, wide in ((same, near), (same, hiddens), (every, hiddens)):
        fits: list[Rounded] = []
        for layout in heads:
            for hidden in wide:
                ffn = _widest(anatomy, alive, target, layout, hidden, widths)
                if ffn is not None:
                    fits.append(Rounded(Shape(hidden, layout.heads, ffn), layout.kv_heads))
        if fits:
            return min(fits, key=distance)
    raise UserError(f"round_to {multiple}: no such widths fit the target: choose a smaller multiple")


def round_widths(most: Shape, options: SelectionOptions, multiple: int) -> tuple[list[int], list[int]]:
    """The hidden sizes and the FFN widths to choose from, rising."""
    hiddens = [n for n in range(multiple, most.hidden + 1, multiple) if n >= options.min_hidden]
    widths = [n for n in range(multiple, most.ffn + 1, multiple) if n >= options.min_ffn]
    return hiddens if "stem" in options.groups else [most.hidden], widths if "ffn" in options.groups else [most.ffn]


def _widest(
    anatomy: Anatomy, alive: Structure, target: Target, layout: Layout, hidden: int, widths: list[int]
) -> int | None:
    """The largest FFN width with which these sizes fit, whatever key/value heads stay."""

    def count(ffn: int) -> int:
        shape = Shape(hidden, layout.heads, ffn)
        return anatomy.count(with_sizes(alive, shape, layout.kv_count(most_kv))).total

    fitting = bisect_right(widths, target.num_parameters, key=count)
    return widths[fitting - 1] if fitting else None


def check_rounding(
    anatomy: Anatomy, target: Target, options: SelectionOptions, multiple: int, key: str = "round_to"
) -> None:
    """Refuse a multiple for which no result fits, whatever the scores will be."""
    if multiple <= 1 or target.shape is not None:
        return
    source, fix = anatomy.source, "choose a smaller multiple, or 1 for exact sizes"
    most = Shape.of(source)
    hiddens, widths = round_widths(most, options, multiple)
    if not hiddens or not widths:
        raise UserError(
            f"{key} {multiple}: no such multiple lies between the floors ({options.min_hidden} hidden, "
            f"{options.min_ffn} FFN channels) and the source's {most.hidden} and {most.ffn}: {fix}"
        )
    least = min(
        anatomy.count(with_sizes(source, Shape(hiddens[0], layout.heads, widths[0]), layout.kv_count(most_kv))).total
        for layout in layouts(source, options)
    )
    if least > target.num_parameters:
        raise UserError(
            f"{key} {multiple}: the smallest model with such widths has {least:,} parameters, the target "
            f"is {target.num_parameters:,}: {fix}, or a larger target"
        )


def rounding_floors(options: SelectionOptions, multiple: int) -> SelectionOptions:
    """Floors above which the smallest multiples stay within reach."""
    hidden, ffn = (-(-least // multiple) * multiple for least in (options.min_hidden, options.min_ffn))
    return replace(options, min_hidden=hidden, min_ffn=ffn)


def _splits(heads: int, kv: int, per_kv: int) -> bool:
    return any(heads % k == 0 and heads // k <= per_kv for k in range(1, kv + 1))


def _one_query(layer: Layer, values_H: Values) -> list[int]:
    return [int(values_H.argmin())]


def _one_query_each(layer: Layer, values_H: Values) -> list[int]:
    """Regular: the queries of a key/value head are neighbours, and equally many."""
    by_kv = values_H.reshape(len(layer.kv_heads), -1)
    return [int(place) + kv * by_kv.shape[1] for kv, place in enumerate(by_kv.argmin(1))]


def _one_kv_head(layer: Layer, values_H: Values) -> list[int]:
    by_kv = values_H.reshape(len(layer.kv_heads), -1)
    first = int(by_kv.sum(1).argmin()) * by_kv.shape[1]
    return list(range(first, first + by_kv.shape[1]))
