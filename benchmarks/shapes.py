"""Llama shapes by name, as settings of a ``LlamaConfig``."""

from __future__ import annotations

from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    name: {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": not name.startswith("llama"),
    }
    for name, vocab, layers, hidden, heads, kv_heads, ffn in (
        ("llama-7b", 32000, 32, 4096, 32, 32, 11008),
        ("llama3-8b", 128256, 32, 4096, 32, 8, 14336),
        ("smollm-1.7b", 49152, 24, 2048, 32, 32, 8192),
        ("smollm2-360m", 49152, 32, 960, 15, 5, 2560),
        ("smollm2-135m", 49152, 30, 576, 9, 3, 1536),
        ("tiny", 512, 3, 64, 4, 4, 192),
    )
}
