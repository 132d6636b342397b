"""EfficientLLM: couple the least salient head or channel of every layer, compare the kinds, remove the minimum."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dwindle.anatomy.anatomy import Anatomy
from dwindle.anatomy.structure import ALL_KINDS, BLOCKS, Group, Kind, Layer, Structure
from dwindle.core.errors import UserError
from dwindle.core.sizes import format_count
from dwindle.pruning.config import PruneConfig
from dwindle.pruning.event_bounds import EventRange, coupled_events
from dwindle.pruning.layouts import (
    Rounded,
    check_rounding,
    fewest_layers,
    final_count,
    layouts,
    most_kv,
    rounded_shape,
    rounding_floors,
    shallower,
    splits,
    with_sizes,
)
from dwindle.pruning.pacing import Pacing
from dwindle.pruning.saliency import Scores
from dwindle.pruning.strategies.base import Choice, GroupScores, Strategy, Trail, check_same_heads
from dwindle.pruning.target import Shape, Target

Values = NDArray[np.float64]
"""Saliencies of the alive query heads of a layer, in their order."""
HeadPicker = Callable[[Layer, Values, Values], tuple[list[int], float]]
"""(layer, saliencies of query heads, of key/value heads) to positions of query heads to remove, and their saliency."""


_SIZES: dict[Kind, str] = {"attn": "heads", "ffn": "ffn", "stem": "hidden", "layer": "layers"}
"""The size of a shape that each kind of group changes."""


class CoupledStrategy(Strategy):
    """Removes one head (or FFN channel) of every layer, or one hidden channel: all layers keep equal sizes."""

    uses_elements = True

    def __init__(self, anatomy: Anatomy, target: Target, config: PruneConfig) -> None:
        super().__init__(anatomy, target, config)
        if config.compare == "zscore":
            raise UserError(
                "compare zscore: is a comparison of layers, which lose the same here: give selection global"
            )
        if "layer" in config.effective_groups and config.round_to > 1 and target.shape is None:
            raise UserError(
                f"round_to {config.round_to}: with the group layer give selection global, or a shape such as "
                "layers=24,ffn=1024"
            )
        check_rounding(anatomy, target, config)
        self._selector = Selector(anatomy, target, config)
        self._shape_is_final = config.round_to <= 1 or target.shape is not None

    def is_finished(self, alive: Structure, num_parameters: int) -> bool:
        if self.target.shape is not None:
            return self.target.shape.is_reached(alive, self.anatomy.source)
        return self._shape_is_final and num_parameters <= final_count(self.anatomy, self.target)

    def choose(
        self, scores: GroupScores, alive: Structure, pacing: Pacing, step: int, num_events: int
    ) -> Iterator[Choice]:
        """With ``round_to``, the first saliencies decide the final shape, so that all its widths are multiples;
        intermediate counts (``Pacing.aim``) come before that and keep the multiples reachable.
        """
        aim, selector = pacing.aim(step), self._selector
        if aim is not None:
            config = self.config if self.target.shape is not None else rounding_floors(self.config)
            selector = Selector(self.anatomy, Target(aim, self.target.shape), config, selector.kv_heads)
        elif not self._shape_is_final:
            choices = list(self._choices(selector, scores.copy(), alive, lambda count, chosen: True))
            rest = choices[-1].rest if choices else alive
            self._aim_at(rounded_shape(self.anatomy, rest, alive, self.target, self.config))
            selector = self._selector
        return self._choices(
            selector, scores, alive, lambda count, chosen: pacing.due(step, count, num_events + chosen)
        )

    def _choices(
        self, selector: Selector, scores: GroupScores, alive: Structure, due: Callable[[int, int], bool]
    ) -> Iterator[Choice]:
        trail, left = Trail(alive), alive.sized()
        count, chosen = self.anatomy.count(left).total, 0
        while due(count, chosen) and (found := selector.step(scores.current, left, count)) is not None:
            best, saliency = found
            scores.remove(best.group)
            left, count, chosen = best.rest, best.num_parameters, chosen + 1
            yield trail.choice(best.group, saliency, count)

    def event_bounds(self, pacing: Pacing) -> EventRange:
        return coupled_events(self.anatomy, self.target, self.config)

    def _aim_at(self, end: Rounded) -> None:
        self.target = Target(0, end.shape)
        self._selector = Selector(self.anatomy, self.target, self.config, end.kv_heads)
        self._shape_is_final = True

    def state_dict(self) -> dict[str, Any]:
        shape, kv_heads = self.target.shape, self._selector.kv_heads
        if shape is None:
            return {}
        return asdict(shape) | ({} if kv_heads is None else {"kv_heads": kv_heads})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            layers = state.get("layers", self.anatomy.num_layers)  # not in older checkpoints
            shape = Shape(state["hidden"], state["heads"], state["ffn"], layers)
            self._aim_at(Rounded(shape, state.get("kv_heads")))


@dataclass(slots=True)
class _CoupledCandidate:
    group: Group
    saliency: float
    rest: Structure
    num_parameters: int


@dataclass(frozen=True, slots=True)
class _Picked:
    """Heads to remove together, and all that decided which."""

    layers: tuple[Layer, ...]
    values: Values
    members: tuple[tuple[int, ...], ...]
    saliency: float
    left: list[Layer | None]
    """The layers without them; None without heads."""

    def is_of(self, layers: tuple[Layer, ...], values: Values) -> bool:
        same = all(a.query_heads is b.query_heads for a, b in zip(self.layers, layers, strict=True))
        return same and np.array_equal(self.values, values)

    def reused(self, number: int, layer: Layer, members: tuple[int, ...]) -> Layer | None:
        """The cached rest of a layer, if its heads and the removed ones are the same; else None."""
        same = layer.query_heads is self.layers[number].query_heads and members == self.members[number]
        return self.left[number] if same else None


class Selector:
    """Picks the next coupled group for a target; holds no state between events (except caches).

    A target with both a shape and a parameter count is an intermediate goal on the way to that shape. With regular
    attention ``kv_heads`` fixes the number of key/value heads of a shape; None does not.
    """

    def __init__(self, anatomy: Anatomy, target: Target, config: PruneConfig, kv_heads: int | None = None) -> None:
        self.anatomy, self.target, self.config, self.kv_heads = anatomy, target, config, kv_heads
        self.groups = config.effective_groups
        source = Shape.of(anatomy.source)
        floor = Shape(config.min_hidden, config.min_heads, config.min_ffn, fewest_layers(anatomy, anatomy.source))
        if target.shape is not None:
            floor = self._exact_floor(target.shape, source)
            changed = target.shape.changed(anatomy.source)
            self.groups = tuple(kind for kind in self.groups if _SIZES[kind] in changed)
        if "attn" in self.groups:
            check_same_heads(anatomy, config)
        self.floor = Shape(
            floor.hidden if "stem" in self.groups else source.hidden,
            floor.heads if "attn" in self.groups else source.heads,
            floor.ffn if "ffn" in self.groups else source.ffn,
            floor.layers if "layer" in self.groups else source.layers,
        )
        self._last_picked: dict[HeadPicker, _Picked] = {}
        if target.shape is None:
            self._check_reachable()

    def step(self, scores: Scores, alive: Structure, count: int) -> tuple[_CoupledCandidate, dict[Kind, float]] | None:
        """The next group and the saliencies of all kinds, or None; only the heads and sizes of ``alive`` (``sized``)
        matter.

        While any kind still fits above the target, only those that fit are compared; the last group is the smallest.
        So the result never exceeds the target and lands at most one minimal group below it.
        """
        excess = count - self.target.num_parameters
        candidates = self.candidates(scores, alive, count) if excess > 0 else {}
        if not candidates:
            return None
        fitting = [c for c in candidates.values() if count - c.num_parameters <= excess]
        if fitting:
            best = min(fitting, key=lambda c: c.saliency)
        else:
            best = max(candidates.values(), key=lambda c: c.num_parameters)
        return best, {kind: c.saliency for kind, c in candidates.items()}

    def candidates(self, scores: Scores, alive: Structure, count: int) -> dict[Kind, _CoupledCandidate]:
        """The least salient group of every kind that is above its minimum size."""
        found: dict[Kind, _CoupledCandidate] = {}
        now = Shape.of(alive)
        makers: dict[Kind, Callable[[], _CoupledCandidate | None]] = {
            "attn": lambda: self._attn(scores, alive, count) if now.heads > self.floor.heads else None,
            "ffn": lambda: self._ffn(scores, alive, count) if now.ffn > self.floor.ffn else None,
            "stem": lambda: self._stem(scores, alive, count) if now.hidden > self.floor.hidden else None,
            "layer": lambda: self._layer(scores, alive, count) if now.layers > self.floor.layers else None,
        }
        for kind in ALL_KINDS:
            candidate = makers[kind]() if kind in self.groups else None
            if candidate is not None:
                found[kind] = candidate
        return found

    def _candidate(self, count: int, group: Group, total: float, elements: int, rest: Structure) -> _CoupledCandidate:
        left = self.anatomy.count(rest).total
        if self.config.compare == "saved":
            elements = count - left
        return _CoupledCandidate(group, total if self.config.compare == "sum" else total / elements, rest, left)

    def _ffn(self, scores: Scores, alive: Structure, count: int) -> _CoupledCandidate:
        values = [s.numpy() for s in scores.ffn]  # many small arrays: numpy's calls cost a tenth of torch's
        least = [int(v.argmin()) if la.ffn else -1 for v, la in zip(values, alive.layers, strict=True)]
        members = tuple((la.ffn[p],) if p >= 0 else () for la, p in zip(scores.structure.layers, least, strict=True))
        found = [float(v[p]) for v, p in zip(values, least, strict=True) if p >= 0]
        group, elements = Group("ffn", members), len(found) * len(alive.hidden)
        return self._candidate(count, group, sum(found), elements, alive.shrunk(group))

    def _layer(self, scores: Scores, alive: Structure, count: int) -> _CoupledCandidate | None:
        """The least salient layer that may be removed whole; of those that fit, or the smallest if none does."""
        best: tuple[tuple[int, float], _CoupledCandidate] | None = None
        excess = count - self.target.num_parameters
        sizes = self.anatomy.layer_counts(alive)
        for number in self.anatomy.removable_wholes(alive):
            group = Group.of_layer("layer", number, alive.layers[number].block_places, len(alive.layers))
            elements = self.anatomy.layer_columns(number, BLOCKS, alive) * len(alive.hidden)
            candidate = self._candidate(count, group, float(scores.blocks[number][2]), elements, alive.shrunk(group))
            order = max(sizes[number] - excess, 0), candidate.saliency
            if best is None or order < best[0]:
                best = order, candidate
        return None if best is None else best[1]

    def _stem(self, scores: Scores, alive: Structure, count: int) -> _CoupledCandidate:
        values = scores.stem.numpy()
        least = int(values.argmin())
        inputs = self.anatomy.num_output_columns(alive)
        group = Group("stem", ((scores.structure.hidden[least],),))
        return self._candidate(count, group, float(values[least]), inputs, alive.shrunk(group))

    def _attn(self, scores: Scores, alive: Structure, count: int) -> _CoupledCandidate | None:
        """Cluster: one query of every layer. Regular: one query of every key/value head, or a whole key/value head."""
        pickers = [_one_query] if self.config.attention == "cluster" else self._regular_pickers(alive)
        best: _CoupledCandidate | None = None
        for pick in pickers:
            found = self._picked(pick, scores, alive)
            elements = sum(map(len, found.members)) * self.anatomy.head_dim * len(alive.hidden)
            layers = tuple(
                la if cut is None else cut.narrowed(len(la.ffn))
                for la, cut in zip(alive.layers, found.left, strict=True)
            )
            rest = Structure(alive.hidden, layers)
            candidate = self._candidate(count, Group("attn", found.members), found.saliency, elements, rest)
            if best is None or candidate.saliency < best.saliency:
                best = candidate
        return best

    def _picked(self, pick: HeadPicker, scores: Scores, alive: Structure) -> _Picked:
        """The heads of all layers that are removed together; most events change neither them nor their saliencies."""
        values = np.concatenate([values.numpy() for values in (*scores.attn, *scores.kv)])
        last = self._last_picked.get(pick)
        if last is not None and last.is_of(alive.layers, values):
            return last
        members, left, total = list[tuple[int, ...]](), list[Layer | None](), 0.0
        for number, (layer, score) in enumerate(zip(alive.layers, scores.attn, strict=True)):
            if not layer.query_heads:
                members.append(())
                left.append(None)
                continue
            here, own = scores.structure.layers[number], score.numpy()
            if layer.query_heads is not here.query_heads:
                own = own[np.searchsorted(here.query_heads, layer.query_heads)]
            chosen, saliency = pick(layer, own, _of_kv_heads(scores, number, here, layer))
            members.append(tuple(layer.query_heads[place] for place in chosen))
            left.append(last.reused(number, layer, members[-1]) if last is not None else None)
            left[-1] = left[-1] or layer.without(query_heads=members[-1])
            total += saliency
        self._last_picked[pick] = found = _Picked(alive.layers, values, tuple(members), total, left)
        return found

    def _regular_pickers(self, alive: Structure) -> list[HeadPicker]:
        """Both keep every layer regular; only those from which the target's number of heads is still reachable."""
        layer = alive.with_heads
        kv, per_kv = len(layer.kv_heads), layer.queries_per_kv[0]
        wanted = self.floor.heads
        exact = self.target.shape is not None and "attn" in self.groups

        def allowed(kv_heads: int, queries: int) -> bool:
            if kv_heads < 1 or queries < 1 or kv_heads * queries < wanted:
                return False
            if self.kv_heads is not None:
                return kv_heads >= self.kv_heads and queries * self.kv_heads >= wanted
            return not exact or splits(wanted, kv_heads, queries)

        pickers: list[HeadPicker] = []
        if allowed(kv, per_kv - 1):
            pickers.append(_one_query_each)
        if allowed(kv - 1, per_kv):
            pickers.append(_one_kv_head)
        return pickers

    def _exact_floor(self, shape: Shape, source: Shape) -> Shape:
        for kind, key in _SIZES.items():
            if kind not in self.groups and getattr(shape, key) != getattr(source, key):
                raise UserError(f"target {key}={getattr(shape, key)} needs the group {kind}: add it to the groups")
        if shape.layers < (least := fewest_layers(self.anatomy, self.anatomy.source)):
            raise UserError(
                f"target layers={shape.layers}: a layer of every kind is kept, at least {least} here: choose more"
            )
        layer = self.anatomy.source.with_heads
        kv, per_kv = len(layer.kv_heads), max(layer.queries_per_kv, default=0)
        changes = shape.heads != source.heads and self.config.attention == "regular"
        if changes and not splits(shape.heads, kv, per_kv):
            reachable = sorted({a * b for a in range(1, kv + 1) for b in range(1, per_kv + 1)})
            raise UserError(
                f"target heads={shape.heads}: with regular attention the heads can be {reachable}: "
                "choose one of these, or attention cluster"
            )
        return shape

    def _check_reachable(self) -> None:
        source, floor = shallower(self.anatomy, self.anatomy.source, self.floor.layers), self.floor
        least = min(
            self.anatomy.count(with_sizes(source, replace(floor, heads=layout.heads), layout.kv_count(most_kv))).total
            for layout in layouts(source, self.config)
        )
        if least > self.target.num_parameters:
            raise UserError(
                f"target {format_count(self.target.num_parameters)} is below the smallest reachable model, "
                f"{least:,} parameters (at least {floor.heads} heads, {floor.ffn} FFN and {floor.hidden} hidden "
                f"channels, {floor.layers} layers): choose a larger target or make more groups prunable"
            )


