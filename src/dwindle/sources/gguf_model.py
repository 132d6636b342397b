"""From a GGUF header to a transformers configuration and state dict, one table row per architecture.

Row order of q and k: llama.cpp's converter reorders them for the architectures that derive from its LlamaModel (llama,
deci, granite, smollm3, arcee, mistral3), but not for the NeoX-style ones (qwen2, qwen3, phi3, olmo2, exaone4, gemma3,
seed_oss, hunyuan-dense), nor for glm4 and ernie4_5, whose rotation is interleaved in transformers too.

``deci`` is llama.cpp's name for a Llama whose layers have different sizes, with or without q/k/v biases (with them it
is a Qwen2 here).
"""

from __future__ import annotations

import math
import re
import warnings
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, PreTrainedConfig

from dwindle.anatomy.build import config_for
from dwindle.anatomy.configuration_dwindle import queries_per_kv
from dwindle.anatomy.families import family_of
from dwindle.anatomy.structure import Structure
from dwindle.core.errors import UserError
from dwindle.core.limits import MAX_WIDTH, check_sizes
from dwindle.core.progress import track
from dwindle.sources.common import SourceNotice, config_reason, interleaved_to_halves
from dwindle.sources.gguf_file import GgufFile, unsupported
from dwindle.sources.gguf_rope import rope_parameters

STEM_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"} | {
    "token_embd_norm": "model.embedding_norm"  # the final norm of LFM2
}
_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"
_WHOLE_HEADS = ("llama", "arcee")
"""Families whose configuration refuses a hidden size that is not a multiple of the number of heads."""
_COMPARED_ROWS = 1024
_ROUNDING = 0.1
"""Two roundings of one matrix to 4 bits or more differ by less, relative to its norm."""
_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_FEED_FORWARD = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_PRE_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_POST_NORMS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_LLAMA_LAYER = {**_PRE_NORMS, **_ATTENTION, **_FEED_FORWARD}
_OLMO2_LAYER = {**_ATTENTION, **_FEED_FORWARD, **_QK_NORMS, **_POST_NORMS}


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufArchitecture:
    """What differs between architectures of GGUF files."""

    model_type: str
    layer: dict[str, str]
    """Part of a ``blk.N`` tensor name → part of a ``model.layers.N`` parameter name."""
    permuted: bool = False
    """q and k rows are stored for interleaved rotation."""
    keys: dict[str, tuple[str, Any]] = field(default_factory=dict)
    """Metadata key → (configuration key, default)."""
    optional_biases: bool = False
    """The configuration has ``attention_bias``, which is set if the file has such tensors."""
    states_head_dim: bool = False
    """The configuration class has ``head_dim``."""
    biases: tuple[str, ...] | None = None
    """Parts whose biases llama.cpp adds; None: not restricted."""
    window_period: int | None = None
    """llama.cpp computes sliding windows, in all layers but every n-th; this n if the file does not state it."""


