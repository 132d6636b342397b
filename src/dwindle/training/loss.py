"""Next-token loss that never holds all logits at once.

A vocabulary of 49k in fp32 costs 200 MB per thousand tokens, several times over in a plain backward pass:
more than everything else of a small model. Here the final hidden states are taken in chunks, and each chunk's
gradients are computed in the forward pass, while its logits are still there. Recomputing the chunk in the
backward pass instead (``torch.utils.checkpoint``) would cost a fourth matrix product with the vocabulary,
about 7 % of a whole step of SmolLM2-135M, to save one copy of the head's gradient.

Shapes: B sequences, T tokens each, N = B·T (or one chunk of it), D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Precision = Literal["fp32", "bf16", "fp64"]


def weights_dtype(precision: Precision) -> torch.dtype:
    """What weights and moments are kept in: ``bf16`` computes in bf16 but keeps fp32 weights."""
    return torch.float64 if precision == "fp64" else torch.float32


def autocast_for(precision: Precision, device: torch.device | str) -> AbstractContextManager[object]:
    """The context in which forward passes run, for training and validation alike."""
    if precision == "bf16":
        return torch.autocast(torch.device(device).type, dtype=torch.bfloat16)
    return nullcontext()


class TokenLoss(NamedTuple):
    """What is minimised and what is reported differ by the scale and the z-loss, so both are returned."""

    objective: Tensor
    """``scale · Σ (cross-entropy + z_loss · logsumexp²)``, to call ``backward()`` on."""
    cross_entropy: Tensor
    """``Σ cross-entropy`` in nats, a plain number without gradient."""


def chunked_cross_entropy(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    *,
    chunk_tokens: int,
    scale: float = 1.0,
    z_loss: float = 0.0,
    logits_scaling: float = 1.0,
    fused: bool = False,
) -> TokenLoss:
    """Sum over tokens of ``−log softmax(hidden · weightᵀ / logits_scaling)[target]``, chunk by chunk.

    ``scale`` (one over the tokens of the whole step) goes in here rather than being multiplied on later, so
    that the gradients have the very bits of ``F.cross_entropy(...) / num_tokens`` when one chunk covers the
    input. The softmax is always computed in fp32 (fp64 for fp64 weights); the products follow autocast.

    ``fused`` compiles loss and gradient of a chunk into one kernel or two: the logits are read from memory about
    three times instead of a dozen, and the last bits differ.
    """
    assert chunk_tokens > 0
    assert hidden_ND.shape[0] == targets_N.shape[0]
    objective, cross_entropy = cast(
        tuple[Tensor, Tensor],
        _ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]
            hidden_ND,
            weight_VD,
            targets_N,
            _Spec(chunk_tokens, scale, z_loss, logits_scaling, torch.is_grad_enabled(), fused),
        ),
    )
    return TokenLoss(objective, cross_entropy)


class _Spec(NamedTuple):
    chunk_tokens: int
    scale: float
    z_loss: float
    logits_scaling: float
    with_gradients: bool
    fused: bool


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, spec: _Spec) -> tuple[Tensor, Tensor]:
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        head = weight.to(dtype)
        wide = torch.promote_types(weight.dtype, torch.float32)
        grad_hidden = torch.empty_like(hidden) if spec.with_gradients else None
        grad_weight: Tensor | None = None
        sums: Tensor | None = None
        with torch.autocast(device, enabled=False):
            for start in range(0, hidden.shape[0], spec.chunk_tokens):
                rows = slice(start, start + spec.chunk_tokens)
                chunk = hidden[rows].to(dtype)
                chunk_sums, grad_logits = _chunk_loss(chunk, head, targets[rows], spec)
                sums = chunk_sums if sums is None else sums + chunk_sums
                if grad_hidden is not None and grad_logits is not None:
                    grad_hidden[rows] = grad_logits @ head
                    grad_weight = _add_product(grad_weight, grad_logits.t(), chunk, wide)
                del grad_logits
        assert sums is not None, "no tokens"
        ctx.gradients = (grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype))
        objective, cross_entropy = sums.unbind()
        objective = objective * spec.scale
        ctx.mark_non_differentiable(cross_entropy)
        return objective, cross_entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        grad_hidden, grad_weight = ctx.gradients
        assert grad_hidden is not None, "backward through a loss computed without gradients, or a second time"
        ctx.gradients = (None, None)
        return grad_hidden.mul_(grads[0]), grad_weight.mul_(grads[0]), None, None


def _chunk_loss(hidden: Tensor, head: Tensor, targets: Tensor, spec: _Spec) -> tuple[Tensor, Tensor | None]:
    """[unscaled objective, cross-entropy] of one chunk, and the scaled objective's gradient by its logits.

    The gradient comes from autograd, not from a formula, so that it has the bits of the library's own.
    """
    if spec.fused and spec.with_gradients:
        scale = torch.tensor(spec.scale, device=hidden.device)
        return _compiled_loss()(F.linear(hidden, head), targets, scale, spec.z_loss, spec.logits_scaling)
    raw_NV = F.linear(hidden, head).detach().requires_grad_(spec.with_gradients)
    with torch.set_grad_enabled(spec.with_gradients):
        objective, cross_entropy = _objective(raw_NV, targets, spec)
    grad_logits = None
    if spec.with_gradients:
        (grad_logits,) = torch.autograd.grad(objective, raw_NV, torch.full_like(objective, spec.scale))
    return torch.stack([objective.detach(), cross_entropy.detach()]), grad_logits


def _objective(raw_NV: Tensor, targets: Tensor, spec: _Spec) -> tuple[Tensor, Tensor]:
    """A function of its own so that the fp32 copy of the logits is gone before their gradient is made."""
    logits = raw_NV if raw_NV.dtype == torch.float64 else raw_NV.float()
    if spec.logits_scaling != 1.0:
        logits = logits / spec.logits_scaling
    cross_entropy = F.cross_entropy(logits, targets, reduction="sum")
    if not spec.z_loss:
        return cross_entropy, cross_entropy
    return cross_entropy + spec.z_loss * logits.logsumexp(dim=-1).square().sum(), cross_entropy


@cache
def _compiled_loss() -> Callable[..., tuple[Tensor, Tensor]]:
    compiled: Any = torch.compile(_loss_and_gradient, fullgraph=True, dynamic=False)
    return cast(Callable[..., tuple[Tensor, Tensor]], compiled)


def _loss_and_gradient(
    raw_NV: Tensor, targets: Tensor, scale: Tensor, z_loss: float, logits_scaling: float
) -> tuple[Tensor, Tensor]:
    """What ``_objective`` and autograd give, written out: the gradient is softmax · (1 + 2·z·lse) − one-hot."""
    logits = raw_NV.to(torch.promote_types(raw_NV.dtype, torch.float32)) / logits_scaling
    lse_N = logits.logsumexp(dim=-1)
    cross_entropy = (lse_N - logits.gather(1, targets[:, None])[:, 0]).sum()
    probabilities = torch.exp(logits - lse_N[:, None]) * (1 + 2 * z_loss * lse_N[:, None])
    chosen = torch.arange(logits.shape[1], device=logits.device) == targets[:, None]
    gradient = (probabilities - chosen.to(logits.dtype)) * (scale / logits_scaling)
    sums = torch.stack([cross_entropy + z_loss * lse_N.square().sum(), cross_entropy])
    return sums, gradient.to(raw_NV.dtype)


def _add_product(total: Tensor | None, left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """``total + left @ right``, in place where the types allow; the sum keeps the weights' precision."""
    if total is None:
        return (left @ right).to(dtype)
    if left.dtype == dtype:
        return total.addmm_(left, right)
    return total.add_(left @ right)


