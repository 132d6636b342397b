"""Clipping of 4-bit weight ranges, in closed form: what OmniQuant learns by gradient is one number per group, and with
the inputs' correlations left out its objective is a sum over groups, so a small grid finds the minimum of each on its
own. At 8 bits it gained nothing on SmolLM2-135M, so it is not done there."""

from __future__ import annotations

import torch
from torch import Tensor

from dwindle.quantization.linear import dequantize_groups, grouped, quantize_groups

CLIPS_4 = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65)


def group_clips(w_OI: Tensor, group: int, importance_I: Tensor | None) -> Tensor:
    """[O, groups]: for each group the factor with the least Σ_j E[x_j²]·(w_j − ŵ_j)²; ``importance`` is E[x_j²]."""
    errors = []
    for clip in CLIPS_4:
        restored = dequantize_groups(*quantize_groups(w_OI, group, clip), group)
        errors.append(grouped(_weighted(restored - w_OI, importance_I), group).sum(-1))
    return torch.tensor(CLIPS_4, device=w_OI.device)[torch.stack(errors).argmin(0)]


def _weighted(difference: Tensor, importance_I: Tensor | None) -> Tensor:
    squared = difference.square()
    return squared if importance_I is None else squared * importance_I
