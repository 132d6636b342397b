"""What pruning without training measures on a text: gradients, exact per-example squared gradients, layer inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dwindle.anatomy.positions import warn_beyond_positions
from dwindle.core.errors import UserError
from dwindle.core.progress import Bar
from dwindle.pruning.config import PruneConfig
from dwindle.pruning.curvature import LayerCurvature
from dwindle.pruning.metrics import Metric, metric_named
from dwindle.pruning.saliency import Scores, begin_scores, group_sums, rows_with_gradients
from dwindle.pruning.second_order import InputStatistics, InputTaps, taps_of, units_to_watch
from dwindle.pruning.surgery import Prunable

_PASS_TOKENS = {"cpu": 2048, "cuda": 16384}
"""Tokens per pass where windows need not be separate; ``_PASS_LOGITS`` limits the logits."""
_PASS_LOGITS = 2**29


@dataclass(slots=True)
class Calibration:
    """By tensor name: g, the mean gradient, and f, the diagonal curvature (squared gradient of one example, or
    layer-wise); by tap: the layers' inputs."""

    gradients: dict[str, Tensor] = field(default_factory=dict)
    fishers: Mapping[str, Tensor] = field(default_factory=dict)
    inputs: InputStatistics | None = None
    groups: Scores | None = None
    """Mean over sequences of the squared derivative by a mask on each head and channel (metric ``group``)."""
    loss: float | None = None


def calibrate(
    prunable: Prunable,
    windows: Tensor | None,
    metric: Metric,
    config: PruneConfig,
    *,
    always: bool = False,
    names: set[str] | None = None,
    bar: Bar | None = None,
) -> Calibration:
    """Passes over the windows: backward too if the metric uses gradients, for the output projections (or ``names``).

    An example is a sequence, so f is E[g²] exactly; gradients of everything else are never formed. The inputs of the
    layers are collected for the second-order update and the layer-wise metrics, only for prunable kinds. ``always``
    makes passes even if nothing is collected here, for those who observe the model. ``bar`` counts windows over
    several calibrations.
    """
    found = Calibration()
    needs_inputs = config.second_order or "inputs" in metric.needs
    if not metric.needs and not needs_inputs and not always:
        return found
    assert windows is not None, "this needs calibration text"
    warn_beyond_positions(windows.shape[1], prunable.model.config)
    taps: InputTaps | None = None
    if needs_inputs:
        num_tokens = min(config.num_gram_tokens or windows.numel(), windows.numel())
        found.inputs = InputStatistics(num_tokens)
        units = units_to_watch(metric, config.effective_groups, second_order=config.second_order)
        taps = InputTaps(prunable.model, taps_of(prunable.anatomy, units, prunable.physical), found.inputs.add)
    try:
        with Bar("calibrating", len(windows)) if bar is None else nullcontext(bar) as bar:
            found.loss = _passes(prunable, windows, metric, config, found, taps, names, bar)
    finally:
        if taps is not None:
            taps.remove()
    if not torch.isfinite(torch.tensor(found.loss)):
        raise UserError("calibration: the loss is not finite: the source's weights or the data are broken")
    if metric.curvature is not None:
        assert found.inputs is not None
        found.fishers = LayerCurvature(prunable, found.inputs, metric, config.damping)
    return found


