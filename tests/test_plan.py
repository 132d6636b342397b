"""What is chosen for a machine before a run begins."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from dwindle.config import from_dict
from dwindle.plan import micro_batch_of
from dwindle.recipe import Recipe

SMOLLM2 = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_key_value_heads": 3}
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


def config(sizes: dict[str, int]) -> LlamaConfig:
    heads = sizes["hidden_size"] // 64
    return LlamaConfig(**sizes, num_attention_heads=heads, vocab_size=49152, tie_word_embeddings=True)


@pytest.mark.parametrize(
    ("sizes", "gigabytes", "training", "sequences"),
    [
        (SMOLLM2, 140, {}, 64),  # all of the step
        (SMOLLM2, 140, {"tokens_per_step": 16384}, 16),
        (SMOLLM2, 24, {}, 16),  # what fits: 64 sequences take about 50 GB by the estimate, 38 as measured
        (SMOLLM2, 24, {"activation_checkpointing": True}, 64),
        (SMOLLM2, 24, {"micro_batch": 64}, 64),  # a person's choice is kept
        (SMOLLM, 150, {}, 32),
        (SMOLLM, 8, {}, 1),
    ],
)
def test_the_micro_batch_fits_the_gpu(
    monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int], gigabytes: int, training: dict[str, Any], sequences: int
) -> None:
    card = SimpleNamespace(total_memory=gigabytes * 10**9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    assert micro_batch_of(recipe(**training), "cuda", config(sizes)) == sequences


def test_the_micro_batch_of_a_cpu() -> None:
    assert micro_batch_of(recipe(), "cpu", config(SMOLLM)) == 2
