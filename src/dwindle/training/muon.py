"""Muon: orthogonalised momentum for the matrices of the decoder layers, AdamW for everything else.

The momentum M of a matrix is replaced by an approximation of U·Vᵀ (M = U·S·Vᵀ), from five Newton–Schulz iterations
(Jordan et al. 2024), and scaled so that an update has the RMS of AdamW's (Liu et al. 2025): learning rates carry over.

- Matrices of equal shape go through Newton–Schulz as one batch: a launch for many layers instead of one for each. A
  batch has at most ``MOST_ELEMENTS``, so that temporary tensors are a small part of a large model's memory.
- Pruned rows and columns are zero in M and stay zero: XXᵀ and its powers keep them. The scale depends on the matrix's
  size, so it is that of what is alive (``state["alive_sizes"]``, updated by surgery), not of the storage; with that,
  masked and compacted models train alike.
- Fused projections (``qkv``, ``gate_up``) are orthogonalised part by part, as separate matrices would be.
- Of a sharded matrix every process gathers the momentum, orthogonalises it, and applies its own rows.

Shapes: N matrices of a batch, R rows, C columns, R ≤ C.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from dwindle.anatomy.anatomy import Anatomy, Row
from dwindle.anatomy.structure import Structure
from dwindle.distributed.shards import gathered, is_sharded, local, row_range
from dwindle.training.moments import MOST_ELEMENTS, AdamW, in_batches

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients (a, b, c) of X ← aX + (bA + cA²)X with A = XXᵀ, tuned for a steep slope at zero."""
_NUM_ITERATIONS = 5
MOMENTUM = "momentum_buffer"
ALIVE_SIZES = "alive_sizes"
"""The larger dimension of each part of a matrix, without what is pruned."""
_RMS = 0.2
"""RMS of a typical AdamW update."""


class Muon(AdamW):
    """One optimizer over both kinds of parameters; groups with ``muon = True`` are matrices of the layers."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        parts: Mapping[nn.Parameter, Sequence[int]],
        momentum: float = 0.95,
        **adamw: Any,
    ) -> None:
        for group in groups:
            group.setdefault("muon", False)
        super().__init__(groups, **adamw)
        self.parts = parts
        """Rows of each part of every matrix, as ``layer_matrices`` gives them."""
        self._momentum = momentum

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "the gradients are there already"
        everything = self.param_groups
        self.param_groups = [group for group in everything if not group["muon"]]
        try:
            super().step()
        finally:
            self.param_groups = everything
        for group in everything:
            if group["muon"]:
                trained = [p for p in group["params"] if p.grad is not None]
                for some in in_batches(sorted(trained, key=lambda p: sorted(p.shape))):
                    self._muon_step(some, group)

    def _muon_step(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        for parameter in parameters:
            state = self.state[parameter]
            if MOMENTUM not in state:
                state[MOMENTUM] = torch.zeros_like(parameter, dtype=self.moment_dtype(parameter))
                rows, columns = self.parts.get(parameter, parameter.shape[:1]), parameter.shape[1]
                state[ALIVE_SIZES] = torch.tensor([float(max(n, columns)) for n in rows])
        wholes = self._orthogonalised(parameters, self._averaged(parameters))
        held = [_rows_of(parameter, whole) for parameter, whole in zip(parameters, wholes, strict=True)]
        weights, lr = [local(p) for p in parameters], float(group["lr"])
        torch._foreach_mul_(weights, 1 - lr * group["weight_decay"])
        torch._foreach_add_(weights, held, alpha=-lr)

    def _averaged(self, parameters: list[nn.Parameter]) -> list[Tensor]:
        """Update the momentum of matrices; the new one with Nesterov's look-ahead, whole on every process."""
        grads = [local(cast(Tensor, p.grad)) for p in parameters]
        stored = [local(self.state[p][MOMENTUM]) for p in parameters]
        momenta = [kept.to(grad.dtype) for kept, grad in zip(stored, grads, strict=True)]
        torch._foreach_lerp_(momenta, grads, 1 - self._momentum)
        for kept, momentum in zip(stored, momenta, strict=True):
            if kept is not momentum:  # stored in bf16
                kept.copy_(momentum)
        ahead = torch._foreach_lerp(grads, momenta, self._momentum)
        return [_whole_like(p, a) if is_sharded(p) else a for p, a in zip(parameters, ahead, strict=True)]

    def _orthogonalised(self, parameters: list[nn.Parameter], updates: list[Tensor]) -> list[Tensor]:
        """The updates, orthogonalised in batches of equal shape, part by part, with the RMS of AdamW's updates."""
        pieces: list[Tensor] = []
        counts: list[int] = []
        scales: list[float] = []
        for parameter, update in zip(parameters, updates, strict=True):
            sizes = list(self.parts.get(parameter, ()))
            split = torch.split(update, sizes) if len(sizes) > 1 else (update,)
            pieces += split
            counts.append(len(split))
            scales += [_RMS * size**0.5 for size in self.state[parameter][ALIVE_SIZES].tolist()]
        done = orthogonalise(pieces)
        torch._foreach_mul_(done, scales)
        found, first = [], 0
        for count in counts:
            found.append(done[first] if count == 1 else torch.cat(done[first : first + count]))
            first += count
        return found


