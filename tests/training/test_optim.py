"""Parameter groups and the shapes of the schedules."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from tiny_run import tiny_llama

from dwindle.core.errors import UserError
from dwindle.training.config import TrainingConfig
from dwindle.training.optim import LRSchedule, build_optimizer


def config(**fields: Any) -> TrainingConfig:
    return TrainingConfig(**{"tokens": 1, "optimizer": "adamw", **fields})


def test_matrices_decay_and_gains_do_not() -> None:
    model = tiny_llama(tied=False)
    optimizer = build_optimizer(model, config(lr=1e-3, weight_decay=0.2))
    decay = {id(p): g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    for name, p in model.named_parameters():
        assert decay[id(p)] == (0.0 if "norm" in name else 0.2), name
    assert len(decay) == len(list(model.parameters()))


def test_the_cpu_update_has_the_bits_of_the_default_adamw() -> None:
    results = []
    for build in (
        lambda m: build_optimizer(m, config(lr=1e-3, weight_decay=0.0)),
        lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0),
    ):
        model = tiny_llama()
        optimizer = build(model)
        for seed in range(3):
            torch.manual_seed(seed)
            for p in model.parameters():
                p.grad = torch.randn_like(p)
            optimizer.step()
        results.append(model.state_dict())
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_cosine() -> None:
    schedule = LRSchedule(kind="cosine", lr=2.0, num_steps=110, warmup_steps=10, min_lr_ratio=0.1)
    rates = [schedule.lr_at(s) for s in range(110)]
    assert rates[:10] == pytest.approx([0.2 * (s + 1) for s in range(10)])
    assert rates[10] == 2.0
    assert rates[60] == pytest.approx(1.1)
    assert all(a > b for a, b in pairwise(rates[10:]))
    assert rates[-1] == pytest.approx(0.2, rel=0.01) and schedule.lr_at(110) == pytest.approx(0.2)


def test_wsd() -> None:
    schedule = LRSchedule(kind="wsd", lr=1.0, num_steps=100, warmup_steps=5, decay_steps=20, min_lr_ratio=0.0)
    rates = [schedule.lr_at(s) for s in range(100)]
    assert rates[4:81] == [1.0] * 77
    assert rates[90] == pytest.approx(0.5) and rates[99] == pytest.approx(0.05)


def test_constant_and_apply() -> None:
    schedule = LRSchedule.of(config(schedule="constant", lr=0.5, warmup=0.1), 40)
    assert schedule.warmup_steps == 4
    assert [schedule.lr_at(s) for s in range(5)] == [0.125, 0.25, 0.375, 0.5, 0.5]
    optimizer = build_optimizer(tiny_llama(), config(lr=9.0))
    assert schedule.apply(optimizer, 1) == 0.25
    assert {group["lr"] for group in optimizer.param_groups} == {0.25}


@pytest.mark.parametrize("optimizer_name", ["adamw", "muon"])
@pytest.mark.parametrize("tied", [False, True])
def test_embeddings_and_head_have_their_own_rate(optimizer_name: str, tied: bool) -> None:
    model = tiny_llama(tied=tied)
    optimizer = build_optimizer(model, config(lr=1.0, optimizer=optimizer_name, embedding_lr_ratio=0.1))
    assert LRSchedule.of(config(schedule="constant", lr=1.0, warmup=0), 10).apply(optimizer, 0) == 1.0
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    outside = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
    assert len(outside) == (1 if tied else 2)
    assert rates == {id(p): 0.1 if id(p) in outside else 1.0 for p in model.parameters()}


def test_builder_and_its_messages() -> None:
    schedule = LRSchedule.of(config(schedule="wsd", lr=1.0, warmup=7, decay=0.2), 50)
    assert (schedule.warmup_steps, schedule.decay_steps) == (7, 10)
    with pytest.raises(UserError, match=r'schedule: expected one of "cosine", "wsd", "constant", got "linear"'):
        LRSchedule.of(config(schedule="linear", lr=1.0), 50)
