# Copyright the dwindle authors. Licensed under the Apache License, Version 2.0.
"""Decoder models whose layers have different sizes, or irregular groups of query heads per key/value head.

This file is saved with the weights of every model that stock transformers classes cannot express; it needs torch and
transformers only. The model type ``dwindle_llama`` is transformers' ``llama`` with each layer built at its own size:
tensors keep their names, and everything except the key/value gather is the stock code.

``config.layer_shapes[l]`` is ``{"intermediate_size": n, "queries_per_kv": [2, 1, 3]}``: the first two query heads
of layer l read key/value head 0, the next one head 1, and so on. The cache holds key/value heads before the gather.
``config.ffn_key`` is the family's own name of ``intermediate_size``.
"""

from __future__ import annotations

import copy
import sys
from functools import cache
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

PREFIX = "dwindle_"
ATTENTION = "dwindle_cluster"


def queries_per_kv(config: Any) -> list[list[int]]:
    """For every layer the number of query heads of each key/value head, also for stock configurations."""
    shapes: list[dict[str, Any]] | None = getattr(config, "layer_shapes", None)
    if shapes is not None:
        return [shape["queries_per_kv"] for shape in shapes]
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return [[config.num_attention_heads // kv_heads] * kv_heads] * config.num_hidden_layers


def gather_heads(states: Tensor, queries_per_kv: list[int]) -> Tensor:
    """[batch, kv heads, length, dim] → one key (or value) per query head."""
    if all(n == 1 for n in queries_per_kv):
        return states
    parts = [states[:, i : i + 1].expand(-1, n, -1, -1) for i, n in enumerate(queries_per_kv)]
    return torch.cat(parts, dim=1)


def cluster_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Gathers keys and values, then the family's own attention: sdpa, or its eager code (sinks, capped scores)."""
    per_kv: list[int] = module.queries_per_kv  # type: ignore[assignment]
    key, value = gather_heads(key, per_kv), gather_heads(value, per_kv)
    attend: Any = sdpa_attention_forward
    if module.is_eager:
        attend = vars(sys.modules[type(module).__module__])["eager_attention_forward"]
    attended: tuple[Tensor, Tensor | None] = attend(module, query, key, value, attention_mask, **kwargs)
    return attended


AttentionInterface.register(ATTENTION, cluster_attention)


def _resize_layers(model: Any) -> None:
    """Replace every decoder layer by one of its own size; layers without heads keep their other block whole."""
    layers: nn.ModuleList = model.model.layers
    for index, shape in enumerate(model.config.layer_shapes):
        config = copy.copy(model.config)
        # not setattr, which would run the checks of the stock configuration on these sizes
        config.__dict__[model.config.ffn_key] = shape["intermediate_size"]
        if heads := shape["queries_per_kv"]:
            config.__dict__.update(
                num_attention_heads=sum(heads),
                num_key_value_heads=len(heads),
                _attn_implementation_internal=ATTENTION,
            )
        layer: Any = type(layers[index])(config, index)
        if heads:
            layer.self_attn.queries_per_kv = list(heads)
            layer.self_attn.num_key_value_groups = 1
            layer.self_attn.is_eager = model.config._attn_implementation == "eager"
        layers[index] = layer


def _title(family: str) -> str:
    """``seed_oss`` in a class name: ``SeedOss``"""
    return "".join(part.capitalize() for part in family.split("_"))


@cache
def classes_for(model_type: str) -> tuple[type[Any], type[Any]]:
    """The configuration and model class of ``dwindle_<family>``."""
    family = model_type.removeprefix(PREFIX)
    base_config = CONFIG_MAPPING[family]
    base_model = AutoModelForCausalLM._model_mapping[base_config]
    title = _title(family)

    def accept(self: Any) -> None:
        """Layer sizes come from ``layer_shapes``; the head size is always explicit."""

    config_class = type(
        f"Dwindle{title}Config",
        (base_config,),
        {
            "__module__": __name__,
            "__annotations__": {"layer_shapes": "list | None", "ffn_key": "str"},
            "layer_shapes": None,
            "ffn_key": "intermediate_size",
            "model_type": PREFIX + family,
            "validate_architecture": accept,
            "validate_rope": accept,
        },
    )
    config_class = strict(config_class)

    def __init__(self: Any, config: Any) -> None:
        base_model.__init__(self, config)
        _resize_layers(self)
        if getattr(config, "embed_scale", None) is not None:  # the factor of Gemma's embeddings before pruning
            embedding = self.model.embed_tokens
            embedding.scalar_embed_scale = config.embed_scale
            embedding.embed_scale = torch.tensor(config.embed_scale)
        self.post_init()

    model_class = type(
        f"Dwindle{title}ForCausalLM",
        (base_model,),
        {"__module__": __name__, "__init__": __init__, "config_class": config_class},
    )
    return config_class, model_class


def __getattr__(name: str) -> Any:
    """``DwindleLlamaConfig``, ``DwindleLlamaForCausalLM``, …: created on access, for ``auto_map``."""
    for suffix, which in (("Config", 0), ("ForCausalLM", 1)):
        if name.startswith("Dwindle") and name.endswith(suffix):
            title = name.removeprefix("Dwindle").removesuffix(suffix)
            family = next((family for family in CONFIG_MAPPING if _title(family) == title), None)
            if family is not None:
                return classes_for(PREFIX + family)[which]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