def _of_kv_heads(scores: Scores, number: int, here: Layer, layer: Layer) -> Values:
    """Saliencies of the alive key/value heads; empty where they are sums over the queries."""
    if not scores.kv:
        return np.zeros(0)
    kept: Values = scores.kv[number].numpy()[np.searchsorted(here.kv_heads, layer.kv_heads)]
    return kept


def _one_query(layer: Layer, values_H: Values, kv_K: Values) -> tuple[list[int], float]:
    least = int(values_H.argmin())
    return [least], float(values_H[least])


def _one_query_each(layer: Layer, values_H: Values, kv_K: Values) -> tuple[list[int], float]:
    """Regular: the queries of a key/value head are neighbours, and equally many."""
    by_kv = values_H.reshape(len(layer.kv_heads), -1)
    places = [int(place) + kv * by_kv.shape[1] for kv, place in enumerate(by_kv.argmin(1))]
    return places, sum(values_H[places].tolist())


def _one_kv_head(layer: Layer, values_H: Values, kv_K: Values) -> tuple[list[int], float]:
    by_kv = values_H.reshape(len(layer.kv_heads), -1)
    least = int((kv_K if len(kv_K) else by_kv.sum(1)).argmin())
    places = list(range(least * by_kv.shape[1], (least + 1) * by_kv.shape[1]))
    return places, float(kv_K[least]) if len(kv_K) else sum(values_H[places].tolist())
