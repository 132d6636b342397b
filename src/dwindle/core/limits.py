"""The largest sizes that are accepted from a header or configuration: beyond any model, small enough to do no harm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dwindle.core.errors import UserError

MAX_LAYERS = 1024
MAX_WIDTH = 1 << 20
MAX_HEADS = 1 << 13
MAX_CHANNELS = 1 << 24
"""FFN channels of all layers."""
MAX_ITEMS = 1 << 22
"""Entries of one list in a header, such as a vocabulary or its merges."""

LIMITS = {
    "hidden_size": MAX_WIDTH,
    "intermediate_size": MAX_WIDTH,
    "num_hidden_layers": MAX_LAYERS,
    "num_attention_heads": MAX_HEADS,
    "num_key_value_heads": MAX_HEADS,
    "head_dim": 1 << 14,
    "vocab_size": 1 << 24,
    "max_position_embeddings": 1 << 40,
}


def check_sizes(sizes: Mapping[str, Any], where: str) -> None:
    """Raise UserError for a size that no model has; names that are missing or None have a default."""
    for name, limit in LIMITS.items():
        value = sizes.get(name)
        if value is not None and not (type(value) is int and 1 <= value <= limit):
            raise UserError(f"source {where}: {name} is {value!r:.40}: a model has 1 to {limit:,}")
    layers, width = sizes.get("num_hidden_layers"), sizes.get("intermediate_size")
    if layers and width and layers * width > MAX_CHANNELS:
        raise UserError(f"source {where}: {layers:,} layers of intermediate_size {width:,} are more than any model has")
    if (shapes := sizes.get("layer_shapes")) is not None:
        _check_layer_shapes(shapes, layers, where)
    if (own := sizes.get("per_layer_config")) is not None:
        _check_per_layer(own, sizes, where)


def _check_per_layer(layers: Any, whole: Mapping[str, Any], where: str) -> None:
    """transformers' sizes of single layers, which replace those of the whole model."""
    if not isinstance(layers, dict) or not all(isinstance(own, dict) for own in layers.values()):
        raise UserError(f"source {where}: per_layer_config does not have the sizes of layers")
    for number, own in layers.items():
        name = f"per_layer_config[{number!r:.20}]"
        if not (str(number).isdecimal() and int(number) < (whole.get("num_hidden_layers") or MAX_LAYERS)):
            raise UserError(f"source {where}: {name} is not a layer")
        per_kv, heads = own.get("queries_per_kv"), own.get("num_attention_heads", whole.get("num_attention_heads"))
        if per_kv is not None and not (
            isinstance(per_kv, list) and all(type(n) is int and n > 0 for n in per_kv) and sum(per_kv) == heads
        ):
            raise UserError(f"source {where}: {name} has no usable queries_per_kv")
        check_sizes({key: value for key, value in own.items() if key != "per_layer_config"}, f"{where}: {name}")
    width = whole.get("intermediate_size") or 0
    widths = [own.get("intermediate_size") or width for own in layers.values()]
    if sum(widths) > MAX_CHANNELS:
        raise UserError(f"source {where}: its layers have more channels than any model")


def _check_layer_shapes(shapes: Any, num_layers: Any, where: str) -> None:
    """The sizes of every layer, in models whose layers differ."""
    if not isinstance(shapes, list) or len(shapes) != num_layers:
        raise UserError(f"source {where}: layer_shapes does not have the sizes of each of {num_layers!r:.20} layers")
    for number, shape in enumerate(shapes):
        per_kv = shape.get("queries_per_kv") if isinstance(shape, dict) else None
        if not isinstance(per_kv, list) or not all(type(n) is int and n > 0 for n in per_kv):
            raise UserError(f"source {where}: layer_shapes[{number}] has no usable queries_per_kv")
        own = {"intermediate_size": shape.get("intermediate_size") or 0}
        own |= {"num_attention_heads": sum(per_kv)} if per_kv else {}  # a convolution has no heads
        check_sizes(own, f"{where}: layer_shapes[{number}]")
    if sum(shape["intermediate_size"] for shape in shapes) > MAX_CHANNELS:
        raise UserError(f"source {where}: its layers have more channels than any model")
