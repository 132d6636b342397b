"""A tiny llama and made-up batches for the tests of the loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from dwindle.training.callbacks import Callback
from dwindle.training.config import TrainingConfig
from dwindle.training.loop import Trainer
from dwindle.training.optim import LRSchedule, build_optimizer
from dwindle.training.stop import StopSignal

VOCAB = 67


def tiny_llama(*, tied: bool = True, dtype: torch.dtype = torch.float32, dropout: float = 0.0) -> LlamaForCausalLM:
    torch.manual_seed(11)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        attention_dropout=dropout,
    )
    return LlamaForCausalLM(config).to(dtype)


class RandomBatches:
    """Step ``i`` is a pure function of ``i``, cut into micro-batches of the given sizes."""

    def __init__(self, sizes: tuple[int, ...] = (4,), seq_len: int = 12) -> None:
        self.sizes, self.seq_len, self.position = sizes, seq_len, 0

    @property
    def num_predictions(self) -> int:
        return self.num_tokens_per_step

    @property
    def num_tokens_per_step(self) -> int:
        return sum(self.sizes) * self.seq_len

    def step_tokens(self, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 + step)
        return torch.randint(0, VOCAB, (sum(self.sizes), self.seq_len + 1), generator=generator)

    def next_step(self) -> list[Tensor]:
        tokens = self.step_tokens(self.position)
        self.position += 1
        return list(torch.split(tokens, list(self.sizes)))

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def make_trainer(
    model: LlamaForCausalLM,
    callbacks: list[Callback] | None = None,
    *,
    sizes: tuple[int, ...] = (4,),
    batches: RandomBatches | None = None,
    stop: StopSignal | None = None,
    schedule: str = "cosine",
    **options: Any,
) -> Trainer:
    """``options`` are those of the trainer, and fields of its configuration."""
    options = {"num_steps": 6, "ce_chunk_tokens": 10_000, **options}
    own = {name: options.pop(name) for name in ("num_steps", "device", "precision") if name in options}
    config = TrainingConfig(**{"tokens": 1, "lr": 1e-2, "optimizer": "adamw", **options})
    return Trainer(
        model,
        build_optimizer(model, config),
        LRSchedule(kind=schedule, lr=1e-2, num_steps=own["num_steps"], warmup_steps=2),  # type: ignore[arg-type]
        batches or RandomBatches(sizes),
        config=config,
        **own,
        callbacks=callbacks or [],
        stop=stop,
    )


@contextmanager
def portable_bf16() -> Iterator[None]:
    """bf16 without oneDNN, which ends the process on virtual machines that announce AMX but forbid it."""
    with torch.backends.mkldnn.flags(enabled=False):
        yield
