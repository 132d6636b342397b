"""Sheared-LLaMA: masks are learned with the weights towards a shape, then the least open groups are removed at once.

The mask phase takes ``prune.horizon`` of the tokens. After its last step every layer keeps the heads and channels with
the largest log α, and the model the hidden channels; their masks become one, and training continues without any. The
paper also weighs the domains of its text by their excess loss, which is not done here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from dwindle.anatomy.structure import Structure
from dwindle.pruning.layouts import largest_count
from dwindle.pruning.masks import MaskedModel, Masks, parts_of
from dwindle.pruning.pacing import MaskPhase
from dwindle.pruning.pruner import Pruner
from dwindle.pruning.strategies.base import Choice

if TYPE_CHECKING:
    from dwindle.training.loop import Trainer


class ShearedPruner(Pruner):
    """Learns masks during the pacing's steps, and removes groups by them after the last."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        assert isinstance(self.pacing, MaskPhase) and self._strategy.target.shape is not None
        self._first, self._last = self.pacing.first_step, self.pacing.last_step
        self._masked: MaskedModel | None = None
        parts = parts_of(self.prunable.anatomy.source, self._strategy.target.shape)
        self._masks = Masks(parts, self._last - self._first)

    @property
    def name(self) -> str:
        return Pruner.__name__

    @property
    def end_count(self) -> int:
        """All key/value groups stay, so the shape determines it exactly."""
        return largest_count(self.prunable.anatomy, self._strategy.target, self.config)

    def scores_step(self, step: int) -> bool:
        """Masks, not the gradients of weights, say what is removed."""
        return False

    def on_start(self, trainer: Trainer) -> None:
        super().on_start(trainer)
        self._show_masks(trainer)

    def edit_gradients(self, trainer: Trainer) -> None:
        super().edit_gradients(trainer)
        if self._masked is not None and trainer.step >= self._first:
            self._derivatives = self._masked.gradients()

    def after_backward(self, trainer: Trainer) -> None:
        if self._masked is None or trainer.step < self._first:
            return
        expected = self._masks.learn(self._derivatives, self._masked.u, trainer.step + 1 - self._first)
        for kind in {part.kind for part in self._masks.parts}:
            own = [share for share, part in zip(expected.tolist(), self._masks.parts, strict=True) if part.kind == kind]
            trainer.extra_metrics[f"open_{kind}"] = sum(own) / len(own)

    def after_step(self, trainer: Trainer) -> None:
        super().after_step(trainer)
        self._show_masks(trainer)

    def _choose_due(self, trainer: Trainer) -> list[Choice]:
        if self.finished or not self._pace.due(trainer.step, self.prunable.num_parameters, self.num_events):
            return []
        self._hide_masks()
        scores, alive = self._masks.scores(self.prunable.physical), self.prunable.alive
        return list(self._strategy.choose(scores, alive, self._pace, trainer.step, self.num_events))

    def compact(self, trainer: Trainer, keep: Structure) -> None:
        self._hide_masks()  # they hold the old model's modules
        super().compact(trainer, keep)

    def _show_masks(self, trainer: Trainer) -> None:
        """Sample the masks of the next step; they depend only on the seed and the step.

        Their hooks exist from the first step of the run: a layer that is already compiled ignores new ones.
        """
        if self.finished or trainer.step >= self._last:
            return
        if self._masked is None:
            self._masked = MaskedModel(self.prunable, self._masks)
        if trainer.step >= self._first:
            self._masked.sample(self.seed * 1_000_003 + trainer.step)

    def _hide_masks(self) -> None:
        if self._masked is not None:
            self._masked.remove()
            self._masked = None

    def tensors(self) -> dict[str, Tensor]:
        return {} if self.finished else self._masks.tensors()

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        self._masks.load_tensors(tensors)
