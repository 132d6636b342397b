"""Precision of a run: the dtype of the weights and the autocast context of the forward pass."""

from __future__ import annotations

import subprocess
import sys
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


def cpu_multiplies_bf16() -> bool:
    """Whether this CPU has instructions for bf16 products, and they work.

    Some virtual machines announce instructions that end a process by a signal, so another process tries them.
    """
    announced = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    if not any(announced.get(unit) for unit in ("avx512_bf16", "amx_bf16", "bf16")):
        return False
    product = "import torch; x = torch.ones(64, 64, dtype=torch.bfloat16); torch.nn.functional.linear(x, x)"
    return subprocess.run([sys.executable, "-c", product], capture_output=True, check=False).returncode == 0
