"""Next-token loss that never materializes all logits.

A vocabulary of 49k in fp32 costs 200 MB per thousand tokens, several times over in a plain backward pass: more than the
rest of a small model. Here the final hidden states are processed in chunks, and the gradients of each chunk are
computed in the forward pass, while its logits exist. Recomputing the chunk in the backward pass instead
(``torch.utils.checkpoint``) would cost a fourth matrix product with the vocabulary, about 7 % of a whole step of
SmolLM2-135M, to save one copy of the head's gradient.

Shapes: B sequences, T tokens each, N = B·T (or one chunk of it), D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import masking_utils

from dwindle.data.packing import planes_of
from dwindle.distributed.engines import Engine
from dwindle.distributed.precision import Precision
from dwindle.training.distill import Distillation, Lesson, Teacher, divergence_and_gradient


class TokenLoss(NamedTuple):
    """The objective that is minimised and the sums that are reported; they differ by scale, z-loss and teacher."""

    objective: Tensor
    """``scale · Σ (cross-entropy + z_loss · logsumexp²)``, for ``backward()``.

    With a teacher, ``(1 − α) · cross-entropy + α · T² · KL`` replaces the cross-entropy.
    """
    cross_entropy: Tensor
    """``Σ cross-entropy`` in nats, without gradient."""
    distillation: Tensor | None = None
    """``Σ T² · KL(teacher ‖ student)`` in nats, without gradient; None without a teacher."""


def chunked_cross_entropy(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    *,
    chunk_tokens: int,
    scale: float | Tensor = 1.0,
    z_loss: float = 0.0,
    logits_scaling: float = 1.0,
    fused: bool = False,
    lesson: Lesson | None = None,
    learned_N: Tensor | None = None,
) -> TokenLoss:
    """Sum over tokens of ``−log softmax(hidden · weightᵀ / logits_scaling)[target]``, chunk by chunk.

    ``scale`` (one over the tokens of the whole step) is applied here, so that the gradients are bit-equal to those of
    ``F.cross_entropy(...) / num_tokens`` if one chunk covers the input. The softmax is always computed in fp32 (fp64
    for fp64 weights); the matrix products follow autocast.

    ``fused`` compiles loss and gradient of a chunk into one or two kernels: the logits are read from memory about three
    times instead of a dozen times, and rounding differs.

    A ``lesson`` adds the divergence from a teacher, whose logits also exist for one chunk at a time. ``learned_N``
    (bool, only with ``fused``) leaves tokens out at fixed shapes.
    """
    assert chunk_tokens > 0
    assert fused or learned_N is None
    assert hidden_ND.shape[0] == targets_N.shape[0]
    objective, reported = cast(
        tuple[Tensor, Tensor],
        _ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]
            hidden_ND,
            weight_VD,
            targets_N,
            _Spec(chunk_tokens, scale, z_loss, logits_scaling, torch.is_grad_enabled(), fused, lesson, learned_N),
        ),
    )
    return TokenLoss(objective, *reported.unbind())


class _Spec(NamedTuple):
    chunk_tokens: int
    scale: float | Tensor
    z_loss: float
    logits_scaling: float
    with_gradients: bool
    fused: bool
    lesson: Lesson | None
    learned_N: Tensor | None


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, spec: _Spec) -> tuple[Tensor, Tensor]:
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        head = weight.to(dtype)
        lesson = None if spec.lesson is None else spec.lesson._replace(head_VE=spec.lesson.head_VE.to(dtype))
        wide = torch.promote_types(weight.dtype, torch.float32)
        grad_hidden = torch.empty_like(hidden) if spec.with_gradients else None
        grad_weight: Tensor | None = None
        sums: Tensor | None = None
        with torch.autocast(device, enabled=False):
            for start in range(0, hidden.shape[0], spec.chunk_tokens):
                rows = slice(start, start + spec.chunk_tokens)
                chunk = hidden[rows].to(dtype)
                teacher = None if lesson is None else lesson.logits(rows)
                learned = None if spec.learned_N is None else spec.learned_N[rows]
                chunk_sums, grad_logits = _chunk_loss(chunk, head, targets[rows], teacher, learned, spec)
                sums = chunk_sums if sums is None else sums + chunk_sums
                if grad_hidden is not None and grad_logits is not None:
                    grad_hidden[rows] = grad_logits @ head
                    if ctx.needs_input_grad[1]:  # a head that is frozen (LoRA) has no gradient
                        grad_weight = _add_product(grad_weight, grad_logits.t(), chunk, wide)
                del grad_logits
        assert sums is not None, "no tokens"
        ctx.gradients = (grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype))
        objective, reported = sums[0] * _as_tensor(spec.scale, sums.device, sums.dtype), sums[1:]
        ctx.mark_non_differentiable(reported)
        return objective, reported

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        grad_hidden, grad_weight = ctx.gradients
        assert grad_hidden is not None, "backward through a loss computed without gradients, or a second time"
        ctx.gradients = (None, None)
        return grad_hidden.mul_(grads[0]), None if grad_weight is None else grad_weight.mul_(grads[0]), None, None


def _chunk_loss(
    hidden: Tensor, head: Tensor, targets: Tensor, teacher: Tensor | None, learned: Tensor | None, spec: _Spec
) -> tuple[Tensor, Tensor | None]:
    """[unscaled objective, cross-entropy, divergence with a teacher] of one chunk; the scaled gradient by its logits.

    The gradient comes from autograd, so that it is bit-equal to that of ``F.cross_entropy``; the fused loss and the
    loss with a teacher use the closed form.
    """
    fused = spec.fused and spec.with_gradients
    if fused or spec.lesson is not None or learned is not None:
        compute = _compiled_loss() if fused else _loss_and_gradient
        wide = torch.promote_types(hidden.dtype, torch.float32)
        how = None if spec.lesson is None else spec.lesson.how
        raw_NV, scale = F.linear(hidden, head), _as_tensor(spec.scale, hidden.device, wide)
        sums, gradient = compute(raw_NV, targets, scale, spec.z_loss, spec.logits_scaling, teacher, how, learned)
        return sums, gradient if spec.with_gradients else None
    raw_NV = F.linear(hidden, head).detach().requires_grad_(spec.with_gradients)
    with torch.set_grad_enabled(spec.with_gradients):
        objective, cross_entropy = _objective(raw_NV, targets, spec)
    grad_logits = None
    if spec.with_gradients:
        scale = _as_tensor(spec.scale, objective.device, objective.dtype)
        (grad_logits,) = torch.autograd.grad(objective, raw_NV, scale)
    return torch.stack([objective.detach(), cross_entropy.detach()]), grad_logits


def _as_tensor(scale: float | Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """A number as a tensor without waiting for the device, as ``torch.tensor`` would."""
    return scale.to(dtype) if isinstance(scale, Tensor) else torch.full((), scale, device=device, dtype=dtype)


def _objective(raw_NV: Tensor, targets: Tensor, spec: _Spec) -> tuple[Tensor, Tensor]:
    """A separate function, so that the fp32 copy of the logits is freed before their gradient is allocated."""
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
    raw_NV: Tensor,
    targets: Tensor,
    scale: Tensor,
    z_loss: float,
    logits_scaling: float,
    teacher_NV: Tensor | None = None,
    how: Distillation | None = None,
    learned_N: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``_objective`` and its gradient in closed form, softmax · (s + 2·z·lse) − s · one-hot.

    s is the weight of the cross-entropy: 1 without a teacher, 1 − α with one. Tokens that are not learned count zero.
    """
    logits = raw_NV.to(torch.promote_types(raw_NV.dtype, torch.float32)) / logits_scaling
    counts_N = None if learned_N is None else learned_N.to(logits.dtype)

    def total(values_N: Tensor) -> Tensor:
        return values_N.sum() if counts_N is None else (values_N * counts_N).sum()

    lse_N = logits.logsumexp(dim=-1)
    cross_entropy = total(lse_N - logits.gather(1, targets[:, None])[:, 0])
    share = 1.0 if how is None else 1.0 - how.weight
    probabilities = torch.exp(logits - lse_N[:, None]) * (share + 2 * z_loss * lse_N[:, None])
    chosen = torch.arange(logits.shape[1], device=logits.device) == targets[:, None]
    gradient = probabilities - share * chosen.to(logits.dtype)
    sums = [share * cross_entropy + z_loss * total(lse_N.square()), cross_entropy]
    if teacher_NV is not None and how is not None:
        divergence_N, pull = divergence_and_gradient(logits, teacher_NV.to(logits.dtype), how)
        divergence = total(divergence_N)
        sums = [sums[0] + how.weight * divergence, cross_entropy, divergence]
        gradient = gradient + how.weight * pull
    if counts_N is not None:
        gradient = gradient * counts_N[:, None]
    return torch.stack(sums), (gradient * (scale / logits_scaling)).to(raw_NV.dtype)


