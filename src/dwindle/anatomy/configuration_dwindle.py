# Copyright the dwindle authors. Licensed under the Apache License, Version 2.0.
"""Configurations of decoder models whose layers have different sizes, or irregular groups of query heads.

This file and ``modeling_dwindle.py`` are saved with the weights of every model that stock transformers classes cannot
express. This one needs transformers only, so a tokenizer loads without torch. The model type ``dwindle_llama`` is
transformers' ``llama``, with the sizes of its layers in transformers' own ``per_layer_config``: ``intermediate_size``
(or the family's name of it), ``num_attention_heads``, ``num_key_value_heads``. A layer with irregular groups also has
``queries_per_kv``: with ``[2, 1, 3]`` the first two query heads read key/value head 0, the next one head 1, and so on.
Its attention function receives one key/value head per query head, and that is the ``num_key_value_heads`` that a server
is told. ``skip`` names the modules of a layer that were removed whole: a block, which adds nothing to the residual
stream, and its norms. Configurations of earlier versions (``layer_shapes``) are read, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import transformers

try:
    from huggingface_hub.dataclasses import strict
    from transformers.integrations.heterogeneity.configuration_utils import AmbiguousGlobalPerLayerAttributeError
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if transformers.__version__.startswith("5.14."):
        raise ImportError("per_layer_config is None for models whose layers are equal")
except ImportError as error:
    raise ImportError(
        f"this model needs transformers 5.15 or newer, and this is {transformers.__version__}: "
        "pip install -U 'transformers>=5.15'"
    ) from error

PREFIX = "dwindle_"
ATTENTION = "dwindle_cluster"
_HEADS = ("num_attention_heads", "num_key_value_heads")


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


def title(family: str) -> str:
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


@cache
def config_class_for(model_type: str) -> type[Any]:
    """The configuration class of ``dwindle_<family>``."""
    family = model_type.removeprefix(PREFIX)
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
        f"Dwindle{title(family)}Config",
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


def family_named(class_name: str, suffix: str) -> str | None:
    """``llama`` of ``DwindleLlamaConfig`` and ``Config``; None for other names."""
    wanted = class_name.removeprefix("Dwindle").removesuffix(suffix)
    if class_name != f"Dwindle{wanted}{suffix}":
        return None
    return next((family for family in CONFIG_MAPPING if title(family) == wanted), None)


def __getattr__(name: str) -> Any:
    """``DwindleLlamaConfig``, …: created on access, for ``auto_map``."""
    if (family := family_named(name, "Config")) is not None:
        return config_class_for(PREFIX + family)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
