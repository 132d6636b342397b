"""Scores of the peers that look at activations: Wanda-sp, FLAP, Minitron; and FLAP's bias.

``observe`` runs the model over calibration windows and keeps, for every input of ``o`` and ``down`` (and every norm's
output), three sums. The scores are functions of these sums and of the weights: tensors in, tensors out.

Shapes: B sequences, T tokens of a sequence, N columns of an input, U units (heads, channels), O outputs of W.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dwindle.anatomy.anatomy import Anatomy, Row
from dwindle.anatomy.positions import warn_beyond_positions
from dwindle.anatomy.structure import Kind, Structure
from dwindle.core.errors import UserError
from dwindle.core.progress import Bar
from dwindle.pruning.calibration import batch_size
from dwindle.pruning.saliency import Scores
from dwindle.pruning.surgery import Prunable


@dataclass(slots=True)
class Activity:
    """Sums over the tokens of one input, in float64."""

    num_tokens: int
    total_N: Tensor
    """Σ x"""
    square_N: Tensor
    """Σ x²"""
    mean_square_U: Tensor
    """Σ over sequences of (mean over the sequence of ‖x_u‖₂)², where x_u is the part of a unit: |x| for one column."""

    @property
    def mean_N(self) -> Tensor:
        return self.total_N / self.num_tokens

    @property
    def variance_N(self) -> Tensor:
        return (self.square_N / self.num_tokens - self.mean_N.square()).clamp(min=0)


def wanda_sp(w_ON: Tensor, seen: Activity) -> Tensor:
    """mean_r |W_rj| · ‖x_j‖₂ of every column j."""
    return w_ON.abs().mean(0, dtype=torch.float64) * seen.square_N.sqrt()


def flap(w_ON: Tensor, seen: Activity, kind: Kind) -> Tensor:
    """The z-score, among the columns of its input, of Var(x_j)·‖W_:j‖² (of its square for heads)."""
    fluctuation_N = seen.variance_N * w_ON.double().square().sum(0)
    if kind == "attn":
        fluctuation_N = fluctuation_N.square()
    deviation = fluctuation_N.std().clamp(min=torch.finfo(torch.float64).tiny)
    return (fluctuation_N - fluctuation_N.mean()) / deviation


def minitron(seen: Activity) -> Tensor:
    """√Σ_B (mean_T ‖x_u‖₂)² of every unit u."""
    return seen.mean_square_U.sqrt()


def activity_of(x_BTN: Tensor, stretch: int) -> Activity:
    """The sums of one batch; ``stretch`` consecutive columns are one unit."""
    x = x_BTN.detach().double()
    norms_BTU = x.abs() if stretch == 1 else x.view(*x.shape[:2], -1, stretch).norm(dim=-1)
    flat = x.flatten(0, 1)
    return Activity(len(flat), flat.sum(0), flat.square().sum(0), norms_BTU.mean(1).square().sum(0))


class _Enough(Exception):
    """Ends a forward pass after the last layer that is needed."""


class LayerWalk:
    """Passes over the same windows for one layer after the other, while only earlier layers change.

    A pass starts at the layer of the previous walk, with its cached inputs and its current weights, and ends after the
    layer of this walk: two layers instead of all. The inputs of that layer are cached for all windows.
    """

    def __init__(self) -> None:
        self._first = 0
        self._inputs: list[Tensor] = []

    @contextmanager
    def to(self, layers: Sequence[nn.Module], last: int) -> Iterator[None]:
        """Inside, passes end after layer ``last``, which must not precede the previous walk's."""
        before, found = iter(self._inputs), list[Tensor]()

        def enter(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return (next(before), *args[1:]) if self._inputs else args

        def keep(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            found.append(args[0])

        def leave(*_: object) -> None:
            raise _Enough

        skipped = layers[: self._first]
        for layer in skipped:
            layer.forward = lambda hidden, **_: hidden
        with (
            layers[self._first].register_forward_pre_hook(enter),
            layers[last].register_forward_pre_hook(keep),
            layers[last].register_forward_hook(leave),
        ):
            try:
                yield
            finally:
                for layer in skipped:
                    del layer.forward
        self._first, self._inputs = last, found


def observe(
    prunable: Prunable,
    windows: Tensor,
    rows: Sequence[Row],
    bar: Bar | None = None,
    passes: AbstractContextManager[None] | None = None,
) -> dict[str, Activity]:
    """Run forward passes; by tensor name, the activity of a matrix's input or of a norm's output.

    ``passes`` may shorten them (``LayerWalk.to``).
    """
    model, found = prunable.model, dict[str, Activity]()
    warn_beyond_positions(windows.shape[1], model.config)

    def add(row: Row, x_BTN: Tensor) -> None:
        new = activity_of(x_BTN, prunable.anatomy.head_dim if row.axes[-1] == ("query",) else 1)
        if (old := found.get(row.name)) is not None:
            new = Activity(
                old.num_tokens + new.num_tokens,
                old.total_N + new.total_N,
                old.square_N + new.square_N,
                old.mean_square_U + new.mean_square_U,
            )
        found[row.name] = new

    device = next(model.parameters()).device
    shown = Bar("calibrating", len(windows)) if bar is None else nullcontext(bar)
    with ExitStack() as hooks, torch.no_grad(), passes or nullcontext(), shown as progress:
        for row in rows:
            hooks.enter_context(_hook(model.get_submodule(row.module), row, add))
        for batch in torch.split(windows, batch_size(prunable, windows)):
            with suppress(_Enough):
                model.model(input_ids=batch.to(device), use_cache=False)  # the head is not needed
            progress.advance(len(batch))
    if not all(torch.isfinite(seen.square_N).all() for seen in found.values()):
        raise UserError("calibration: activations are not finite: the source's weights or the data are broken")
    return found


def _hook(module: nn.Module, row: Row, add: Callable[[Row, Tensor], None]) -> torch.utils.hooks.RemovableHandle:
    if row.is_norm:
        return module.register_forward_hook(lambda _, args, output: add(row, output))
    return module.register_forward_pre_hook(lambda _, args: add(row, args[0]))


def output_rows(anatomy: Anatomy, layers: Iterable[int] | None = None) -> dict[tuple[int, Kind], Row]:
    """``o`` and ``down`` by layer and kind; layers without heads have no ``o``."""
    wanted = None if layers is None else set(layers)
    return {
        (row.layer, kind): row  # type: ignore[misc]
        for kind, row in anatomy.outputs
        if kind != "whole" and (wanted is None or row.layer in wanted)
    }


def norm_rows(anatomy: Anatomy) -> list[Row]:
    """Gains of the norms of the residual stream and of blocks' outputs."""
    return [row for row in anatomy.rows if row.is_norm and row.axes == (("hidden",),)]


def column_scores(prunable: Prunable, columns: dict[tuple[int, Kind], Tensor]) -> Scores:
    """Sums over the columns of each head and channel."""
    head_dim = prunable.anatomy.head_dim
    sums = {key: x_N.view(-1, head_dim).sum(1) if key[1] == "attn" else x_N for key, x_N in columns.items()}
    return unit_scores(prunable, sums)


def unit_scores(prunable: Prunable, units: dict[tuple[int, Kind], Tensor], stem: Tensor | None = None) -> Scores:
    """The scores of heads and channels, by layer and kind; 0 for layers that were not observed."""
    scores = Scores.zero(prunable.physical)
    scores.stem = scores.stem if stem is None else stem
    for (layer, kind), score_U in units.items():
        (scores.attn if kind == "attn" else scores.ffn)[layer] = score_U.detach().cpu()
    return scores.mask(prunable.pruned)


@torch.no_grad()
def move_means_to_bias(prunable: Prunable, keep: Structure, seen: dict[str, Activity]) -> None:
    """FLAP's repair, b += W_P·E[x_P] on ``o`` and ``down``, where P are the columns that ``keep`` does not have.

    Call it before they are zeroed.
    """
    anatomy, parameters = prunable.anatomy, prunable.parameters
    for row in output_rows(anatomy).values():
        kept = anatomy.positions(row, 1, keep, prunable.physical)
        weight, bias = parameters[row.name], parameters[f"{row.module}.bias"]
        mean_N = seen[row.name].mean_N.index_fill(0, kept.to(weight.device), 0.0)
        bias.add_((weight.double() @ mean_N).to(bias.dtype))
