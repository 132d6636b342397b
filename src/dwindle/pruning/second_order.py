"""The second-order update (EfficientLLM-B): record layer inputs, regress, update the remaining weights.

``InputTaps`` records the inputs of the linear layers with prunable input columns: ``o`` and ``down``, and for the stem
the readers of every norm's output. ``repair`` then updates the kept columns, before the others are zeroed.

- Tied embeddings: updating a tied head would change the input embedding of every token, so it is not updated (its
  tensor is not a reader in the anatomy). An untied head is.
- Norms divide by the number of alive channels. Removing hidden channels therefore scales their output by a factor c
  that is nearly the same for all tokens; the gain of every norm in front of readers is divided by it.
- Adam's moments are unchanged. The gradient of a kept column is (dL/dy)·x_kept; the update preserves y, and with it
  dL/dy, as well as possible and does not touch x. So the moments are as valid for the new weights as for the old.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dwindle.anatomy.anatomy import Anatomy, Removed, Row
from dwindle.anatomy.structure import KIND_OF, UNIT_OF, Kind, Structure
from dwindle.data.batches import BatchStream
from dwindle.distributed.async_copy import sent
from dwindle.distributed.collectives import Exchange, num_processes
from dwindle.distributed.shards import gathered, is_idle, local, row_range
from dwindle.pruning.gram import Gram, Inputs, Regression, Sample, finished, removal_update, spread
from dwindle.pruning.metrics import Metric
from dwindle.pruning.surgery import Prunable

Sink = Callable[[str, Tensor], None]


def units_to_watch(metric: Metric, groups: Iterable[Kind], second_order: bool) -> tuple[str, ...]:
    """The kinds of columns whose inputs are needed: the prunable ones, and those that the metric scores."""
    units = [UNIT_OF[kind] for kind in groups if kind in UNIT_OF] if second_order else []
    return tuple(dict.fromkeys([*(("query", "ffn") if "inputs" in metric.needs else ()), *units]))


@dataclass(frozen=True, slots=True)
class Tap:
    """One input, and the matrices that read it (their columns are removed together)."""

    key: str
    """The module that is hooked, by its name in the source."""
    rows: tuple[Row, ...]
    unit: str
    """What the columns count: ``query``, ``ffn`` or ``hidden``."""
    at_output: bool = False
    """Whether the input is that module's output (the head is not always called as a module)."""
    norm: str | None = None
    """The gain of the norm that makes this input; None where readers see the residual stream itself (OLMo 2)."""
    module: str = ""
    """The hooked module's name in the model."""

    @property
    def layer(self) -> int | None:
        """The layer that its columns belong to; None for hidden channels, which all layers share."""
        return None if self.unit == "hidden" else self.rows[0].layer


def taps_of(
    anatomy: Anatomy, units: tuple[str, ...] = ("query", "ffn", "hidden"), structure: Structure | None = None
) -> list[Tap]:
    """Every input with prunable columns of a model with this structure, from the anatomy table only."""
    structure = structure or anatomy.source
    readers: dict[tuple[str, str], list[Row]] = {}
    for row in (row for row in anatomy.rows if row.is_in(structure)):
        if row.layer is not None and len(row.axes) == 2 and row.axes[1][0] in units:
            writes = row.axes == (("hidden",), ("hidden",))  # its inputs are inside the block, not the residual stream
            parent = row.module if writes else row.module.rpartition(".")[0]
            readers.setdefault((parent, row.axes[1][0]), []).append(row)
    taps = [
        Tap(
            rows[0].module,
            tuple(rows),
            unit,
            norm=_norm_before(parent, anatomy) if unit == "hidden" else None,
            module=anatomy.name_in(rows[0], structure).rpartition(".")[0],
        )
        for (parent, unit), rows in readers.items()
    ]
    if "hidden" in units:
        heads = tuple(row for row in anatomy.rows if row.name == "lm_head.weight")  # none where it is tied
        final = next(row for row in anatomy.rows if row.layer is None and row.is_norm)
        taps.append(Tap(final.module, heads, "hidden", at_output=True, norm=final.name, module=final.module))
    return taps


def _norm_before(parent: str, anatomy: Anatomy) -> str | None:
    """The gain in front of a block, in families that have one there."""
    layer, _, part = parent.rpartition(".")
    norm = anatomy.family.norm_before.get(part)
    return None if norm is None else f"{layer}.{norm}.weight"


