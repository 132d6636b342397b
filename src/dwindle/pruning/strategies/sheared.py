"""Sheared-LLaMA's choice: of every layer the heads and channels with the smallest masks, down to one shape."""

from __future__ import annotations

from dwindle.anatomy.anatomy import Anatomy
from dwindle.core.errors import UserError
from dwindle.pruning.config import PruneConfig
from dwindle.pruning.strategies.peers import OneShapeStrategy
from dwindle.pruning.target import Shape, Target


class ShearedStrategy(OneShapeStrategy):
    """The masks (``masks.py``) are the scores."""

    def __init__(self, anatomy: Anatomy, target: Target, config: PruneConfig) -> None:
        super().__init__(anatomy, target, config)
        norm = next((row.name for row in anatomy.rows if row.is_norm and row.axes == (("query",),)), None)
        shape = self.target.shape
        if norm is not None and shape is not None and shape.heads != Shape.of(anatomy.source).heads:
            raise UserError(
                f"method sheared: {norm} spans all heads, so a head cannot be masked alone: give groups without attn"
            )
