"""What leaves when groups are due in training: the same group in every layer, one anywhere, or by layer importance.

A pruner asks its chooser after every step after which the pacing says that more must leave.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Literal, Protocol

from torch import nn

from dwindle.anatomy import Anatomy, Structure
from dwindle.anatomy.anatomy import places
from dwindle.pruning.importance import LayerWatch
from dwindle.pruning.ledger import Event, allocation_event
from dwindle.pruning.pacing import Pacing, Stages
from dwindle.pruning.saliency import Scores
from dwindle.pruning.strategies.adapt import AllocationOptions, Allocator
from dwindle.pruning.strategies.coupled import Choice, Rounded, SelectionOptions, Selector, final_count, rounded_shape
from dwindle.pruning.strategies.global_selection import GlobalSelector
from dwindle.pruning.target import Shape, Target

ChooserKind = Literal["coupled", "global", "adapt"]


class Chooser(Protocol):
    """All of them reach ``target`` and never stop above it."""

    target: Target

    def is_finished(self, alive: Structure, num_parameters: int) -> bool:
        """Whether nothing more will leave."""

    def listen(self, model: nn.Module) -> None:
        """Groups are due after the next step of this model: watch what will be needed then."""

    def choose(self, scores: Scores, alive: Structure, pacing: Pacing, step: int, num_events: int) -> list[Choice]:
        """Every group that is due once ``step`` steps are done, from the same scores."""

    def notes(self, step: int) -> list[Event]:
        """Further lines for the ledger about the groups just chosen."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def make_chooser(
    kind: ChooserKind,
    anatomy: Anatomy,
    target: Target,
    selection: SelectionOptions,
    *,
    round_to: int = 1,
    allocation: AllocationOptions | None = None,
) -> Chooser:
    """Refuses targets that cannot be reached; only coupled groups can end in a given shape, and adapt cannot round."""
    if kind == "coupled":
        return CoupledChooser(anatomy, target, selection, round_to)
    if kind == "global":
        return GlobalChooser(anatomy, target, selection, round_to)
    return AdaptChooser(anatomy, target, selection, allocation or AllocationOptions())


class _ByCount:
    """Choosers whose target is a number of parameters."""

    target: Target

    def is_finished(self, alive: Structure, num_parameters: int) -> bool:
        return num_parameters <= self.target.num_parameters

    def listen(self, model: nn.Module) -> None:
        """Scores are all that is needed."""

    def notes(self, step: int) -> list[Event]:
        return []

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to restore."""


class CoupledChooser(_ByCount):
    """EfficientLLM: a head (or FFN channel) of every layer at once, or a hidden channel everywhere."""

    def __init__(self, anatomy: Anatomy, target: Target, selection: SelectionOptions, round_to: int = 1) -> None:
        self.anatomy, self.selection, self.round_to = anatomy, selection, round_to
        self.target = target
        self._selector = Selector(anatomy, target, selection)
        self._shape_chosen = round_to <= 1 or target.shape is not None

    def is_finished(self, alive: Structure, num_parameters: int) -> bool:
        if self.target.shape is not None:
            return Shape.of(alive) == self.target.shape
        return self._shape_chosen and num_parameters <= final_count(self.anatomy, self.target)

    def choose(self, scores: Scores, alive: Structure, pacing: Pacing, step: int, num_events: int) -> list[Choice]:
        """Sums of one group ignore the others' leaving."""
        if not self._shape_chosen:
            self._choose_shape(scores, alive)
        working, choices = copy_of(scores), list[Choice]()
        count = self.anatomy.count(alive).total
        while pacing.due(step, count, num_events + len(choices)):
            choice = self._selector.choose(working, alive)
            if choice is None:
                break
            choices.append(choice)
            alive, count = choice.rest, choice.num_parameters
            exclude(working, choice)
        return choices

    def _choose_shape(self, scores: Scores, now: Structure) -> None:
        """With rounding, the final shape follows from the first scores, so that all types can land on multiples."""
        working, alive = copy_of(scores), now
        while (choice := self._selector.choose(working, alive)) is not None:
            alive = choice.rest
            exclude(working, choice)
        self._aim_at(rounded_shape(self.anatomy, alive, now, self.target, self.selection, self.round_to))

    def _aim_at(self, aim: Rounded) -> None:
        self.target = Target(0, aim.shape)
        self._selector = Selector(self.anatomy, self.target, self.selection, aim.kv_heads)
        self._shape_chosen = True

    def state_dict(self) -> dict[str, Any]:
        shape, kv_heads = self.target.shape, self._selector.kv_heads
        if shape is None:
            return {}
        return asdict(shape) | ({} if kv_heads is None else {"kv_heads": kv_heads})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            self._aim_at(Rounded(Shape(state["hidden"], state["heads"], state["ffn"]), state.get("kv_heads")))


class GlobalChooser(_ByCount):
    """The weakest group anywhere: layers get different sizes."""

    def __init__(self, anatomy: Anatomy, target: Target, selection: SelectionOptions, round_to: int = 1) -> None:
        self.target = target
        self._selector = GlobalSelector(anatomy, target, selection, round_to)

    def choose(self, scores: Scores, alive: Structure, pacing: Pacing, step: int, num_events: int) -> list[Choice]:
        return self._selector.choose_while(
            scores, alive, lambda count, chosen: pacing.due(step, count, num_events + chosen)
        )


class AdaptChooser(_ByCount):
    """Adapt-Accel: each stage shares what must leave out over the layers, by how much they change the stream."""

    def __init__(
        self, anatomy: Anatomy, target: Target, selection: SelectionOptions, allocation: AllocationOptions
    ) -> None:
        self.target = target
        self._allocator = Allocator(anatomy, target, selection, allocation)
        self._watch = LayerWatch(allocation.distance, only_in_training=True)
        self._importance: list[float] = []

    def listen(self, model: nn.Module) -> None:
        self._watch.attach(model)
        self._watch.open()

    def choose(self, scores: Scores, alive: Structure, pacing: Pacing, step: int, num_events: int) -> list[Choice]:
        assert isinstance(pacing, Stages), "the method adapt prunes in stages"
        self._importance = self._watch.close()
        self._watch.detach()  # the model may be rebuilt now, and the old one must be free
        return self._allocator.choose(scores, self._importance, alive, pacing.planned(step))

    def notes(self, step: int) -> list[Event]:
        return [allocation_event(step, self._importance, self._allocator.sparsity)]

    def state_dict(self) -> dict[str, Any]:
        return self._allocator.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._allocator.load_state_dict(state)


def copy_of(scores: Scores) -> Scores:
    return Scores(
        scores.structure, [t.clone() for t in scores.attn], [t.clone() for t in scores.ffn], scores.stem.clone()
    )


def exclude(scores: Scores, choice: Choice) -> None:
    """Never choose this group again."""
    group, structure = choice.group, scores.structure
    if group.kind == "stem":
        scores.stem[places(group.members[0], structure.hidden)] = float("inf")
        return
    values, unit = (scores.attn, "query") if group.kind == "attn" else (scores.ffn, "ffn")
    for layer, members in enumerate(group.members):
        values[layer][places(members, structure.unit(unit, layer))] = float("inf")
