"""Masked and compacted models are the same function, also after training, for every family and kind of group."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from masked_steps import adamw, adamw_bf16, muon, muon_bf16, train
from transformers import AutoModelForCausalLM

from dwindle.anatomy.build import has_stock_config, is_custom, restore_buffers
from dwindle.anatomy.shrink import Float64Throughout
from dwindle.anatomy.structure import Group, Structure
from dwindle.export.huggingface import save_model
from dwindle.pruning.surgery import Prunable
from dwindle.run.family_check import copied
from tiny import FAMILIES, PUBLISHED, random_group, tiny_model, tokens

PATTERNS = {  # one kind of group on its own is checked by tests/run/test_family_check.py, for every family
    "all": ["attn", "ffn", "stem", "attn", "ffn", "stem", "attn"],
    "unequal": ["attn", "ffn", "stem", "layers"],
}
CASES = [
    *((family, "all", adamw) for family in FAMILIES),
    *((family, "unequal", muon) for family in FAMILIES),
    *((model, "unequal", adamw) for model in PUBLISHED),
    *(("llama", pattern, make) for pattern, make in (("all", muon), ("unequal", adamw), ("unequal", adamw_bf16))),
    *((family, "all", muon_bf16) for family in ("llama", "phi3")),
]
NUM_STEPS = 6


def reduced(kind: str, structure: Structure, seed: int) -> Structure:
    """The structure without one random group, or (``layers``) with layers of different sizes."""
    if kind != "layers":
        return structure.without(random_group(kind, structure, seed))
    first, second, *others = structure.layers
    first = first.without(ffn=first.ffn[::3])
    second = second.without(query_heads=second.query_heads[:1], ffn=second.ffn[:2])
    return Structure(structure.hidden, (first, second, *others))


def warmed_up(family: str, make: Any = adamw) -> tuple[Prunable, torch.optim.Optimizer]:
    """A model with non-trivial moments, as pruning meets it in the middle of training; a copy for each caller."""
    return copied(trained(family, make), make)


@functools.cache
def trained(family: str, make: Any) -> tuple[Prunable, torch.optim.Optimizer]:
    prunable = Prunable(tiny_model(family))
    optimizer = make(prunable.model)
    train(prunable, optimizer, 3, seed=100)
    return prunable, optimizer


@pytest.mark.parity
@pytest.mark.parametrize(("family", "pattern", "make"), CASES)
def test_masked_equals_compacted(family: str, pattern: str, make: Any) -> None:
    masked, masked_optimizer = warmed_up(family, make)
    kinds = [kind for kind in PATTERNS[pattern] if kind in ("layers", *masked.anatomy.family.groups)]
    sliced, sliced_optimizer = warmed_up(family, make)
    for seed, kind in enumerate(kinds):
        keep = reduced(kind, masked.alive, seed)
        masked.prune_to(keep, masked_optimizer)
        sliced.prune_to(keep, sliced_optimizer)
    moved = sliced.compact(optimizer=sliced_optimizer, rebuild=make)
    assert moved is not None

    assert sliced.physical == sliced.alive == masked.alive != masked.physical
    assert sliced.num_parameters == sum(p.numel() for p in sliced.model.parameters())
    batch = tokens(2, 16, seed=7)
    with torch.no_grad(), Float64Throughout():
        difference = masked.model(input_ids=batch).logits - sliced.model(input_ids=batch).logits
    assert difference.abs().max() < 1e-10

    masked_losses = train(masked, masked_optimizer, NUM_STEPS, seed=200)
    sliced_losses = train(sliced, moved, NUM_STEPS, seed=200)
    assert masked_losses == pytest.approx(sliced_losses, abs=1e-10, rel=0)
    for (name, before), after in zip(masked.model.named_parameters(), sliced.model.parameters(), strict=True):
        row = masked.anatomy[name]
        kept = masked.anatomy.slice(row, before, masked.alive, masked.physical)
        assert torch.allclose(kept, after, atol=1e-9, rtol=0), name
        assert before.count_nonzero() == kept.count_nonzero(), f"{name}: pruned entries moved"


@pytest.mark.parametrize("family", [*FAMILIES, *PUBLISHED])
def test_masked_training_equals_what_transformers_loads(family: str, tmp_path: Path) -> None:
    """A masked model trains in float64; its compacted form, saved as float32, computes the same in transformers.

    First with equal layers, in a class of transformers, then with layers of different sizes, in ours.
    """
    masked, optimizer = warmed_up(family)
    keep = reduced("ffn", masked.alive, 0)
    for seed in range(4):  # 28 hidden channels and 4 heads: only Phi-4-mini's configuration refuses these
        keep = reduced("stem", keep, seed)
    keep = keep.without(Group("attn", tuple(la.query_heads[1::2] for la in keep.layers)))
    if not has_stock_config(masked.model.config, keep):
        assert family == "Phi-4-mini"
        keep = reduced("ffn", masked.alive, 0)
    batch = tokens(2, 16, seed=7)
    for sizes in ("uniform", "unequal"):
        masked.prune_to(keep if sizes == "uniform" else reduced("layers", keep, 0), optimizer)
        train(masked, optimizer, 3, seed=300)
        small = masked.compacted().float()
        restore_buffers(small, "cpu")
        assert is_custom(small.config) == (sizes == "unequal")
        out = tmp_path / sizes
        save_model(small, None, out, structure=masked.alive, source="tiny", ledger=[{"event": "source"}])
        trusted = {"trust_remote_code": sizes == "unequal"}
        loaded = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, **trusted)
        assert type(loaded).__module__.startswith("transformers.") == (sizes == "uniform")
        with torch.no_grad():
            expected = masked.model(input_ids=batch).logits.float()
            assert torch.allclose(loaded(input_ids=batch).logits, expected, atol=1e-5, rtol=1e-5)


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
