"""ShortGPT: the whole layers that change the residual stream least are removed, and nothing else.

Block influence of layer l: BI_l = 1 − E cos(h_l, h_{l+1}) over tokens, h_l and h_{l+1} its input and its output.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite
from typing import Any

from torch import Tensor, nn

from dwindle.anatomy.anatomy import Anatomy
from dwindle.anatomy.structure import Group, Structure
from dwindle.core.errors import UserError
from dwindle.core.progress import Bar
from dwindle.core.sizes import counted, format_count
from dwindle.pruning.activity import observe
from dwindle.pruning.config import PruneConfig
from dwindle.pruning.event_bounds import EventRange
from dwindle.pruning.importance import LayerWatch
from dwindle.pruning.layouts import fewest_layers, shallower
from dwindle.pruning.pacing import Pacing, Stages
from dwindle.pruning.saliency import Scores
from dwindle.pruning.strategies.base import Choice, GroupScores, Strategy, Trail
from dwindle.pruning.surgery import Prunable
from dwindle.pruning.target import Shape, Target


class ShortGptStrategy(Strategy):
    """Removes the layers of the lowest block influence until the target; lands at most one layer below it."""

    def __init__(self, anatomy: Anatomy, target: Target, config: PruneConfig) -> None:
        super().__init__(anatomy, target, config)
        self._watch = LayerWatch("cosine")
        self._left = anatomy.source
        """After the last choice."""
        self.influence: list[float | None] = []
        source, least = Shape.of(anatomy.source), fewest_layers(anatomy, anatomy.source)
        if target.shape is not None:
            if (target.shape.hidden, target.shape.heads, target.shape.ffn) != (source.hidden, source.heads, source.ffn):
                raise UserError("target: method shortgpt removes layers alone: give layers=… or a size such as 60%")
            if target.shape.layers < least:
                raise UserError(f"target layers={target.shape.layers}: at least {least} must be kept: choose more")
        smallest = anatomy.count(shallower(anatomy, anatomy.source, least)).total
        if target.shape is None and smallest > target.num_parameters:
            raise UserError(
                f"target {format_count(target.num_parameters)} is below the smallest model that method shortgpt can "
                f"reach, {smallest:,} parameters in {counted(least, 'layer')}: choose a larger target"
            )

    def is_finished(self, alive: Structure, num_parameters: int) -> bool:
        if self.target.shape is not None:
            return len(alive.places) <= self.target.shape.layers
        return num_parameters <= self.target.num_parameters

    def listen(self, model: nn.Module) -> None:
        self._watch.attach(model)
        self._watch.open()

    def measure(self, prunable: Prunable, windows: Tensor, bar: Bar | None) -> Scores:
        self.listen(prunable.model)
        observe(prunable, windows, [], bar)
        return Scores.zero(prunable.physical)

    def choose(
        self, scores: GroupScores, alive: Structure, pacing: Pacing, step: int, num_events: int
    ) -> Iterator[Choice]:
        """The structure of the scores is that of the observed model: its removed layers were not observed."""
        places = scores.current.structure.places
        found = self._watch.close()
        self._watch.detach()
        if not all(map(isfinite, found)):
            raise UserError("method shortgpt: the residual stream is not finite: the weights or the data are broken")
        self.influence = [1 + found[places[n]] if n in places else None for n in range(self.anatomy.num_layers)]
        counts_layers = self.target.shape is not None and isinstance(pacing, Stages)
        goal = self.target.num_parameters if counts_layers else self.goal(pacing, step)
        count, trail = self.anatomy.count(alive).total, Trail(alive)
        while count > goal and not self.is_finished(alive, count):
            values = {n: bi for n in self.anatomy.removable_wholes(alive) if (bi := self.influence[n]) is not None}
            if not values:
                break
            least = min(values, key=values.__getitem__)
            group = Group.of_layer("layer", least, alive.layers[least].block_places, len(alive.layers))
            self._left = alive = alive.without(group)
            count = self.anatomy.count(alive).total
            yield trail.choice(group, {"layer": values[least]}, count)

    def event_bounds(self, pacing: Pacing) -> EventRange:
        source = self.anatomy.source
        if self.target.shape is not None:
            events = len(source.places) - self.target.shape.layers
            return EventRange(events, events)
        excess = self.anatomy.count(source).total - self.target.num_parameters
        sizes = sorted(self.anatomy.layer_counts(source)[n] for n in self.anatomy.removable_layers(source))
        return EventRange(_until(excess, sizes[::-1]), _until(excess, sizes))

    def notes(self, step: int) -> list[dict[str, Any]]:
        """The block influence of every layer."""
        sparsity = [float(layer.is_gone) for layer in self._left.layers]
        return [{"event": "allocation", "step": step, "importance": list(self.influence), "sparsity": sparsity}]


def _until(excess: int, sizes: list[int]) -> int:
    """How many layers of these sizes, in this order, until so many parameters are removed."""
    for number, size in enumerate(sizes, 1):
        excess -= size
        if excess <= 0:
            return number
    return len(sizes)
