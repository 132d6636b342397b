"""Adapt-Pruner and equal shares of layers: sizes of heads and FFN channels for each layer; the hidden size is kept.

A layer's sparsity is the pruned fraction of its parameters (with ``balance = "ratio"``, of its key/value groups and of
its FFN channels alike). In every iteration of Adapt-Pruner it grows by ``step − amplitude · importance``; here the step
is found by bisection, so that the parameter count reaches its goal (with the paper's fixed step it drifts with the
amplitude).
"""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from dwindle.anatomy.anatomy import Anatomy
from dwindle.anatomy.structure import Group, Kind, Structure
from dwindle.core.errors import UserError
from dwindle.core.sizes import format_count
from dwindle.pruning.config import PruneConfig
from dwindle.pruning.event_bounds import EventRange, global_events, staged_events
from dwindle.pruning.importance import LayerWatch, normalised
from dwindle.pruning.pacing import Pacing, Stages
from dwindle.pruning.saliency import Scores
from dwindle.pruning.strategies.base import Choice, GroupScores, Strategy, Trail
from dwindle.pruning.strategies.layer_plan import LayerPlan, plan_layer, units_of
from dwindle.pruning.target import Target

MAX_SPARSITY = 0.99
"""Maximum pruned fraction of a layer."""
LAYER_KINDS: tuple[Kind, ...] = ("attn", "ffn")

Sizes = list[tuple[int, int]]
"""For each layer, the numbers of kept groups of query heads and FFN channels."""


