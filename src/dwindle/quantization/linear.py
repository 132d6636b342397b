"""Linear layers with rounded weights and activations, in the arithmetic of compressed-tensors.

Weights ``w_OI`` are int8 with a scale per row, 4-bit integers with a scale and an integer zero point per group of
inputs, or 8-bit floats with a scale per row; activations are rounded with one dynamic scale per token. The products are
computed in floating point on the rounded values: the results are those of an integer kernel, the speed is not.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Rounding = Literal["int8", "fp8"]

LEVELS_8 = 127
LOW_4, HIGH_4 = -8, 7
FP8_MAX = 448.0


def _usable(scale: Tensor) -> Tensor:
    """1 where all values are zero, or so small that the scale's dtype has no number for them."""
    return torch.where(scale == 0, torch.ones_like(scale), scale)


def quantize_tokens(x: Tensor, rounding: Rounding = "int8") -> Tensor:
    """x̂ = s·round(x / s), one scale per token: s = max|x| / 127.5 (int8, −128 … 127) or max|x| / 448 (8-bit float)."""
    peak = x.abs().amax(-1, keepdim=True)
    if rounding == "fp8":
        scale = _usable(peak / FP8_MAX)
        return (x / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).to(x.dtype) * scale
    scale = _usable(peak / 127.5)
    return (x / scale).round().clamp(-128, 127) * scale


def quantize_rows(w_OI: Tensor, scale_dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """int8 weights [O, I] and a scale per row [O, 1], rounded to the dtype in which it is stored."""
    scale_O1 = _usable((w_OI.abs().amax(1, keepdim=True) / LEVELS_8).to(scale_dtype))
    return (w_OI / scale_O1.float()).round().clamp(-LEVELS_8, LEVELS_8).to(torch.int8), scale_O1


def quantize_rows_fp8(w_OI: Tensor, scale_dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """The same with 8-bit floats (e4m3)."""
    scale_O1 = _usable((w_OI.abs().amax(1, keepdim=True) / FP8_MAX).to(scale_dtype))
    return (w_OI / scale_O1.float()).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scale_O1


def quantize_groups(
    w_OI: Tensor, group: int, clip: Tensor | float = 1.0, scale_dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """4-bit weights (−8 … 7, as int8) with a scale and an integer zero point per group; ``group`` divides the inputs.

    ``clip`` below 1 saturates the largest values of a group in exchange for a finer grid.
    """
    blocks = grouped(w_OI, group)
    low = blocks.amin(-1).clamp(max=0) * clip
    high = blocks.amax(-1).clamp(min=0) * clip
    scale = _usable(((high - low) / (HIGH_4 - LOW_4)).to(scale_dtype))
    step = scale.float()
    zero = (LOW_4 - low / step).round().clamp(LOW_4, HIGH_4)
    values = (blocks / step[..., None] + zero[..., None]).round().clamp(LOW_4, HIGH_4)
    return values.flatten(1).to(torch.int8), scale, zero.to(torch.int8)


def dequantize(values_OI: Tensor, scale: Tensor, zero: Tensor | None = None) -> Tensor:
    """Float32 weights; as many groups per row as ``scale`` has columns."""
    blocks = values_OI.float().view(values_OI.shape[0], scale.shape[1], -1)
    if zero is not None:
        blocks = blocks - zero.float()[..., None]
    return (blocks * scale.float()[..., None]).flatten(1)


def grouped(w_OI: Tensor, group: int) -> Tensor:
    """[O, groups, group]"""
    return w_OI.reshape(w_OI.shape[0], -1, group)


class QuantizedLinear(nn.Module):
    """Rounded weights with a scale per row or group; ``rounds`` says how the inputs are rounded, if they are."""

    weight: Tensor
    scale: Tensor
    zero: Tensor | None
    bias: Tensor | None

    def __init__(
        self, weight: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None, *, rounds: Rounding | None
    ) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.register_buffer("zero", zero)
        self.register_buffer("bias", bias)
        self.rounds = rounds

    def forward(self, x: Tensor) -> Tensor:
        if self.rounds is not None:
            x = quantize_tokens(x, self.rounds)
        return F.linear(x, dequantize(self.weight, self.scale, self.zero).to(x.dtype), self.bias)
