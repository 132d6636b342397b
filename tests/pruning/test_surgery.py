"""Masked and compacted models are the same function, also after training, for every family and kind of group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from masked_steps import adamw, muon, train

import dwindle.anatomy.families as tables
from dwindle.anatomy.shrink import Float64Throughout
from dwindle.pruning.surgery import Prunable
from tiny import FAMILIES, random_group, tiny_model, tokens

PATTERNS = {
    "attn": ["attn"] * 3,
    "ffn": ["ffn"] * 5,
    "stem": ["stem"] * 4,
    "all": ["attn", "ffn", "stem", "attn", "ffn", "stem", "attn"],
}


def warmed_up(family: str, make: Any = adamw, **options: Any) -> tuple[Prunable, torch.optim.Optimizer]:
    """A model with non-trivial moments, as pruning meets it in the middle of training."""
    prunable = Prunable(tiny_model(family, **options))
    optimizer = make(prunable.model)
    train(prunable, optimizer, 3, seed=100)
    return prunable, optimizer


@pytest.mark.parametrize("make", [adamw, muon])
@pytest.mark.parametrize("pattern", [p if p == "all" else pytest.param(p, marks=pytest.mark.slow) for p in PATTERNS])
@pytest.mark.parametrize("family", FAMILIES)
def test_masked_equals_compacted(family: str, pattern: str, make: Any) -> None:
    kinds = [kind for kind in PATTERNS[pattern] if kind in tables.FAMILIES[family].groups]
    if not kinds:
        pytest.skip("the family keeps such groups whole")
    masked, masked_optimizer = warmed_up(family, make)
    sliced, sliced_optimizer = warmed_up(family, make)
    for seed, kind in enumerate(kinds):
        group = random_group(kind, masked.alive, seed)
        masked.prune(group, masked_optimizer)
        sliced.prune(group, sliced_optimizer)
    moved = sliced.compact(optimizer=sliced_optimizer, rebuild=make)
    assert moved is not None

    assert sliced.physical == sliced.alive == masked.alive != masked.physical
    assert sliced.num_parameters == sum(p.numel() for p in sliced.model.parameters())
    batch = tokens(2, 16, seed=7)
    with torch.no_grad(), Float64Throughout():
        difference = masked.model(input_ids=batch).logits - sliced.model(input_ids=batch).logits
    assert difference.abs().max() < 1e-10

    masked_losses = train(masked, masked_optimizer, 20, seed=200)
    sliced_losses = train(sliced, moved, 20, seed=200)
    assert masked_losses == pytest.approx(sliced_losses, abs=1e-10, rel=0)
    for (name, before), after in zip(masked.model.named_parameters(), sliced.model.parameters(), strict=True):
        row = masked.anatomy[name]
        kept = masked.anatomy.slice(row, before, masked.alive, masked.physical)
        assert torch.allclose(kept, after, atol=1e-9, rtol=0), name
        assert before.count_nonzero() == kept.count_nonzero(), f"{name}: pruned entries moved"


def test_compaction_may_keep_dead_parts_and_go_on() -> None:
    """Compaction to round sizes keeps some pruned channels; later events and a last compaction are exact."""
    reference, optimizer = warmed_up("llama")
    stepwise, stepwise_optimizer = warmed_up("llama")
    first = [random_group(kind, reference.alive, seed) for seed, kind in enumerate(["ffn", "stem"])]
    for group in first:
        reference.prune(group, optimizer)
        stepwise.prune(group, stepwise_optimizer)
    keep_more = stepwise.anatomy.source.without(first[0])  # the pruned hidden channel is kept for now
    moved = stepwise.compact(keep_more, stepwise_optimizer, adamw)
    assert moved is not None and stepwise.physical == keep_more and stepwise.alive == reference.alive
    group = random_group("attn", reference.alive, 3)
    reference.prune(group, optimizer)
    stepwise.prune(group, moved)
    assert train(reference, optimizer, 10, 5) == pytest.approx(train(stepwise, moved, 10, 5), abs=1e-10, rel=0)
    moved = stepwise.compact(optimizer=moved, rebuild=adamw)
    assert moved is not None
    assert train(reference, optimizer, 10, 9) == pytest.approx(train(stepwise, moved, 10, 9), abs=1e-10, rel=0)


def test_dead_query_columns_need_their_gradient_masked() -> None:
    """Grouped-query attention: without the mask a pruned head would become non-zero again; with it, never."""
    prunable = Prunable(tiny_model("llama"))
    group = random_group("attn", prunable.alive, 1)
    prunable.prune(group)
    batch = tokens(2, 12)
    prunable.model(input_ids=batch, labels=batch).loss.backward()
    weight = dict(prunable.model.named_parameters())["model.layers.0.self_attn.o_proj.weight"]
    pruned = slice(group.members[0][0] * 4, group.members[0][0] * 4 + 4)
    assert weight.grad is not None and weight.grad[:, pruned].abs().max() > 0
    prunable.mask_gradients()
    assert weight.grad[:, pruned].abs().max() == 0


def test_norms_equal_stock_norms_before_pruning() -> None:
    for family in FAMILIES:
        model = tiny_model(family, dtype=torch.float32)
        batch = tokens(2, 9)
        before = model(input_ids=batch).logits
        Prunable(model)
        assert torch.equal(before, model(input_ids=batch).logits), family
