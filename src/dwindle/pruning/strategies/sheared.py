"""Sheared-LLaMA's choice: of every layer the heads and channels with the smallest masks, down to one shape."""

from __future__ import annotations

from dwindle.anatomy.anatomy import Anatomy
from dwindle.core.errors import UserError
from dwindle.pruning.config import PruneConfig
from dwindle.pruning.strategies.coupled import CoupledStrategy
from dwindle.pruning.strategies.peers import uniform_shape
from dwindle.pruning.target import Shape, Target


class ShearedStrategy(CoupledStrategy):
    """Aims at the target's shape, or at a uniform one of its size; the masks (``masks.py``) are the scores."""

    uses_elements = False

    def __init__(self, anatomy: Anatomy, target: Target, config: PruneConfig) -> None:
        end = uniform_shape(anatomy, target, config)
        super().__init__(anatomy, target, config)
        norm = next((row.name for row in anatomy.rows if row.is_norm and row.axes == (("query",),)), None)
        if norm is not None and end.shape.heads != Shape.of(anatomy.source).heads:
            raise UserError(
                f"method sheared: {norm} spans all heads, so a head cannot be masked alone: give groups without attn"
            )
        self._aim_at(end)
