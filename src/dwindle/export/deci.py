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
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from dwindle.anatomy.anatomy import Anatomy
from dwindle.anatomy.family import CUSTOM_PREFIX
from dwindle.core.errors import UserError
from dwindle.core.reading import read_json
from dwindle.export import configuration_decilm
from dwindle.export.verification import (
    HF_TOLERANCE,
    Verified,
    as_float32,
    check,
    check_same_weights,
    logits_of,
    relative_error,
)

ARCHITECTURE = "DeciLMForCausalLM"
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
    rope = dict(values["rope_parameters"])
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
        "rope_theta": rope.pop("rope_theta"),  # where readers that are not transformers look
        "rope_scaling": rope if rope.get("rope_type", "default") != "default" else None,
    }
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    (folder / "modeling_dwindle.py").unlink(missing_ok=True)
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
    """Compare with the layout computed from the files alone: transformers has no class for it."""
    reference, config = as_float32(model), read_json(folder / "config.json")
    files = sorted(folder.glob("*.safetensors"))
    weights = {name: tensor.float() for file in files for name, tensor in load_file(file).items()}
    weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])
    check_same_weights(weights, reference)
    worst = max(relative_error(layout_logits(config, weights, ids), logits_of(reference, ids)) for ids in prompts)
    return check(Verified("torch, by the layout", worst, HF_TOLERANCE, "largest relative difference of a logit"))


@torch.inference_mode()
def layout_logits(config: dict[str, Any], weights: dict[str, Tensor], ids: list[int]) -> Tensor:
    """Logits [length, vocabulary] of a sequence."""
    size, heads = config["head_dim"], config["num_attention_heads"]
    x = F.embedding(torch.tensor(ids), weights["model.embed_tokens.weight"])
    angles = torch.arange(len(ids))[:, None] * frequencies(config).repeat(2)
    cos, sin = angles.cos(), angles.sin()

    def norm(name: str, values: Tensor) -> Tensor:
        gain, epsilon = weights[f"{name}.weight"], float(config["rms_norm_eps"])
        normed: Tensor = F.rms_norm(values, [values.shape[-1]], gain, epsilon)
        return normed

    def linear(name: str, values: Tensor) -> Tensor:
        return F.linear(values, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def rotated(states: Tensor) -> Tensor:
        first, second = states.chunk(2, -1)
        return states * cos + torch.cat([-second, first], -1) * sin

    for number, block in enumerate(config["block_configs"]):
        layer = f"model.layers.{number}"
        if not block["attention"]["no_op"]:
            y = norm(f"{layer}.input_layernorm", x)
            q, k, v = (linear(f"{layer}.self_attn.{p}_proj", y).view(len(ids), -1, size).transpose(0, 1) for p in "qkv")
            assert len(q) == heads and len(k) == heads // block["attention"]["n_heads_in_group"]
            attended = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True, enable_gqa=True)
            x = x + linear(f"{layer}.self_attn.o_proj", attended.transpose(0, 1).reshape(len(ids), -1))
        if not block["ffn"]["no_op"]:
            y = norm(f"{layer}.post_attention_layernorm", x)
            gate, up = (linear(f"{layer}.mlp.{part}_proj", y) for part in ("gate", "up"))
            assert up.shape[-1] == ffn_width(block["ffn"], config["hidden_size"])
            x = x + linear(f"{layer}.mlp.down_proj", F.silu(gate) * up)
    return linear("lm_head", norm("model.norm", x))


def frequencies(config: dict[str, Any]) -> Tensor:
    """Radians per position of each pair of a head's values, from ``rope_theta`` and ``rope_scaling`` as written."""
    size, scaling = config["head_dim"], config["rope_scaling"] or {}
    plain: Tensor = config["rope_theta"] ** (-torch.arange(0, size, 2) / size)
    if scaling.get("rope_type") == "linear":
        return plain / float(scaling["factor"])
    if scaling.get("rope_type") != "llama3":
        return plain
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    turns: Tensor = plain * scaling["original_max_position_embeddings"] / (2 * math.pi)  # within the original context
    kept = ((turns - low) / (high - low)).clamp(0, 1)  # fast pairs as they are, slow ones slower
    slower: Tensor = plain / scaling["factor"]
    return kept * plain + (1 - kept) * slower


def ffn_width(ffn: dict[str, Any], hidden: int) -> int:
    """The width of a layer as the layout's readers compute it."""
    if "ffn_mult" not in ffn:
        return int(ffn["intermediate_size"])
    return -(-int(2 * ffn["ffn_mult"] * hidden / 3) // _MULTIPLE) * _MULTIPLE