_LLAMA = GgufArchitecture(
    model_type="llama", layer=_LLAMA_LAYER, permuted=True, optional_biases=True, states_head_dim=True
)
ARCHITECTURES: dict[str, GgufArchitecture] = {
    "llama": _LLAMA,
    "deci": _LLAMA,
    "qwen2": GgufArchitecture(model_type="qwen2", layer=_LLAMA_LAYER),
    "qwen3": GgufArchitecture(
        model_type="qwen3", layer={**_LLAMA_LAYER, **_QK_NORMS}, optional_biases=True, states_head_dim=True
    ),
    "phi3": GgufArchitecture(
        model_type="phi3",
        layer={
            **_PRE_NORMS,
            "attn_qkv": "self_attn.qkv_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        },
        keys={"attention.sliding_window": ("sliding_window", None)},
    ),
    "granite": GgufArchitecture(
        model_type="granite",
        layer=_LLAMA_LAYER,
        permuted=True,
        optional_biases=True,
        keys={
            "embedding_scale": ("embedding_multiplier", 1.0),
            "residual_scale": ("residual_multiplier", 1.0),
            "logit_scale": ("logits_scaling", 1.0),
            "attention.scale": ("attention_multiplier", None),
        },
    ),
    "olmo2": GgufArchitecture(model_type="olmo2", layer=_OLMO2_LAYER, optional_biases=True, biases=(), window_period=4),
    "lfm2": GgufArchitecture(
        model_type="lfm2",
        layer={
            "attn_norm": "operator_norm",
            "attn_q": "self_attn.q_proj",
            "attn_k": "self_attn.k_proj",
            "attn_v": "self_attn.v_proj",
            "attn_output": "self_attn.out_proj",
            "attn_q_norm": "self_attn.q_layernorm",
            "attn_k_norm": "self_attn.k_layernorm",
            "shortconv.in_proj": "conv.in_proj",
            "shortconv.conv": "conv.conv",
            "shortconv.out_proj": "conv.out_proj",
            "ffn_norm": "ffn_norm",
            "ffn_gate": "feed_forward.w1",
            "ffn_up": "feed_forward.w3",
            "ffn_down": "feed_forward.w2",
        },
        keys={"shortconv.l_cache": ("conv_L_cache", 3)},
        biases=(),
    ),
    "smollm3": GgufArchitecture(model_type="smollm3", layer=_LLAMA_LAYER, permuted=True, optional_biases=True),
    "exaone4": GgufArchitecture(model_type="exaone4", layer=_OLMO2_LAYER, biases=()),
    "mistral3": GgufArchitecture(
        model_type="ministral3", layer=_LLAMA_LAYER, permuted=True, states_head_dim=True, biases=()
    ),
    "seed_oss": GgufArchitecture(
        model_type="seed_oss",
        layer={
            **_ATTENTION,
            **_FEED_FORWARD,
            "attn_norm": "input_layernorm",
            "post_attention_norm": "post_attention_layernorm",
        },
        optional_biases=True,
        states_head_dim=True,
        biases=_QKV,
    ),
    "ernie4_5": GgufArchitecture(model_type="ernie4_5", layer=_LLAMA_LAYER, states_head_dim=True, biases=()),
    "hunyuan-dense": GgufArchitecture(
        model_type="hunyuan_v1_dense",
        layer={
            **_LLAMA_LAYER,
            "attn_q_norm": "self_attn.query_layernorm",
            "attn_k_norm": "self_attn.key_layernorm",
        },
        states_head_dim=True,
        biases=(),
    ),
    "glm4": GgufArchitecture(
        model_type="glm4",
        layer={
            **_ATTENTION,
            **_PRE_NORMS,
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        },
        optional_biases=True,
        states_head_dim=True,
        biases=_QKV,
    ),
    "arcee": GgufArchitecture(model_type="arcee", layer=_LLAMA_LAYER, permuted=True, states_head_dim=True, biases=()),
    "gemma3": GgufArchitecture(
        model_type="gemma3_text",
        layer={
            **_OLMO2_LAYER,
            "attn_norm": "input_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
        },
        states_head_dim=True,
        biases=(),
        window_period=6,
    ),
}

_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.([\w.]+)\.(weight|bias)")
_STEM_TENSOR = re.compile(r"(\w+)\.(weight|bias)")
_ROPE_TENSORS = re.compile(r"(blk\.\d+\.)?(rope_freqs|rope_factors_long|rope_factors_short|attn_rot_embd)\.weight")


def architecture_of(file: GgufFile) -> GgufArchitecture:
    architecture = ARCHITECTURES.get(file.architecture)
    if architecture is None:
        raise UserError(
            f"source {file.path}: GGUF architecture {file.architecture!r} is not supported: "
            f"give one of {', '.join(ARCHITECTURES)}"
        )
    return architecture


def gguf_config(file: GgufFile) -> PreTrainedConfig:
    """The transformers configuration of a GGUF file: a stock one, or one of ours if layers have different sizes."""
    architecture = architecture_of(file)
    _refuse_unsupported(file)
    hidden_size = file.whole("embedding_length")
    check_sizes({"hidden_size": hidden_size, "num_hidden_layers": file.whole("block_count")}, str(file.path))
    layers = _layer_sizes(file)
    attends = next(number for number, (heads, _, _) in enumerate(layers) if heads)
    num_heads, num_kv_heads, ffn = layers[attends]
    head_dim = file.whole("attention.key_length", max(hidden_size // num_heads, 1))
    values: dict[str, Any] = {
        "hidden_size": hidden_size,
        "num_hidden_layers": len(layers),
        "intermediate_size": ffn,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "max_position_embeddings": file.whole("context_length"),
        "rms_norm_eps": file.number("attention.layer_norm_rms_epsilon", 1e-6),
        "vocab_size": _vocab_size(file),
        "tie_word_embeddings": _ties_embedding(file),
        "rope_parameters": rope_parameters(file, head_dim),
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": file.metadata.get("tokenizer.ggml.padding_token_id"),
    }
    for key, (name, default) in architecture.keys.items():
        values[name] = file.get(key, default)
    if architecture.states_head_dim or head_dim * num_heads != hidden_size:
        values["head_dim"] = head_dim
    if architecture.optional_biases:
        values["attention_bias"] = f"blk.{attends}.attn_q.bias" in file.tensors
    if "blk.0.ffn_up.bias" in file.tensors:
        values["mlp_bias"] = True
    model_type = _add_own(file, architecture, values)
    if file.architecture == "deci" or (model_type in _WHOLE_HEADS and hidden_size % num_heads):
        return _config_of_sizes(file, model_type, values, layers)
    return _make_config(file, model_type, values)


def _add_own(file: GgufFile, architecture: GgufArchitecture, values: dict[str, Any]) -> str:
    """The model type; adds what only it has to the values."""
    model_type, num_layers = architecture.model_type, values["num_hidden_layers"]
    has_output_bias = any(name.endswith(".attn_output.bias") for name in file.tensors)
    if file.architecture == "deci" and values["attention_bias"] and not has_output_bias:
        model_type = "qwen2"
        del values["attention_bias"]
    if architecture.window_period is not None and file.get("attention.sliding_window"):
        model_type = "olmo3" if model_type == "olmo2" else model_type
        values |= _windowed(file, architecture.window_period, values)
        values["sliding_window"] = file.whole("attention.sliding_window")
    if model_type == "exaone4":
        values |= {"sliding_window": None, "layer_types": ["full_attention"] * num_layers}
    if model_type == "lfm2":
        kinds = file.get("attention.head_count_kv")
        kinds = kinds if isinstance(kinds, list) else [kinds] * num_layers
        values |= {"norm_eps": values.pop("rms_norm_eps"), "block_auto_adjust_ff_dim": False}
        values["layer_types"] = ["full_attention" if count else "conv" for count in kinds]
    if model_type == "gemma3_text":
        values["query_pre_attn_scalar"] = values["head_dim"]
        if "sliding_window" not in values:  # its class would take one by default
            values |= _windowed(file, 1, values)
    return model_type


def _windowed(file: GgufFile, period: int, values: dict[str, Any]) -> dict[str, Any]:
    """Layer types and rotations of a model with sliding-window layers."""
    slides, num_layers = file.get("attention.sliding_window_pattern"), values["num_hidden_layers"]
    if not isinstance(slides, list):
        every = file.whole("attention.sliding_window_pattern", period)
        slides = [(n + 1) % every != 0 for n in range(num_layers)]
    rope = values["rope_parameters"]
    own = 10000.0 if file.architecture == "gemma3" else rope["rope_theta"]
    return {
        "layer_types": ["sliding_attention" if slide else "full_attention" for slide in slides],
        "rope_parameters": {
            "full_attention": rope,
            "sliding_attention": {"rope_type": "default", "rope_theta": file.number("rope.freq_base_swa", own)},
        },
    }


def _config_of_sizes(
    file: GgufFile, model_type: str, values: dict[str, Any], layers: list[tuple[int, int, int]]
) -> PreTrainedConfig:
    """A configuration of ours, or a stock one of another class, where the family's own does not accept the sizes."""
    # the sizes come from the structure; one head passes the checks of every family until then
    base = _make_config(file, model_type, values | {"num_attention_heads": 1, "num_key_value_heads": 1})
    structure = Structure.full(
        hidden=values["hidden_size"],
        ffn=[ffn for _, _, ffn in layers],
        kv_of_query=[[kv for kv in range(kvs) for _ in range(heads // kvs)] for heads, kvs, _ in layers],
        absent=[(*(() if heads else ("attn",)), *(() if ffn else ("mlp",))) for heads, _, ffn in layers],
    )
    config: PreTrainedConfig = config_for(base, structure)
    return config


def _layer_sizes(file: GgufFile) -> list[tuple[int, int, int]]:
    """(query heads, key/value heads, FFN channels) of every layer; only ``deci`` may have different ones."""
    num_layers = file.whole("block_count")
    if file.architecture != "deci":
        heads = file.whole("attention.head_count")
        kv_heads = file.get("attention.head_count_kv", heads)
        if file.architecture == "lfm2" and isinstance(kv_heads, list) and len({*kv_heads} - {0}) == 1:
            kv_heads = max(kv_heads)  # 0 in convolutions
        else:
            kv_heads = file.whole("attention.head_count_kv", heads)
        size = (heads, kv_heads, file.whole("feed_forward_length"))
        return [size] * num_layers
    columns = []
    for key in ("attention.head_count", "attention.head_count_kv", "feed_forward_length"):
        value = file.get(key)
        column = value if isinstance(value, list) else [value] * num_layers
        if len(column) != num_layers or not all(type(number) is int and number <= MAX_WIDTH for number in column):
            raise UserError(f"source {file.path}: deci.{key} is {value!r:.60}: the file is not a usable model")
        if min(column) < 0 or max(column) < 1:
            raise unsupported(file, f"has no attention or no FFN (deci.{key} is {value!r:.60}), which is not supported")
        columns.append(column)
    sizes = list(zip(*columns, strict=True))
    for number, (heads, kv_heads, width) in enumerate(sizes):
        if not heads == kv_heads == 0 and 0 in (heads, kv_heads):
            raise unsupported(file, f"has a linear layer in place of attention in layer {number}")
        if not heads and not width:
            raise unsupported(file, f"has nothing in layer {number}")
        if heads and heads % kv_heads:
            raise unsupported(file, f"has {heads} query heads on {kv_heads} key/value heads in layer {number}")
    return sizes


def _make_config(file: GgufFile, model_type: str, values: dict[str, Any]) -> PreTrainedConfig:
    if model_type == "granite" and values["attention_multiplier"] is None:
        head_dim = values.get("head_dim", values["hidden_size"] // values["num_attention_heads"])
        values["attention_multiplier"] = 1 / math.sqrt(head_dim)
    if values["rope_parameters"].get("rope_type") == "longrope":
        values["original_max_position_embeddings"] = values["rope_parameters"]["original_max_position_embeddings"]
    check_sizes(values, str(file.path))
    try:
        config: PreTrainedConfig = AutoConfig.for_model(model_type, **values)
    except Exception as error:
        reason = config_reason(error)
        raise UserError(
            f"source {file.path}: its metadata is not a valid {model_type} configuration: {reason}"
        ) from error
    return config


def gguf_tensors(file: GgufFile, config: PreTrainedConfig, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The state dict, dequantised tensor by tensor, so that only one float32 copy exists at a time."""
    architecture = architecture_of(file)
    file.check_complete()
    left_out = _second_embedding(file)
    renamed = {
        name: parameter_name(name if not left_out or name != _HEAD else _EMBEDDING, architecture)
        for name in file.tensors
        if name != left_out and not _ROPE_TENSORS.fullmatch(name)
    }
    unknown = sorted(name for name, target in renamed.items() if target is None)
    if unknown:
        raise unsupported(file, f"holds the tensor {unknown[0]}, which a {config.model_type} model does not have")
    per_kv = queries_per_kv(config)
    heads = {"attn_q": [sum(counts) for counts in per_kv], "attn_k": [len(counts) for counts in per_kv]}
    result: dict[str, torch.Tensor] = {}
    for name, target in track(renamed.items(), f"reading {file.path.name}", len(renamed)):
        assert target is not None
        tensor = torch.from_numpy(file.read(name))
        part = name.split(".")[-2]
        tensor = tensor.unsqueeze(1) if target.endswith(".conv.conv.weight") else tensor
        if architecture.permuted and part in heads:
            number = int(name.split(".")[1])
            if number >= len(per_kv):
                raise unsupported(file, f"holds {name}, but its metadata says {len(per_kv)} layers")
            count = heads[part][number]
            if tensor.shape[0] % (2 * count):
                raise unsupported(file, f"holds {name} with {tensor.shape[0]} rows for {count} heads")
            tensor = interleaved_to_halves(tensor, count)
        if target.endswith("norm.weight"):
            tensor = tensor - family_of(config.model_type).gain_offset
        result[target] = tensor.to(dtype)
    return result


def _ties_embedding(file: GgufFile) -> bool:
    """Whether the head is the embedding: it is not stored, or stored again and rounded otherwise."""
    if _HEAD not in file.tensors or _EMBEDDING not in file.tensors:
        return _HEAD not in file.tensors
    if file.tensors[_HEAD].shape != file.tensors[_EMBEDDING].shape:
        return False
    try:
        file.check_complete()
        head, embedding = (file.read(name, rows=_COMPARED_ROWS) for name in (_HEAD, _EMBEDDING))
    except UserError:  # a damaged file, or no package that dequantises: reading the weights says so
        return False
    near = _ROUNDING if any(file.is_rounded(name) for name in (_HEAD, _EMBEDDING)) else 0.0
    return bool(np.linalg.norm(head - embedding) <= near * np.linalg.norm(embedding))


def _second_embedding(file: GgufFile) -> str:
    """The coarser copy of a tied embedding that is stored twice; it is not read. Empty if there is one copy."""
    if _HEAD not in file.tensors or not _ties_embedding(file):
        return ""
    coarser = min((_EMBEDDING, _HEAD), key=file.num_bytes)
    warnings.warn(
        f"source {file.path}: its head is its embedding, stored again: they are tied, without {coarser}",
        SourceNotice,
        stacklevel=3,
    )
    return coarser


def parameter_name(name: str, architecture: GgufArchitecture) -> str | None:
    """``blk.3.attn_q.weight`` → ``model.layers.3.self_attn.q_proj.weight``; None for an unknown part."""
    if match := _LAYER_TENSOR.fullmatch(name):
        index, part, kind = match.groups()
        return f"model.layers.{index}.{architecture.layer[part]}.{kind}" if part in architecture.layer else None
    match = _STEM_TENSOR.fullmatch(name)
    return f"{STEM_NAMES[match[1]]}.{match[2]}" if match and match[1] in STEM_NAMES else None


def _refuse_unsupported(file: GgufFile) -> None:
    if file.get("expert_count", 0):
        raise unsupported(file, "is a mixture of experts, which is not supported")
    key_length, value_length = file.get("attention.key_length"), file.get("attention.value_length")
    if key_length != value_length and None not in (key_length, value_length):
        raise unsupported(file, f"has keys of size {key_length} but values of size {value_length}")
    windowed = file.architecture in ("phi3", "llama") or architecture_of(file).window_period is not None
    if file.get("attention.sliding_window") and not windowed:
        raise unsupported(file, "uses a sliding attention window, which is not supported")
    if (file.architecture, file.get("block_count")) in (("exaone4", 64), ("gemma3", 62)):
        raise unsupported(file, "is of a size whose attention llama.cpp sets by itself, which is not supported")
    for key in ("attention.clamp_kqv", "attention.temperature_scale", "logit_softcapping", "final_logit_softcapping"):
        if file.get(key) and (key, file.architecture) != ("attention.temperature_scale", "mistral3"):
            raise unsupported(file, f"sets {file.architecture}.{key}, which is not supported")


def _vocab_size(file: GgufFile) -> int:
    """From the shape of the embedding; the metadata may not count padding."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise UserError(f"source {file.path}: tensor token_embd.weight is missing: the file is not a usable model")
    return embedding.shape[0]