def _add_product(total: Tensor | None, left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """``total + left @ right``, in place where the dtypes allow; the sum has the precision of the weights."""
    if total is None:
        return (left @ right).to(dtype)
    if left.dtype == dtype:
        return total.addmm_(left, right)
    return total.add_(left @ right)


def language_model_loss(
    model: nn.Module,
    batch: Tensor,
    *,
    chunk_tokens: int,
    scale: float | Tensor = 1.0,
    z_loss: float = 0.0,
    fused: bool = False,
    bf16_residual: bool = False,
    teacher: Teacher | None = None,
) -> TokenLoss:
    """Loss of predicting ``tokens[:, 1:]`` from ``tokens[:, :-1]``, for any ``…ForCausalLM`` model.

    ``batch`` is int64 [B, T + 1]; of packed conversations [B, 3, T + 1] (``data.packing``), whose answers alone are
    learned. Only their logits are computed, unless the loss is ``fused``: their number varies, so it would be compiled
    again for each, and a CUDA graph needs fixed shapes.

    ``bf16_residual`` starts the residual stream in bf16, as in a model with bf16 weights; autocast alone would keep it
    in fp32, which costs memory bandwidth.
    """
    head, logits_scaling = _head(model)
    tokens_BT, learned_BT, positions_BT = planes_of(batch)
    places = {} if positions_BT is None else {"position_ids": positions_BT[:, :-1]}
    inputs: dict[str, Tensor] = {"input_ids": tokens_BT[:, :-1]}
    if bf16_residual:
        inputs = {"inputs_embeds": cast(Any, model).get_input_embeddings()(tokens_BT[:, :-1]).to(torch.bfloat16)}

    learned_N = None if learned_BT is None else learned_BT[:, 1:].flatten()

    def chosen(values_BT: Tensor) -> Tensor:
        flat = values_BT.flatten(0, 1)
        return flat if learned_N is None or fused else flat[learned_N]

    lesson = None
    with _sequences_known(packed=positions_BT is not None):
        if teacher is not None:
            taught_BTE = teacher.hidden(tokens_BT[:, :-1], **places)
            lesson = Lesson(chosen(taught_BTE), *_head(teacher.model), teacher.how)
        hidden_BTD = cast(Any, model).model(**inputs, **places, use_cache=False).last_hidden_state
    return chunked_cross_entropy(
        chosen(hidden_BTD),
        head,
        chosen(tokens_BT[:, 1:]),
        chunk_tokens=chunk_tokens,
        scale=scale,
        z_loss=z_loss,
        logits_scaling=logits_scaling,
        fused=fused,
        lesson=lesson,
        learned_N=learned_N if fused else None,
    )


@contextmanager
def _sequences_known(*, packed: bool) -> Iterator[None]:
    """Tell transformers whether rows hold several sequences; if not, its causal mask is the kernels' own.

    It would look at the positions, and wait for the device in every pass. In a CUDA graph it cannot look, and would
    always mask as if there were several.
    """
    known = masking_utils.find_packed_sequence_indices, masking_utils.is_tracing
    masking_utils.find_packed_sequence_indices = _sequence_numbers if packed else lambda position_ids: None
    masking_utils.is_tracing = lambda tensor=None: False
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices, masking_utils.is_tracing = known


def _sequence_numbers(positions_BT: Tensor) -> Tensor:
    """Number of the sequence that each cell belongs to: one begins wherever a position does not follow the last."""
    return F.pad((positions_BT[:, 1:] != positions_BT[:, :-1] + 1).cumsum(-1), (1, 0))


def _head(model: nn.Module) -> tuple[Tensor, float]:
    module = cast(Any, model).get_output_embeddings()
    config = cast(Any, model).config
    assert getattr(module, "bias", None) is None, "a head with a bias is not supported"
    assert getattr(config, "final_logit_softcapping", None) is None, "logit softcapping is not supported"
    scaling = getattr(config, "logits_scaling", None)
    return module.weight, 1.0 if scaling is None else float(scaling)


def evaluate_loss(
    model: nn.Module,
    windows_NT: Tensor,
    *,
    batch: int = 8,
    chunk_tokens: int = 1024,
    precision: Precision = "fp32",
) -> float:
    """Mean nats per learned token of ``windows_NT``, in one process; the model's mode is restored."""
    engine = Engine(language_model_loss)
    return engine.evaluate(model, windows_NT, batch=batch, chunk_tokens=chunk_tokens, precision=precision)
