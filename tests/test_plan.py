"""What is chosen for a machine before a run begins."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config

from dwindle.config import from_dict
from dwindle.memory import footprint
from dwindle.plan import micro_batch_of
from dwindle.recipe import Recipe

SMOLLM2 = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_key_value_heads": 3}
QWEN3 = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_key_value_heads": 8}
SMOLLM = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24, "num_key_value_heads": 32}


def recipe(**training: Any) -> Recipe:
    return from_dict(
        Recipe,
        {
            "source": {"model": "nowhere", "device": "cuda"},
            "data": {"train": ["pydoc:train"], "seq_len": 1024},
            "training": {"tokens": "16M", "tokens_per_step": 65536, **training},
            "prune": {"enabled": False},
        },
    )


def config(sizes: dict[str, int]) -> PretrainedConfig:
    if sizes is QWEN3:
        return Qwen3Config(**sizes, num_attention_heads=16, head_dim=128, vocab_size=151936, tie_word_embeddings=True)
    heads = sizes["hidden_size"] // 64
    return LlamaConfig(**sizes, num_attention_heads=heads, vocab_size=49152, tie_word_embeddings=True)


@pytest.mark.parametrize(
    ("sizes", "gigabytes", "training", "sequences"),
    [
        (SMOLLM2, 150, {"compile": True}, 64),  # all of the step: 50 GB by the estimate, 38 as measured
        (SMOLLM2, 150, {"compile": True, "tokens_per_step": 16384}, 16),
        (SMOLLM2, 24, {"compile": True}, 16),
        (SMOLLM2, 24, {}, 8),  # eager layers keep more
        (SMOLLM2, 24, {"activation_checkpointing": True}, 64),
        (SMOLLM2, 24, {"micro_batch": 64}, 64),  # a person's choice is kept
        (SMOLLM, 150, {"compile": True}, 32),  # 94 GB as measured
        (SMOLLM, 8, {}, 1),
        (QWEN3, 150, {}, 32),  # queries twice as wide as the stream
        (QWEN3, 150, {"compile": True}, 64),
    ],
)
def test_the_micro_batch_fits_the_gpu(
    monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int], gigabytes: int, training: dict[str, Any], sequences: int
) -> None:
    card = SimpleNamespace(total_memory=gigabytes * 10**9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert micro_batch_of(recipe(**training), "cuda", config(sizes)) == sequences


def test_shards_and_teachers_count() -> None:
    """Weights are shared out, activations are not; a teacher brings its weights, final states and logits."""
    training, sizes = recipe(compile=True).training, config(SMOLLM)
    alone, spread = (footprint(sizes, training, "bf16", shards=n) for n in (1, 8))
    assert spread.fixed == alone.fixed / 8 and spread.per_token == alone.per_token
    assert alone.fixed == 18 * 1_711_376_384  # fp32 weight, gradient and two moments, and the bf16 copy
    taught = footprint(sizes, training, "bf16", teacher=(config(SMOLLM2), torch.bfloat16))
    assert taught.fixed - alone.fixed == 2 * 134_515_008 and taught.per_token - alone.per_token == 2 * 576
    assert taught.total(1024) > alone.total(1024) + 12 * 1024 * 49152
    assert footprint(sizes, training, "fp64").fixed == 32 * 1_711_376_384


def test_the_micro_batch_of_a_cpu() -> None:
    assert micro_batch_of(recipe(), "cpu", config(SMOLLM)) == 2
