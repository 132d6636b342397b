"""On a GPU: an event queues its work behind the optimizer's step and does not wait for it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from masked_steps import adamw

from dwindle.pruning.metrics import metric_named
from dwindle.pruning.saliency import begin_scores
from dwindle.pruning.second_order import InputStatistics, InputTaps, repair, taps_of
from dwindle.pruning.surgery import Prunable
from tiny import random_group, tiny_model, tokens

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
KINDS = ("attn", "ffn", "stem")


def trained() -> tuple[Prunable, torch.optim.Optimizer]:
    """Grouped-query heads, so that gradients of pruned ones are masked too; fp32, as in training."""
    prunable = Prunable(tiny_model("llama").float().cuda())
    optimizer = adamw(prunable.model)
    batch = tokens(2, 16).cuda()
    prunable.model(input_ids=batch, labels=batch).loss.backward()
    optimizer.step()
    return prunable, optimizer


@contextmanager
def waits() -> Iterator[Callable[[], int]]:
    """Counts how often the host waits for the device."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield lambda: sum("called a synchronizing" in str(warning.message) for warning in seen)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("kind", KINDS)
def test_scoring_and_zeroing_do_not_wait(kind: str) -> None:
    prunable, optimizer = trained()
    gradients = {name: p.grad for name, p in prunable.parameters.items() if p.grad is not None}
    group = random_group(kind, prunable.alive, 1)
    begin_scores(prunable, gradients, None, metric_named("taylor"))()  # what is set up once may wait
    with waits() as count:
        begin_scores(prunable, gradients, None, metric_named("taylor"))
        prunable.prune(group, optimizer)
        prunable.mask_gradients()
        assert count() == 0
    for name, parameter in prunable.parameters.items():
        for tensor in (parameter, parameter.grad, *(optimizer.state[parameter][k] for k in ("exp_avg", "exp_avg_sq"))):
            assert tensor is not None
            kept = prunable.anatomy.slice(prunable.anatomy[name], tensor, prunable.alive, prunable.physical)
            assert tensor.count_nonzero() == kept.count_nonzero(), name


@pytest.mark.parametrize("kind", KINDS)
def test_a_repair_waits_once_and_equals_the_cpu(kind: str) -> None:
    results: list[dict[str, Any]] = []
    for device in ("cuda", "cpu"):
        prunable, _ = trained()
        prunable = Prunable(prunable.model.to(device))
        statistics = InputStatistics(64)
        taps = InputTaps(prunable.model, taps_of(prunable.anatomy), statistics.add)
        taps.open(64)
        with torch.no_grad():
            prunable.model(input_ids=tokens(4, 16).to(device))
        taps.remove()
        keep = prunable.alive.without(random_group(kind, prunable.alive, 1))
        with waits() as count:
            repair(prunable, keep, statistics, damping=0.01)
            assert count() <= 1
        results.append({name: p.detach().cpu() for name, p in prunable.parameters.items()})
    for name, ours in results[0].items():
        assert torch.allclose(ours, results[1][name], rtol=1e-2, atol=1e-3), name


def test_fused_scores_on_the_gpu() -> None:
    prunable, _ = trained()
    gradients = {name: p.grad for name, p in prunable.parameters.items() if p.grad is not None}
    plain = begin_scores(prunable, gradients, None, metric_named("taylor"))()
    fused = begin_scores(prunable, gradients, None, metric_named("taylor"), fused=True)()
    ours, theirs = ([*s.attn, *s.ffn, s.stem] for s in (fused, plain))
    assert all(torch.allclose(a, b, rtol=1e-5) for a, b in zip(ours, theirs, strict=True))