class LayerwiseStrategy(Strategy):
    """Base of the adaptive and the uniform strategy: layer plans, counting, and one group per kind and event."""

    compacts_between_rounds = True
    spared: frozenset[int] = frozenset()
    """Layers that stay whole."""

    def __init__(self, anatomy: Anatomy, target: Target, config: PruneConfig) -> None:
        super().__init__(anatomy, target, config)
        if target.shape is not None:
            raise UserError(
                f"target: method {config.method} finds the sizes of layers itself: give a size such as 100M or 60%"
            )
        self.sparsity = [0.0] * anatomy.num_layers
        self.importance: list[float] = []
        self._check_reachable()

    def choose(
        self, scores: GroupScores, alive: Structure, pacing: Pacing, step: int, num_events: int
    ) -> Iterator[Choice]:
        """One group of heads and one of channels, which bring the model to at most the step's count."""
        self._before_choice()
        return iter(self.choose_to(scores.current, alive, self.goal(pacing, step)))

    def choose_to(self, scores: Scores, alive: Structure, goal: int) -> list[Choice]:
        """The groups to remove so that at most ``goal`` parameters remain."""
        if self.anatomy.count(alive).total <= goal:
            return []
        plans = self._plans(scores, alive)
        kept = self._sizes_at(plans, alive, goal)
        choices = self._choices(plans, alive, kept)
        self._after_choice(choices[-1].rest)
        return choices

    def _before_choice(self) -> None:
        """Read what was observed since ``listen``."""

    @abstractmethod
    def _sizes_at(self, plans: list[LayerPlan], alive: Structure, goal: int) -> Sizes:
        """The sizes that every layer keeps so that at most ``goal`` parameters remain."""

    def _after_choice(self, rest: Structure) -> None:
        """Update the sparsities: the pruned share of every layer's parameters."""
        hidden, count = len(rest.hidden), self.anatomy.count_layer
        pairs = enumerate(zip(self.anatomy.source.layers, rest.layers, strict=True))
        self.sparsity = [1 - count(n, hidden, now) / count(n, hidden, full) for n, (full, now) in pairs]

    def event_bounds(self, pacing: Pacing) -> EventRange:
        if isinstance(pacing, Stages):
            return staged_events(self.anatomy, pacing, self.config)
        return global_events(self.anatomy, self.target, self.config)

    def notes(self, step: int) -> list[dict[str, Any]]:
        """The sparsity of every layer, and the importance that decided it."""
        own = {"importance": list(self.importance), "sparsity": list(self.sparsity)}
        return [{"event": "allocation", "step": step, **own}]

    def state_dict(self) -> dict[str, Any]:
        return {"sparsity": self.sparsity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sparsity = [float(share) for share in state["sparsity"]]

    def _plans(self, scores: Scores, alive: Structure) -> list[LayerPlan]:
        return [
            plan_layer(
                number,
                layer,
                self.anatomy.source.layers[number],
                scores,
                head_dim=self.anatomy.head_dim,
                config=self.config,
                count=partial(self.anatomy.count_layer, number, len(alive.hidden)),
                spared=number in self.spared,
            )
            for number, layer in enumerate(alive.layers)
        ]

    def _kept_at(self, plans: list[LayerPlan], sparsity: Sequence[float]) -> Sizes:
        return [plan.kept_at(share) for plan, share in zip(plans, sparsity, strict=True)]

    def _count(self, plans: list[LayerPlan], alive: Structure, kept: Sequence[tuple[int, int]]) -> int:
        layers = tuple(plan.cut_to(sizes) for plan, sizes in zip(plans, kept, strict=True))
        return self.anatomy.count(Structure(alive.hidden, layers)).total

    def _choices(self, plans: list[LayerPlan], alive: Structure, kept: Sizes) -> list[Choice]:
        heads = [
            tuple(sorted(q for unit in plan.units[: len(plan.units) - n] for q in unit))
            for plan, (n, _) in zip(plans, kept, strict=True)
        ]
        channels = [
            tuple(sorted(plan.channels[: len(plan.channels) - n].tolist()))
            for plan, (_, n) in zip(plans, kept, strict=True)
        ]
        choices: list[Choice] = []
        members: dict[Kind, list[tuple[int, ...]]] = {"attn": heads, "ffn": channels}
        saliency = {
            kind: self._mean(plans, kept, kind, len(alive.hidden)) for kind in LAYER_KINDS if any(members[kind])
        }
        trail = Trail(alive)
        for kind in saliency:
            group = Group(kind, tuple(members[kind]))
            alive = alive.without(group)
            choices.append(trail.choice(group, dict(saliency), self.anatomy.count(alive).total))
        return choices

    def _mean(self, plans: list[LayerPlan], kept: Sizes, kind: Kind, hidden: int) -> float:
        """The mean saliency of the removed elements."""
        axis = LAYER_KINDS.index(kind)
        values: list[float] = []
        for plan, sizes in zip(plans, kept, strict=True):
            values += plan.scores[axis][: plan.here[axis] - sizes[axis]]
        return sum(values) / len(values) / hidden

    def _check_reachable(self) -> None:
        """For the heads that are worst to keep: with cluster attention all of different key/value heads."""
        source = self.anatomy.source
        scores = Scores.zero(source)
        for layer, heads in zip(source.layers, scores.attn, strict=True):
            heads -= torch.tensor([layer.kv_of_query[:n].count(kv) for n, kv in enumerate(layer.kv_of_query)])
        plans = self._plans(scores, source)
        least = self._count(plans, source, self._kept_at(plans, [MAX_SPARSITY] * len(plans)))
        if least > self.target.num_parameters:
            units, width = next(plan.floor for number, plan in enumerate(plans) if number not in self.spared)
            raise UserError(
                f"target {format_count(self.target.num_parameters)} is below the smallest model that method "
                f"{self.config.method} can reach, {least:,} parameters (at least {units} groups of heads and {width} "
                f"FFN channels per layer, at most {MAX_SPARSITY:.0%} of a layer pruned, the hidden size unchanged): "
                "choose a larger target"
            )


class AdaptStrategy(LayerwiseStrategy):
    """Adapt-Pruner: layers that change the residual stream more are pruned less; sparsities persist over iterations."""

    watches_layers = True

    def __init__(self, anatomy: Anatomy, target: Target, config: PruneConfig) -> None:
        super().__init__(anatomy, target, config)
        self._watch = LayerWatch(config.distance)
        self._next_sparsity = self.sparsity

    def listen(self, model: nn.Module) -> None:
        self._watch.attach(model)
        self._watch.open()

    def _before_choice(self) -> None:
        self.importance = self._watch.close()
        self._watch.detach()  # the model may be rebuilt now, and the old one must be freed

    def _sizes_at(self, plans: list[LayerPlan], alive: Structure, goal: int) -> Sizes:
        """Lands at most one minimal group below the goal, or the model is at its minimum sizes."""
        weights, amplitude = normalised(self.importance), self.config.amplitude

        def sparser(step: float) -> list[float]:
            return grown(self.sparsity, weights, step, amplitude)

        low, high = -amplitude, 1 + amplitude  # prunes nothing; prunes everything prunable
        for _ in range(60):
            middle = (low + high) / 2
            fits = self._count(plans, alive, self._kept_at(plans, sparser(middle))) <= goal
            low, high = (low, middle) if fits else (middle, high)
        more, less = self._kept_at(plans, sparser(low)), self._kept_at(plans, sparser(high))
        if self._count(plans, alive, more) <= goal:  # saliencies changed: the old sparsities imply more than is due
            more = [plan.here for plan in plans]
        self._next_sparsity = sparser(high)
        return self._land(plans, alive, more, less, goal)

    def _after_choice(self, rest: Structure) -> None:
        self.sparsity = self._next_sparsity

    def _land(self, plans: list[LayerPlan], alive: Structure, more: Sizes, less: Sizes, goal: int) -> Sizes:
        """Go from ``more`` (above the goal) towards ``less``, least salient groups first, as long as they fit.

        If the count then still exceeds the goal, the least salient channels of any layer are removed.
        """
        kept = list(more)
        steps: list[tuple[float, int, int]] = []
        for number, (plan, big, small) in enumerate(zip(plans, more, less, strict=True)):
            for axis, values in enumerate(plan.scores):
                removed = len(values) - big[axis]
                steps += [(values[removed + extra], number, axis) for extra in range(big[axis] - small[axis])]
        count = self._count(plans, alive, kept)

        def after(number: int, smaller: tuple[int, int]) -> int:
            before, rest = (plans[number].cut_to(sizes) for sizes in (kept[number], smaller))
            hidden = len(alive.hidden)
            return (
                count
                - self.anatomy.count_layer(number, hidden, before)
                + self.anatomy.count_layer(number, hidden, rest)
            )

        for _, number, axis in sorted(steps):
            smaller = _one_less(kept[number], axis)
            if (left := after(number, smaller)) >= goal:
                kept[number], count = smaller, left
        while count > goal:
            number, axis = self._smallest_step(plans, kept)
            smaller = _one_less(kept[number], axis)
            count = after(number, smaller)
            kept[number] = smaller
        return kept

    def _smallest_step(self, plans: list[LayerPlan], kept: Sizes) -> tuple[int, int]:
        """(layer, axis)"""
        options = []
        for number, (plan, sizes) in enumerate(zip(plans, kept, strict=True)):
            for axis in (0, 1):
                if sizes[axis] > plan.floor[axis]:
                    options.append((-axis, plan.next_score(sizes, axis), number, axis))
        _, _, number, axis = min(options)  # channels before heads: they are the smaller groups
        return number, axis


class UniformStrategy(LayerwiseStrategy):
    """Equal sizes: the same numbers of heads and channels in every layer that is not spared.

    Of the pairs of sizes that fit the goal, it takes the one that removes the least saliency (with
    ``balance = "ratio"``, the one with the most equal shares); lands less than one group of every layer below it.
    """

    def _check_reachable(self) -> None:
        layers = self.anatomy.source.layers
        if len({(len(units_of(layer, self.config)), len(layer.ffn)) for layer in layers}) > 1:
            raise UserError(
                f"method {self.config.method}: the source's layers already have different sizes: choose adapt"
            )
        super()._check_reachable()

    def _sizes_at(self, plans: list[LayerPlan], alive: Structure, goal: int) -> Sizes:
        cut = [plan for number, plan in enumerate(plans) if number not in self.spared]
        most, floor = tuple(min(sizes) for sizes in zip(*(plan.here for plan in cut), strict=True)), cut[0].floor
        options: list[tuple[float, tuple[int, int]]] = []
        for units in range(floor[0], most[0] + 1):
            widths = range(floor[1], most[1] + 1)
            fitting = bisect_right(
                widths, goal, key=lambda n: self._count(plans, alive, self._equal(plans, (units, n)))
            )
            if fitting:
                kept = (units, widths[fitting - 1])
                options.append((self._harm(cut, kept), kept))
        assert options, "the target was checked against the minimum sizes"
        return self._equal(plans, min(options)[1])

    def _equal(self, plans: list[LayerPlan], kept: tuple[int, int]) -> Sizes:
        return [plan.here if number in self.spared else kept for number, plan in enumerate(plans)]

    def _harm(self, plans: list[LayerPlan], kept: tuple[int, int]) -> float:
        """The cost of a pair of sizes; the lowest wins."""
        if self.config.balance == "ratio":
            full = plans[0].full
            return abs(kept[0] / full[0] - kept[1] / full[1]) if full[0] else -float(kept[1])
        units = [
            len(unit) * self.anatomy.head_dim * score
            for plan in plans
            for unit, score in list(zip(plan.units, plan.scores[0], strict=True))[: plan.here[0] - kept[0]]
        ]
        return sum(units) + sum(sum(plan.scores[1][: plan.here[1] - kept[1]]) for plan in plans)


def grown(sparsity: Sequence[float], importance: Sequence[float], step: float, amplitude: float) -> list[float]:
    """The layers' sparsities after an iteration: they never decrease, and never exceed ``MAX_SPARSITY``."""
    pairs = zip(sparsity, importance, strict=True)
    return [min(max(s + step - amplitude * i, s), MAX_SPARSITY) for s, i in pairs]


def _one_less(sizes: tuple[int, int], axis: int) -> tuple[int, int]:
    return (sizes[0] - 1, sizes[1]) if axis == 0 else (sizes[0], sizes[1] - 1)
