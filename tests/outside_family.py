"""A family that the package does not have: its table, as a user would write it, and tiny models of it."""

from __future__ import annotations

import tomllib
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM

STARCODER2 = """
model_type = "starcoder2"
groups = ["attn", "ffn"] # LayerNorm subtracts the mean, so hidden channels stay

[stem]
"model.embed_tokens.weight" = "vocab hidden"
"lm_head.weight" = "vocab hidden"
"model.norm.weight" = "hidden"
"model.norm.bias" = "hidden"

[layer]
"input_layernorm.weight" = "hidden"
"input_layernorm.bias" = "hidden"
"post_attention_layernorm.weight" = "hidden"
"post_attention_layernorm.bias" = "hidden"
"self_attn.q_proj.weight" = "query hidden"
"self_attn.q_proj.bias" = "query"
"self_attn.k_proj.weight" = "kv hidden"
"self_attn.k_proj.bias" = "kv"
"self_attn.v_proj.weight" = "kv hidden"
"self_attn.v_proj.bias" = "kv"
"self_attn.o_proj.weight" = "hidden query"
"self_attn.o_proj.bias" = "hidden"
"mlp.c_fc.weight" = "ffn hidden"
"mlp.c_fc.bias" = "ffn"
"mlp.c_proj.weight" = "hidden ffn"
"mlp.c_proj.bias" = "hidden"
"""


def tables(text: str) -> dict[str, Any]:
    return tomllib.loads(text)


def starcoder2(**options: Any) -> Any:
    sizes = {"vocab_size": 257, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "bos_token_id": 1, "eos_token_id": 2}
    config = AutoConfig.for_model("starcoder2", **{**sizes, **heads, "residual_dropout": 0.0, **options})
    return AutoModelForCausalLM.from_config(config).eval()
