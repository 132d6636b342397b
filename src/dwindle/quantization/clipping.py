"""Clipping of 4-bit weight ranges by grid search.

OmniQuant learns one clipping factor per group by gradient descent. If the correlations between inputs are ignored, its
objective is a sum over groups, so a small grid finds the minimum of each. At 8 bits clipping gained nothing on
SmolLM2-135M, so it is only used at 4 bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dwindle.quantization.linear import dequantize, grouped, quantize_groups

CLIPS_4 = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65)


def group_clips(w_OI: Tensor, group: int, importance_I: Tensor | None) -> Tensor:
    """[O, groups]: for each group the factor that minimizes Σ_j E[x_j²]·(w_j − ŵ_j)²; ``importance`` is E[x_j²]."""
    errors, weight = [], 1.0 if importance_I is None else importance_I
    for clip in CLIPS_4:
        restored = dequantize(*quantize_groups(w_OI, group, clip))
        errors.append(grouped((restored - w_OI).square() * weight, group).sum(-1))
    return torch.tensor(CLIPS_4, device=w_OI.device)[torch.stack(errors).argmin(0)]
