"""A file as the target: another strategy prunes to an estimated number of parameters, then on until the file fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from dwindle.anatomy.anatomy import Anatomy
from dwindle.anatomy.structure import Structure
from dwindle.core.errors import UserError
from dwindle.core.sizes import format_bytes
from dwindle.pruning.config import PruneConfig
from dwindle.pruning.event_bounds import EventRange
from dwindle.pruning.layouts import fewest_layers, layouts, most_kv, rounding_floors, shallower, with_sizes
from dwindle.pruning.pacing import Pacing, Rounds
from dwindle.pruning.strategies.base import Choice, GroupScores, Strategy
from dwindle.pruning.strategies.global_mixture import at_floors
from dwindle.pruning.target import Shape, Target

_CAUTION = 1.25
"""A step on the way removes this much fewer parameters than the excess suggests, because types differ by tensor."""
_MOST_BYTES = 2.0
"""Most bytes per parameter in a file whose type is not f32: rows that are not whole blocks are stored in f16."""


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
        self._measured: Structure | None = None
        self._count, self._excess = 0, 0
        """Parameters of the structure that was measured last, and its bytes above the limit."""
        smallest = _smallest(anatomy, config)
        self._least = anatomy.count(smallest).total
        self._check_reachable(smallest)
        self._aim_at(target.num_parameters)

    def _check_reachable(self, smallest: Structure) -> None:
        """Fail now, not in the middle of a run."""
        least = self._limit.bytes_of(smallest)
        if least > self._limit.max_bytes:
            raise UserError(
                f"target: {self._named} is below the smallest reachable one, {format_bytes(least)} ({self._least:,} "
                "parameters): choose more, lower minimum sizes, make more groups prunable, or trim the vocabulary first"
            )

    @property
    def _named(self) -> str:
        return f"a {self._limit.type} file of {format_bytes(self._limit.max_bytes)}"

    def _aim_at(self, num_parameters: int) -> None:
        self._num_parameters = num_parameters = max(num_parameters, self._least)
        try:
            self._inner = self._make(self.anatomy, Target(num_parameters), self.config)
        except UserError as error:
            why = f"{error}"
            if why.startswith("round_to"):
                why += f" ({self._limit.type} files store rows in blocks, so round_to is set unless you give one)"
            raise UserError(f"target: {self._named} needs about {num_parameters:,} parameters: {why}") from error
        self.uses_elements = self._inner.uses_elements
        self.target = self._inner.target

    def _fits(self, alive: Structure, count: int) -> bool:
        """Whether the file is small enough and its widths are multiples.

        Not measured again before enough parameters are removed for it to be possible.
        """
        rate = max(_MOST_BYTES, self._limit.bytes_per_parameter)
        if (self._count - count) * rate < self._excess and self._count > count:
            return False
        if self._measured is not alive:
            self._measured, self._count = alive, count
            self._excess = self._limit.bytes_of(alive) - self._limit.max_bytes
        return self._excess <= 0 and self._is_round(alive)

    def _is_round(self, alive: Structure) -> bool:
        groups, multiple = self.config.effective_groups, self.config.round_to
        widths = [len(la.ffn) for la in alive.layers] if "ffn" in groups else []
        widths += [len(alive.hidden)] if "stem" in groups else []
        return not any(width % multiple for width in widths)

    def choose(
        self, scores: GroupScores, alive: Structure, pacing: Pacing, step: int, num_events: int
    ) -> Iterator[Choice]:
        """The other strategy's groups; if the file does not fit at its parameter count, more groups until it does."""
        for choice in self._inner.choose(scores, alive, pacing, step, num_events):
            alive = choice.rest
            yield choice
            if self._fits(alive, choice.num_parameters):
                break
        while self._inner.is_finished(alive, count := self.anatomy.count(alive).total) and count > self._least:
            self._count = count  # measure now, to know how much is left to remove
            if self._fits(alive, count):
                break
            self._aim_at(count - max(int(self._excess / (_CAUTION * self._limit.bytes_per_parameter)), 1))
            for choice in self._inner.choose(scores, alive, Rounds(count, self.target.num_parameters, 1), 1, 0):
                alive = choice.rest
                yield choice
                if self._fits(alive, choice.num_parameters):
                    break
        self.target = self._inner.target

    def is_finished(self, alive: Structure, num_parameters: int) -> bool:
        return self._fits(alive, num_parameters)

    def event_bounds(self, pacing: Pacing) -> EventRange:
        return self._inner.event_bounds(pacing)

    def state_dict(self) -> dict[str, Any]:
        measured = {"count": self._count, "excess": self._excess}
        return {"num_parameters": self._num_parameters, "inner": self._inner.state_dict(), **measured}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._aim_at(int(state["num_parameters"]))
        self._inner.load_state_dict(state["inner"])
        self._measured, self._count, self._excess = None, int(state.get("count", 0)), int(state.get("excess", 0))
        self.target = self._inner.target


def _smallest(anatomy: Anatomy, config: PruneConfig) -> Structure:
    """A structure that can always be reached and from which nothing more can be removed."""
    config = rounding_floors(config)
    if config.effective_selection == "global":
        return at_floors(anatomy, config)
    source, groups = anatomy.source, config.effective_groups
    if "layer" in groups:
        source = shallower(anatomy, source, fewest_layers(anatomy, source))
    now = Shape.of(source)
    hidden = min(config.min_hidden, now.hidden) if "stem" in groups else now.hidden
    ffn = min(config.min_ffn, now.ffn) if "ffn" in groups else now.ffn
    found = (
        with_sizes(source, Shape(hidden, layout.heads, ffn, now.layers), layout.kv_count(most_kv))
        for layout in layouts(source, config)
    )
    return min(found, key=lambda one: anatomy.count(one).total)