def language_model_loss(
    model: nn.Module,
    tokens_BT: Tensor,
    *,
    chunk_tokens: int,
    scale: float = 1.0,
    z_loss: float = 0.0,
    fused: bool = False,
    bf16_residual: bool = False,
) -> TokenLoss:
    """Loss of predicting ``tokens[:, 1:]`` from ``tokens[:, :-1]``, for any ``…ForCausalLM`` model.

    ``bf16_residual`` starts the residual stream in bf16, as a model with bf16 weights does; autocast alone would
    keep it in fp32, which costs memory traffic between the products.
    """
    head, logits_scaling = _head(model)
    inputs: dict[str, Tensor] = {"input_ids": tokens_BT[:, :-1]}
    if bf16_residual:
        inputs = {"inputs_embeds": cast(Any, model).get_input_embeddings()(tokens_BT[:, :-1]).to(torch.bfloat16)}
    hidden_BTD = cast(Any, model).model(**inputs, use_cache=False).last_hidden_state
    return chunked_cross_entropy(
        hidden_BTD.flatten(0, 1),
        head,
        tokens_BT[:, 1:].flatten(),
        chunk_tokens=chunk_tokens,
        scale=scale,
        z_loss=z_loss,
        logits_scaling=logits_scaling,
        fused=fused,
    )


def _head(model: nn.Module) -> tuple[Tensor, float]:
    module = cast(Any, model).get_output_embeddings()
    config = cast(Any, model).config
    assert getattr(module, "bias", None) is None, "a head with a bias is not supported"
    assert getattr(config, "final_logit_softcapping", None) is None, "capped logits are not supported"
    scaling = getattr(config, "logits_scaling", None)
    return module.weight, 1.0 if scaling is None else float(scaling)


@torch.no_grad()
def evaluate_loss(
    model: nn.Module,
    windows_NT: Tensor,
    *,
    batch: int = 8,
    chunk_tokens: int = 1024,
    precision: Precision = "fp32",
) -> float:
    """Mean nats per token over windows of ``seq_len + 1`` tokens; leaves the model in the mode it was in."""
    assert windows_NT.ndim == 2 and windows_NT.shape[0] > 0 and windows_NT.shape[1] > 1
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    try:
        total = torch.zeros((), dtype=torch.float64, device=device)
        for start in range(0, windows_NT.shape[0], batch):
            tokens = windows_NT[start : start + batch]
            with autocast_for(precision, device):
                total += language_model_loss(model, tokens.to(device), chunk_tokens=chunk_tokens).cross_entropy
    finally:
        model.train(was_training)
    return float(total) / (windows_NT.shape[0] * (windows_NT.shape[1] - 1))
