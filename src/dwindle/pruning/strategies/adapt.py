"""Adapt-Pruner: how much of every layer leaves follows from the layer's importance, so widths differ between layers.

A layer's sparsity is the share of its parameters that has left (or, with ``balance="ratio"``, of its key/value groups
and of its FFN channels alike). In every iteration it grows by ``step − amplitude · importance``; here the step is not
given but found, so that the parameter count lands where it should (with the paper's fixed step it drifts with the
amplitude). The hidden size stays.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

import torch

from dwindle.anatomy import Anatomy, Group, Kind, Layer, Structure
from dwindle.core.errors import UserError
from dwindle.core.sizes import format_count
from dwindle.pruning.importance import DISTANCES, Distance, normalised
from dwindle.pruning.saliency import Scores
from dwindle.pruning.strategies.coupled import Choice, SelectionOptions
from dwindle.pruning.strategies.layer_plan import Balance, LayerPlan, plan_layer
from dwindle.pruning.target import Target

MOST = 0.99
"""No layer ever loses more than this share."""
DEFAULT_AMPLITUDE = 0.02
ADAPT_KINDS: tuple[Kind, ...] = ("attn", "ffn")


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocationOptions:
    amplitude: float = DEFAULT_AMPLITUDE
    """How far the most and the least important layer are moved apart in one iteration; 0 treats all alike."""
    distance: Distance = "cosine"
    """How the change that a layer makes is measured."""
    balance: Balance = "score"
    """Inside a layer the weakest groups leave, heads or channels; ``ratio``: equal shares of both (LLM-Pruner)."""

    def __post_init__(self) -> None:
        if not 0 <= self.amplitude <= 1:
            raise UserError(f"amplitude {self.amplitude}: give a share from 0 to 1, such as {DEFAULT_AMPLITUDE}")
        if self.distance not in DISTANCES:
            raise UserError(f"distance {self.distance!r}: choose {', '.join(DISTANCES)}")
        if self.balance not in get_args(Balance):
            raise UserError(f"balance {self.balance!r}: choose {', '.join(get_args(Balance))}")


def grown(sparsity: Sequence[float], importance: Sequence[float], step: float, amplitude: float) -> list[float]:
    """The layers' sparsities after an iteration: what has left does not come back, and something always stays."""
    pairs = zip(sparsity, importance, strict=True)
    return [min(max(s + step - amplitude * i, s), MOST) for s, i in pairs]


