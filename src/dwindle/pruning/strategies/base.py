"""The interface of a strategy: given saliencies and what is alive, which groups are removed next?

One strategy serves both drivers. The training callback (``pruner``) asks it after optimizer steps, the post-training
loop (``rounds``) after calibrations; ``Pacing`` says how much is due either way.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self

from torch import nn

from dwindle.anatomy.anatomy import Anatomy
from dwindle.anatomy.structure import Group, Kind, Structure
from dwindle.core.errors import UserError
from dwindle.pruning.config import PruneConfig
from dwindle.pruning.event_bounds import EventRange
from dwindle.pruning.pacing import Pacing
from dwindle.pruning.saliency import Scores
from dwindle.pruning.target import Target


@dataclass(frozen=True, slots=True)
class Choice:
    """A group to remove, the saliency of each kind's candidate, and what remains."""

    group: Group
    saliency: dict[Kind, float]
    rest: Structure
    num_parameters: int


class GroupScores(Protocol):
    """Saliencies that follow removals: fixed sums (``Scores``) or sums over elements (``ElementScores``)."""

    @property
    def current(self) -> Scores:
        """The saliency of every head and channel now; removed ones are infinite."""

    def remove(self, group: Group) -> None: ...

    def copy(self) -> Self: ...


class Strategy(ABC):
    """Chooses groups until a target, and never stops above it; refuses targets that it cannot reach."""

    uses_elements: ClassVar[bool] = False
    """Whether rounds without training sum saliencies again, element by element, after every removal."""
    compacts_between_rounds: ClassVar[bool] = False
    """Whether rounds without training rebuild the model on the way, because they are many."""
    watches_layers: ClassVar[bool] = False
    """Whether forward passes must be observed (``listen``) before groups can be chosen."""

    def __init__(self, anatomy: Anatomy, target: Target, config: PruneConfig) -> None:
        if config.attention == "regular" and not all(layer.is_regular for layer in anatomy.source.layers):
            raise UserError("attention: the source already has cluster attention: choose cluster")
        self.anatomy, self.target, self.config = anatomy, target, config

    @abstractmethod
    def choose(
        self, scores: GroupScores, alive: Structure, pacing: Pacing, step: int, num_events: int
    ) -> Iterator[Choice]:
        """The groups to remove once ``step`` steps (or rounds) are done, after ``num_events`` earlier events.

        ``scores`` are used up: removals are noted in them.
        """

    @abstractmethod
    def event_bounds(self, pacing: Pacing) -> EventRange:
        """How many events the target takes."""

    def is_finished(self, alive: Structure, num_parameters: int) -> bool:
        """Whether nothing more will be removed."""
        return num_parameters <= self.target.num_parameters

    def listen(self, model: nn.Module) -> None:  # noqa: B027 (optional)
        """Groups are chosen after the next passes of this model: observe what will be needed."""

    def notes(self, step: int) -> list[dict[str, Any]]:
        """Further ledger lines about the groups just chosen."""
        return []

    def state_dict(self) -> dict[str, Any]:
        """JSON-able state between events."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027 (optional)
        """Inverse of ``state_dict``."""
