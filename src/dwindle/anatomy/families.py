"""The supported model families, each one table, and how a model type finds its table.

``family.py`` explains the rows. To add a family, add a table here and a line in the parity test. A family from outside
the package is the same table in a TOML or JSON file (``family_files.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from dwindle.anatomy.family import CUSTOM_PREFIX, Family, FamilyFile
from dwindle.anatomy.family_files import file_beside, package_family, read_family, table_of
from dwindle.core.errors import UserError

_STEM = {
    "model.embed_tokens.weight": "vocab hidden",
    "lm_head.weight": "vocab hidden",
    "model.norm.weight": "hidden",
}
_NORMS = {
    "input_layernorm.weight": "hidden",
    "post_attention_layernorm.weight": "hidden",
}
_ATTENTION = {
    "self_attn.q_proj.weight": "query hidden",
    "self_attn.q_proj.bias": "query",
    "self_attn.k_proj.weight": "kv hidden",
    "self_attn.k_proj.bias": "kv",
    "self_attn.v_proj.weight": "kv hidden",
    "self_attn.v_proj.bias": "kv",
    "self_attn.o_proj.weight": "hidden query",
    "self_attn.o_proj.bias": "hidden",
}
_FFN = {
    "mlp.gate_proj.weight": "ffn hidden",
    "mlp.gate_proj.bias": "ffn",
    "mlp.up_proj.weight": "ffn hidden",
    "mlp.up_proj.bias": "ffn",
    "mlp.down_proj.weight": "hidden ffn",
    "mlp.down_proj.bias": "hidden",
}

_AFTER = {"self_attn": "post_attention_layernorm", "mlp": "post_feedforward_layernorm"}

_PLAIN = Family(stem=_STEM, layer=_NORMS | _ATTENTION | _FFN)
_LLAMA = _PLAIN.changed(output_bias_keys=["attention_bias", "mlp_bias"])

_QWEN3 = _PLAIN.changed(
    layer={**_PLAIN.layer, "self_attn.q_norm.weight": "dim", "self_attn.k_norm.weight": "dim"}, head_norms=True
)

_OLMO2 = Family(
    stem=_STEM,
    layer={
        "post_attention_layernorm.weight": "hidden",
        "post_feedforward_layernorm.weight": "hidden",
        "self_attn.q_norm.weight": "query",
        "self_attn.k_norm.weight": "kv",
        **_ATTENTION,
        **_FFN,
    },
    gain_in_float32=True,
    norm_before={},
    norm_after=_AFTER,
    head_norms=True,
)

_PHI3 = Family(
    stem=_STEM,
    layer={
        **_NORMS,
        "self_attn.qkv_proj.weight": "query+kv+kv hidden",
        "self_attn.o_proj.weight": "hidden query",
        "mlp.gate_up_proj.weight": "ffn+ffn hidden",
        "mlp.down_proj.weight": "hidden ffn",
    },
)

_EXAONE4 = _OLMO2.changed(
    layer={**_OLMO2.layer, "self_attn.q_norm.weight": "dim", "self_attn.k_norm.weight": "dim"}, gain_in_float32=False
)

_HUNYUAN = _PLAIN.changed(
    layer={**_PLAIN.layer, "self_attn.query_layernorm.weight": "dim", "self_attn.key_layernorm.weight": "dim"},
    head_norms=True,
)

_GLM4 = Family(
    stem=_STEM,
    layer={
        **_NORMS,
        "post_self_attn_layernorm.weight": "hidden",
        "post_mlp_layernorm.weight": "hidden",
        **_ATTENTION,
        "mlp.gate_up_proj.weight": "ffn+ffn hidden",
        "mlp.down_proj.weight": "hidden ffn",
    },
    norm_after={"self_attn": "post_self_attn_layernorm", "mlp": "post_mlp_layernorm"},
    interleaved_rotation=True,
)

_GEMMA3 = Family(
    stem=_STEM,
    layer={
        **_QWEN3.layer,
        "pre_feedforward_layernorm.weight": "hidden",
        "post_feedforward_layernorm.weight": "hidden",
    },
    gain_in_float32=True,
    gain_offset=1.0,
    scales_embedding=True,
    norm_before={"self_attn": "input_layernorm", "mlp": "pre_feedforward_layernorm"},
    norm_after=_AFTER,
    head_norms=True,
)

_GRANITE_SWA = _LLAMA.changed(layer={**_LLAMA.layer, "self_attn.sinks": "head"})

_GRANITE_HYBRID = Family(
    stem=_STEM,
    layer={
        **_NORMS,
        **_ATTENTION,
        "shared_mlp.input_linear.weight": "ffn+ffn hidden",
        "shared_mlp.output_linear.weight": "hidden ffn",
    },
    norm_before={"self_attn": "input_layernorm", "shared_mlp": "post_attention_layernorm"},
    ffn_key="shared_intermediate_size",
    # sizes of layers that a supported model does not have, but that its configuration checks against the hidden size
    written={"mamba_n_heads": 1, "mamba_d_head": "auto"},
    tiny={"mamba_n_heads": 1, "mamba_d_head": "auto"},
)

_LFM2 = Family(
    stem={
        "model.embed_tokens.weight": "vocab hidden",
        "lm_head.weight": "vocab hidden",
        "model.embedding_norm.weight": "hidden",
    },
    layer={
        "operator_norm.weight": "hidden",
        "ffn_norm.weight": "hidden",
        "self_attn.q_proj.weight": "query hidden",
        "self_attn.k_proj.weight": "kv hidden",
        "self_attn.v_proj.weight": "kv hidden",
        "self_attn.out_proj.weight": "hidden query",
        "self_attn.q_layernorm.weight": "dim",
        "self_attn.k_layernorm.weight": "dim",
        # the channels of a convolution are as many as hidden channels, and are removed with them
        "conv.in_proj.weight": "hidden+hidden+hidden hidden",
        "conv.in_proj.bias": "hidden+hidden+hidden",
        "conv.conv.weight": "hidden dim dim",
        "conv.conv.bias": "hidden",
        "conv.out_proj.weight": "hidden hidden",
        "conv.out_proj.bias": "hidden",
        "feed_forward.w1.weight": "ffn hidden",
        "feed_forward.w3.weight": "ffn hidden",
        "feed_forward.w2.weight": "hidden ffn",
    },
    norm_before={"self_attn": "operator_norm", "conv": "operator_norm", "feed_forward": "ffn_norm"},
    head_norms=True,
    written={"block_auto_adjust_ff_dim": False},
    tiny={"block_multiple_of": 8},
)

_QWEN35 = Family(
    stem=_STEM,
    layer={
        **_NORMS,
        **_FFN,
        "self_attn.q_proj.weight": "dim hidden",
        "self_attn.q_proj.bias": "dim",
        "self_attn.k_proj.weight": "dim hidden",
        "self_attn.k_proj.bias": "dim",
        "self_attn.v_proj.weight": "dim hidden",
        "self_attn.v_proj.bias": "dim",
        "self_attn.o_proj.weight": "hidden dim",
        "self_attn.o_proj.bias": "hidden",
        "self_attn.q_norm.weight": "dim",
        "self_attn.k_norm.weight": "dim",
        "linear_attn.in_proj_qkv.weight": "dim hidden",
        "linear_attn.in_proj_z.weight": "dim hidden",
        "linear_attn.in_proj_b.weight": "dim hidden",
        "linear_attn.in_proj_a.weight": "dim hidden",
        "linear_attn.conv1d.weight": "dim dim dim",
        "linear_attn.dt_bias": "dim",
        "linear_attn.A_log": "dim",
        "linear_attn.norm.weight": "dim",
        "linear_attn.out_proj.weight": "hidden dim",
    },
    gain_in_float32=True,
    gain_offset=1.0,
    norm_before={
        "self_attn": "input_layernorm",
        "linear_attn": "input_layernorm",
        "mlp": "post_attention_layernorm",
    },
    head_norms=True,
    groups=["ffn", "stem", "layer"],
    tiny={
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
)

FAMILIES: dict[str, Family] = {
    "llama": _LLAMA,  # SmolLM, SmolLM2, TinyLlama, Llama 2 and 3
    "mistral": _PLAIN,
    "qwen2": _PLAIN,  # and 2.5; biases on q, k, v
    "qwen3": _QWEN3,  # per-head norms of the head size
    "smollm3": _LLAMA,
    "olmo2": _OLMO2,  # norms after the blocks, q/k norms over all heads
    "granite": _LLAMA,
    "phi3": _PHI3,  # fused projections; Phi-4-mini
    "olmo3": _OLMO2,  # OLMo 2 with sliding-window layers
    "exaone4": _EXAONE4,  # norms after the blocks, per-head norms, no rotation in full-attention layers
    "ministral3": _PLAIN,
    "seed_oss": _PLAIN.changed(output_bias_keys=["attention_out_bias", "mlp_bias"]),
    "ernie4_5": _PLAIN.changed(interleaved_rotation=True, output_bias_keys=["use_bias"]),
    "hunyuan_v1_dense": _HUNYUAN,  # per-head norms after the rotation
    "glm4": _GLM4,  # norms before and after the blocks, half of each head rotated, interleaved
    "arcee": _LLAMA,  # no gate
    "gemma3_text": _GEMMA3,  # norms before and after the blocks, per-head norms, scaled embeddings
    "granite_swa": _GRANITE_SWA,  # sliding windows, a sink for every query head
    "granitemoehybrid": _GRANITE_HYBRID,  # dense Granite 4: no experts, attention layers only
    "qwen3_5_text": _QWEN35,  # gated linear attention between attention layers, both kept whole
    "lfm2": _LFM2,  # convolutions between attention layers
}

_registered: dict[str, FamilyFile] = {}


def register_family(table: str | PathLike[str] | Mapping[str, Any] | FamilyFile) -> FamilyFile:
    """Make a table known in this process: a file, or its contents. A later one of the same model type replaces it."""
    where = f"{table}: " if isinstance(table, str | PathLike) else ""
    found = read_family(table) if isinstance(table, str | PathLike) else table_of(table)
    if found.model_type in FAMILIES:
        raise UserError(f"{where}model_type: {found.model_type!r} is a built-in family: its table cannot be replaced")
    _registered[found.model_type] = found
    return found


def register_beside(folder: Path, model_type: str) -> None:
    """Use the table in a model directory, if it has one and no built-in table describes the model."""
    name = model_type.removeprefix(CUSTOM_PREFIX)
    if name in FAMILIES or (file := file_beside(folder)) is None:
        return
    table = read_family(file)
    if table.model_type != name:
        raise UserError(f"family {file}: describes {table.model_type!r}, config.json is {name!r}: correct one of them")
    register_family(table)


def find_family(model_type: str) -> Family | None:
    """The table of a ``model_type``: built-in, registered, or of an installed package; None if there is none."""
    name = model_type.removeprefix(CUSTOM_PREFIX)
    if name not in FAMILIES and name not in _registered and (packaged := package_family(name)) is not None:
        register_family(packaged)
    return FAMILIES.get(name) or _registered.get(name)


def outside_family(model_type: str) -> FamilyFile | None:
    """The table that must accompany a model of this type; None for built-in and unknown families."""
    find_family(model_type)
    return _registered.get(model_type.removeprefix(CUSTOM_PREFIX))


def family_of(model_type: str) -> Family:
    """The table of a ``model_type`` that is known to have one."""
    family = find_family(model_type)
    assert family is not None, model_type
    return family
