"""Tiny models of every supported family, built from configurations in code."""

from __future__ import annotations

from itertools import islice
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from dwindle.anatomy.build import restore_buffers
from dwindle.anatomy.structure import Group, Layer, Structure

VOCAB = 61

WINDOWED = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
"""A window shorter than the tests' sequences, and layers of both kinds."""

# One line per family in the parity tests: every optional tensor of the family, and together every irregularity of real
# configurations (1, 2, 4 and 8 queries per key/value head, head size ≠ hidden size / heads, tied or not, windows).
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 8},
    "smollm3": {"attention_bias": True, "mlp_bias": True},
    "olmo2": {},
    "granite": {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.7},
    "phi3": {},
    "olmo3": {
        **WINDOWED,
        "attention_bias": True,
        "num_key_value_heads": 8,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 16,
                "attention_factor": 1.2,
            }
        },
    },
    "exaone4": {**WINDOWED, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "ministral3": {
        "head_dim": 8,
        "sliding_window": 5,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1000000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 8,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "seed_oss": {
        "head_dim": 8,
        "num_key_value_heads": 1,
        "attention_out_bias": True,
        "mlp_bias": True,
    },
    "ernie4_5": {"head_dim": 8, "num_key_value_heads": 1, "use_bias": True},
    "hunyuan_v1_dense": {
        "head_dim": 8,
        "attention_bias": True,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 1000.0, "factor": 1.0},
    },
    "glm4": {"head_dim": 8, "num_key_value_heads": 1, "rope_parameters": {"partial_rotary_factor": 0.25}},
    "arcee": {
        "num_key_value_heads": 2,
        "attention_bias": True,
        "mlp_bias": True,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 20.0,
            "original_max_position_embeddings": 8,
            "mscale": 1.0,
        },
    },
    "gemma3_text": {
        **WINDOWED,
        "head_dim": 8,
        "num_key_value_heads": 1,
        "query_pre_attn_scalar": 6,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "granite_swa": {
        "attention_bias": True,
        "mlp_bias": True,
        "attention_multiplier": 0.3,
        "sliding_window": 5,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "layer_rope_theta": [0, 10000.0, 500000.0],
    },
    "granitemoehybrid": {
        "num_local_experts": 0,
        "layer_types": ["full_attention"] * 3,
        "position_embedding_type": "rope",
        "shared_intermediate_size": 40,
        "tie_word_embeddings": True,
        "attention_multiplier": 0.3,
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.7,
        "attention_bias": True,
        "mamba_n_heads": 4,
    },
    "qwen3_5_text": {
        "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        "head_dim": 8,
        "attention_bias": True,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    "lfm2": {
        "layer_types": ["conv", "full_attention", "conv"],
        "intermediate_size": 60,
        "block_multiple_of": 8,
        "conv_bias": True,
    },
}


_LLAMA_3_2 = {
    "num_key_value_heads": 2,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 64,
    },
}
_GEMMA_ROPE = {
    "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}

# Published models: (family, what their config.json sets apart from sizes). Head sizes, heads and windows are shrunk;
# their ratios are kept where three layers of eight heads allow it.
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama-3.2-1B": ("llama", {**_LLAMA_3_2, "tie_word_embeddings": True}),
    "Llama-3.2-1B-untied": ("llama", {**_LLAMA_3_2, "tie_word_embeddings": False}),
    "Qwen3-0.6B": ("qwen3", {"head_dim": 8, "tie_word_embeddings": True, "rope_parameters": {"rope_theta": 1e6}}),
    "Qwen3-1.7B": ("qwen3", {"head_dim": 4, "tie_word_embeddings": True, "rope_parameters": {"rope_theta": 1e6}}),
    "Phi-4-mini": (
        "phi3",
        {
            "hidden_size": 48,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
            "sliding_window": 256,
            "original_max_position_embeddings": 16,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0, 1.1, 1.3],
                "long_factor": [1.0, 1.5, 2.5],
            },
        },
    ),
    "Gemma-3-270M": (
        "gemma3_text",
        {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 12, "query_pre_attn_scalar": 12, **WINDOWED}
        | {"rope_parameters": _GEMMA_ROPE},
    ),
    "Gemma-3-1B": (
        "gemma3_text",
        {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 6, "query_pre_attn_scalar": 6, **WINDOWED}
        | {"rope_parameters": _GEMMA_ROPE},
    ),
    "EXAONE-4.0-1.2B": (
        "exaone4",
        {**_LLAMA_3_2, "tie_word_embeddings": True, "sliding_window": None, "layer_types": ["full_attention"] * 3},
    ),
}


