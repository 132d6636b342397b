"""The rows of a vocabulary: tensors with a ``vocab`` axis, cut to the ids that are kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dwindle.anatomy.anatomy import Anatomy, Row
from dwindle.anatomy.build import build


def kept_rows(row: Row, tensor: Tensor, kept: Sequence[int]) -> Tensor:
    """The entries of the kept ids along the vocabulary axis; a tensor without one is returned as it is."""
    for axis, units in enumerate(row.axes):
        if units == ("vocab",):
            tensor = tensor.index_select(axis, torch.tensor(kept, device=tensor.device))
    return tensor


def with_vocabulary(model: nn.Module, config: Any, kept: Sequence[int]) -> nn.Module:
    """The model of ``config`` with only the rows of the kept ids; all other tensors are shared."""
    anatomy = Anatomy.of(model)
    tensors = {name: kept_rows(anatomy[name], p.detach(), kept) for name, p in model.named_parameters()}
    return build(config, tensors)