class Allocator:
    """Chooses what leaves every layer in one iteration; remembers the layers' sparsities between iterations."""

    def __init__(
        self, anatomy: Anatomy, target: Target, selection: SelectionOptions, options: AllocationOptions
    ) -> None:
        if "stem" in selection.groups:
            raise UserError("groups stem: this method keeps the hidden size: choose among attn and ffn")
        if target.shape is not None:
            raise UserError("target: this method finds the sizes of layers itself: give a size such as 100M or 60%")
        if selection.attention == "regular" and not all(la.is_regular for la in anatomy.source.layers):
            raise UserError("the source has cluster attention already: choose attention cluster")
        self.anatomy, self.selection, self.options = anatomy, selection, options
        self.sparsity = [0.0] * anatomy.num_layers
        self._check_reachable(target)

    def choose(self, scores: Scores, importance: Sequence[float], alive: Structure, aim: int) -> list[Choice]:
        """The groups (all heads, all channels) that bring the model to at most ``aim`` parameters.

        The result is less than one smallest group below the aim, or the model is at its floors.
        """
        if self.anatomy.count(alive).total <= aim:
            return []
        plans = self._plans(scores, alive)
        weights = normalised(importance)

        def sparser(step: float) -> list[float]:
            return grown(self.sparsity, weights, step, self.options.amplitude)

        low, high = -self.options.amplitude, 1 + self.options.amplitude  # nothing leaves; everything that may
        for _ in range(60):
            middle = (low + high) / 2
            fits = self._count(plans, alive, self._left(plans, sparser(middle))) <= aim
            low, high = (low, middle) if fits else (middle, high)
        more, less = self._left(plans, sparser(low)), self._left(plans, sparser(high))
        if self._count(plans, alive, more) <= aim:  # scores have changed, and what they owe is more than is due now
            more = [plan.here for plan in plans]
        left = self._land(plans, alive, more, less, aim)
        self.sparsity = sparser(high)
        return self._choices(plans, alive, left)

    def choose_uniform(self, scores: Scores, alive: Structure, aim: int) -> list[Choice]:
        """The same number of heads and of channels in every layer: the weakest of the pairs that fit the aim (or, by
        ratio, that with the most equal shares). Less than one channel of every layer below the aim.
        """
        if self.anatomy.count(alive).total <= aim:
            return []
        plans = self._plans(scores, alive)
        if len({plan.full for plan in plans}) > 1:
            raise UserError("method uniform: the source's layers have different sizes already: choose adapt")
        most, floor = tuple(min(sizes) for sizes in zip(*(plan.here for plan in plans), strict=True)), plans[0].floor
        options: list[tuple[float, tuple[int, int]]] = []
        for units in range(floor[0], most[0] + 1):
            widths = range(floor[1], most[1] + 1)
            fitting = bisect_right(widths, aim, key=lambda n: self._count(plans, alive, [(units, n)] * len(plans)))
            if fitting:
                left = (units, widths[fitting - 1])
                options.append((self._harm(plans, left), left))
        assert options, "the target was checked against the floors"
        left = min(options)[1]
        choices = self._choices(plans, alive, [left] * len(plans))
        full, rest = self.anatomy.source, choices[-1].rest
        self.sparsity = [
            1 - count(len(rest.hidden), b) / count(len(full.hidden), a)
            for a, b, count in zip(full.layers, rest.layers, self._counters(), strict=True)
        ]
        return choices

    def _counters(self) -> list[Callable[[int, Layer], int]]:
        """For each layer, its parameters at a hidden size and its own sizes."""
        return [partial(self.anatomy.count_layer, number) for number in range(self.anatomy.num_layers)]

    def _harm(self, plans: list[LayerPlan], left: tuple[int, int]) -> float:
        """What decides between pairs of sizes."""
        if self.options.balance == "ratio":
            full = plans[0].full
            return abs(left[0] / full[0] - left[1] / full[1])
        units = [
            len(unit) * self.anatomy.head_dim * score
            for plan in plans
            for unit, score in list(zip(plan.units, plan.scores[0], strict=True))[: plan.here[0] - left[0]]
        ]
        return sum(units) + sum(sum(plan.scores[1][: plan.here[1] - left[1]]) for plan in plans)

    def _plans(self, scores: Scores, alive: Structure) -> list[LayerPlan]:
        return [
            plan_layer(
                layer,
                self.anatomy.source.layers[number],
                scores.structure.layers[number],
                scores.attn[number],
                scores.ffn[number],
                head_dim=self.anatomy.head_dim,
                options=self.selection,
                balance=self.options.balance,
                count=partial(count, len(alive.hidden)),
            )
            for (number, layer), count in zip(enumerate(alive.layers), self._counters(), strict=True)
        ]

    def _left(self, plans: list[LayerPlan], sparsity: Sequence[float]) -> list[tuple[int, int]]:
        return [plan.left_at(share) for plan, share in zip(plans, sparsity, strict=True)]

    def _count(self, plans: list[LayerPlan], alive: Structure, left: Sequence[tuple[int, int]]) -> int:
        layers = tuple(plan.cut_to(sizes) for plan, sizes in zip(plans, left, strict=True))
        return self.anatomy.count(Structure(alive.hidden, layers)).total

    def _land(
        self,
        plans: list[LayerPlan],
        alive: Structure,
        more: list[tuple[int, int]],
        less: list[tuple[int, int]],
        aim: int,
    ) -> list[tuple[int, int]]:
        """From the last sizes above the aim, groups that the next sizes lack, weakest first, while they fit.

        What is then still too much leaves in smallest groups: the weakest channel anywhere.
        """
        left = list(more)
        steps: list[tuple[float, int, int]] = []
        for number, (plan, big, small) in enumerate(zip(plans, more, less, strict=True)):
            for axis, values in enumerate(plan.scores):
                gone = len(values) - big[axis]
                steps += [(values[gone + extra], number, axis) for extra in range(big[axis] - small[axis])]
        for _, number, axis in sorted(steps):
            smaller = _one_less(left, number, axis)
            if self._count(plans, alive, smaller) >= aim:
                left = smaller
        while self._count(plans, alive, left) > aim:
            left = self._smallest_step(plans, left)
        return left

    def _smallest_step(self, plans: list[LayerPlan], left: list[tuple[int, int]]) -> list[tuple[int, int]]:
        options = []
        for number, (plan, sizes) in enumerate(zip(plans, left, strict=True)):
            for axis in (0, 1):
                if sizes[axis] > plan.floor[axis]:
                    options.append((-axis, plan.next_score(sizes, axis), number, axis))
        _, _, number, axis = min(options)  # channels before heads: they are the smaller groups
        return _one_less(left, number, axis)

    def _choices(self, plans: list[LayerPlan], alive: Structure, left: list[tuple[int, int]]) -> list[Choice]:
        """One group with all heads that leave, one with all channels."""
        heads = [
            tuple(sorted(q for unit in plan.units[: len(plan.units) - n] for q in unit))
            for plan, (n, _) in zip(plans, left, strict=True)
        ]
        channels = [
            tuple(sorted(plan.channels[: len(plan.channels) - n])) for plan, (_, n) in zip(plans, left, strict=True)
        ]
        choices: list[Choice] = []
        members: dict[Kind, list[tuple[int, ...]]] = {"attn": heads, "ffn": channels}
        saliency = {
            kind: self._mean(plans, left, kind, len(alive.hidden)) for kind in ADAPT_KINDS if any(members[kind])
        }
        for kind in saliency:
            group = Group(kind, tuple(members[kind]))
            alive = alive.without(group)
            choices.append(Choice(group, dict(saliency), alive, self.anatomy.count(alive).total))
        return choices

    def _mean(self, plans: list[LayerPlan], left: list[tuple[int, int]], kind: Kind, hidden: int) -> float:
        """The mean score of an element that leaves."""
        axis = ADAPT_KINDS.index(kind)
        values: list[float] = []
        for plan, sizes in zip(plans, left, strict=True):
            values += plan.scores[axis][: plan.here[axis] - sizes[axis]]
        return sum(values) / len(values) / hidden

    def _check_reachable(self, target: Target) -> None:
        source = self.anatomy.source
        plans = self._plans(level_scores(source), source)
        least = self._count(plans, source, self._left(plans, [MOST] * len(plans)))
        if least > target.num_parameters:
            units, width = plans[0].floor
            raise UserError(
                f"target {format_count(target.num_parameters)} is below the smallest model that this method can "
                f"reach, {least:,} parameters (at least {units} groups of heads and {width} FFN channels in a "
                f"layer, at most {MOST:.0%} of it gone, the hidden size as it is): choose a larger target"
            )

    def state_dict(self) -> dict[str, Any]:
        return {"sparsity": self.sparsity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sparsity = [float(share) for share in state["sparsity"]]


def level_scores(structure: Structure) -> Scores:
    """The same score for everything, for questions that only depend on sizes."""
    heads = [torch.zeros(len(la.query_heads)) for la in structure.layers]
    channels = [torch.zeros(len(la.ffn)) for la in structure.layers]
    return Scores(structure, heads, channels, torch.zeros(len(structure.hidden)))


def _one_less(left: list[tuple[int, int]], number: int, axis: int) -> list[tuple[int, int]]:
    sizes = list(left[number])
    sizes[axis] -= 1
    return [*left[:number], (sizes[0], sizes[1]), *left[number + 1 :]]
