# Copyright the dwindle authors. Licensed under the Apache License, Version 2.0.
"""Decoder models whose layers have different sizes, in mlx-lm: ``mlx_lm.load(folder, trust_remote_code=True)``.

This file is saved with the weights; it needs mlx-lm only. Every layer is mlx-lm's own of the family (``dwindle_llama``
is its ``llama``), made at the sizes of ``per_layer_config`` in ``config.json``. Where query heads are in irregular
groups (``queries_per_kv``), each of them gets a copy of its key/value head as the weights are loaded. The modules in
``skip`` were removed whole: blocks, which add nothing to the residual stream, and their norms.
"""

from __future__ import annotations

import importlib
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.utils import MODEL_REMAPPING

PREFIX = "dwindle_"


class ModelArgs:
    """``config.json`` as it is."""

    def __init__(self, config: dict[str, Any]) -> None:
        family = config["model_type"].removeprefix(PREFIX)
        self.config = {**config, "model_type": family}
        self.family: Any = importlib.import_module(f"mlx_lm.models.{MODEL_REMAPPING.get(family, family)}")
        differing = {int(index): own for index, own in config["per_layer_config"].items()}
        self.layers = [differing.get(index, {}) for index in range(config["num_hidden_layers"])]
        """What each layer has instead of the sizes of the whole model."""

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> ModelArgs:
        return cls(config)

    def at(self, layer: dict[str, Any]) -> Any:
        """The family's arguments for a model whose layers all have the sizes of this one."""
        sizes = {**self.config, **layer}
        if layer.get("queries_per_kv"):
            sizes["num_key_value_heads"] = sizes["num_attention_heads"]
        return self.family.ModelArgs.from_dict(sizes)


class AbsentBlock(nn.Module):
    """In place of a block that was removed: adds nothing to the residual stream."""

    def __call__(self, x: mx.array, *_: Any, **__: Any) -> mx.array:
        return mx.zeros_like(x)


class AbsentAttention(nn.Module):
    """Attention that was removed; every layer's cache counts tokens, so it stores one head of zeros."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        if cache is not None:
            nothing = mx.zeros((x.shape[0], 1, x.shape[1], self.head_dim), x.dtype)
            cache.update_and_fetch(nothing, nothing)
        return mx.zeros_like(x)


def _sized_layer(args: ModelArgs, index: int, whole: dict[str, Any]) -> Any:
    """Layer ``index`` at its own size; ``whole`` keeps the models that layers are taken from, by their sizes."""
    own = args.layers[index]
    key = repr({name: value for name, value in own.items() if name != "skip"})
    if key not in whole:
        whole[key] = args.family.Model(args.at(own))
    layer = whole[key].model.layers[index]
    for name in own.get("skip", ()):
        if name in layer:
            is_block = bool(layer[name].children())
            layer[name] = AbsentBlock() if is_block else nn.Identity()
            if name == "self_attn":
                layer[name] = AbsentAttention(args.config["head_dim"])
    return layer


def _copied_heads(weight: mx.array, queries_per_kv: list[int]) -> mx.array:
    """Rows of a key or value projection (or of its bias), one head for each query head."""
    heads = weight.reshape(len(queries_per_kv), -1, *weight.shape[1:])
    copies = mx.array([kv for kv, count in enumerate(queries_per_kv) for _ in range(count)])
    return heads[copies].reshape(-1, *weight.shape[1:])


def Model(args: ModelArgs) -> Any:
    """The family's model with layers of their own sizes; mlx-lm calls this like a class."""
    base: Any = args.family.Model

    def sanitize(model: Any, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        weights = base.sanitize(model, weights) if hasattr(base, "sanitize") else weights
        for index, own in enumerate(args.layers):
            groups = own.get("queries_per_kv")
            rows = len(groups or ()) * args.config["head_dim"]
            for part in ("k_proj.weight", "v_proj.weight", "k_proj.bias", "v_proj.bias") if groups else ():
                name = f"model.layers.{index}.self_attn.{part}"
                if name in weights and weights[name].shape[0] == rows:  # a converted model has the copies
                    weights[name] = _copied_heads(weights[name], groups)
        return weights

    whole: dict[str, Any] = {}
    model = type("Unequal", (base,), {"__module__": __name__, "sanitize": sanitize})(args.at({}))
    model.model.layers = [_sized_layer(args, index, whole) for index in range(len(args.layers))]
    return model
