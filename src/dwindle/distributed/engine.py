"""How a step is computed by one process or by several; the loop above is the same for all.

The engine of one process is the plain calls. Engines of several processes (``training/distributed.py``) differ in
how gradients are combined and in what each process holds of the model.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from dwindle.training.loss import Precision, TokenLoss, autocast_for, evaluate_loss, language_model_loss


class Engine:
    """One process."""

    rank = 0
    size = 1

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and talks to people."""
        return self.rank == 0

    def adopt(self, model: nn.Module) -> None:
        """Take note of the model that the next steps train."""

    def num_tokens(self, micro_batches: Sequence[Tensor], batches: Any) -> int:
        """Predicted tokens of the step, over all processes."""
        return sum(tokens.shape[0] * (tokens.shape[1] - 1) for tokens in micro_batches)

    def autocast(self, precision: Precision, device: str) -> AbstractContextManager[object]:
        return autocast_for(precision, device)

    def micro_step(self, *, last: bool) -> AbstractContextManager[object]:
        """Around the passes of one micro-batch; gradients are combined in the last one only."""
        return nullcontext()

    def loss(self, model: nn.Module, tokens_BT: Tensor, **options: Any) -> TokenLoss:
        return language_model_loss(model, tokens_BT, **options)

    def share(self, sums: Tensor, stop: bool) -> Tensor:
        """Numbers summed over all processes and, behind them, how many processes were asked to stop; fp64."""
        return torch.cat([sums.detach().double(), torch.full((1,), float(stop), device=sums.device).double()])

    def grad_norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        return get_total_norm([p.grad for p in parameters if p.grad is not None])

    def clip(self, parameters: Iterable[nn.Parameter], largest: float, norm: Tensor) -> None:
        clip_grads_with_norm_(parameters, largest, norm)

    def evaluate(
        self, model: nn.Module, windows_NT: Tensor, *, batch: int, chunk_tokens: int, precision: Precision
    ) -> float:
        """Mean nats per token over held-out windows."""
        return evaluate_loss(model, windows_NT, batch=batch, chunk_tokens=chunk_tokens, precision=precision)

    def barrier(self) -> None:
        """Wait for all processes."""


_MOST_LAYERS = 64
_VARIANTS = 8
"""Graphs that one layer may need: training, measuring, a teacher's pass, last batches that are smaller, and so on."""
_compiled: set[Hashable] = set()
"""Kinds of layers that may have graphs."""


def compile_blocks(model: nn.Module, *, mode: str | None = None) -> None:
    """Compile the forward pass of every decoder layer; layers of equal shapes share one graph.

    The pass alone, not the module call: the hooks by which FSDP2 gathers weights must stay outside the graph. With
    ``fullgraph`` a model that cannot be compiled is an error instead of a silently slow run, and so is the limit on
    graphs, which is raised to what layers of all different sizes need. Graphs that were made before (a teacher's, the
    loss's) stay until there are too many.
    """
    layers: Any = model.model.layers  # type: ignore[union-attr]
    most = max(len(layers), _MOST_LAYERS)
    kinds = {_kind(layer) for layer in layers}
    if len(_compiled | kinds) > most:
        forget_graphs()
    _compiled.update(kinds)
    dynamo: Any = torch._dynamo.config
    dynamo.recompile_limit = max(dynamo.recompile_limit, _VARIANTS * most)
    dynamo.accumulated_recompile_limit = max(dynamo.accumulated_recompile_limit, 2 * _VARIANTS * most)
    for layer in layers:
        layer.forward = torch.compile(layer.forward, fullgraph=True, dynamic=False, mode=mode)


def forget_graphs() -> None:
    """All compiled graphs of this process."""
    torch.compiler.reset()
    _compiled.clear()


def _kind(layer: nn.Module) -> Hashable:
    """Layers of one kind share graphs: the same modules, shapes of tensors and groups of heads."""
    modules = tuple((name, type(module)) for name, module in layer.named_modules())
    groups = tuple(getattr(getattr(layer, "self_attn", None), "queries_per_kv", ()))
    return modules, tuple(tuple(tensor.shape) for tensor in layer.parameters()), groups