def batch_size(prunable: Prunable, windows: Tensor) -> int:
    """Windows per pass where they need not be separate."""
    device = next(prunable.model.parameters()).device
    vocab: int = prunable.model.config.vocab_size
    tokens = min(_PASS_TOKENS.get(device.type, 2048), _PASS_LOGITS // vocab)
    return max(1, tokens // windows.shape[1])


def _passes(
    prunable: Prunable,
    windows: Tensor,
    metric: Metric,
    config: PruneConfig,
    found: Calibration,
    taps: InputTaps | None,
    wanted: set[str] | None,
    bar: Bar,
) -> float:
    """The mean loss; every window contributes an equal share of the collected tokens.

    A window is a pass of its own only where it must be: for squared gradients.
    """
    model, scored, blocks = prunable.model, dict[str, nn.Parameter](), "layer" in config.effective_groups
    if metric.needs & {"gradient", "fisher", "groups"}:
        rows = rows_with_gradients(prunable, metric, blocks=blocks)
        names = {row.name for row in rows} if wanted is None else wanted
        scored = {name: p for name, p in prunable.parameters.items() if name in names}
    device = next(model.parameters()).device
    total = torch.zeros((), dtype=torch.float64, device=device)
    size = 1 if metric.needs & {"fisher", "groups"} else batch_size(prunable, windows)
    first = 0
    gradients = _Gradients(prunable, found, metric)
    with _only_these_need_gradients(model, scored.values()), gradients.taken_from(scored):
        for batch in torch.split(windows, size):
            last = first + len(batch)
            if taps is not None and found.inputs is not None:
                share = found.inputs.num_tokens * last // len(windows)
                taps.open(share - found.inputs.num_tokens * first // len(windows))
            batch = batch.to(device)
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss
            total += loss.detach() * len(batch)
            if scored:
                gradients.share = len(batch) / len(windows)
                loss.backward()
                gradients.finish(scored, last, blocks=blocks)
            first = last
            bar.advance(len(batch))
    return float(total) / len(windows)


def _on_gradient(parameter: Any, call: Callable[[Tensor], None]) -> RemovableHandle:
    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(call)
    return handle


class _Gradients:
    """Adds every gradient to the sums as soon as the backward pass has it, and frees it: never are all there at once.

    For the metric ``group`` only its sums over rows and columns are kept.
    """

    def __init__(self, prunable: Prunable, found: Calibration, metric: Metric) -> None:
        self._prunable, self._found, self._needs = prunable, found, metric.needs
        self.share = 1.0
        """Of the windows in the present pass."""
        self._matrices = {row.name for _, row in prunable.outputs}
        self._sums: dict[str, tuple[Tensor, Tensor]] = {}
        self._vectors: dict[str, Tensor] = {}
        self._taken: set[str] = set()

    @contextmanager
    def taken_from(self, scored: Mapping[str, nn.Parameter]) -> Iterator[None]:
        handles = [_on_gradient(p, partial(self._take, name)) for name, p in scored.items()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _take(self, name: str, parameter: Tensor) -> None:
        self._prunable.mask_gradients([name])
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None, name
        self._taken.add(name)
        if "groups" in self._needs and name in self._matrices:
            self._sums[name] = group_sums(parameter.detach(), gradient)
        elif "groups" in self._needs:
            self._vectors[name] = gradient
        if "gradient" in self._needs:
            _add(self._found.gradients, name, gradient, self.share)
        if "fisher" in self._needs:
            assert isinstance(self._found.fishers, dict)
            _add(self._found.fishers, name, gradient.square(), self.share)

    def finish(self, scored: Mapping[str, nn.Parameter], count: int, *, blocks: bool) -> None:
        """After a backward pass: the last of the first ``count`` sequences, over which ``group`` is averaged."""
        assert self._taken == {*scored}, "a gradient is missing"
        self._taken.clear()
        if "groups" in self._needs:
            this = begin_scores(
                self._prunable, self._vectors, None, metric_named("group"), blocks=blocks, reduced=self._sums
            )()
            self._found.groups = this.smoothed(self._found.groups, 1 - 1 / count)


def _add(sums: dict[str, Tensor], name: str, value: Tensor, share: float) -> None:
    if name in sums:
        sums[name].add_(value, alpha=share)
    else:
        sums[name] = value * share


@contextmanager
def _only_these_need_gradients(model: nn.Module, those: Iterable[nn.Parameter]) -> Iterator[None]:
    before, chosen = {name: p.requires_grad for name, p in model.named_parameters()}, {id(p) for p in those}
    try:
        for parameter in model.parameters():
            parameter.requires_grad_(id(parameter) in chosen)
        yield
    finally:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(before[name])
            parameter.grad = None
