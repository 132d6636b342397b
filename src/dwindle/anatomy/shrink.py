"""Tiny random models that keep every irregularity of a configuration, to check a family's table quickly.

Kept are tied or untied embeddings, biases, the number of query heads per key/value head, a head size that is not
hidden size / heads, sliding windows, kinds of layers, capped scores, multipliers and the scaling of positions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM

from dwindle.anatomy.build import restore_buffers
from dwindle.anatomy.families import family_of
from dwindle.anatomy.structure import head_dim_of

VOCAB = 61
HEAD_DIM = 8
FFN = 40
WINDOW = 5
"""Shorter than the sequences that are compared."""
MIN_LAYERS = 3
_MAX_QUERIES_PER_KV = 8
_ORIGINAL_POSITIONS = 8
_DROP = ("architectures", "auto_map", "transformers_version", "_name_or_path", "model_type", "dtype")


def tiny_config(config: Any) -> Any:
    """A configuration of the same class with a few small layers, one of each kind that the source has."""
    family = family_of(config.model_type)
    values: dict[str, Any] = {key: value for key, value in config.to_dict().items() if key not in _DROP}
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    per_kv = min(config.num_attention_heads // kv_heads, _MAX_QUERIES_PER_KV)
    kv = min(kv_heads, 2 if per_kv > 1 else 4)
    is_usual = head_dim_of(config) * config.num_attention_heads == config.hidden_size
    layers = _layers_of_each_kind(values, config.num_hidden_layers)
    values = {key: _of_layers(value, layers, config.num_hidden_layers) for key, value in values.items()}
    values |= {key: 0.0 for key in values if key.endswith(("dropout", "_pdrop")) and values[key] is not None}
    values |= {
        "vocab_size": VOCAB,
        "hidden_size": per_kv * kv * (HEAD_DIM if is_usual else HEAD_DIM + 4),
        "num_hidden_layers": len(layers),
        "num_attention_heads": per_kv * kv,
        "num_key_value_heads": kv,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 128,
        family.ffn_key: FFN,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if values.get("sliding_window"):
        values["sliding_window"] = WINDOW
    if values.get("rope_parameters"):
        values["rope_parameters"] = _tiny_rope(values["rope_parameters"])
    return type(config)(**{**values, **family.tiny})


def random_model(config: Any, *, dtype: torch.dtype = torch.float64) -> Any:
    """A model with random values in every tensor, also those that initialise to zero or one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for number, (name, parameter) in enumerate(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
            is_gain = name.endswith("norm.weight") and not family_of(config.model_type).gain_offset
            parameter.copy_(1 + 0.2 * noise if is_gain else 0.2 * noise)
    model = model.to(dtype).eval()
    restore_buffers(model, "cpu")  # as in a model that is built in this dtype
    return model


class Float64Throughout(TorchFunctionMode):
    """Stock code computes norms, softmax and some rotations in float32, whose rounding would hide small differences."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64:
            if func is torch.Tensor.float or (func is torch.Tensor.to and args[1:2] == (torch.float32,)):
                return args[0]
            if func is torch.nn.functional.softmax and kwargs.get("dtype") is torch.float32:
                kwargs = kwargs | {"dtype": torch.float64}
        return func(*args, **kwargs)


def _layers_of_each_kind(values: dict[str, Any], num_layers: int) -> list[int]:
    """The first layer of each kind, by every list that has one entry per layer, and at least ``MIN_LAYERS``."""
    lists = [value for value in values.values() if isinstance(value, list) and len(value) == num_layers]
    kinds: dict[str, int] = {}
    for layer in range(num_layers):
        kinds.setdefault(repr([value[layer] for value in lists]), layer)
    others = (layer for layer in range(num_layers) if layer not in kinds.values())
    first = list(kinds.values())
    while len(first) < min(MIN_LAYERS, num_layers):
        first.append(next(others))
    return sorted(first)


def _of_layers(value: Any, layers: list[int], num_layers: int) -> Any:
    if isinstance(value, list) and len(value) == num_layers:
        return [value[layer] for layer in layers]
    return value


def _tiny_rope(rope: dict[str, Any]) -> dict[str, Any]:
    """The same scaling for short positions; tables of factors are cut to the head size."""
    found: dict[str, Any] = {}
    for key, value in rope.items():
        if isinstance(value, dict):  # one table for each kind of layer
            value = _tiny_rope(value)
        elif key == "original_max_position_embeddings" and value:
            value = _ORIGINAL_POSITIONS
        elif key in ("long_factor", "short_factor") and value:
            rotated = int(HEAD_DIM * rope.get("partial_rotary_factor", 1.0))
            value = value[: rotated // 2]
        found[key] = value
    return found
