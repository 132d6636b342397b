"""When groups leave: pure functions of the step, so that a resumed run needs no state for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Pacing(Protocol):
    """Says whether another group is due once ``step`` gradient steps are done."""

    def due(self, step: int, num_parameters: int, num_events: int) -> bool: ...

    def next_step(self, step: int, num_parameters: int, num_events: int) -> int | None:
        """The first step from ``step`` on after which a group is due; None: never."""

    @property
    def last_step(self) -> int | None:
        """The step by which the target is reached for certain; None if only the events decide."""


@dataclass(frozen=True, slots=True)
class Horizon:
    """The parameter count falls on a straight line from the source's to the target's, over a share of the steps.

    Groups of different sizes leave as the line passes them, so that parameters, not events, are evenly spread.
    """

    start_count: int
    end_count: int
    first_step: int
    """Steps before the line begins to fall (the warm-up)."""
    last_step: int

    def planned(self, step: int) -> int:
        """Parameters that may be left once ``step`` steps are done."""
        done = min(max(step - self.first_step, 0), self.last_step - self.first_step)
        fall = (self.start_count - self.end_count) * done
        return self.start_count - fall // (self.last_step - self.first_step)

    def due(self, step: int, num_parameters: int, num_events: int) -> bool:
        return step > self.first_step and num_parameters > self.planned(step)

    def next_step(self, step: int, num_parameters: int, num_events: int) -> int | None:
        if num_parameters <= self.end_count:
            return None
        while not self.due(step, num_parameters, num_events):
            step += 1
        return step


@dataclass(frozen=True, slots=True)
class Ratio:
    """``pruning`` groups leave after every ``gradient`` steps, until the target (the paper's alternation)."""

    pruning: int
    gradient: int
    first_step: int

    @property
    def last_step(self) -> int | None:
        return None

    def events_by(self, step: int) -> int:
        """Groups that have left once ``step`` steps are done."""
        return max(step - self.first_step, 0) // self.gradient * self.pruning

    def due(self, step: int, num_parameters: int, num_events: int) -> bool:
        return num_events < self.events_by(step)

    def next_step(self, step: int, num_parameters: int, num_events: int) -> int | None:
        while not self.due(step, num_parameters, num_events):
            step += 1
        return step
