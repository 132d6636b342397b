"""CUDA graphs: the passes of a micro-batch are recorded once and then started as a whole.

A small model waits for the host, which starts thousands of kernels for every micro-batch. A recording has the same
kernels on the same memory, so results are the same bits; the host starts it in one call. It is only valid while
shapes, places of the weights and everything that Python decides stay as they were: a rebuilt model needs a new one
(``Trainer.replace_model``), and steps in which a callback watches the passes run without.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Passes = Callable[[Tensor, float | Tensor], Tensor]
"""(micro-batch, scale of the loss) → sums to report; adds to the gradients."""
_PLAIN_CALLS = 3
"""Eager calls with each kind of micro-batch before recording: they compile and tune kernels, and libraries allocate."""


@dataclass(slots=True)
class _Recording:
    graph: torch.cuda.CUDAGraph
    batch: Tensor
    scale: Tensor
    sums: Tensor

    def replay(self, batch: Tensor, scale: float) -> Tensor:
        self.batch.copy_(batch)
        self.scale.fill_(scale)
        self.graph.replay()
        return self.sums.clone()  # the next replay writes to the same place


class GraphedPasses:
    """Passes that record themselves. The first micro-batch of a step writes the gradients, the others add to them."""

    def __init__(self, passes: Passes, parameters: Sequence[nn.Parameter], *, conversations: bool = False) -> None:
        """``conversations``: whether passes of packed conversations have fixed shapes as well."""
        self._passes, self._conversations = passes, conversations
        self._parameters = [p for p in parameters if p.requires_grad]
        self._recordings: dict[Hashable, _Recording] = {}
        self._gradients: list[Tensor | None] | None = None
        """Where the recordings write."""
        self._plain_calls: Counter[Hashable] = Counter()

    @property
    def num_recordings(self) -> int:
        return len(self._recordings)

    def __call__(self, batch: Tensor, scale: float) -> Tensor:
        adds = any(p.grad is not None for p in self._parameters)
        key = (batch.shape, adds)
        if key not in self._recordings:
            if not self._is_recordable(batch, adds) or self._plain_calls[key] < _PLAIN_CALLS:
                self._plain_calls[key] += 1
                return self._passes(batch, scale)
            self._recordings[key] = self._record(batch)
            if not adds:
                self._gradients = [p.grad for p in self._parameters]
        if adds and not self._holds_gradients():
            return self._passes(batch, scale)
        for parameter, gradient in zip(self._parameters, self._gradients or (), strict=True):
            parameter.grad = gradient
        return self._recordings[key].replay(batch, scale)

    def _is_recordable(self, batch: Tensor, adds: bool) -> bool:
        """Passes of fixed shapes that fit the one place of the gradients."""
        fixed = batch.ndim == 2 or self._conversations
        return fixed and (self._holds_gradients() if adds else self._gradients is None)

    def _holds_gradients(self) -> bool:
        """Whether the gradients of this step are those of the recordings."""
        return self._gradients is not None and all(
            p.grad is g for p, g in zip(self._parameters, self._gradients, strict=True)
        )

    def _record(self, batch: Tensor) -> _Recording:
        """Nothing is computed while recording; gradients that do not exist yet get their places."""
        batch, graph = batch.clone(), torch.cuda.CUDAGraph()
        scale = torch.ones((), device=batch.device, dtype=torch.float64)
        pool = next(iter(self._recordings.values())).graph.pool() if self._recordings else None
        # only this thread is watched: the checkpoint writer copies tensors in another one
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            sums = self._passes(batch, scale)
        return _Recording(graph, batch, scale, sums)
