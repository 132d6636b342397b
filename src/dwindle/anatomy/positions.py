"""Sequences longer than the positions that a model was trained for."""

from __future__ import annotations

import warnings
from typing import Any


class SizeWarning(UserWarning):
    """A probably unintended size."""


def beyond_positions(seq_len: int, config: Any, name: str = "seq_len") -> str:
    """Warning text if ``seq_len`` exceeds the model's positions, else empty.

    Rotary embeddings extrapolate, so it works and may be intended; but the model never saw such positions, and
    attention's cost grows with the square of the length.
    """
    positions = getattr(config, "max_position_embeddings", None)
    if positions is None or seq_len <= positions:
        return ""
    return f"{name}: {seq_len:,} is more than the {positions:,} positions that the source was made for"


def warn_beyond_positions(seq_len: int, config: Any) -> None:
    """Issue that text, if any, as a warning."""
    if text := beyond_positions(seq_len, config):
        warnings.warn(text, SizeWarning, stacklevel=2)
