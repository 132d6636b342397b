"""Linear layers that train in float8 (``training.precision = "fp8"``), with one scale per tensor.

The product y = x Wᵀ multiplies e4m3 by e4m3; the gradients of x and W multiply the gradient of y in e5m2, which has the
wider range, by W and x in e4m3. Scales are computed on the device at every use: there is no state, so a resumed run
computes the same bits, and nothing waits for the device. Zero stays zero, so pruned groups stay dead.

Shapes: T tokens, I input and O output features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dwindle.core.errors import UserError

MULTIPLE = 16
"""The matrix products need sizes that are multiples of this; others are computed in bf16."""
_FORWARD, _BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
_SMALLEST = 1e-30
"""Lower limit of a largest magnitude, against division by zero; divided by e5m2's maximum it is a normal float32."""
_CAPABILITY = (8, 9)
"""Compute capability of the first GPUs that multiply float8 (Ada); an H100 has 9.0."""


def check_float8(device: str, key: str = "training.precision") -> None:
    """Refuse fp8 on a device that cannot multiply float8; ``key`` asked for it."""
    if device == "cuda" and torch.cuda.get_device_capability() >= _CAPABILITY:
        return
    name = torch.cuda.get_device_name() if device == "cuda" else "this CPU"
    raise UserError(f"{key}: fp8 needs a GPU of compute capability 8.9 or above, which {name} is not: use bf16 or auto")


def use_float8(model: nn.Module) -> None:
    """Let the linear layers inside the decoder layers train in float8, where their sizes allow it.

    Before the layers are compiled, and again whenever the model is rebuilt. Only the class of a module changes: its
    parameters, their names and its hooks stay, and what is built from its tensors is stock.
    """
    for module in model.model.layers.modules():  # type: ignore[union-attr]
        if type(module) is nn.Linear and all(size and size % MULTIPLE == 0 for size in module.weight.shape):
            module.__class__ = Float8Linear


class Float8Linear(nn.Linear):
    """A linear layer that trains in float8; stock in evaluation and if the number of tokens is not a multiple of 16."""

    def forward(self, x: Tensor) -> Tensor:
        num_tokens = x.shape[:-1].numel()
        if not self.training or num_tokens % MULTIPLE:  # the weight's gradient sums over tokens in float8
            return nn.functional.linear(x, self.weight, self.bias)
        x_TI = x.to(torch.bfloat16).reshape(num_tokens, x.shape[-1])
        y: Tensor = _Product.apply(x_TI, self.weight).view(*x.shape[:-1], -1)  # type: ignore[no-untyped-call]
        return y if self.bias is None else y + self.bias.to(y.dtype)


class _Product(torch.autograd.Function):
    """``x Wᵀ`` in bf16; the gradient of W is float32, as W is."""

    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, w_OI: Tensor) -> Tensor:
        x8_TI, x_scale = quantized(x_TI, _FORWARD)
        w8_OI, w_scale = quantized(w_OI, _FORWARD)
        ctx.save_for_backward(x8_TI, x_scale, w8_OI, w_scale)
        return torch._scaled_mm(x8_TI, w8_OI.t(), x_scale, w_scale, out_dtype=torch.bfloat16, use_fast_accum=True)

    @staticmethod
    def backward(ctx: Any, grad_TO: Tensor) -> tuple[Tensor, Tensor]:
        x8_TI, x_scale, w8_OI, w_scale = ctx.saved_tensors
        g8_TO, g_scale = quantized(grad_TO, _BACKWARD)
        grad_x = torch._scaled_mm(g8_TO, _by_columns(w8_OI), g_scale, w_scale, out_dtype=torch.bfloat16)
        grad_w = torch._scaled_mm(g8_TO.t().contiguous(), _by_columns(x8_TI), g_scale, x_scale, out_dtype=torch.float32)
        return grad_x, grad_w


def quantized(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(x / scale in ``dtype``, scale), with the scale that makes the largest magnitude the largest number of ``dtype``.

    A value that is not finite makes everything NaN, and the loop skips the step.
    """
    scale = x.abs().amax().float().clamp(min=_SMALLEST) / torch.finfo(dtype).max
    return (x.float() * scale.reciprocal()).to(dtype).contiguous(), scale


def _by_columns(matrix: Tensor) -> Tensor:
    """The same matrix, column by column in memory, as the right factor has to be."""
    return matrix.t().contiguous().t()
