"""A file as the target: another strategy prunes to an estimated number of parameters, then on until the file fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from dwindle.anatomy.anatomy import Anatomy
from dwindle.anatomy.structure import Structure
from dwindle.core.errors import UserError
from dwindle.core.sizes import format_bytes
from dwindle.pruning.config import PruneConfig
from dwindle.pruning.event_bounds import EventRange
from dwindle.pruning.pacing import Pacing, Rounds
from dwindle.pruning.strategies.base import Choice, GroupScores, Strategy
from dwindle.pruning.target import Target

_CAUTION = 1.25
"""A step on the way removes this much fewer parameters than the excess suggests, because types differ by tensor."""


class FileStrategy(Strategy):
    """Prunes with another strategy until the file is at most as large as the target says."""

    def __init__(
        self,
        anatomy: Anatomy,
        target: Target,
        config: PruneConfig,
        make: Callable[[Anatomy, Target, PruneConfig], Strategy],
    ) -> None:
        super().__init__(anatomy, target, config)
        assert target.file is not None
        if config.method != "efficientllm":
            raise UserError(f"target: method {config.method} lands on a number of parameters: give a size such as 60%")
        self._limit, self._make = target.file, make
        self._measured: tuple[Structure, int] | None = None
        self._aim_at(target.num_parameters)

    def _aim_at(self, num_parameters: int) -> None:
        self._num_parameters = num_parameters
        limit = f"a {self._limit.type} file of {format_bytes(self._limit.max_bytes)}"
        try:
            self._inner = self._make(self.anatomy, Target(num_parameters), self.config)
        except UserError as error:
            raise UserError(f"target: {limit} needs about {num_parameters:,} parameters: {error}") from error
        self.uses_elements = self._inner.uses_elements
        self.target = self._inner.target

    def _excess(self, alive: Structure) -> int:
        """Bytes above the limit; sizes are computed once for a structure."""
        if self._measured is None or self._measured[0] is not alive:
            self._measured = alive, self._limit.bytes_of(alive)
        return self._measured[1] - self._limit.max_bytes

    def choose(
        self, scores: GroupScores, alive: Structure, pacing: Pacing, step: int, num_events: int
    ) -> Iterator[Choice]:
        """The other strategy's groups; once it is at its count, the least salient ones until the file fits."""
        for choice in self._inner.choose(scores, alive, pacing, step, num_events):
            alive = choice.rest
            yield choice
        while self._inner.is_finished(alive, count := self.anatomy.count(alive).total):
            if (excess := self._excess(alive)) <= 0:
                break
            self._aim_at(count - max(int(excess / (_CAUTION * self._limit.bytes_per_parameter)), 1))
            for choice in self._inner.choose(scores, alive, Rounds(count, self.target.num_parameters, 1), 1, 0):
                alive = choice.rest
                yield choice
        self.target = self._inner.target

    def is_finished(self, alive: Structure, num_parameters: int) -> bool:
        return self._inner.is_finished(alive, num_parameters) and self._excess(alive) <= 0

    def event_bounds(self, pacing: Pacing) -> EventRange:
        return self._inner.event_bounds(pacing)

    def listen(self, model: nn.Module) -> None:
        self._inner.listen(model)

    def notes(self, step: int) -> list[dict[str, Any]]:
        return self._inner.notes(step)

    def state_dict(self) -> dict[str, Any]:
        return {"num_parameters": self._num_parameters, "inner": self._inner.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._aim_at(int(state["num_parameters"]))
        self._inner.load_state_dict(state["inner"])
        self.target = self._inner.target
