"""One rank of a world that does not exist: torch's ``fake`` process group, and tensors without storage.

The engines run as they are; collectives return at once, and nothing of a model's size is allocated. Rank 0 is
simulated, which holds as many rows of each tensor as any.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dwindle.core.errors import UserError
from dwindle.distributed.engines import Loss, ReplicatedEngine
from dwindle.distributed.traffic import Tally
from dwindle.distributed.world import World

_MIB = 1 << 20
_BUCKET_BYTES, _SYNC_BYTES = 25 * _MIB, 250 * _MIB
"""DDP's defaults: gradients in one all-reduce, and weights in one broadcast."""


@contextmanager
def simulated_world(size: int, ranks_per_node: int) -> Iterator[World]:
    """Rank 0 of ``size`` ranks, none of which exists."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise UserError("--world: counts for ranks that do not exist: run it in one process, without torchrun")
    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    try:
        yield World(0, size, 0, ranks_per_node)
    finally:
        dist.destroy_process_group()


@contextmanager
def weightless(tally: Tally) -> Iterator[None]:
    """New tensors have a shape and no values: every number that is read from one is 1, and any two are equal."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True), _Ones(), tally:  # type: ignore[no-untyped-call]
        yield


class _Ones(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0 if args[0].is_floating_point() else 1
        if func is torch.ops.aten.equal.default:
            return True
        return func(*args, **(kwargs or {}))


class SimulatedReplicas(ReplicatedEngine):
    """DDP's collectives and buckets without its reducer, which is C++ and reads the values of tensors."""

    _buckets: Sequence[_Bucket] = ()

    def adopt(self, model: nn.Module) -> None:
        """Rank 0's weights for all; then buckets of gradients, in the order of the backward pass."""
        self.is_last = True
        """Whether the gradients of this micro-batch are reduced."""
        torch_dist: Any = dist  # DDP's own functions have no public names
        trained: list[Any] = [p for p in model.parameters() if p.requires_grad]
        metadata = torch.zeros(1, dtype=torch.int64)
        dist.all_gather([torch.zeros_like(metadata) for _ in range(self.size)], metadata)  # are all models alike?
        dist.broadcast(torch.zeros(sum(2 * p.ndim for p in trained), dtype=torch.int64), src=0)
        torch_dist._broadcast_coalesced(dist.group.WORLD, [p.detach() for p in model.parameters()], _SYNC_BYTES, 0)
        backwards = trained[::-1]
        limits = [torch_dist._DEFAULT_FIRST_BUCKET_BYTES, _BUCKET_BYTES]
        buckets, _ = torch_dist._compute_bucket_assignment_by_size(backwards, limits)
        before = self._buckets
        self._buckets = [_Bucket(self, [backwards[index] for index in bucket]) for bucket in buckets]
        for bucket in before:
            bucket.close()

    def micro_step(self, *, last: bool) -> AbstractContextManager[object]:
        self.is_last = last
        return nullcontext()

    def loss(self, model: nn.Module, batch: Tensor, **options: Any) -> Loss:
        return self.loss_function(model, batch, **options)


class _Bucket:
    """Gradients that are views of one tensor, which is reduced when the last of them has arrived."""

    def __init__(self, engine: SimulatedReplicas, parameters: list[nn.Parameter]) -> None:
        self._engine, self._missing, self._number = engine, len(parameters), len(parameters)
        first = parameters[0]
        self._flat = torch.empty(sum(p.numel() for p in parameters), dtype=first.dtype, device=first.device)
        views = torch.split(self._flat, [p.numel() for p in parameters])
        self._views = {p: view.view(p.shape) for p, view in zip(parameters, views, strict=True)}
        self._hooks = [
            cast(Any, parameter).register_post_accumulate_grad_hook(self._arrived) for parameter in parameters
        ]

    def close(self) -> None:
        """Release all tensors."""
        for hook in self._hooks:
            hook.remove()
        self._views.clear()

    def _arrived(self, parameter: Tensor) -> None:
        parameter.grad = self._views[parameter]  # type: ignore[index]
        if not self._engine.is_last:
            return
        self._missing -= 1
        if not self._missing:
            dist.all_reduce(self._flat)
            self._missing = self._number
