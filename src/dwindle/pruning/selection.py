"""Which group leaves next: couple the weakest head or channel of every layer, compare the types, take the least."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import log
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dwindle.anatomy import KINDS, Anatomy, Group, Kind, Layer, Structure
from dwindle.errors import UserError
from dwindle.pruning.saliency import Scores
from dwindle.pruning.target import Shape, Target
from dwindle.sizes import format_count

DEFAULT_MIN_WIDTH = 8

Values = NDArray[np.float64]
"""Scores of the living query heads of a layer, in their order."""
Way = Callable[[Layer, Values], list[int]]
"""Which of them leave together: their places."""


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
    """Chooses groups until a target; holds no state between events."""

    def __init__(self, anatomy: Anatomy, target: Target, options: SelectionOptions) -> None:
        self.anatomy = anatomy
        self.options = options
        self.target = target
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
        floor = reachable_floor(self.anatomy.source, self.floor, self.options)
        least = self.anatomy.count(smallest(self.anatomy.source, floor)).total
        if least > self.target.num_parameters:
            raise UserError(
                f"target {format_count(self.target.num_parameters)} is below the smallest reachable model, "
                f"{least:,} parameters (at least {self.floor.heads} heads, {self.floor.ffn} FFN and "
                f"{self.floor.hidden} hidden channels): choose a larger target or allow more groups"
            )


def reachable_floor(source: Structure, floor: Shape, options: SelectionOptions) -> Shape:
    """With regular attention a layer has key/value heads × queries of each: not every number of heads exists."""
    layer = source.layers[0]
    if options.attention == "cluster" or "attn" not in options.groups or not layer.is_regular:
        return floor
    kv, per_kv = len(layer.kv_heads), layer.queries_per_kv[0]
    sizes = (a * b for a in range(1, kv + 1) for b in range(1, per_kv + 1))
    return replace(floor, heads=min(size for size in sizes if size >= min(floor.heads, kv * per_kv)))


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


def rounded_shape(
    anatomy: Anatomy, natural: Structure, alive: Structure, target: Target, options: SelectionOptions, multiple: int
) -> Shape:
    """The shape nearest to a natural result whose widths are multiples and that still fits the target.

    It must be reachable from ``alive``. Widths of types that may not leave stay as they are. Nearest: least change of
    the logarithms of both widths.
    """
    shape, most = Shape.of(natural), Shape.of(alive)
    down = shape.hidden // multiple * multiple
    hiddens = [h for h in (down, down + multiple) if options.min_hidden <= h <= most.hidden]
    widths = [n for n in range(multiple, most.ffn + 1, multiple) if n >= options.min_ffn]
    if "stem" not in options.groups:
        hiddens = [most.hidden]
    if "ffn" not in options.groups:
        widths = [most.ffn]
    fits: list[tuple[float, Shape]] = []
    for hidden in hiddens:
        for ffn in reversed(widths):
            candidate = Shape(hidden, shape.heads, ffn)
            layers = tuple(
                Layer(kept.query_heads, kept.kv_of_query, here.ffn[:ffn])
                for kept, here in zip(natural.layers, alive.layers, strict=True)
            )
            if anatomy.count(Structure(alive.hidden[:hidden], layers)).total <= target.num_parameters:
                fits.append((abs(log(hidden / shape.hidden)) + abs(log(ffn / shape.ffn)), candidate))
                break
    if not fits:
        raise UserError(f"round_to {multiple}: no such widths fit the target: choose a smaller multiple")
    return min(fits, key=lambda fit: fit[0])[1]


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
