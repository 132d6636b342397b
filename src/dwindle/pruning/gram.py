"""The mathematics of removing input columns from a linear layer: tensors in, tensors out.

A layer computes ``y = W x``. With H = E[x xᵀ] (its Gram) and λ the damping, removing the inputs P and keeping R,

    minimise over Δ:  E‖W_P x_P − Δ x_R‖² + λ‖Δ‖²      gives      Δ = W_P A,   A = H_PR (H_RR + λI)⁻¹

A is the regression of the removed inputs on the kept ones. It does not depend on W, so all layers that read the same
input share it, and only A is communicated between ranks. With Z, the columns P of (H + λI)⁻¹, A = −(Z_P)⁻¹ Z_Rᵀ: the
Optimal Brain Surgeon update. Because Δ = 0 is feasible, the error after the update is never above the error without
it, for any λ and any H, even a singular one.

With T tokens X [T, N], T < N, the same A = X_Pᵀ (X_R X_Rᵀ + TλI)⁻¹ X_R needs only a T×T system (``Sample``);
otherwise H is accumulated (``Gram``).

Shapes: T tokens, N inputs of a layer, P removed inputs, R kept inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dwindle.distributed.collectives import Exchange

Solve = Callable[[torch.dtype], tuple[Tensor, Tensor]]
"""A [P, R] and the remaining error of every input P, in this precision; infinite where the solve failed."""
NOISE_TO_SIGNAL = 2.0
"""Variance of an input that the other inputs do not explain, over the variance that they do: about 2 as measured."""


def damping_for(damping: float, num_inputs: int, num_tokens: float) -> float:
    """The damping (a fraction of the mean diagonal of H) that also generalises to text other than the T tokens.

    Few tokens fit noise: with 1 % damping and as many tokens as inputs, the update more than doubled the error on
    unseen text. The optimal ridge there is (N/T)·(noise/signal) of the mean diagonal; it vanishes as T grows.
    """
    return damping + NOISE_TO_SIGNAL * num_inputs / num_tokens


def accumulate_gram(gram_NN: Tensor, x_TN: Tensor) -> Tensor:
    """``gram += Σ x xᵀ`` in the precision of ``gram``."""
    return gram_NN.add_(_inner(x_TN.T, x_TN, gram_NN.dtype))


def spread(a_PR: Tensor, kept_R: Tensor, num_inputs: int) -> Tensor:
    """A with a column for every input: zero for those that are not kept."""
    return a_PR.new_zeros(len(a_PR), num_inputs).index_copy_(1, kept_R, a_PR)


def removal_update(w_ON: Tensor, removed_P: Tensor, a_PN: Tensor) -> Tensor:
    """``W += W_P A`` in place; the caller zeroes the columns P."""
    return w_ON.addmm_(w_ON.index_select(1, removed_P), a_PN.to(w_ON.dtype))


class Regression:
    """A, computed but not yet checked: ``finished`` checks once for all layers whether fp32 was enough.

    The check synchronises with the device, which would be idle between layers if each were checked on its own.
    """

    def __init__(self, solve: Solve, h_P: Tensor) -> None:
        self._solve, self._h_P = solve, h_P
        self.a_PR, good_P = self._in(h_P.dtype)
        self.is_good = good_P.all()
        if h_P.dtype == torch.float64:
            self.is_good = torch.ones_like(self.is_good)  # no higher precision to try

    def in_fp64(self) -> Tensor:
        return self._in(torch.float64)[0].to(self._h_P.dtype)

    def _in(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """A with zero rows where it is not finite or worse than no update, and which rows were good."""
        a_PR, error_P = self._solve(dtype)
        slack = torch.finfo(self._h_P.dtype).eps ** 0.5  # the error itself is only known up to rounding
        good_P = a_PR.isfinite().all(1) & (error_P <= self._h_P * (1 + slack))
        return torch.where(good_P[:, None], a_PR, 0.0), good_P


def finished(regressions: Sequence[Regression]) -> list[Tensor]:
    """A [P, R] of each; those for which fp32 was not enough are solved again in fp64. Synchronises once."""
    if not regressions:
        return []
    good = torch.stack([regression.is_good for regression in regressions]).tolist()
    return [r.a_PR if is_good else r.in_fp64() for r, is_good in zip(regressions, good, strict=True)]


def regression_from_gram(gram_NN: Tensor, removed_P: Tensor, kept_R: Tensor, damping: float) -> Regression:
    """A = H_PR (H_RR + λI)⁻¹."""
    h_P = gram_NN.diagonal()[removed_P]

    def solve(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        h_RN = gram_NN.index_select(0, kept_R)
        h_RR, h_RP = h_RN.index_select(1, kept_R), h_RN.index_select(1, removed_P)
        ridge = damping * (h_RR.diagonal().sum() + h_P.sum()) / (len(removed_P) + len(kept_R))
        factor, is_whole = cholesky(h_RR.to(dtype), ridge.to(dtype))
        a_RP = torch.cholesky_solve(h_RP.to(dtype), factor)
        error_P = h_P - (a_RP * (2 * h_RP - h_RR @ a_RP.to(h_RP))).sum(0)
        return a_RP.T, torch.where(is_whole, error_P, torch.inf)

    return Regression(solve, h_P)


def regression_from_inputs(x_TN: Tensor, removed_P: Tensor, kept_R: Tensor, damping: float) -> Regression:
    """The same A from the inputs, by a T×T system: cheaper when there are fewer tokens than inputs.

    Columns that are not kept are zeroed, not sliced: GPUs multiply matrices of odd widths slowly.
    """
    wide = _wide(x_TN.dtype)
    x_TP = x_TN.index_select(1, removed_P).to(wide)
    h_P = x_TP.square().sum(0)

    def solve(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        is_kept_N = torch.zeros(x_TN.shape[1], dtype=torch.bool, device=x_TN.device).index_fill_(0, kept_R, True)
        kept_TN = torch.where(is_kept_N, x_TN, 0.0)
        kernel_TT = _inner(kept_TN, kept_TN.T, wide)
        ridge = damping * (kernel_TT.diagonal().sum() + h_P.sum()) / (len(removed_P) + len(kept_R))
        factor, is_whole = cholesky(kernel_TT.to(dtype), ridge.to(dtype))
        target_TP = x_TP.to(dtype)
        a_NP = kept_TN.T.to(dtype) @ torch.cholesky_solve(target_TP, factor)
        error_P = (target_TP - kept_TN.to(dtype) @ a_NP).square().sum(0)
        return a_NP.index_select(0, kept_R).T, torch.where(is_whole, error_P.to(wide), torch.inf)

    return Regression(solve, h_P)


def cholesky(matrix_NN: Tensor, ridge: Tensor) -> tuple[Tensor, Tensor]:
    """The Cholesky factor of ``matrix + ridge·I``, and whether it exists in this precision (a tensor: no sync).

    One matrix at a time on purpose: the batched routines of GPU libraries are made for small matrices.
    """
    damped = matrix_NN.clone()
    damped.diagonal().add_(ridge)
    factor: Tensor
    factor, info = torch.linalg.cholesky_ex(damped)
    return factor, (info == 0) & factor.diagonal().isfinite().all()


def inverse_diagonal_from_gram(gram_NN: Tensor, alive: Tensor, damping: float) -> Tensor:
    """diag((H + λI)⁻¹) of the alive inputs, by a triangular inverse (the full one is never formed)."""
    h = gram_NN.index_select(0, alive).index_select(1, alive)
    for dtype in dict.fromkeys((h.dtype, torch.float64)):
        factor, is_whole = cholesky(h.to(dtype), damping * h.diagonal().mean().to(dtype))
        if is_whole:
            eye = torch.eye(len(h), dtype=dtype, device=h.device)
            lower: Tensor = torch.linalg.solve_triangular(factor, eye, upper=False)
            return lower.square().sum(0).to(gram_NN.dtype)
    return 1 / h.diagonal().clamp(min=torch.finfo(h.dtype).tiny)  # fall back to the diagonal


def inverse_diagonal_from_inputs(x_TN: Tensor, alive: Tensor, damping: float) -> Tensor:
    """The same from inputs X: (1 − ‖L⁻¹ x_n‖²) / Tλ with L Lᵀ = X Xᵀ + TλI; scaled like Σ x xᵀ."""
    x = x_TN.index_select(1, alive)
    kernel_TT = _inner(x, x.T, _wide(x.dtype))
    ridge = damping * kernel_TT.diagonal().sum().double() / len(alive)
    factor, is_whole = cholesky(kernel_TT.double(), ridge)
    if not is_whole:
        return 1 / x.to(kernel_TT.dtype).square().sum(0).clamp(min=torch.finfo(kernel_TT.dtype).tiny)
    lower: Tensor = torch.linalg.solve_triangular(factor, x.double(), upper=False)
    leverage = lower.square().sum(0)
    return ((1 - leverage).clamp(min=torch.finfo(torch.float64).eps) / ridge).to(kernel_TT.dtype)


class Gram:
    """H, accumulated over tokens: N² numbers for any number of tokens."""

    def __init__(self, total_NN: Tensor | None = None, num_tokens: int = 0) -> None:
        self.total_NN, self.num_tokens = total_NN, num_tokens

    def add(self, x_TN: Tensor) -> None:
        if self.total_NN is None:
            self.total_NN = x_TN.new_zeros(x_TN.shape[1], x_TN.shape[1], dtype=_wide(x_TN.dtype))
        accumulate_gram(self.total_NN, x_TN)
        self.num_tokens += len(x_TN)

    @property
    def matrix_NN(self) -> Tensor:
        assert self.total_NN is not None, "no inputs were observed"
        return self.total_NN

    def regression(self, removed_P: Tensor, kept_R: Tensor, damping: float) -> Regression:
        """The regression A, with the damping adapted to the number of tokens (``damping_for``)."""
        damping = damping_for(damping, len(removed_P) + len(kept_R), self.num_tokens)
        return regression_from_gram(self.matrix_NN, removed_P, kept_R, damping)

    def mean_square(self) -> Tensor:
        """E[x²] of every input: the diagonal of H."""
        return self.matrix_NN.diagonal() / self.num_tokens

    def inverse_diagonal(self, alive: Tensor, damping: float) -> Tensor:
        """diag((H + λI)⁻¹) of the alive inputs."""
        return inverse_diagonal_from_gram(self.matrix_NN, alive, damping) * self.num_tokens

    def at_owner(self, number: int, exchange: Exchange) -> Gram:
        """The statistics over the tokens of all ranks, on the owner."""
        total = sum(exchange.counts(self.num_tokens, self.matrix_NN.device))
        return Gram(exchange.sum_to_owner(number, self.matrix_NN), total)


class Sample:
    """The inputs themselves, as a ``Gram``: T·N numbers, fewer than N² when T < N; nothing is computed until needed."""

    def __init__(self, rows: list[Tensor] | None = None) -> None:
        self._rows = rows or []

    def add(self, x_TN: Tensor) -> None:
        self._rows.append(x_TN)

    @property
    def inputs_TN(self) -> Tensor:
        assert self._rows, "no inputs were observed"
        if len(self._rows) > 1:
            self._rows = [torch.cat(self._rows)]
        return self._rows[0]

    def regression(self, removed_P: Tensor, kept_R: Tensor, damping: float) -> Regression:
        x_TN = self.inputs_TN
        if x_TN.shape[0] < x_TN.shape[1]:
            damping = damping_for(damping, len(removed_P) + len(kept_R), len(x_TN))
            return regression_from_inputs(x_TN, removed_P, kept_R, damping)
        return self._gram().regression(removed_P, kept_R, damping)

    def mean_square(self) -> Tensor:
        x_TN = self.inputs_TN
        return x_TN.to(_wide(x_TN.dtype)).square().mean(0)

    def inverse_diagonal(self, alive: Tensor, damping: float) -> Tensor:
        x_TN = self.inputs_TN
        if x_TN.shape[0] < x_TN.shape[1]:
            return inverse_diagonal_from_inputs(x_TN, alive, damping) * len(x_TN)
        return self._gram().inverse_diagonal(alive, damping)

    def at_owner(self, number: int, exchange: Exchange) -> Sample:
        return Sample([exchange.rows_to_owner(number, self.inputs_TN)])

    def _gram(self) -> Gram:
        gram = Gram()
        gram.add(self.inputs_TN)
        return gram


Inputs = Gram | Sample
"""Statistics of a layer's inputs."""


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _inner(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """``a @ b`` accumulated in ``dtype``; on a GPU half-precision inputs are not copied."""
    if a.is_cuda and a.dtype in (torch.bfloat16, torch.float16) and dtype == torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.to(dtype) @ b.to(dtype)
