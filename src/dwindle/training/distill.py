"""Knowledge distillation from a frozen teacher, without materializing all logits.

The objective of a token is ``(1 − α) · cross-entropy + α · T² · KL(teacher ‖ student)``, both distributions softened by
the temperature T. T² keeps the size of the gradient about the same for every T.

With ``top_k`` only the teacher's k most likely tokens are distinguished; all others form one outcome, "the rest". The
usual alternative, renormalising the k, asks the student for probability zero everywhere else and makes it
overconfident. With a rest, the student's distribution over the unlikely tokens is unconstrained, and the result is a
lower bound of the full divergence.

Shapes: N tokens, D and E hidden sizes of student and teacher, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Distillation(NamedTuple):
    """Settings of the distillation loss."""

    weight: float
    """α, the weight of the divergence in the objective."""
    temperature: float = 1.0
    top_k: int = 0
    """Most likely tokens of the teacher that are distinguished; 0 = all."""


class Lesson(NamedTuple):
    """A teacher's final hidden states for some tokens, from which logits are computed chunk by chunk."""

    hidden_NE: Tensor
    head_VE: Tensor
    logits_scaling: float
    how: Distillation

    def logits(self, rows: slice) -> Tensor:
        """The teacher's logits of one chunk, computed in the dtype of its head."""
        raw_NV = F.linear(self.hidden_NE[rows].to(self.head_VE.dtype), self.head_VE)
        return raw_NV if self.logits_scaling == 1.0 else raw_NV / self.logits_scaling


def divergence_and_gradient(student_NV: Tensor, teacher_NV: Tensor, how: Distillation) -> tuple[Tensor, Tensor]:
    """``T² · KL(teacher ‖ student)`` of each token, and its gradient by the student's logits, ``T · (q − target)``.

    ``q`` is the softened student. The target is the softened teacher; with ``top_k`` its rest is distributed over the
    unlikely tokens in the student's proportions, so that their gradients share one factor.
    """
    log_q = F.log_softmax(student_NV / how.temperature, dim=-1)
    log_target = F.log_softmax(teacher_NV / how.temperature, dim=-1)
    if 0 < how.top_k < teacher_NV.shape[-1]:
        likely = torch.zeros_like(teacher_NV, dtype=torch.bool)
        likely = likely.scatter(-1, teacher_NV.topk(how.top_k, dim=-1).indices, True)
        rest_p, rest_q = (x.masked_fill(likely, -torch.inf).logsumexp(-1, keepdim=True) for x in (log_target, log_q))
        log_target = torch.where(likely, log_target, log_q + (rest_p - rest_q))
    target = log_target.exp()
    divergence_N = (target * (log_target - log_q)).sum(-1) * how.temperature**2
    return divergence_N, (log_q.exp() - target) * how.temperature


class HiddenStates(nn.Module):
    """A model without its head as one module call, because FSDP2 gathers weights around module calls."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens_BT: Tensor, **places: Tensor) -> Tensor:
        states = cast(Any, self.model).model(input_ids=tokens_BT, **places, use_cache=False)
        return cast(Tensor, states.last_hidden_state)


@dataclass(frozen=True, slots=True)
class Teacher:
    """A frozen model and the distillation settings. It has no state: a resumed run loads it from its source again."""

    states: HiddenStates
    how: Distillation

    @staticmethod
    def of(states: HiddenStates, how: Distillation) -> Teacher:
        states.requires_grad_(False)
        states.eval()
        return Teacher(states, how)

    @property
    def model(self) -> nn.Module:
        return self.states.model

    @torch.no_grad()
    def hidden(self, tokens_BT: Tensor, **places: Tensor) -> Tensor:
        """Final hidden states; ``places`` are the positions of packed conversations."""
        return cast(Tensor, self.states(tokens_BT, **places))