def tiny_model(family: str = "llama", *, dtype: torch.dtype = torch.float64, seed: int = 0, **options: Any) -> Any:
    """Three layers, 8 query and 4 key/value heads of 4, random (not only initial) values in every tensor.

    ``family`` is a key of ``FAMILIES`` or ``PUBLISHED``.
    """
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "max_position_embeddings": 128,
    }
    family, special = PUBLISHED.get(family) or (family, FAMILIES.get(family, {}))
    config = AutoConfig.for_model(family, **{**sizes, **special, **options})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(hash_name(name) + seed))
            is_gain = name.endswith("norm.weight") and not family.startswith(("gemma", "qwen3_5"))
            parameter.copy_(1 + 0.2 * noise if is_gain else 0.2 * noise)
    model = model.to(dtype).eval()
    restore_buffers(model, "cpu")
    return model


def shrunk(family: str, kind: str, **options: Any) -> tuple[Any, Structure]:
    """``stock``, ``ffn`` (widths differ), ``unequal`` (and heads, every layer regular) or ``cluster`` (irregular)."""
    from dwindle.anatomy.anatomy import Anatomy, cut

    model = tiny_model(family, dtype=torch.float32, **options)
    anatomy = Anatomy.of(model)
    structure, layers = anatomy.source, list[Layer]()
    for number, layer in enumerate(structure.layers):
        gone: tuple[int, ...] = ()
        if kind == "unequal":
            gone = tuple(q for kv in layer.kv_heads[: number % 2] for q in layer.queries_of(kv))
        if kind == "cluster":
            gone = layer.query_heads[: number + 1]
        width = 0 if kind == "stock" else 5 * number
        layers.append(layer.without(query_heads=gone, ffn=layer.ffn[len(layer.ffn) - width :]))
    smaller = Structure(structure.hidden, tuple(layers))
    return cut(model, anatomy, smaller, structure), smaller


def hash_name(name: str) -> int:
    return sum((place + 1) * ord(letter) for place, letter in enumerate(name))


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def random_group(kind: str, structure: Structure, seed: int = 0) -> Group:
    """One head (channel) in every layer that has any, or one hidden index, drawn at random."""
    generator = torch.Generator().manual_seed(seed)

    def pick(items: tuple[int, ...]) -> tuple[int, ...]:
        return () if not items else (items[int(torch.randint(len(items), (1,), generator=generator))],)

    if kind == "stem":
        return Group("stem", (pick(structure.hidden),))
    if kind == "attn":
        return Group("attn", tuple(pick(layer.query_heads) for layer in structure.layers))
    return Group("ffn", tuple(pick(layer.ffn) for layer in structure.layers))


def tiny_tokenizer() -> Any:
    """Bytes as tokens, and ``<|endoftext|>``: 257 entries."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<|endoftext|>": 0} | {letter: number + 1 for number, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")


def tiny_directory(path: Any, family: str = "llama", **options: Any) -> Any:
    """A Hugging Face directory with a byte tokenizer, as a user would have one."""
    defaults = {"vocab_size": 257, "attention_bias": False, "mlp_bias": False}
    if family != "llama":
        defaults = {"vocab_size": 257}
    model = tiny_model(family, dtype=torch.float32, **{**defaults, **options})
    model.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


def merged_tokenizer(size: int = 640) -> Any:
    """A trained byte-level BPE with a chat template; ``<|endoftext|>`` and ``<|im_end|>`` are its last two tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from dwindle.data.pydoc_text import pydoc_documents

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer: Any = trainers.BpeTrainer(
        vocab_size=size - 2, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator([text[:3000] for text in islice(pydoc_documents("valid"), 20)], trainer)
    backend.add_special_tokens(["<|endoftext|>", "<|im_end|>"])
    template = "{% for m in messages %}{{ m.role + ': ' + m.content + '<|im_end|>' }}{% endfor %}"
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", chat_template=template)


def merged_directory(path: Any, size: int = 640, **options: Any) -> Any:
    """A Hugging Face directory whose tokenizer has merges, so that its vocabulary can be trimmed."""
    ids = {"eos_token_id": size - 1, "bos_token_id": size - 2, "pad_token_id": size - 2}
    defaults = {"vocab_size": size, "attention_bias": False, "mlp_bias": False, **ids}
    tiny_model("llama", dtype=torch.float32, **{**defaults, **options}).save_pretrained(path)
    merged_tokenizer(size).save_pretrained(path)
    return path
