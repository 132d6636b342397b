"""What pruning without training measures on a text: gradients, exact per-example squared gradients, layer inputs."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

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
"""Tokens per pass; ``_PASS_LOGITS`` limits the logits, and on a GPU memory limits passes with gradients."""
_PASS_LOGITS = 2**29
_SHARING = frozenset({"cuda"})
"""Devices on which several examples share a pass: a CPU gains nothing and would need all their logits at once."""
_EXAMPLE_ELEMENTS = 2**26
"""Limit of the per-example gradients that exist at a time."""


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
    makes passes even if nothing is collected here, for observers of the model. ``bar`` counts windows over several
    calibrations.
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
        units = units_to_watch(metric, config.effective_groups, config.second_order)
        taps = InputTaps(prunable.model, taps_of(prunable.anatomy, units, prunable.physical), found.inputs.add)
        taps.open(num_tokens, len(windows))
    try:
        with Bar("calibrating", len(windows)) if bar is None else nullcontext(bar) as bar:
            found.loss = _passes(prunable, windows, metric, config, found, names, bar)
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
    """Windows per pass."""
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
    wanted: set[str] | None,
    bar: Bar,
) -> float:
    """The mean loss."""
    model, scored, blocks = prunable.model, dict[str, nn.Parameter](), "layer" in config.effective_groups
    if metric.needs & {"gradient", "fisher", "groups"}:
        rows = rows_with_gradients(prunable, metric, blocks=blocks)
        names = {row.name for row in rows} if wanted is None else wanted
        scored = {name: p for name, p in prunable.parameters.items() if name in names}
    device = next(model.parameters()).device
    total = torch.zeros((), dtype=torch.float64, device=device)
    gradients = _Gradients(prunable, found, metric, scored, blocks=blocks)
    first, most = 0, batch_size(prunable, windows) if gradients.takes_batches else 1
    size = 1 if scored and device.type == "cuda" else most  # the first window shows how much memory one needs
    with _only_these_need_gradients(model, gradients.by_autograd), gradients.taken():
        while first < len(windows):
            batch = windows[first : first + size].to(device)
            last = first + len(batch)
            before = _allocated(device)
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss
            total += loss.detach() * len(batch)
            if first == 0:
                size = min(most, _fitting(device, _allocated(device) - before))
            if scored:
                gradients.add_from(loss, len(batch), len(windows))
                gradients.finish(last)
            first = last
            bar.advance(len(batch))
    prunable.mask_gradients(found.gradients)
    prunable.mask_gradients(found.fishers)
    return float(total) / len(windows)


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _fitting(device: torch.device, held: int) -> int:
    """Windows for half of the free memory of a GPU, if one holds so much after its forward pass and the backward pass
    needs as much again."""
    if device.type != "cuda":
        return sys.maxsize
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return max(1, free // (4 * max(held, 1)))


class _Gradients:
    """Adds every gradient to the sums as soon as the backward pass has it, and frees it, so that they never exist all
    at once.

    Squares are of the gradient of one example (a window). Autograd gives the sum over a batch, so each example needs
    its own pass, in which a GPU spends more time on launching kernels than on running them. On GPUs, linear layers are
    watched instead: the gradient of an example is δᵀx, from the layer's input x and the derivative δ of the example's
    loss by its output. If anything else is scored (norms, biases), each example is a pass there, too.

    For the metric ``group`` only sums over rows and columns are kept.
    """

    def __init__(
        self,
        prunable: Prunable,
        found: Calibration,
        metric: Metric,
        scored: Mapping[str, nn.Parameter],
        *,
        blocks: bool,
    ) -> None:
        self._prunable, self._found, self._needs, self._scored = prunable, found, metric.needs, scored
        self._share, self._blocks = 1.0, blocks
        self._matrices = {row.name for _, row in prunable.outputs}
        self._sums: dict[str, tuple[Tensor, Tensor]] = {}
        """Row and column sums of every example of a pass."""
        self._vectors: dict[str, Tensor] = {}
        self._taken: set[str] = set()
        self._of_examples = bool(metric.needs & {"fisher", "groups"})
        self._watched: dict[str, nn.Module] = {}
        if self._of_examples and next(prunable.model.parameters()).device.type in _SHARING:
            names = {id(parameter): name for name, parameter in scored.items()}
            for module in prunable.model.modules():
                if isinstance(module, nn.Linear) and id(module.weight) in names:
                    self._watched[names[id(module.weight)]] = module
            if self._watched.keys() != scored.keys():
                self._watched = {}

    @property
    def takes_batches(self) -> bool:
        return bool(self._watched) or not self._of_examples

    @property
    def by_autograd(self) -> list[nn.Parameter]:
        """Parameters whose gradients the backward pass computes."""
        return [] if self._watched else [*self._scored.values()]

    @contextmanager
    def taken(self) -> Iterator[None]:
        with ExitStack() as hooks:
            for name, module in self._watched.items():
                hooks.enter_context(module.register_forward_hook(partial(self._watch, name)))
            for name, parameter in {} if self._watched else self._scored.items():
                take = partial(self._take_gradient, name)
                hooks.enter_context(cast(Any, parameter).register_post_accumulate_grad_hook(take))
            yield

    def add_from(self, loss: Tensor, count: int, of: int) -> None:
        """Backward pass of the mean loss of ``count`` of the windows."""
        self._share = (1 if self._watched else count) / of
        (loss * count if self._watched else loss).backward()  # type: ignore[no-untyped-call]

    def _watch(self, name: str, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        if not output.requires_grad:
            output.requires_grad_()  # the first layer that is scored: nothing before it is differentiated
        x_BTI = args[0].detach()
        cast(Any, output).register_hook(lambda delta_BTO: self._take_examples(name, x_BTI, delta_BTO))

    def _take_examples(self, name: str, x_BTI: Tensor, delta_BTO: Tensor) -> None:
        at_once = max(1, _EXAMPLE_ELEMENTS // (x_BTI.shape[-1] * delta_BTO.shape[-1]))
        for x, delta in zip(torch.split(x_BTI, at_once), torch.split(delta_BTO, at_once), strict=True):
            self._take(name, delta.mT @ x)

    def _take_gradient(self, name: str, parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None, name
        self._take(name, gradient[None])

    def _take(self, name: str, gradients_B: Tensor) -> None:
        """Add the gradients of some examples, or the mean over a batch."""
        self._taken.add(name)
        is_one = len(gradients_B) == 1
        if "groups" in self._needs and name in self._matrices:
            sums = group_sums(self._scored[name].detach(), gradients_B)
            before = self._sums.get(name, (sums[0][:0], sums[1][:0]))
            self._sums[name] = torch.cat([before[0], sums[0]]), torch.cat([before[1], sums[1]])
        elif "groups" in self._needs:
            self._vectors[name] = gradients_B[0]
        if "gradient" in self._needs:
            _add(self._found.gradients, name, gradients_B[0] if is_one else gradients_B.sum(0), self._share)
        if "fisher" in self._needs:
            assert isinstance(self._found.fishers, dict)
            squares = gradients_B[0].square() if is_one else gradients_B.norm(dim=0).square()
            _add(self._found.fishers, name, squares, self._share)

    def finish(self, count: int) -> None:
        """After a backward pass: the last of the first ``count`` windows, over which ``group`` is averaged."""
        assert self._taken == {*self._scored}, "a gradient is missing"
        self._taken.clear()
        if "groups" not in self._needs:
            return
        in_pass = len(next(iter(self._sums.values()))[0])
        for place in range(in_pass):
            sums = {name: (rows[place], columns[place]) for name, (rows, columns) in self._sums.items()}
            this = begin_scores(
                self._prunable, self._vectors, None, metric_named("group"), blocks=self._blocks, reduced=sums
            )()
            self._found.groups = this.smoothed(self._found.groups, 1 - 1 / (count - in_pass + place + 1))
        self._sums.clear()


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
