"""Distillation: value and gradients against a plain computation with all logits, eager and compiled."""

from __future__ import annotations

import math

import pytest
import torch
from tiny_run import VOCAB, RandomBatches, make_trainer, tiny_llama
from torch import Tensor

from dwindle.training import loss as loss_module
from dwindle.training.callbacks import Callback
from dwindle.training.distill import Distillation, HiddenStates, Lesson, Teacher, divergence_and_gradient
from dwindle.training.loop import Trainer
from dwindle.training.loss import chunked_cross_entropy, language_model_loss

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
HOW = [Distillation(0.3), Distillation(0.7, 2.5), Distillation(1.0, 0.5, 5), Distillation(0.4, 2.0, VOCAB)]


def plain_divergence(student_NV: Tensor, teacher_NV: Tensor, how: Distillation) -> Tensor:
    """Token by token, from probabilities, the rest as one more outcome."""
    total = student_NV.new_zeros(())
    for s, t in zip(student_NV, teacher_NV, strict=True):
        q, p = (torch.softmax(x / how.temperature, 0) for x in (s, t))
        order = t.argsort(descending=True)
        named = order[: how.top_k or len(t)]
        others = order[len(named) :]
        outcomes = [(p[i], q[i]) for i in named]
        if len(others):
            outcomes.append((p[others].sum(), q[others].sum()))
        for a, b in outcomes:
            total = total + a * (a / b).log()
    return total * how.temperature**2


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("how", HOW)
def test_divergence_and_its_written_out_gradient(how: Distillation) -> None:
    student, teacher = random(6, VOCAB, seed=1).requires_grad_(), 3 * random(6, VOCAB, seed=2)
    expected = plain_divergence(student, teacher, how)
    (gradient,) = torch.autograd.grad(expected, student)
    got, got_gradient = divergence_and_gradient(student.detach(), teacher, how)
    torch.testing.assert_close(got.sum(), expected.detach(), atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(got_gradient, gradient, atol=1e-10, rtol=1e-10)


def test_a_rest_bounds_the_whole_divergence_from_below() -> None:
    student, teacher = random(9, VOCAB, seed=3), 2 * random(9, VOCAB, seed=4)
    found = [
        divergence_and_gradient(student, teacher, Distillation(1.0, 1.0, k))[0].sum().item() for k in (1, 4, 20, 0)
    ]
    assert 0 < found[0] < found[1] < found[2] < found[3]
    certain = torch.full((1, VOCAB), -1e4, dtype=torch.float64)
    certain[0, 3] = 1e4
    value, gradient = divergence_and_gradient(certain, certain, Distillation(1.0, 1.0, 2))
    assert value.item() == 0 and torch.isfinite(gradient).all()


def teacher_of(how: Distillation) -> Teacher:
    model = tiny_llama(tied=False, dtype=torch.float64)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.add_(random(*parameter.shape, seed=number), alpha=0.2)
    return Teacher.of(HiddenStates(model), how)


def full_objective(model: torch.nn.Module, teacher: Teacher, tokens: Tensor, z_loss: float) -> tuple[Tensor, ...]:
    """(objective, cross-entropy, divergence) with all logits of both models, by autograd."""
    logits = model(input_ids=tokens[:, :-1]).logits.flatten(0, 1)
    with torch.no_grad():
        taught = teacher.model(input_ids=tokens[:, :-1]).logits.flatten(0, 1)  # type: ignore[operator]
    entropy = torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten(), reduction="sum")
    divergence = plain_divergence(logits, taught, teacher.how)
    share = teacher.how.weight
    objective = (1 - share) * entropy + share * divergence + z_loss * logits.logsumexp(-1).square().sum()
    return objective, entropy.detach(), divergence.detach()


