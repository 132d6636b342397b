"""When groups are removed: pure functions of the step (or round), so that a resumed run needs no state for them."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field

from dwindle.pruning.config import PretrainPruneConfig


class Pacing:
    """Says whether another group is due once ``step`` gradient steps (or rounds) are done."""

    __slots__ = ()

    @property
    def last_step(self) -> int | None:
        """The step by which the target is reached for certain; None if only the events decide."""
        return None

    @abstractmethod
    def due(self, step: int, num_parameters: int, num_events: int) -> bool: ...

    def aim(self, step: int) -> int | None:
        """The parameter count that the removals of this step aim at; None: only the final target."""
        return None

    def next_step(self, step: int, num_parameters: int, num_events: int) -> int | None:
        """The first step from ``step`` on after which a group is due; None: never."""
        if self.last_step is not None and not self.due(max(step, self.last_step), num_parameters, num_events):
            return None
        while not self.due(step, num_parameters, num_events):
            step += 1
        return step


@dataclass(frozen=True, slots=True)
class Horizon(Pacing):
    """The parameter count falls linearly from the source's to the target's, over a fraction of the steps.

    Groups of different sizes are removed as the line passes them: parameters, not events, are evenly spread.
    """

    start_count: int
    end_count: int
    first_step: int
    """Steps before the line begins to fall (the warm-up)."""
    last_step: int = field()  # not the property as its default

    def planned(self, step: int) -> int:
        """Planned parameters once ``step`` steps are done."""
        done = min(max(step - self.first_step, 0), self.last_step - self.first_step)
        fall = (self.start_count - self.end_count) * done
        return self.start_count - fall // (self.last_step - self.first_step)

    def due(self, step: int, num_parameters: int, num_events: int) -> bool:
        return step > self.first_step and num_parameters > self.planned(step)


@dataclass(frozen=True)
class MaskPhase(Horizon):
    """Masks are learned until the last step, and everything is removed after it (sheared)."""

    def planned(self, step: int) -> int:
        return self.start_count if step < self.last_step else self.end_count


@dataclass(frozen=True, slots=True)
class Ratio(Pacing):
    """``pruning`` groups are removed after every ``gradient`` steps, until the target (the paper's alternation)."""

    pruning: int
    gradient: int
    first_step: int

    def events_by(self, step: int) -> int:
        """Groups to have been removed once ``step`` steps are done."""
        return max(step - self.first_step, 0) // self.gradient * self.pruning

    def due(self, step: int, num_parameters: int, num_events: int) -> bool:
        return num_events < self.events_by(step)


def stage_shares(num_stages: int) -> list[float]:
    """The fraction of all tokens that each stage trains on: growing linearly, because later cuts hurt more."""
    return [2 * (number + 1) / (num_stages * (num_stages + 1)) for number in range(num_stages)]


@dataclass(frozen=True, slots=True)
class Stages(Pacing):
    """Adapt-Accel: prune a few per cent, train, repeat; every stage keeps the same fraction of the parameters.

    A stage begins with its pruning, after its first step: its gradients are the calibration.
    """

    start_count: int
    end_count: int
    first_step: int
    """Steps before the first stage (the warm-up)."""
    num_steps: int
    num_stages: int

    def sizes(self) -> list[int]:
        """Parameters of the model in each stage."""
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
        """Planned parameters once ``step`` steps are done."""
        begun = [size for start, size in zip(self.starts(), self.sizes(), strict=True) if start <= step]
        return begun[-1] if begun else self.start_count

    def due(self, step: int, num_parameters: int, num_events: int) -> bool:
        return num_parameters > self.planned(step)

    def aim(self, step: int) -> int | None:
        return self.planned(step)

    def next_step(self, step: int, num_parameters: int, num_events: int) -> int | None:
        later = [
            max(start, step) for start, size in zip(self.starts(), self.sizes(), strict=True) if num_parameters > size
        ]
        return min(later, default=None)


@dataclass(frozen=True, slots=True)
class Rounds(Pacing):
    """Pruning without training: rounds with equal decrements of the parameter count, each rescored."""

    start_count: int
    end_count: int
    num_rounds: int

    def planned(self, step: int) -> int:
        """Parameters after a round."""
        return self.start_count - (self.start_count - self.end_count) * step // self.num_rounds

    def due(self, step: int, num_parameters: int, num_events: int) -> bool:
        """In the last round only the target decides: an exact shape may have another count than was planned."""
        return step >= self.num_rounds or num_parameters > self.planned(step)

    def aim(self, step: int) -> int | None:
        return None if step >= self.num_rounds else self.planned(step)


def training_pacing(config: PretrainPruneConfig, *, start: int, end: int, first_step: int, num_steps: int) -> Pacing:
    """When a run of ``num_steps`` prunes from ``start`` to ``end`` parameters, after ``first_step`` steps without."""
    if config.keeps_hidden_size:
        return Stages(start, end, first_step, num_steps, config.num_stages)
    if config.steps_ratio is not None:
        return Ratio(*config.steps_ratio, first_step=first_step)
    assert config.effective_horizon is not None
    last = first_step + max(round(config.effective_horizon * num_steps), 1)
    kind = MaskPhase if config.method == "sheared" else Horizon
    return kind(start, end, first_step, min(last, num_steps))
