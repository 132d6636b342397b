"""The knobs of quantization."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dwindle.core.config import Config


class QuantizeConfig(Config):
    """How weights and activations are rounded."""

    scheme: Literal["w8a8", "w8", "w4", "fp8"] = "w8a8"
    """w8a8 (8-bit weights and activations), w8 (8-bit weights), w4 (4-bit weights in groups) or fp8 (8-bit floats)."""
    smoothing: bool = True
    """Move activation outliers into the weights (w8a8)."""
    group: Annotated[int, Field(ge=2, multiple_of=2)] = 32
    """Weights that share a scale (w4); an even number, for vLLM 32, 64 or 128."""
    sequences: Annotated[int, Field(ge=1)] = 32
    """Calibration sequences."""
    seq_len: Annotated[int, Field(ge=2)] = 256
    """Tokens per calibration sequence."""
    valid_seq_len: Annotated[int, Field(ge=2)] = 1024
    """Tokens per window of the validation text."""
    valid_tokens: Annotated[int, Field(ge=1)] = 65_536
    """Maximum tokens of the validation text."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of the calibration sample."""
