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


def stage_shares(num_stages: int) -> list[float]:
    """The part of all tokens that each stage trains on: growing linearly, because later cuts hurt more."""
    return [2 * (number + 1) / (num_stages * (num_stages + 1)) for number in range(num_stages)]


@dataclass(frozen=True, slots=True)
class Stages:
    """Adapt-Accel: prune a few per cent, train, repeat; every stage keeps the same share of the parameters.

    A stage begins with its pruning, after its first step: its gradients are the calibration.
    """

    start_count: int
    end_count: int
    first_step: int
    """Steps before the first stage (the warm-up)."""
    num_steps: int
    num_stages: int

    def sizes(self) -> list[int]:
        """Parameters that each stage trains with."""
        keep = (self.end_count / self.start_count) ** (1 / self.num_stages)
        sizes = [int(self.start_count * keep ** (number + 1)) for number in range(self.num_stages)]
        return [*sizes[:-1], self.end_count]

    def starts(self) -> list[int]:
        """Steps after which each stage prunes."""
        steps, done, starts = self.num_steps - self.first_step, 0.0, []
        for share in stage_shares(self.num_stages):
            starts.append(self.first_step + max(1, round(done * steps)))
            done += share
        return starts

    @property
    def last_step(self) -> int:
        return self.starts()[-1]

    def planned(self, step: int) -> int:
        """Parameters that may be left once ``step`` steps are done."""
        begun = [size for start, size in zip(self.starts(), self.sizes(), strict=True) if start <= step]
        return begun[-1] if begun else self.start_count

    def due(self, step: int, num_parameters: int, num_events: int) -> bool:
        return num_parameters > self.planned(step)

    def next_step(self, step: int, num_parameters: int, num_events: int) -> int | None:
        later = [
            max(start, step) for start, size in zip(self.starts(), self.sizes(), strict=True) if num_parameters > size
        ]
        return min(later, default=None)
