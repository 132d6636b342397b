# Copyright the dwindle authors. Licensed under the Apache License, Version 2.0.
"""Decoder models whose layers have different sizes, or irregular groups of query heads per key/value head.

This file is saved with the weights of every model that stock transformers classes cannot express; it needs torch and
transformers only. The model type ``dwindle_llama`` is transformers' ``llama`` with each layer built at its own size:
tensors keep their names, and everything except the key/value gather is the stock code.

The sizes are transformers' own ``per_layer_config`` in ``config.json``: ``intermediate_size`` (or the family's name of
it), ``num_attention_heads``, ``num_key_value_heads``. Attention is looked up in ``ALL_ATTENTION_FUNCTIONS``, so eager,
sdpa, flash and what a server registers all work. A layer with irregular groups also has ``queries_per_kv``: with
``[2, 1, 3]`` the first two query heads read key/value head 0, the next one head 1, and so on. Its attention function
receives one key/value head per query head, and that is the ``num_key_value_heads`` that a server is told; transformers'
caches hold the heads before this gather. ``skip`` names the modules of a layer that were removed whole: a block, which
adds nothing to the residual stream, and its norms. Configurations of earlier versions (``layer_shapes``) are read, too.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
import transformers
from torch import Tensor, nn

try:
    from huggingface_hub.dataclasses import strict
    from transformers import AttentionInterface, AutoModel, AutoModelForCausalLM
    from transformers.integrations.heterogeneity.configuration_utils import AmbiguousGlobalPerLayerAttributeError
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if transformers.__version__.startswith("5.14."):
        raise ImportError("per_layer_config is None for models whose layers are equal")
except ImportError as error:
    raise ImportError(
        f"modeling_dwindle.py needs transformers 5.15 or newer, and this is {transformers.__version__}: "
        "pip install -U 'transformers>=5.15'"
    ) from error

PREFIX = "dwindle_"
ATTENTION = "dwindle_cluster"
_HEADS = ("num_attention_heads", "num_key_value_heads")
_SPEC = "_heterogeneity_spec"
"""Where transformers keeps ``per_layer_config``; without it, a configuration has only the largest sizes."""


def queries_per_kv(config: Any) -> list[list[int]]:
    """For every layer the number of query heads of each key/value head, also for stock configurations."""
    found = []
    for own in config.per_layer_config:
        kv_heads = getattr(own, "num_key_value_heads", None) or own.num_attention_heads
        regular = [own.num_attention_heads // kv_heads] * kv_heads
        found.append(getattr(own, "queries_per_kv", None) or regular)
    return found


def per_layer(shapes: Sequence[Mapping[str, Any]], ffn_key: str) -> dict[int, dict[str, Any]]:
    """``per_layer_config`` of layers given as ``{"intermediate_size": n, "queries_per_kv": [2, 1, 3], "skip": []}``."""
    layers: dict[int, dict[str, Any]] = {}
    for index, shape in enumerate(shapes):
        layers[index] = {ffn_key: shape["intermediate_size"]} if shape["intermediate_size"] else {}
        layers[index] |= {"skip": list(shape["skip"])} if shape.get("skip") else {}
        if heads := list(shape["queries_per_kv"]):  # a convolution has none
            irregular = len(set(heads)) > 1
            kv_heads = sum(heads) if irregular else len(heads)
            layers[index] |= {"num_attention_heads": sum(heads), "num_key_value_heads": kv_heads}
            layers[index] |= {"queries_per_kv": heads} if irregular else {}
    return layers


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


def _title(family: str) -> str:
    """``seed_oss`` in a class name: ``SeedOss``"""
    return "".join(part.capitalize() for part in family.split("_"))


class _LargestSizes:
    """transformers refuses to read what differs between layers; here it is the largest size of any layer.

    Not for heads: a server that gives every layer the same number would read another layer's keys without an error.
    """

    def __getattribute__(self, key: str) -> Any:
        try:
            return super().__getattribute__(key)
        except AmbiguousGlobalPerLayerAttributeError as error:
            if key in _HEADS:
                raise AmbiguousGlobalPerLayerAttributeError(
                    f"{key} is not one number, layers differ: read it from per_layer_config, as vLLM does from version "
                    "0.28 on; for other programs write the model with `dwindle export --to hf --as deci` or `--stock`"
                ) from error
            return vars(self)[key]


def _config_class(family: str) -> type[Any]:
    base: Any = CONFIG_MAPPING[family]

    def accept(self: Any) -> None:
        """Layer sizes come from ``per_layer_config``; the head size is always explicit."""

    def post_init(self: Any, **kwargs: Any) -> None:
        shapes, ffn_key = kwargs.pop("layer_shapes", None), kwargs.pop("ffn_key", "intermediate_size")
        if shapes is not None:
            kwargs["per_layer_config"] = per_layer(shapes, ffn_key)
        base.__post_init__(self, **kwargs)
        if self.base_model_tp_plan and any(getattr(own, "queries_per_kv", None) for own in self.per_layer_config):
            kept = {name: how for name, how in self.base_model_tp_plan.items() if ".self_attn." not in name}
            vars(self)["base_model_tp_plan"] = kept  # irregular groups cannot be split between ranks

    def attention(self: Any) -> str | None:
        """That of the whole model, which may change later; cluster attention where groups are irregular."""
        whole = vars(self).get("_whole")
        implementation: str | None
        if whole is None:
            implementation = vars(self).get("_attn_implementation_internal")
        else:
            implementation = ATTENTION if vars(self)["_is_irregular"] else whole._attn_implementation
        return implementation

    made: type[Any] = type(
        f"Dwindle{_title(family)}Config",
        (_LargestSizes, base),
        {
            "__module__": __name__,
            "__annotations__": {"queries_per_kv": "list | None"},
            "__post_init__": post_init,
            "queries_per_kv": None,
            "model_type": PREFIX + family,
            "_attn_implementation": property(attention, base._attn_implementation.fset),
            "validate_architecture": accept,
            "validate_rope": accept,
        },
    )
    checked: type[Any] = strict(made)
    return checked


def _model_class(family: str, base: type[Any], suffix: str, config_class: type[Any]) -> type[Any]:
    def __init__(self: Any, config: Any) -> None:
        _built(self, base, config)

    def cache_shape(self: Any) -> tuple[list[int], int]:
        """Stored key/value heads of every layer and the head size: what a static cache holds."""
        skips = ["self_attn" in getattr(own, "skip", ()) for own in self.config.per_layer_config]
        heads = [1 if skip else len(own) for own, skip in zip(queries_per_kv(self.config), skips, strict=True)]
        return heads, self.config.head_dim

    members = {"__module__": __name__, "__init__": __init__, "config_class": config_class}
    if hasattr(base, "_get_static_cache_init_shape"):
        members["_get_static_cache_init_shape"] = cache_shape
    return type(f"Dwindle{_title(family)}{suffix}", (base,), members)


@cache
def classes_for(model_type: str) -> tuple[type[Any], type[Any]]:
    """The configuration and causal model class of ``dwindle_<family>``."""
    family = model_type.removeprefix(PREFIX)
    config_class = _config_class(family)
    causal = AutoModelForCausalLM._model_mapping[CONFIG_MAPPING[family]]
    return config_class, _model_class(family, causal, "ForCausalLM", config_class)


@cache
def backbone_for(model_type: str) -> type[Any]:
    """The model class of ``dwindle_<family>`` without a head."""
    family = model_type.removeprefix(PREFIX)
    return _model_class(family, AutoModel._model_mapping[CONFIG_MAPPING[family]], "Model", classes_for(model_type)[0])


def __getattr__(name: str) -> Any:
    """``DwindleLlamaConfig``, ``DwindleLlamaModel``, …: created on access, for ``auto_map``."""
    for suffix in ("Config", "ForCausalLM", "Model"):
        if name.startswith("Dwindle") and name.endswith(suffix):
            title = name.removeprefix("Dwindle").removesuffix(suffix)
            family = next((family for family in CONFIG_MAPPING if _title(family) == title), None)
            if family is not None and suffix == "Model":
                return backbone_for(PREFIX + family)
            if family is not None:
                return classes_for(PREFIX + family)[suffix != "Config"]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
