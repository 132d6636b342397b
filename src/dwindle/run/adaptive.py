"""Adapt-Pruner without training: T iterations, in each of which layers lose by their importance (``--method adapt``).

``uniform`` is the control: the same scores and calibration, the same sizes in every layer (LLM-Pruner).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from torch import Tensor

from dwindle.core.progress import Bar
from dwindle.pruning.calibration import calibrate
from dwindle.pruning.importance import LayerWatch
from dwindle.pruning.ledger import Event, allocation_event, prune_event, source_event
from dwindle.pruning.saliency import metric_named, score_model
from dwindle.pruning.second_order import repair
from dwindle.pruning.strategies.adapt import Allocator
from dwindle.pruning.surgery import Prunable

ADAPT_ITERATIONS = 50
ADAPT_SEQUENCES = 512
ADAPT_SEQ_LEN = 64
ADAPT_METRIC = "taylor1"

_REBUILD_SHARE = 0.1
"""Dead share at which the model is rebuilt smaller, so that later iterations are faster."""


@dataclass(slots=True)
class AdaptJob:
    """One pruning from source to target."""

    prunable: Prunable
    allocator: Allocator
    method: Literal["adapt", "uniform"]
    metric: str
    num_parameters: int
    """The target."""
    windows: Tensor | None
    seed: int
    second_order: bool
    gram_tokens: int | None
    damping: float

    def run(self, iterations: int, source: str) -> list[Event]:
        start = self.prunable.num_parameters
        settings: dict[str, Any] = {"method": self.method, "metric": self.metric, "second_order": self.second_order}
        settings |= {"iterations": iterations, "seed": self.seed}
        settings |= asdict(self.allocator.options) | asdict(self.allocator.selection)
        events = [source_event(source, self.prunable.anatomy, settings)]
        with Bar("pruning layers", iterations * (1 if self.windows is None else len(self.windows))) as bar:
            for number in range(1, iterations + 1):
                aim = start - (start - self.num_parameters) * number // iterations
                events += self._iteration(number, aim, bar)
                if self.windows is None:  # else calibration counts its windows
                    bar.advance()
        return events

    def _iteration(self, number: int, aim: int, bar: Bar) -> list[Event]:
        """Measure importance and scores in the same passes, share out what must leave, remove it."""
        metric = metric_named(self.metric, seed=self.seed * 1000 + number)
        watch = LayerWatch(self.allocator.options.distance) if self.method == "adapt" else None
        found = calibrate(
            self.prunable,
            self.windows,
            metric,
            groups=self.allocator.selection.groups,
            second_order=self.second_order,
            gram_tokens=self.gram_tokens,
            damping=self.damping,
            layers=watch,
            bar=bar,
        )
        if watch is not None:
            watch.detach()
        scores, alive = score_model(self.prunable, found.gradients, found.fishers, metric), self.prunable.alive
        if self.method == "adapt":
            choices = self.allocator.choose(scores, found.importance, alive, aim)
        else:
            choices = self.allocator.choose_uniform(scores, alive, aim)
        if not choices:
            return []
        if found.inputs is not None and self.second_order:
            repair(self.prunable, choices[-1].rest, found.inputs, damping=self.damping)
        self.prunable.kill(choices[-1].rest)
        if self.prunable.dead_share >= _REBUILD_SHARE:
            self.prunable.compact()
        events = [prune_event(choice, step=number, tokens=0) for choice in choices]
        return [allocation_event(number, found.importance, self.allocator.sparsity), *events]
