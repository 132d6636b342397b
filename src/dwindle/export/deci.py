"""The layout ``DeciLMForCausalLM`` (``nemotron-nas``): unequal Llama layers that servers have native code for.

All layers have one number of query heads; key/value heads and FFN widths are their own (``block_configs``). vLLM and
TensorRT-LLM run it, and mlx-lm if hidden size = heads × head size and widths are multiples of 256.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig

from dwindle.anatomy.anatomy import Anatomy
from dwindle.anatomy.build import config_for
from dwindle.anatomy.family import CUSTOM_PREFIX
from dwindle.anatomy.structure import Structure
from dwindle.core.errors import UserError
from dwindle.core.reading import read_json
from dwindle.export import configuration_decilm
from dwindle.export.other_readers import rotary_keys
from dwindle.export.verification import (
    Verified,
    as_float32,
    check_logits,
    check_same_numbers,
    check_same_weights,
    numbers_of,
)
from dwindle.sources.common import build_model

ARCHITECTURE = "DeciLMForCausalLM"
_SHARED = (
    *("vocab_size", "hidden_size", "head_dim", "rms_norm_eps", "tie_word_embeddings", "max_position_embeddings"),
    *("attention_bias", "mlp_bias"),
)
"""Keys that mean the same in a Llama's configuration."""
_MULTIPLE = 256
"""FFN widths that are multiples of this are stored as a factor of the hidden size, which every reader understands."""


def refuse_other_models(model: Any) -> None:
    """Raise unless the model is a Llama, apart from its sizes."""
    config, family = model.config, model.config.model_type.removeprefix(CUSTOM_PREFIX)
    why = None
    if family not in ("llama", "mistral"):
        why = f"computes Llama layers, and this is a {family}"
    elif (getattr(config, "sliding_window", None) or math.inf) < config.max_position_embeddings:
        why = "has no sliding window, and this model has one"
    elif config.rope_parameters.get("rope_type", "default") not in ("default", "linear", "llama3"):
        why = f"has no rotation of type {config.rope_parameters['rope_type']}"
    elif config.hidden_act not in ("silu", "swish"):
        why = f"computes silu, and this model {config.hidden_act}"
    if why is not None:
        raise UserError(f"--as deci: the layout {why}: export without --as")


def write_config(model: Any, folder: Path) -> None:
    """``config.json`` of the layout, and the class that reads it."""
    path = folder / "config.json"
    anatomy, values = Anatomy.of(model), read_json(path)
    structure = anatomy.source
    for key in ("per_layer_config", "queries_per_kv", "num_key_value_heads", "layer_types", "sliding_window"):
        values.pop(key, None)
    values |= rotary_keys(values["rope_parameters"])
    values |= {
        "architectures": [ARCHITECTURE],
        "auto_map": {"AutoConfig": "configuration_decilm.DeciLMConfig"},
        "block_configs": [
            _block(len(la.query_heads) // max(len(la.kv_heads), 1), len(la.ffn), len(structure.hidden))
            for la in structure.layers
        ],
        "head_dim": anatomy.head_dim,
        "intermediate_size": max(len(la.ffn) for la in structure.layers),
        "model_type": "nemotron-nas",
        "num_attention_heads": len(structure.with_heads.query_heads),
    }
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    shutil.copyfile(str(configuration_decilm.__file__), folder / "configuration_decilm.py")


def _block(queries_per_kv: int, width: int, hidden: int) -> dict[str, Any]:
    """The entry of a layer; a block that it does not have is a ``no_op``."""
    ffn: dict[str, Any] = {"no_op": not width, "replace_with_linear": False, "sparsify": None}
    if not width:
        ffn["ffn_mult"] = None
    elif width % _MULTIPLE:
        ffn["intermediate_size"] = width
    else:  # readers compute ⌊2/3 · factor · hidden⌋ and round up to 256
        ffn["ffn_mult"] = round(1.5 * (width - 0.5) / hidden, 6)
    group, missing = queries_per_kv or None, not queries_per_kv
    attention = {"n_heads_in_group": group, "no_op": missing, "replace_with_linear": False, "sparsify": None}
    return {"attention": attention, "ffn": ffn}


def verify(folder: Path, model: Any, prompts: list[list[int]]) -> Verified:
    """Compare with the model that the files alone describe: transformers has no class for the layout."""
    reference, found = as_float32(model), described(folder)
    check_same_weights(found.state_dict(), reference)
    check_same_numbers(numbers_of(found), numbers_of(reference))
    return check_logits("torch, by the layout", found, reference, prompts)


def described(folder: Path) -> Any:
    """The model of a directory in this layout, in float32."""
    values = read_json(folder / "config.json")
    heads, blocks = values["num_attention_heads"], values["block_configs"]
    attention, ffn = ([block[part] for block in blocks] for part in ("attention", "ffn"))
    structure = Structure.full(
        hidden=values["hidden_size"],
        ffn=[0 if one["no_op"] else ffn_width(one, values["hidden_size"]) for one in ffn],
        kv_of_query=[[] if a["no_op"] else [q // a["n_heads_in_group"] for q in range(heads)] for a in attention],
        absent=[
            (*(("attn",) if a["no_op"] else ()), *(("mlp",) if f["no_op"] else ()))
            for a, f in zip(attention, ffn, strict=True)
        ],
    )
    rope = {"rope_theta": values["rope_theta"], **(values["rope_scaling"] or {"rope_type": "default"})}
    known = {key: values[key] for key in _SHARED if key in values}
    config = LlamaConfig(**known, num_attention_heads=1, num_hidden_layers=len(blocks), rope_parameters=rope)
    weights: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        weights |= load_file(file)
    return build_model(config_for(config, structure), weights, torch.float32, str(folder)).eval()


def ffn_width(ffn: dict[str, Any], hidden: int) -> int:
    """The width of a layer as the layout's readers compute it."""
    if "ffn_mult" not in ffn:
        return int(ffn["intermediate_size"])
    return -(-int(2 * ffn["ffn_mult"] * hidden / 3) // _MULTIPLE) * _MULTIPLE
