# Copyright the dwindle authors. Licensed under the Apache License, Version 2.0.
"""Decoder models whose layers have different sizes, or irregular groups of query heads per key/value head.

This file is saved with the weights of every model that stock transformers classes cannot express; it needs torch,
transformers and ``configuration_dwindle.py`` only. The model type ``dwindle_llama`` is transformers' ``llama`` with
each layer built at its own size: tensors keep their names, and everything except the key/value gather is stock code.

Attention is looked up in ``ALL_ATTENTION_FUNCTIONS``, so eager, sdpa, flash and what a server registers all work.
transformers' caches hold the key/value heads that are stored; with irregular groups they are gathered afterwards, one
for each query head.
"""

from __future__ import annotations

import copy
import sys
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModel, AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from .configuration_dwindle import ATTENTION, PREFIX, config_class_for, family_named, queries_per_kv, title

_SPEC = "_heterogeneity_spec"
"""Where transformers keeps ``per_layer_config``; without it, a configuration has only the largest sizes."""


def gather_heads(states: Tensor, queries_per_kv: list[int] | Tensor) -> Tensor:
    """[batch, kv heads, length, dim] → one key (or value) per query head.

    Groups may be a 0/1 matrix [query heads, kv heads]: one compiled graph for all of them, and the same numbers.
    """
    if isinstance(queries_per_kv, Tensor):
        return torch.einsum("qk,bktd->bqtd", queries_per_kv.to(states.dtype), states)
    parts = [states[:, i : i + 1].expand(-1, n, -1, -1) for i, n in enumerate(queries_per_kv)]
    return torch.cat(parts, dim=1)


def cluster_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Gathers keys and values, then the attention function that the model is set to."""
    per_kv: list[int] | Tensor = module.queries_per_kv  # type: ignore[assignment]
    key, value = gather_heads(key, per_kv), gather_heads(value, per_kv)
    plain: Any = module.plain
    eager = vars(sys.modules[type(module).__module__])["eager_attention_forward"]
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(plain.config._attn_implementation, eager)
    attended: tuple[Tensor, Tensor | None] = attend(plain, query, key, value, attention_mask, **kwargs)
    return attended


AttentionInterface.register(ATTENTION, cluster_attention)


class AbsentBlock(nn.Module):
    """In place of a block that was removed: adds nothing to the residual stream."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return torch.zeros_like(hidden_states)


class AbsentAttention(AbsentBlock):
    """Attention that was removed; caches count the tokens of every layer, so it stores one head of zeros."""

    def __init__(self, layer_idx: int, head_dim: int) -> None:
        super().__init__()
        self.layer_idx, self.head_dim = layer_idx, head_dim

    def forward(self, hidden_states: Tensor, *args: Any, past_key_values: Any = None, **kwargs: Any) -> Any:
        if past_key_values is not None:
            batch, length = hidden_states.shape[:2]
            nothing = hidden_states.new_zeros(batch, 1, length, self.head_dim)
            past_key_values.update(nothing, nothing, self.layer_idx)
        return torch.zeros_like(hidden_states), None


def _remove_blocks(layer: Any, own: Any, index: int) -> None:
    """Replace the modules that a layer does not have; a norm is recognised by having no modules inside."""
    for name in (name for name in own.skip if hasattr(layer, name)):
        absent: nn.Module = AbsentBlock() if any(True for _ in getattr(layer, name).children()) else nn.Identity()
        setattr(layer, name, AbsentAttention(index, own.head_dim) if name == "self_attn" else absent)


def _resize_layers(backbone: Any, config: Any) -> None:
    """Replace every decoder layer by one of its own size; layers without heads keep their other block whole."""
    for index, own in enumerate(config.per_layer_config):
        if own is config:  # nothing differs
            return
        heads = own.queries_per_kv
        vars(own)["_whole"], vars(own)["_is_irregular"] = config, bool(heads)
        if heads:  # built with the heads that are stored, not those that attention receives
            vars(own)["num_key_value_heads"] = len(heads)
        layer: Any = type(backbone.layers[index])(own, index)
        if heads and hasattr(layer, "self_attn"):
            attention = layer.self_attn
            attention.queries_per_kv, attention.num_key_value_groups = list(heads), 1
            # what attention functions are given: the same module, not named cluster attention, and no submodule
            vars(attention)["plain"] = plain = copy.copy(attention)
            plain.config = config
        _remove_blocks(layer, own, index)
        backbone.layers[index] = layer


def _restore_scale(embedding: Any, config: Any) -> None:
    if getattr(config, "embed_scale", None) is not None:  # the factor of Gemma's embeddings before pruning
        embedding.scalar_embed_scale = config.embed_scale
        embedding.embed_scale = torch.tensor(config.embed_scale)


def _built(model: Any, base: type[Any], config: Any) -> None:
    """``base.__init__`` at the largest sizes, then every layer at its own."""
    spec = vars(config).pop(_SPEC, None)
    try:
        base.__init__(model, config)
    finally:
        if spec is not None:
            vars(config)[_SPEC] = spec
    backbone = getattr(model, "model", model)
    _resize_layers(backbone, config)
    if getattr(backbone, "rotary_emb", None) is not None:  # longer contexts compute frequencies again, and read heads
        backbone.rotary_emb.config = config.per_layer_config[0]
    _restore_scale(backbone.embed_tokens, config)
    model.post_init()


def _model_class(family: str, base: type[Any], suffix: str) -> type[Any]:
    def __init__(self: Any, config: Any) -> None:
        _built(self, base, config)

    def cache_shape(self: Any) -> tuple[list[int], int]:
        """Stored key/value heads of every layer and the head size: what a static cache holds."""
        skips = ["self_attn" in getattr(own, "skip", ()) for own in self.config.per_layer_config]
        heads = [1 if skip else len(own) for own, skip in zip(queries_per_kv(self.config), skips, strict=True)]
        return heads, self.config.head_dim

    members = {"__module__": __name__, "__init__": __init__, "config_class": config_class_for(PREFIX + family)}
    if hasattr(base, "_get_static_cache_init_shape"):
        members["_get_static_cache_init_shape"] = cache_shape
    return type(f"Dwindle{title(family)}{suffix}", (base,), members)


@cache
def classes_for(model_type: str) -> tuple[type[Any], type[Any]]:
    """The configuration and causal model class of ``dwindle_<family>``."""
    family = model_type.removeprefix(PREFIX)
    causal = AutoModelForCausalLM._model_mapping[CONFIG_MAPPING[family]]
    return config_class_for(model_type), _model_class(family, causal, "ForCausalLM")


@cache
def backbone_for(model_type: str) -> type[Any]:
    """The model class of ``dwindle_<family>`` without a head."""
    family = model_type.removeprefix(PREFIX)
    return _model_class(family, AutoModel._model_mapping[CONFIG_MAPPING[family]], "Model")


def __getattr__(name: str) -> Any:
    """``DwindleLlamaModel``, ``DwindleLlamaForCausalLM``, …: created on access, for ``auto_map``."""
    if (family := family_named(name, "ForCausalLM")) is not None:
        return classes_for(PREFIX + family)[1]
    if (family := family_named(name, "Model")) is not None:
        return backbone_for(PREFIX + family)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
