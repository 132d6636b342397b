"""Precision of a run: the dtype of the weights and the autocast context of the forward pass."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch

Precision = Literal["fp32", "bf16", "fp8", "fp64"]


def is_bf16(precision: Precision) -> bool:
    """Whether the forward pass is in bf16; fp8 is, except for the linear layers (``training.float8``)."""
    return precision in ("bf16", "fp8")


def weights_dtype(precision: Precision) -> torch.dtype:
    """The dtype of weights: ``bf16`` and ``fp8`` only compute in it and keep fp32 weights."""
    return torch.float64 if precision == "fp64" else torch.float32


def autocast_for(
    precision: Precision, device: torch.device | str, *, keep_copies: bool = True
) -> AbstractContextManager[object]:
    """The context of every forward pass, in training and in validation.

    ``keep_copies`` False drops the bf16 copy of a weight after its use: with activation checkpointing, the backward
    pass makes its own. Weights are used once in a pass, so nothing is computed twice.
    """
    if is_bf16(precision):
        return torch.autocast(torch.device(device).type, dtype=torch.bfloat16, cache_enabled=keep_copies)
    return nullcontext()