class InputTaps:
    """Passes samples of layer inputs to ``sink`` while open.

    The hooks are permanent, read a plain attribute and store what they see on the module. So they work inside compiled
    layers, which ignore hooks that are added or removed later. They remain open during the backward pass, so that
    recomputed activations use the same graph.
    """

    def __init__(self, model: Any, taps: list[Tap], sink: Sink, *, only_in_training: bool = False) -> None:
        self.taps, self.sink, self.only_in_training = taps, sink, only_in_training
        self._num_tokens = 0
        """Still to be taken, or of all sequences if their number is known."""
        self._num_sequences: int | None = None
        self._is_placeholder = False
        """Whether the batch is the placeholder (token 0) of an idle process, which must not count."""
        backbone: nn.Module = model.model
        self._modules: list[Any] = [model.get_submodule(tap.module) for tap in taps]
        self._handles: list[RemovableHandle] = []
        for tap, module in zip(taps, self._modules, strict=True):
            module.tap_stride = 0
            module.tapped = None
            handle = module.register_forward_hook(_keep_output) if tap.at_output else None
            self._handles.append(handle or module.register_forward_pre_hook(_keep_input))
        self._handles.append(backbone.register_forward_pre_hook(self._before, with_kwargs=True))
        self._handles.append(backbone.register_forward_hook(self._after))

    def open(self, num_tokens: int, num_sequences: int | None = None) -> None:
        """Take evenly spaced tokens of every sequence: together ``num_tokens``, or fewer, but at least one of each.

        Which ones depends on nothing but the sequence. If the number of sequences in the next passes is not known,
        tokens are taken from these passes until there are enough.
        """
        self._num_tokens, self._num_sequences = num_tokens, num_sequences

    def close(self) -> None:
        self._num_tokens = 0
        self._set_stride(0)

    def remove(self) -> None:
        """Remove the hooks and their attributes from the model."""
        for handle in self._handles:
            handle.remove()
        for module in self._modules:
            del module.tap_stride, module.tapped

    def _set_stride(self, stride: int) -> None:
        for module in self._modules:
            module.tap_stride = stride
            module.tapped = None

    def _before(self, backbone: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = [kwargs[name] for name in ("input_ids", "inputs_embeds") if kwargs.get(name) is not None]
        batch, length = (given or args)[0].shape[:2]
        is_open = self._num_tokens > 0 and (backbone.training or not self.only_in_training)
        each = max(self._num_tokens // (self._num_sequences or batch), 1)
        self._set_stride(-(-length // each) if is_open else 0)
        self._is_placeholder = is_idle(backbone)

    def _after(self, backbone: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        seen = 0
        for tap, module in zip(self.taps, self._modules, strict=True):
            if module.tapped is not None:
                x_TN = module.tapped[:0] if self._is_placeholder else module.tapped
                seen = len(x_TN)
                self.sink(tap.key, x_TN)
                module.tapped = None
        if self._num_sequences is None:
            self._num_tokens -= seen


def _keep_input(module: Any, args: tuple[Tensor, ...]) -> None:
    if module.tap_stride:
        module.tapped = _thinned(args[0], module.tap_stride)


def _keep_output(module: Any, args: tuple[Tensor, ...], output: Tensor) -> None:
    if module.tap_stride:
        module.tapped = _thinned(output, module.tap_stride)


def _thinned(x_BLN: Tensor, stride: int) -> Tensor:
    """Every ``stride``-th token of each sequence, in the precision that the layer computes in."""
    device = x_BLN.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x_BLN.dtype
    x_BLN = x_BLN.detach()[:, ::stride].to(dtype, copy=True)  # a view would keep all activations in memory
    return x_BLN.flatten(0, 1)


class InputStatistics(dict[str, Inputs]):
    """Statistics of the inputs by tap: a Gram or a sample, whichever is smaller."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__()
        self.num_tokens = num_tokens

    def add(self, key: str, x_TN: Tensor) -> None:
        if key not in self:
            is_wide = 4 * x_TN.shape[1] >= x_TN.element_size() * self.num_tokens
            self[key] = Sample() if is_wide else Gram()
        self[key].add(x_TN)


class InputWatch:
    """Records the layer inputs of a model in training, one step at a time, across compactions."""

    def __init__(self, units: tuple[str, ...], num_tokens: int) -> None:
        self._units, self._num_tokens = units, num_tokens
        self.inputs = InputStatistics(-(-num_tokens // num_processes()))
        self._taps: InputTaps | None = None
        self._model: object = None

    def attach(self, prunable: Prunable) -> None:
        """Hook the current model, before its first step: a layer that is already compiled ignores new hooks."""
        if prunable.model is not self._model:
            taps = taps_of(prunable.anatomy, self._units, prunable.physical)
            self._taps = InputTaps(prunable.model, taps, self.inputs.add, only_in_training=True)
            self._model = prunable.model

    def listen(self, batches: object) -> None:
        """Record in the next step, whose number of sequences is known in our own loop."""
        assert self._taps is not None
        self._taps.open(self._num_tokens, batches.sequences_per_step if isinstance(batches, BatchStream) else None)

    def forget(self) -> None:
        """Free the recorded inputs after the step."""
        self.inputs.clear()
        if self._taps is not None:
            self._taps.close()


@dataclass(frozen=True, slots=True)
class _Problem:
    """One input with removed columns; the tensors are on the device."""

    number: int
    tap: Tap
    removed_P: Tensor
    kept_R: Tensor


@torch.no_grad()
def repair(
    prunable: Prunable,
    keep: Structure,
    inputs: Mapping[str, Inputs],
    *,
    damping: float,
) -> None:
    """Update the kept columns so that the outputs of layers change least when the model is pruned to ``keep``.

    Call it before ``Prunable.prune_to(keep)``. Rows that are pruned already remain zero.

    All problems are launched on the device before the first result is read.
    """
    exchange = Exchange()
    offset = prunable.anatomy.family.gain_offset
    problems = _problems(prunable, keep)
    factors: dict[int, Tensor] = {}
    regressions: dict[int, Regression] = {}
    for problem in problems:
        number, tap = problem.number, problem.tap
        gain = None if tap.norm is None else gathered(prunable.parameters[tap.norm]) + offset
        seen = inputs[tap.key].at_owner(number, exchange)
        if exchange.is_mine(number):
            if gain is not None:
                factors[number] = norm_factor(seen.mean_square(), gain, problem.removed_P, len(problem.kept_R))
            if tap.rows:
                regressions[number] = seen.regression(problem.removed_P, problem.kept_R, damping)
    found = dict(zip(regressions, finished(list(regressions.values())), strict=True))
    for problem in problems:
        _apply(prunable, problem, found.get(problem.number), factors.get(problem.number), exchange)


def _problems(prunable: Prunable, keep: Structure) -> list[_Problem]:
    """Every input that loses columns; their indices are copied to the device in one transfer."""
    removed = prunable.anatomy.removed(prunable.alive, keep, prunable.physical)
    units = tuple(dict.fromkeys(unit for unit, _ in removed if unit in KIND_OF))
    taps = [tap for tap in taps_of(prunable.anatomy, units, prunable.physical) if (tap.unit, tap.layer) in removed]
    taps = [tap for tap in taps if all(row.is_in(keep) for row in tap.rows)]  # of a removed block nothing is kept
    one_each = {(tap.unit, tap.layer): tap for tap in taps}
    places = {key: columns(prunable, tap, removed) for key, tap in one_each.items()}
    device = next(iter(prunable.parameters.values())).device
    there = iter(sent([part for pair in places.values() for part in pair], device))
    on_device = {key: (next(there), next(there)) for key in places}
    return [_Problem(number, tap, *on_device[tap.unit, tap.layer]) for number, tap in enumerate(taps)]


def _apply(
    prunable: Prunable, problem: _Problem, a_PR: Tensor | None, factor: Tensor | None, exchange: Exchange
) -> None:
    """Apply the owner's result to all readers of the input and to the norm before it."""
    parameters, tap, removed_P = prunable.parameters, problem.tap, problem.removed_P
    weights = [local(parameters[row.name]) for row in tap.rows]
    gain = None if tap.norm is None else local(parameters[tap.norm])
    if weights:
        width = weights[0].shape[1]
        a_PN = weights[0].new_zeros(len(removed_P), width)
        if a_PR is not None:
            a_PN = spread(a_PR.to(a_PN.dtype), problem.kept_R, width)
        a_PN = exchange.from_owner(problem.number, a_PN)
        for weight in weights:
            removal_update(weight, removed_P, a_PN)
    if gain is not None:
        factor = gain.new_zeros(()) if factor is None else factor.to(gain.dtype)
        factor = exchange.from_owner(problem.number, factor)
        offset = prunable.anatomy.family.gain_offset
        if offset:
            gain.add_(offset).div_(factor).sub_(offset)
            gain.masked_fill_(_pruned_rows(prunable, cast(str, tap.norm)), 0.0)
        else:
            gain.div_(factor)


def _pruned_rows(prunable: Prunable, norm: str) -> Tensor:
    """Which of this process's entries of a norm are pruned already."""
    parameter = prunable.parameters[norm]
    first, count = row_range(parameter)
    return prunable.pruned["stem"][0][first : first + count].to(parameter.device)


def norm_factor(mean_square_N: Tensor, gain_N: Tensor, removed_P: Tensor, num_kept: int) -> Tensor:
    """c = √((kept/all) / (1 − e)): the factor by which removing channels scales the output of an ``ActiveRMSNorm``.

    e is the removed channels' mean share of the squared norm of its input: (x/gain)² averages to 1 over all channels.
    """
    num_all = num_kept + len(removed_P)
    gain_P = gain_N[removed_P].to(mean_square_N.dtype)
    share = torch.where(gain_P == 0, 1.0, mean_square_N[removed_P] / gain_P.square()).sum() / num_all
    return (num_kept / num_all / (1 - share.clamp(0.0, 0.9))).sqrt()


def columns(prunable: Prunable, tap: Tap, removed: Removed) -> tuple[Tensor, Tensor]:
    """Positions of the removed and of the kept columns in the current tensors."""
    is_kept = ~prunable.pruned[KIND_OF[tap.unit]][tap.layer or 0]
    now_removed = torch.tensor(removed[tap.unit, tap.layer])
    is_kept[now_removed] = False
    stretch = prunable.anatomy.stretch(tap.unit)
    both = (now_removed, is_kept.nonzero()[:, 0])
    removed_P, kept_R = ((where[:, None] * stretch + torch.arange(stretch)).flatten() for where in both)
    return removed_P, kept_R
