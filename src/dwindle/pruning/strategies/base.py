"""The interface of a strategy: given saliencies and what is alive, which groups are removed next?

Both drivers use the same strategies: the training callback (``pruner``) after optimizer steps, the post-training loop
(``rounds``) after calibrations. ``Pacing`` determines how much is due.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from dwindle.anatomy.anatomy import Anatomy
from dwindle.anatomy.structure import Group, Kind, Structure
from dwindle.core.errors import UserError
from dwindle.core.progress import Bar
from dwindle.pruning.config import PostTrainingConfig, PretrainPruneConfig, PruneConfig
from dwindle.pruning.event_bounds import EventRange
from dwindle.pruning.methods import METHODS, METHODS_OF
from dwindle.pruning.pacing import Pacing
from dwindle.pruning.saliency import ElementScores, Scores
from dwindle.pruning.surgery import Prunable
from dwindle.pruning.target import Target


class Trail:
    """The groups removed from a structure, one after the other; what is left is computed on demand."""

    def __init__(self, start: Structure) -> None:
        self._groups = list[Group]()
        self._start = self._now = start
        self._num_removed = 0

    def choice(self, group: Group, saliency: dict[Kind, float], num_parameters: int) -> Choice:
        """The next group to remove, with which so many parameters are left."""
        self._groups.append(group)
        return Choice(group, saliency, num_parameters, self, len(self._groups))

    def after(self, number: int) -> Structure:
        """What is left after so many groups; the last answer is kept."""
        if number < self._num_removed:
            self._now, self._num_removed = self._start, 0
        if number > self._num_removed:
            self._now = self._now.without_all(self._groups[self._num_removed : number])
            self._num_removed = number
        return self._now


@dataclass(frozen=True, slots=True)
class Choice:
    """A group to remove, the saliency of every kind's candidate, and the parameters that are left."""

    group: Group
    saliency: dict[Kind, float]
    num_parameters: int
    trail: Trail = field(repr=False, compare=False)
    number: int
    """How many groups of the trail are removed with this one."""

    @property
    def rest(self) -> Structure:
        """The remaining structure."""
        return self.trail.after(self.number)


GroupScores = Scores | ElementScores
"""Saliencies that are updated by removals: fixed sums, or sums over elements."""


def check_heads(anatomy: Anatomy, config: PruneConfig) -> None:
    """Refuse to prune heads of a source with cluster attention as if they were regular."""
    is_regular = all(layer.is_regular for layer in anatomy.source.layers)
    if is_regular or config.attention == "cluster" or "attn" not in config.effective_groups:
        return
    if config.method in METHODS_OF["attention"]:
        raise UserError("attention: the source already has cluster attention: choose cluster")
    in_training = isinstance(config, PretrainPruneConfig)
    able = [name for name in METHODS_OF["attention"] if METHODS[name].in_training or not in_training]
    raise UserError(
        f"method {config.method}: cannot prune the cluster attention that the source already has: choose "
        f"{', '.join(able[:-1])} or {able[-1]}, with attention cluster"
    )


def heads_differ(anatomy: Anatomy) -> bool:
    """Whether the layers of the source that have heads have different ones."""
    return len({(len(la.query_heads), len(la.kv_heads)) for la in anatomy.source.layers if la.query_heads}) > 1


def check_same_heads(anatomy: Anatomy, config: PruneConfig) -> None:
    """Refuse to remove heads from all layers at once where these differ: the smallest would lose its last ones."""
    if config.attention == "regular" and heads_differ(anatomy):
        which, ways = f"method {config.method}", "adapt"
        if config.method == "efficientllm":
            which, ways = "selection coupled", "global, attention cluster"
        raise UserError(
            f"{which}: the source's layers already have different heads: choose {ways} or groups without attn"
        )


class Strategy(ABC):
    """Chooses groups until the model is at or below the target; raises if the target is not reachable."""

    uses_elements: bool = False
    """Whether pruning without training updates the sums of saliencies element by element after every removal."""
    compacts_between_rounds: bool = False
    """Whether pruning without training compacts the model between its (many) rounds."""
    watches_layers: bool = False
    """Whether ``listen`` must be called before the forward passes whose results decide the groups."""

    def __init__(self, anatomy: Anatomy, target: Target, config: PruneConfig) -> None:
        check_heads(anatomy, config)
        self.anatomy, self.target, self.config = anatomy, target, config

    @abstractmethod
    def choose(
        self, scores: GroupScores, alive: Structure, pacing: Pacing, step: int, num_events: int
    ) -> Iterator[Choice]:
        """The groups to remove once ``step`` steps (or rounds) are done, after ``num_events`` earlier events.

        Modifies ``scores``: chosen groups are removed from them.
        """

    def goal(self, pacing: Pacing, step: int) -> int:
        """The parameter count that the removals after ``step`` land on."""
        aim = pacing.aim(step)
        return self.target.num_parameters if aim is None else aim

    @property
    def num_rounds(self) -> int:
        """Rounds without training, each with its own calibration."""
        assert isinstance(self.config, PostTrainingConfig)
        return self.config.num_rounds

    def measure(self, prunable: Prunable, windows: Tensor, bar: Bar | None) -> GroupScores:
        """The saliencies of a method that has its own score (``PruneConfig.has_own_score``), without training."""
        raise NotImplementedError

    def repair(self, prunable: Prunable, keep: Structure) -> None:  # noqa: B027 (optional)
        """The method's own update of the kept weights, before the others are zeroed; after ``measure``."""

    @abstractmethod
    def event_bounds(self, pacing: Pacing) -> EventRange:
        """Bounds on the number of events until the target."""

    def is_finished(self, alive: Structure, num_parameters: int) -> bool:
        """Whether nothing more will be removed."""
        return num_parameters <= self.target.num_parameters

    def listen(self, model: nn.Module) -> None:  # noqa: B027 (optional)
        """Observe the next forward passes of this model, after which groups are chosen."""

    def notes(self, step: int) -> list[dict[str, Any]]:
        """Additional ledger events about the groups just chosen."""
        return []

    def state_dict(self) -> dict[str, Any]:
        """JSON-able state between events."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027 (optional)
        """Inverse of ``state_dict``."""