def layer_matrices(model: nn.Module) -> dict[nn.Parameter, list[int]]:
    """The matrices of the decoder layers, each with the numbers of rows of its parts (several where it is fused)."""
    anatomy, parameters = Anatomy.of(model), dict(model.named_parameters())
    rows = [row for row in anatomy.rows if row.layer is not None and len(row.axes) == 2]
    return {parameters[row.name]: part_sizes(anatomy, row, anatomy.source) for row in rows}


def part_sizes(anatomy: Anatomy, row: Row, structure: Structure) -> list[int]:
    """Rows of each part of a matrix with this structure."""
    if len(row.axes[0]) == 1:
        return [anatomy.shape(row, structure)[0]]
    return [anatomy.width(unit, row.layer, structure) for unit in row.axes[0]]


def alive_sizes(anatomy: Anatomy, row: Row, structure: Structure) -> Tensor:
    """``state["alive_sizes"]`` of a matrix of which this structure is alive."""
    columns = anatomy.shape(row, structure)[1]
    return torch.tensor([float(max(rows, columns)) for rows in part_sizes(anatomy, row, structure)])


def orthogonalise(matrices: Sequence[Tensor]) -> list[Tensor]:
    """Newton–Schulz over all matrices, in batches of one shape (a matrix and a transposed one share a batch)."""
    batches: dict[tuple[int, int], list[int]] = {}
    for number, matrix in enumerate(matrices):
        rows, columns = sorted(matrix.shape)
        batches.setdefault((rows, columns), []).append(number)
    found: dict[int, Tensor] = {}
    for (rows, columns), numbers in batches.items():
        most = max(1, MOST_ELEMENTS // (rows * columns))
        for start in range(0, len(numbers), most):
            chosen = numbers[start : start + most]
            wide = [matrices[n].mT if matrices[n].shape[0] > matrices[n].shape[1] else matrices[n] for n in chosen]
            for n, x_RC in zip(chosen, _newton_schulz(wide), strict=True):
                found[n] = x_RC.mT if matrices[n].shape[0] > matrices[n].shape[1] else x_RC
    return [found[number] for number in range(len(matrices))]


def _newton_schulz(matrices: Sequence[Tensor]) -> Tensor:
    """In bf16 on a GPU, where the iteration only needs to be roughly right; else in the dtype of the input."""
    first = matrices[0]
    x_NRC = first.new_empty((len(matrices), *first.shape), dtype=torch.bfloat16 if first.is_cuda else first.dtype)
    torch._foreach_copy_(list(x_NRC.unbind()), list(matrices))
    x_NRC = x_NRC / x_NRC.flatten(1).norm(dim=1).clamp(min=1e-7)[:, None, None]
    a, b, c = NEWTON_SCHULZ
    for _ in range(_NUM_ITERATIONS):
        gram_NRR = x_NRC @ x_NRC.mT
        poly_NRR = torch.baddbmm(gram_NRR, gram_NRR, gram_NRR, beta=b, alpha=c)
        x_NRC = torch.baddbmm(x_NRC, poly_NRR, x_NRC, beta=a)
    return x_NRC.to(first.dtype)


def _whole_like(parameter: nn.Parameter, held: Tensor) -> Tensor:
    """The whole tensor of which this process computed its rows; all processes must call this in the same order."""
    sharded = torch.empty_like(parameter.detach())
    local(sharded).copy_(held)
    return gathered(sharded)


def _rows_of(parameter: nn.Parameter, whole: Tensor) -> Tensor:
    """This process's rows of a whole tensor."""
    if not is_sharded(parameter):
        return whole.contiguous()
    first, count = row_range(parameter)
    return whole.narrow(0, first, count).contiguous()
