"""Positions: sequences longer than a model was trained for, and several sequences in one row."""

from __future__ import annotations

import math
import warnings
from typing import Any

_IGNORES_POSITIONS = ("granitemoehybrid",)
_FOLLOWS_LENGTH = ("dynamic", "longrope")


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


def can_be_packed(config: Any) -> bool:
    """Whether several sequences can share a row: positions separate attention, but no other mixing of tokens.

    Convolutions and recurrent layers would carry the end of one sequence into the next. Transformers' code of
    ``_IGNORES_POSITIONS`` builds its attention masks without looking at positions.
    """
    kinds = getattr(config, "layer_types", None) or ()
    attends = all(str(kind).endswith("_attention") and kind != "linear_attention" for kind in kinds)
    return attends and not config.model_type.endswith(_IGNORES_POSITIONS)


def follows_length(model: Any) -> str:
    """The kind of a model's rotary frequencies if they depend on the length of its sequences, else empty.

    transformers looks for the largest position in every pass and waits for the device, as a CUDA graph cannot.
    """
    backbone = getattr(model, "model", model)
    for rotary in (getattr(backbone, "rotary_emb", None), *getattr(backbone, "rotary_embs", ())):
        kinds = getattr(rotary, "rope_type", "")
        for kind in kinds.values() if isinstance(kinds, dict) else [kinds]:
            if kind in _FOLLOWS_LENGTH:
                return str(kind)
    return ""


def switch_of(model: Any) -> float:
    """The length beyond which all frequencies of a forward pass are others (longrope); infinite for other models."""
    rope = getattr(model.config, "rope_parameters", None) or {}
    found = [one.get("original_max_position_embeddings") for one in (rope, *rope.values()) if isinstance(one, dict)]
    return min(filter(None, found), default=math.inf) if follows_length(model) == "longrope" else math.inf


def warn_beyond_positions(seq_len: int, config: Any) -> None:
    """Issue that text, if any, as a warning."""
    if text := beyond_positions(seq_len, config):
        warnings.warn(text, SizeWarning, stacklevel=2)
