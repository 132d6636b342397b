"""The knobs of an evaluation."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dwindle.core.config import Config

EngineName = Literal["dwindle", "harness"]


class EvalConfig(Config):
    """How a model is evaluated."""

    limit: Annotated[int, Field(ge=1)] | None = None
    """Only the first N items of each data set."""
    batch: Annotated[int, Field(ge=0)] = 0
    """Choices per forward pass; 0: automatic."""
    engine: EngineName = "dwindle"
    """dwindle (fast, no extra packages) or harness (lm-evaluation-harness)."""
    dtype: Literal["float32", "bfloat16", "float16", "float64", "auto"] | None = None
    """dtype of a model that is loaded. Not set: float32."""
    max_length: Annotated[int, Field(ge=1)] | None = None
    """Maximum sequence length. Not set: the model's."""