@pytest.mark.parametrize("how", HOW[:3])
@pytest.mark.parametrize(("chunk_tokens", "z_loss"), [(7, 0.0), (1000, 1e-2)])
def test_the_chunked_objective_of_a_model(how: Distillation, chunk_tokens: int, z_loss: float) -> None:
    model, teacher = tiny_llama(dtype=torch.float64), teacher_of(how)
    tokens = RandomBatches().step_tokens(0)
    objective, entropy, divergence = full_objective(model, teacher, tokens, z_loss)
    (objective / 48).backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    got = language_model_loss(model, tokens, chunk_tokens=chunk_tokens, scale=1 / 48, z_loss=z_loss, teacher=teacher)
    got.objective.backward()
    assert got.distillation is not None
    for ours, plain in ((got.objective, objective / 48), (got.cross_entropy, entropy), (got.distillation, divergence)):
        assert ours.item() == pytest.approx(plain.item(), rel=1e-10)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], atol=1e-10, rtol=1e-10)
    assert all(p.grad is None and not p.requires_grad for p in teacher.model.parameters())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
@pytest.mark.parametrize("top_k", [0, 4])
def test_compiled_and_eager_agree(device: str, top_k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both against autograd on full logits, with scalings as Granite has them; without a GPU no code is generated."""
    if device == "cpu":
        graph = torch.compile(loss_module._loss_and_gradient, fullgraph=True, dynamic=False, backend="aot_eager")
        monkeypatch.setattr(loss_module, "_compiled_loss", lambda: graph)
    how = Distillation(0.6, 2.0, top_k)
    targets = torch.randint(0, VOCAB, (12,), generator=torch.Generator().manual_seed(0)).to(device)
    lesson = Lesson(random(12, 5, seed=5).to(device), random(VOCAB, 5, seed=6).to(device), 2.0, how)
    found = []
    for fused in (None, False, True):
        hidden, head = (random(n, 8, seed=n).to(device).requires_grad_() for n in (12, VOCAB))
        if fused is None:
            logits, taught = hidden @ head.t() / 3, lesson.hidden_NE @ lesson.head_VE.t() / 2
            entropy = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
            objective = 0.4 * entropy + 0.6 * plain_divergence(logits, taught, how)
        else:
            objective = chunked_cross_entropy(
                hidden, head, targets, chunk_tokens=12, logits_scaling=3.0, fused=fused, lesson=lesson
            ).objective
        (objective * 1.5).backward()
        found.append((objective.detach(), hidden.grad, head.grad))
    for ours in found[1:]:
        for got, expected in zip(ours, found[0], strict=True):
            torch.testing.assert_close(got, expected, atol=1e-10, rtol=1e-10)


def test_full_logits_are_never_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither model's logits are ever larger than a chunk."""
    largest: list[int] = []
    original = torch.nn.functional.linear

    def watched(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if weight.shape[0] == VOCAB:
            largest.append(x.shape[0])
        return original(x, weight, bias)

    monkeypatch.setattr("torch.nn.functional.linear", watched)
    model = tiny_llama(dtype=torch.float64)
    language_model_loss(
        model, RandomBatches().step_tokens(0), chunk_tokens=16, teacher=teacher_of(HOW[1])
    ).objective.backward()
    assert len(largest) == 6 and max(largest) == 16  # 48 tokens, two models


class SameTokens(RandomBatches):
    def step_tokens(self, step: int) -> Tensor:
        return super().step_tokens(0)


class Recorder(Callback):
    def __init__(self) -> None:
        self.history: list[tuple[float, float]] = []

    def after_step(self, trainer: Trainer) -> None:
        assert trainer.last is not None
        self.history.append((trainer.last.loss, trainer.extra_metrics["distill_loss"]))


def test_the_loop_reports_both_and_follows_the_teacher() -> None:
    """A student of a fixed teacher gets closer to it; micro-batches do not change the step."""
    histories = []
    for sizes in ((4,), (3, 1)):
        recorder = Recorder()
        model, options = tiny_llama(dtype=torch.float64), {"num_steps": 12, "precision": "fp64"}
        trainer = make_trainer(model, [recorder], batches=SameTokens(sizes), **options)
        trainer.teacher = teacher_of(Distillation(1.0))
        trainer.run()
        histories.append(recorder.history)
    assert histories[0] == [pytest.approx(values, rel=1e-6) for values in histories[1]]
    assert histories[0][-1][1] < 0.9 * histories[0][0][1]
    assert histories[0][0][0] == pytest.approx(math.log(VOCAB), rel=0.2)  # the cross-entropy, though its weight is 0
