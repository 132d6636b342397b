"""What the host starts in a step beside the passes: a few operations, however many layers there are. (Counted.)"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_run import VOCAB, RandomBatches
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from dwindle.training.config import TrainingConfig
from dwindle.training.loop import Trainer
from dwindle.training.optim import LRSchedule, build_optimizer


class Parts(TorchDispatchMode):
    """Counts operations by name, for each part of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.part = "passes"
        self.counts: defaultdict[str, Counter[str]] = defaultdict(Counter)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[self.part][func._schema.name] += not func._schema.name.startswith("profiler::")
        return func(*args, **(kwargs or {}))

    def of(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, its operations counted as this part."""

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.part, before = part, self.part
            try:
                return function(*args, **kwargs)
            finally:
                self.part = before

        return counted


def second_step(optimizer: str, num_layers: int) -> dict[str, Counter[str]]:
    """The operations of a step of two micro-batches, in bf16, with clipping and the fused AdamW of a GPU."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    model, settings = LlamaForCausalLM(config), TrainingConfig(tokens=1, optimizer=optimizer, clip=1e-3)  # type: ignore[arg-type]
    schedule = LRSchedule(kind="constant", lr=1e-3, num_steps=2)
    chosen: Any = build_optimizer(model, settings, fused=True)
    trainer: Any = Trainer(
        model, chosen, schedule, RandomBatches((2, 2)), config=settings, num_steps=1, precision="bf16"
    )
    trainer.run()
    trainer.num_steps, parts, engine = 2, Parts(), trainer.engine
    engine.grad_norm, engine.clip = parts.of("norm", engine.grad_norm), parts.of("clip", engine.clip)
    chosen.step, trainer._read = parts.of("optimizer", chosen.step), parts.of("read", trainer._read)
    with parts:
        trainer.run()
    return parts.counts


def total(counts: dict[str, Counter[str]], part: str) -> int:
    return sum(counts[part].values())


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_step_is_a_few_operations_and_its_passes(optimizer: str) -> None:
    few, many = second_step(optimizer, 1), second_step(optimizer, 5)
    for part, most in (("norm", 3), ("clip", 5), ("read", 3)):
        assert total(few, part) == total(many, part) <= most, part
    added = (total(many, "optimizer") - total(few, "optimizer")) / 4
    if optimizer == "adamw":
        assert added == 0 and total(many, "optimizer") <= 6
    else:  # views of the seven matrices of a layer in their batches, and two that are turned
        assert added <= 7
        products = [many["optimizer"][f"aten::{name}"] for name in ("bmm", "baddbmm")]
        assert products == [few["optimizer"][f"aten::{name}"] for name in ("bmm", "baddbmm")]
