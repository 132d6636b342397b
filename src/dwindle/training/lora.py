"""LoRA adapters through ``peft``: low-rank updates that are trained instead of the weights, and merged into a result.

An adapter of rank r adds ``2 · B A`` to the weight of every linear map of the layers; B starts at zero, so the first
step sees the source. Weights, embeddings and norms are frozen: they need no gradients and no moments.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from dwindle.anatomy.build import build
from dwindle.core.errors import UserError, install_hint

_BASE, _ADAPTER = ".base_layer.", ".lora_"


def add_adapters(model: nn.Module, rank: int) -> None:
    """Put an adapter on every linear map of the layers, in place, and freeze everything else."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise UserError(f"training.lora_rank: needs the peft package: {install_hint('lora')}") from error
    layers: Any = cast(Any, model).model.layers
    names = sorted(
        {name.rpartition(".")[2] for name, module in layers.named_modules() if isinstance(module, nn.Linear)}
    )
    dtype = next(model.parameters()).dtype
    inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=names), model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(_ADAPTER in name)
        parameter.data = parameter.data.to(dtype)


def has_adapters(model: nn.Module) -> bool:
    return any(_ADAPTER in name for name, _ in model.named_parameters())


@torch.no_grad()
def merged(model: nn.Module) -> nn.Module:
    """A model of plain weights with the adapters added; the model itself, if it has none."""
    if not has_adapters(model):
        return model
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if _ADAPTER not in name:
            tensors[name.replace(_BASE, ".")] = parameter.detach().clone()
    for name, module in model.named_modules():
        if hasattr(module, "get_delta_weight"):
            tensors[f"{name}.weight"] += cast(Any, module).get_delta_weight("default")
    return build(cast(Any, model).config, tensors, model)
