"""RMSNorm that divides by the number of alive channels.

Zeroed channels add nothing to the sum of squares, so dividing by the *active* width makes a masked model equal to
the sliced one. Folding the factor into the gain would drift, because Adam is not scale-equivariant.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class ActiveRMSNorm(nn.Module):
    """Replaces a stock RMSNorm and uses its gain; ``active_width`` is a tensor, so changing it does not recompile."""

    active_width: Tensor

    def __init__(self, stock: Any, *, gain_in_float32: bool, gain_offset: float = 0.0) -> None:
        super().__init__()
        self.weight: nn.Parameter = stock.weight
        self.variance_epsilon: float = stock.eps if hasattr(stock, "eps") else stock.variance_epsilon
        self.gain_in_float32, self.gain_offset = gain_in_float32, gain_offset
        width = torch.tensor(float(self.weight.numel()), device=self.weight.device)
        self.register_buffer("active_width", width, persistent=False)

    def forward(self, x_BLD: Tensor) -> Tensor:
        dtype = x_BLD.dtype
        wide = torch.promote_types(dtype, torch.float32)
        x_BLD = x_BLD.to(wide)
        mean_square = x_BLD.pow(2).sum(-1, keepdim=True) / self.active_width
        x_BLD = x_BLD * torch.rsqrt(mean_square + self.variance_epsilon)
        if self.gain_offset:
            return (x_BLD * (self.gain_offset + self.weight.to(wide))).to(dtype)
        if self.gain_in_float32:
            return (self.weight * x_BLD).to(dtype)
        return self.weight * x_BLD.to(dtype)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.variance_epsilon}, active={int(self.active_width)}"
