"""The supported model families, each one table.

A row gives, for one tensor, the unit of every axis:

    vocab    tokens (never pruned)
    hidden   hidden channels, shared by the whole model
    query    query heads x head size
    kv       key/value heads x head size
    ffn      intermediate channels of this layer
    dim      the head size itself (never pruned)

``a+b`` means that the axis is a concatenation (fused projections). Rows for tensors that a given model does not have
(biases, an untied head) are ignored; a tensor without a row is an error, so that no tensor is missed when groups are
pruned. To add a family, add a table here and a line in the parity test.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from dwindle.core.errors import UserError

CUSTOM_PREFIX = "dwindle_"
"""Prefix of the model types that dwindle writes: ``dwindle_llama`` has the tensors of ``llama``."""


@dataclass(frozen=True, slots=True)
class Family:
    """One table: tensors outside the layers, and tensors of a layer (names below ``model.layers.N.``)."""

    stem: Mapping[str, str]
    layer: Mapping[str, str]
    gain_in_float32: bool = False
    """Whether RMSNorm multiplies by its gain before casting back (OLMo 2) or after (Llama)."""
    gain_offset: float = 0.0
    """RMSNorm multiplies by ``gain_offset + weight`` (1 in Gemma)."""
    scales_embedding: bool = False
    """Whether embeddings are multiplied by the square root of the hidden size (Gemma)."""
    norm_before: Mapping[str, str] = field(
        default_factory=lambda: {"self_attn": "input_layernorm", "mlp": "post_attention_layernorm"}
    )
    """The norm in front of the projections of each block; empty where they read the residual stream itself."""
    norm_after: Mapping[str, str] = field(default_factory=dict)
    """The norm of each block's output, in families that have one."""
    interleaved_rotation: bool = False
    """Whether channels 2i and 2i + 1 of a head rotate together, not i and i + d/2."""
    head_norms: bool = False
    """Whether the outputs of ``q_proj`` and ``k_proj`` are normed (per head or over all heads)."""


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

_LLAMA = Family(stem=_STEM, layer=_NORMS | _ATTENTION | _FFN)

_QWEN3 = Family(
    stem=_STEM,
    layer={**_LLAMA.layer, "self_attn.q_norm.weight": "dim", "self_attn.k_norm.weight": "dim"},
    head_norms=True,
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

_EXAONE4 = Family(
    stem=_STEM,
    layer={**_OLMO2.layer, "self_attn.q_norm.weight": "dim", "self_attn.k_norm.weight": "dim"},
    norm_before={},
    norm_after=_AFTER,
    head_norms=True,
)

_HUNYUAN = Family(
    stem=_STEM,
    layer={**_LLAMA.layer, "self_attn.query_layernorm.weight": "dim", "self_attn.key_layernorm.weight": "dim"},
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

FAMILIES: dict[str, Family] = {
    "llama": _LLAMA,  # SmolLM, SmolLM2, TinyLlama, Llama 2 and 3
    "mistral": _LLAMA,
    "qwen2": _LLAMA,  # and 2.5; biases on q, k, v
    "qwen3": _QWEN3,  # per-head norms of the head size
    "smollm3": _LLAMA,
    "olmo2": _OLMO2,  # norms after the blocks, q/k norms over all heads
    "granite": _LLAMA,
    "phi3": _PHI3,  # fused projections; Phi-4-mini
    "olmo3": _OLMO2,  # OLMo 2 with sliding-window layers
    "exaone4": _EXAONE4,  # norms after the blocks, per-head norms, no rotation in full-attention layers
    "ministral3": _LLAMA,
    "seed_oss": _LLAMA,
    "ernie4_5": replace(_LLAMA, interleaved_rotation=True),
    "hunyuan_v1_dense": _HUNYUAN,  # per-head norms after the rotation
    "glm4": _GLM4,  # norms before and after the blocks, half of each head rotated, interleaved
    "arcee": _LLAMA,  # no gate
    "gemma3_text": _GEMMA3,  # norms before and after the blocks, per-head norms, scaled embeddings
}


def family_of(model_type: str, source: str = "") -> Family:
    """The table for a configuration's ``model_type``; ``source`` names its origin in the error message."""
    family = FAMILIES.get(model_type.removeprefix(CUSTOM_PREFIX))
    if family is None:
        where = f"source {source}: " if source else ""
        known = ", ".join(sorted(FAMILIES))
        raise UserError(f"{where}model type {model_type!r} is not supported: choose one of {known}")
    return family
