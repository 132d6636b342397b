"""Floating-point operations per training token, and the peak of a device."""

from __future__ import annotations

import torch

from dwindle.anatomy.anatomy import Anatomy
from dwindle.anatomy.structure import Structure

PEAK_FLOPS = {"H200": 989e12, "H100 80GB HBM3": 989e12}
"""Dense bf16 FLOP/s by a part of the device's name (the PCIe version of the H100 has a lower peak)."""


def flops_per_token(anatomy: Anatomy, structure: Structure, seq_len: int) -> float:
    """Forward and backward: 6 per weight (embeddings count once, as the head) plus 12·L·H·d·T for attention.

    Full attention is counted, as is common, although a causal kernel computes half of it.
    """
    vocabularies = [row.full_shape[0] for row in anatomy.rows if row.is_embedding]
    input_embedding = (sum(vocabularies) - max(vocabularies)) * len(structure.hidden)
    weights = anatomy.count(structure).total - input_embedding
    attended = sum(len(layer.query_heads) for layer in structure.layers) * anatomy.head_dim
    return 6.0 * weights + 12.0 * attended * seq_len


def forward_flops_per_token(anatomy: Anatomy, seq_len: int) -> float:
    """FLOPs per token of a teacher: the forward pass is a third of training."""
    return flops_per_token(anatomy, anatomy.source, seq_len) / 3


def peak_flops(device: str) -> float | None:
    """Dense bf16 FLOP/s of one device; None if unknown."""
    if not device.startswith("cuda") or not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)
