"""Packed conversations in the loss: examples do not see each other, answers alone count, in every family."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dwindle.anatomy.positions import can_be_packed
from dwindle.data.packing import num_predictions
from dwindle.training import loss as loss_module
from dwindle.training.distill import Distillation, HiddenStates, Teacher
from dwindle.training.loss import language_model_loss
from tiny import FAMILIES, tiny_model, tokens

LENGTHS = (7, 5, 9)
PACKABLE = [name for name in FAMILIES if can_be_packed(tiny_model(name).config)]


def examples() -> list[tuple[Tensor, Tensor]]:
    """(Tokens, learned): the second half of each, and once two answers."""
    made = []
    for number, length in enumerate(LENGTHS):
        learned = torch.arange(length) >= length // 2
        learned[length // 2 + 1] = number != 2
        made.append((tokens(length, seed=number), learned))
    return made


def packed(made: list[tuple[Tensor, Tensor]], cells: int = 24) -> Tensor:
    """One row of all examples, the rest filled."""
    left = cells - sum(len(ids) for ids, _ in made)
    ids = torch.cat([*(ids for ids, _ in made), torch.zeros(left, dtype=torch.int64)])
    learned = torch.cat([*(mine for _, mine in made), torch.zeros(left, dtype=torch.bool)])
    positions = torch.cat([*(torch.arange(len(ids)) for ids, _ in made), torch.arange(left)])
    return torch.stack([ids, learned.long(), positions])[None]


def plain_loss(model: Any, made: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Every example in a forward pass of its own."""
    total = torch.zeros((), dtype=torch.float64)
    for ids, learned in made:
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
        total = total + F.cross_entropy(logits[learned[1:]], ids[1:][learned[1:]], reduction="sum")
    return total


@pytest.mark.parametrize("family", PACKABLE)
def test_a_packed_row_equals_its_examples_one_by_one(family: str) -> None:
    model, made = tiny_model(family), examples()
    loss = language_model_loss(model, packed(made), chunk_tokens=4)
    assert num_predictions(packed(made)) == sum(int(mine[1:].sum()) for _, mine in made)
    loss.objective.backward()
    ours = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    expected = plain_loss(model, made)
    expected.backward()
    torch.testing.assert_close(loss.cross_entropy, expected.detach(), rtol=1e-6, atol=0)
    for name, p in model.named_parameters():  # some families compute rotations and norms in fp32
        torch.testing.assert_close(ours[name], p.grad, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_changing_one_example_leaves_the_others_as_they_are(attention: str) -> None:
    model = tiny_model("llama", attn_implementation=attention)
    made = examples()
    row = packed(made)
    other = row.clone()
    other[0, 0, : LENGTHS[0]] = tokens(LENGTHS[0], seed=99)

    def outcome(batch: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of all cells, and gradients of the later examples' answers by all embeddings."""
        ids, learned, positions = batch[:, 0], batch[:, 1].bool().clone(), batch[:, 2]
        learned[:, : LENGTHS[0]] = False
        embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
        logits = model(inputs_embeds=embedded, position_ids=positions, use_cache=False).logits
        chosen = learned[0, 1:]
        F.cross_entropy(logits[0, :-1][chosen], ids[0, 1:][chosen]).backward()
        assert embedded.grad is not None
        return logits.detach(), embedded.grad

    (logits, grads), (others, other_grads) = outcome(row), outcome(other)
    cut = LENGTHS[0]
    assert not torch.equal(logits[:, :cut], others[:, :cut])
    assert torch.equal(logits[:, cut:], others[:, cut:]) and torch.equal(grads[:, cut:], other_grads[:, cut:])
    assert not grads[:, :cut].any(), "an answer has no gradient by another example"


@pytest.fixture(params=[False, True], ids=["chosen", "fixed shapes"])
def fused(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Logits of answers alone, or of all cells, as on a GPU (not compiled here)."""
    monkeypatch.setattr(loss_module, "_compiled_loss", lambda: loss_module._loss_and_gradient)
    return bool(request.param)


@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
def test_both_ways_to_leave_tokens_out_agree(fused: bool, z_loss: float) -> None:
    """Value and gradients, against a plain computation with a scale that is a tensor, as in a CUDA graph."""
    model, made, scale = tiny_model("llama"), examples(), torch.tensor(0.125, dtype=torch.float64)
    loss = language_model_loss(model, packed(made), chunk_tokens=5, scale=scale, z_loss=z_loss, fused=fused)
    loss.objective.backward()
    ours = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    expected = plain_loss(model, made)
    for ids, learned in made if z_loss else ():
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1][learned[1:]]
        expected = expected + z_loss * logits.logsumexp(-1).square().sum()
    (expected / 8).backward()
    torch.testing.assert_close(loss.objective, expected / 8, rtol=1e-9, atol=0)
    for name, p in model.named_parameters():  # rotations are computed in fp32
        torch.testing.assert_close(ours[name], p.grad, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_distillation_counts_answers_alone(fused: bool) -> None:
    model, source, made = tiny_model("llama"), tiny_model("llama", seed=5), examples()
    how = Distillation(weight=0.5, temperature=2.0)
    teacher = Teacher.of(HiddenStates(source), how)
    loss = language_model_loss(model, packed(made), chunk_tokens=3, teacher=teacher, fused=fused)
    total = torch.zeros((), dtype=torch.float64)
    for ids, learned in made:
        ours, theirs = (m(input_ids=ids[None]).logits[0, :-1][learned[1:]] for m in (model, source))
        total += F.kl_div(F.log_softmax(ours / 2, -1), F.log_softmax(theirs / 2, -1), reduction="sum", log_target=True)
    assert loss.distillation is not None
    torch.testing.assert_close(loss.distillation, 4 * total.detach(), rtol=1e-9, atol=1e-9)
    loss.objective.backward()
    assert all(p.grad is None for p in source.parameters())


def test_rows_of_text_and_of_conversations_in_one_batch() -> None:
    model, made = tiny_model("llama"), examples()
    ids = tokens(24, seed=7)
    text = torch.stack([ids, torch.ones_like(ids), torch.arange(24)])[None]
    both = language_model_loss(model, torch.cat([packed(made), text]), chunk_tokens=8).cross_entropy
    alone = language_model_loss(model, ids[None], chunk_tokens=8).cross_entropy
    torch.testing.assert_close(both, plain_loss(model, made).detach() + alone, rtol=1e-9, atol=1e-9)


def test_models_that_mix_tokens_without_attention_are_not_packed() -> None:
    assert set(FAMILIES) - set(PACKABLE) == {"lfm2", "qwen3_5_text", "granitemoehybrid"}
