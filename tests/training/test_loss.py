"""Chunked cross-entropy against the full one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tiny_run import VOCAB, RandomBatches, portable_bf16, tiny_llama
from torch import Tensor
from transformers import GraniteConfig, GraniteForCausalLM, LlamaForCausalLM

from dwindle.distributed.precision import autocast_for
from dwindle.training.loss import chunked_cross_entropy, evaluate_loss, language_model_loss


def full_loss(logits: Tensor, targets: Tensor, z_loss: float) -> Tensor:
    rows = logits.flatten(0, -2)
    loss = F.cross_entropy(rows, targets.flatten(), reduction="sum")
    return loss + z_loss * (rows.logsumexp(-1) ** 2).sum()


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
@pytest.mark.parametrize("chunk_tokens", [1, 7, 48, 1000])
def test_value_and_all_gradients_equal_the_full_computation(tied: bool, z_loss: float, chunk_tokens: int) -> None:
    model = tiny_llama(tied=tied, dtype=torch.float64)
    tokens = RandomBatches().step_tokens(0)
    expected = full_loss(model(input_ids=tokens[:, :-1]).logits, tokens[:, 1:], z_loss) / 48
    expected.backward()
    expected_grads = gradients(model)

    got = language_model_loss(model, tokens, chunk_tokens=chunk_tokens, scale=1 / 48, z_loss=z_loss)
    got.objective.backward()
    got_grads = gradients(model)

    assert torch.allclose(got.objective, expected, rtol=1e-12, atol=0)
    assert got_grads.keys() == expected_grads.keys()
    for name, grad in expected_grads.items():
        assert torch.allclose(got_grads[name], grad, rtol=1e-12, atol=1e-14), name
    plain = full_loss(model(input_ids=tokens[:, :-1]).logits, tokens[:, 1:], 0.0)
    assert torch.allclose(got.cross_entropy, plain, rtol=1e-12, atol=0)


def test_a_factor_on_the_objective_reaches_the_gradients() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 8, generator=generator, dtype=torch.float64) for n in (20, VOCAB))
    targets = torch.randint(0, VOCAB, (20,), generator=generator)
    results = []
    for chunked in (True, False):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        if chunked:
            loss = chunked_cross_entropy(h, w, targets, chunk_tokens=6).objective
        else:
            loss = F.cross_entropy(h @ w.t(), targets, reduction="sum")
        (loss * 3.7).backward()
        assert h.grad is not None and w.grad is not None
        results.append((h.grad, w.grad))
    for got, expected in zip(*results, strict=True):
        assert torch.allclose(got, expected, rtol=1e-12, atol=1e-14)


def test_logits_scaling_of_granite() -> None:
    config = GraniteConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        logits_scaling=3.0,
    )
    model = GraniteForCausalLM(config).double()
    tokens = RandomBatches().step_tokens(0)
    expected = full_loss(model(input_ids=tokens[:, :-1]).logits, tokens[:, 1:], 0.0)
    got = language_model_loss(model, tokens, chunk_tokens=9)
    assert torch.allclose(got.objective, expected, rtol=1e-12, atol=0)


def test_bf16_autocast_has_the_bits_of_the_full_computation() -> None:
    model = tiny_llama()
    tokens = RandomBatches().step_tokens(0)
    with portable_bf16(), autocast_for("bf16", "cpu"):
        expected = full_loss(model(input_ids=tokens[:, :-1]).logits.float(), tokens[:, 1:], 0.0)
    with portable_bf16():
        expected.backward()
    expected_grads = gradients(model)
    with portable_bf16(), autocast_for("bf16", "cpu"):
        got = language_model_loss(model, tokens, chunk_tokens=10_000)
    with portable_bf16():
        got.objective.backward()
    assert torch.equal(got.objective, expected)
    for name, grad in gradients(model).items():
        assert grad.dtype == torch.float32
        assert torch.equal(grad, expected_grads[name]), name


def largest_saved(model: LlamaForCausalLM, chunk_tokens: int) -> int:
    """Elements of the largest tensor that the graph of a loss keeps for its backward pass."""
    sizes: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        language_model_loss(model, RandomBatches((40,)).step_tokens(0), chunk_tokens=chunk_tokens)
    return max(sizes)


def test_all_logits_are_never_saved() -> None:
    assert largest_saved(tiny_llama(), chunk_tokens=16) < 40 * 12 * VOCAB


@pytest.mark.parametrize("batch", [1, 3, 16])
def test_evaluate_loss_is_the_mean_over_tokens(batch: int) -> None:
    model = tiny_llama(dtype=torch.float64, dropout=0.5)
    model.train()
    windows = RandomBatches((7,)).step_tokens(0)
    got = evaluate_loss(model, windows, batch=batch, chunk_tokens=11)
    assert model.training
    model.eval()
    with torch.no_grad():
        expected = full_loss(model(input_ids=windows[:, :-1]).logits, windows[:, 1:], 0.0) / (7 * 12)
    assert got == pytest.approx(expected.item(), rel=1e-12)
    assert all(p.grad is None for p in model.parameters())
