"""Gradients for scoring without training: the mean gradient and the exact per-example squared gradient."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from dwindle.errors import UserError
from dwindle.progress import track
from dwindle.pruning.saliency import Metric
from dwindle.pruning.surgery import Prunable


@dataclass(slots=True)
class Calibration:
    """By tensor name: g, the mean gradient, and f, the mean squared gradient of one example."""

    gradients: dict[str, Tensor] = field(default_factory=dict)
    fishers: dict[str, Tensor] = field(default_factory=dict)
    loss: float | None = None


def calibrate(prunable: Prunable, windows: Tensor | None, metric: Metric) -> Calibration:
    """One backward pass for each window, with gradients for the output projections only.

    An example is a sequence, so f is E[g²] exactly; gradients of everything else are never formed.
    """
    found = Calibration()
    if not metric.needs:
        return found
    assert windows is not None, "this metric needs calibration text"
    model = prunable.model
    anatomy = prunable.anatomy
    outputs = [anatomy.output_row(layer, kind) for layer in range(anatomy.num_layers) for kind in ("attn", "ffn")]
    names = {row.name for row in outputs}
    scored = {name: p for name, p in model.named_parameters() if name in names}
    device = next(model.parameters()).device
    total = 0.0
    with _only_these_need_gradients(model, set(scored)):
        for window in track(windows, "calibrating", len(windows)):
            batch = window[None].to(device)
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss
            loss.backward()
            total += loss.item()
            prunable.mask_gradients()
            _accumulate(found, scored, metric, len(windows))
    found.loss = total / len(windows)
    if not torch.isfinite(torch.tensor(found.loss)):
        raise UserError("calibration: the loss is not finite: the source's weights or the data are broken")
    return found


def _accumulate(found: Calibration, scored: dict[str, nn.Parameter], metric: Metric, count: int) -> None:
    for name, parameter in scored.items():
        gradient = parameter.grad
        assert gradient is not None, name
        if "gradient" in metric.needs:
            _add(found.gradients, name, gradient, count)
        if "fisher" in metric.needs:
            _add(found.fishers, name, gradient.square(), count)
        parameter.grad = None


def _add(sums: dict[str, Tensor], name: str, value: Tensor, count: int) -> None:
    if name in sums:
        sums[name].add_(value, alpha=1 / count)
    else:
        sums[name] = value / count


@contextmanager
def _only_these_need_gradients(model: nn.Module, names: set[str]) -> Iterator[None]:
    before = {name: p.requires_grad for name, p in model.named_parameters()}
    try:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in names)
        yield
    finally:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(before[name])
            parameter.grad = None
