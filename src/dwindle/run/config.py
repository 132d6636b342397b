"""The knobs of ``dwindle compare``."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from dwindle.core.sizes import parse_count
from dwindle.pruning.config import PostTrainingConfig

NOT_COMPARED = ("method", "metric", "amplitude", "distance", "balance", "rounds")
"""Settings of post-training pruning that a comparison does not take: it lists metrics and calibrates once, which adapt
cannot do.
"""


class CompareConfig(PostTrainingConfig):
    """Settings shared by all cells."""

    text_field: str = "text"
    """Field of JSON lines, or column of Parquet, that holds the text."""
    valid_tokens: str | int = 16384
    """Maximum held-out tokens."""
    tokens: str | int = 0
    """Also prune while training on this many tokens (each cell); 0: no training."""
    tokens_per_step: str | int = 8192
    """Tokens per training step."""
    lr: Annotated[float, Field(gt=0)] = 6e-4
    """Learning rate of the training."""

    @property
    def num_tokens(self) -> int:
        return parse_count(self.tokens, "tokens")

    @property
    def num_valid_tokens(self) -> int:
        return parse_count(self.valid_tokens, "valid_tokens")
