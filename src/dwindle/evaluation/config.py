"""The knobs of an evaluation, and of generation."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dwindle.core.config import Config

EngineName = Literal["dwindle", "harness"]
DtypeName = Literal["float32", "bfloat16", "float16", "float64", "auto"]


class EvalConfig(Config):
    """How a model is evaluated."""

    limit: Annotated[int, Field(ge=1)] | None = None
    """Only the first N items of each data set."""
    batch: Annotated[int, Field(ge=0)] = 0
    """Choices per forward pass; 0: automatic."""
    engine: EngineName = "dwindle"
    """dwindle (fast, no extra packages) or harness (lm-evaluation-harness)."""
    dtype: DtypeName | None = None
    """dtype of a model that is loaded. Not set: float32."""
    max_length: Annotated[int, Field(ge=1)] | None = None
    """Maximum sequence length. Not set: the model's."""
    tokens: Annotated[int, Field(ge=1)] | None = None
    """Maximum tokens of a generated answer. Not set: the task's, such as 1280 of ifeval."""


LONG_ANSWER = 512
"""Tokens at most, where ``tokens`` is not set: of a file of prompts, or of a chat."""


class SamplingConfig(Config):
    """How the next token is chosen."""

    tokens: Annotated[int, Field(ge=1)] | None = None
    """Tokens to generate at most. Not set: 48 for one prompt, 512 for a file of prompts or a chat."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """0: greedy, the likeliest token; above: sampling."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Sample from the K likeliest tokens; 0: from all."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the likeliest tokens that together have this probability."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of sampling; each prompt of a file gets its own seed, drawn from this one."""


class GenerateConfig(SamplingConfig):
    """How prompts are answered."""

    batch: Annotated[int, Field(ge=0)] = 0
    """Prompts at a time; 0: automatic."""
    dtype: DtypeName | None = None
    """dtype of a model that is loaded in transformers. Not set: float32."""
    runtime: Literal["auto", "transformers", "llama.cpp"] = "auto"
    """transformers or llama.cpp; auto: llama.cpp for a .gguf file on a CPU."""
