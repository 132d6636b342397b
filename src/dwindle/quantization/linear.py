"""Linear layers and embeddings with integer weights, and their arithmetic.

Weights ``w_OI`` are stored as integers with a scale per output row (8 bits, symmetric) or per group of inputs of a row
(4 bits, with an offset). Activations are rounded to 8 bits with one dynamic scale per token. The products are computed
in floating point on the integers' values: the results are those of an integer kernel on any device, the speed is not.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LEVELS_8 = 127
LEVELS_4 = 15
_TINY = 1e-12


def quantize_tokens(x: Tensor) -> Tensor:
    """x̂ = s·round(x / s) with s = max|x| / 127 over the last axis: 8-bit activations, one scale per token."""
    scale = x.abs().amax(-1, keepdim=True).clamp(min=_TINY) / LEVELS_8
    return (x / scale).round().clamp(-LEVELS_8, LEVELS_8) * scale


def quantize_rows(w_OI: Tensor) -> tuple[Tensor, Tensor]:
    """int8 weights [O, I] and a scale per row [O]."""
    scale_O = w_OI.abs().amax(1).clamp(min=_TINY) / LEVELS_8
    return (w_OI / scale_O[:, None]).round().clamp(-LEVELS_8, LEVELS_8).to(torch.int8), scale_O


def quantize_groups(w_OI: Tensor, group: int, clip: Tensor | float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """4-bit weights (0 … 15, not packed) with a scale and a minimum per group of inputs.

    The last group is shorter if ``group`` does not divide the inputs. ``clip`` below 1 saturates the largest values of
    a group in exchange for a finer grid.
    """
    blocks = grouped(w_OI, group)
    low = blocks.amin(-1).clamp(max=0) * clip
    high = blocks.amax(-1).clamp(min=0) * clip
    scale = ((high - low) / LEVELS_4).clamp(min=_TINY)
    values = ((blocks - low[..., None]) / scale[..., None]).round().clamp(0, LEVELS_4)
    return values.flatten(1)[:, : w_OI.shape[1]].to(torch.uint8), scale, low


def dequantize_groups(values_OI: Tensor, scale: Tensor, low: Tensor, group: int) -> Tensor:
    """Inverse of ``quantize_groups``, up to rounding."""
    width = values_OI.shape[1]
    blocks = grouped(values_OI.to(scale.dtype), group)
    return (blocks * scale[..., None] + low[..., None]).flatten(1)[:, :width]


def grouped(w_OI: Tensor, group: int) -> Tensor:
    """[O, groups, group]; a short last group is padded with zeros, which lie inside every range."""
    missing = -w_OI.shape[1] % group
    return F.pad(w_OI, (0, missing)).view(w_OI.shape[0], -1, group)


def pack_nibbles(values: Tensor) -> Tensor:
    """Two 4-bit values per byte, the first in the lower half."""
    padded = F.pad(values, (0, values.shape[1] % 2))
    return padded[:, 0::2] | (padded[:, 1::2] << 4)


def unpack_nibbles(packed: Tensor, width: int) -> Tensor:
    """Inverse of ``pack_nibbles`` for rows of ``width`` values."""
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1)[:, :width]


class Linear8(nn.Module):
    """8-bit weights with a scale per row; ``round_inputs`` also rounds the activations to 8 bits."""

    weight: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, scale: Tensor, bias: Tensor | None, *, round_inputs: bool) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.register_buffer("bias", bias)
        self.round_inputs = round_inputs

    def forward(self, x: Tensor) -> Tensor:
        if self.round_inputs:
            x = quantize_tokens(x)
        y = F.linear(x, self.weight.to(x.dtype)) * self.scale.to(x.dtype)
        return y if self.bias is None else y + self.bias


class Linear4(nn.Module):
    """4-bit weights with a scale and minimum per group of inputs, packed two per byte."""

    weight: Tensor
    scale: Tensor
    low: Tensor
    bias: Tensor | None

    def __init__(
        self, weight: Tensor, scale: Tensor, low: Tensor, bias: Tensor | None, *, in_features: int, group: int
    ):
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.register_buffer("low", low)
        self.register_buffer("bias", bias)
        self.in_features = in_features
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        values = unpack_nibbles(self.weight, self.in_features)
        weight = dequantize_groups(values, self.scale, self.low, self.group)
        return F.linear(x, weight.to(x.dtype), self.bias)


class Embedding8(nn.Module):
    """8-bit weights with a scale per row; shares its tensors with a tied head."""

    weight: Tensor
    scale: Tensor

    def __init__(self, weight: Tensor, scale: Tensor, dtype: torch.dtype, factor: float = 1.0) -> None:
        """``factor`` multiplies every embedding (Gemma)."""
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.dtype, self.factor = dtype, factor

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.weight[ids].to(self.dtype) * self.scale[ids][..., None].to(self.dtype)
        return rows if self.factor == 1.0 else rows * torch.tensor(self.factor, dtype=self.dtype, device=rows.device)
