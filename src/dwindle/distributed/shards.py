"""Tensors of which each process may hold only some rows (FSDP2 shards), and plain tensors, through the same calls.

Sharding is always by rows (dimension 0), in the way of ``torch.chunk``: the last processes may hold fewer rows, or
none. A plain tensor is held whole by every process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn


def several_processes() -> bool:
    """Whether this process is one of a group."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


@contextmanager
def idle(model: Any) -> Iterator[None]:
    """Around a pass that a process without a sequence takes part with: whoever watches the model must not count it."""
    model.model.is_idle = True
    try:
        yield
    finally:
        del model.model.is_idle


def is_idle(backbone: nn.Module) -> bool:
    return getattr(backbone, "is_idle", False)


def is_sharded(tensor: Tensor) -> bool:
    if type(tensor) in (Tensor, nn.Parameter) or not several_processes():  # the import below is not free
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def local(tensor: Tensor) -> Tensor:
    """The rows that this process holds; writing into them changes the tensor."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        return cast(Tensor, cast(Any, tensor).to_local())


def _shard_dim(tensor: Tensor) -> int:
    """The dimension of the device mesh over which the rows are spread."""
    placements = cast(Any, tensor).placements
    dims = [dim for dim, placement in enumerate(placements) if placement.is_shard(0)]
    assert len(dims) == 1, f"not sharded by rows: {placements}"
    return dims[0]


def row_range(tensor: Tensor) -> tuple[int, int]:
    """First row and number of rows that this process holds."""
    total = tensor.shape[0] if tensor.ndim else 1
    if not is_sharded(tensor):
        return 0, total
    mesh, dim = cast(Any, tensor).device_mesh, _shard_dim(tensor)
    each = -(-total // mesh.size(dim))
    first = min(mesh.get_local_rank(dim) * each, total)
    return first, min(each, total - first)


def gathered(tensor: Tensor) -> Tensor:
    """The whole tensor; every process must call this in the same order."""
    return cast(Tensor, cast(Any, tensor.detach()).full_tensor()) if is_sharded(tensor) else tensor.detach()


def shaped_like(parameter: Tensor, whole: Tensor) -> Tensor:
    """A tensor distributed as ``parameter`` is, with the values of ``whole``."""
    if not is_sharded(parameter):
        return whole
    empty = torch.empty_like(parameter.detach())
    first, rows = row_range(empty)
    if rows:
        local(empty).copy_(whole.narrow(0, first, rows))
    return empty


def narrowed(tensor: Tensor, axis: int, start: int, length: int) -> Tensor | None:
    """What this process holds of ``tensor.narrow(axis, start, length)``, to be written into."""
    if not is_sharded(tensor):
        return tensor.narrow(axis, start, length)
    first, rows = row_range(tensor)
    if not rows:
        return None
    if axis:
        return local(tensor).narrow(axis, start, length)
    begin, end = max(start, first), min(start + length, first + rows)
    return local(tensor).narrow(0, begin - first, end - begin) if begin < end else None


def release(parameter: nn.Parameter) -> None:
    """Give the memory of a parameter back although others may still refer to it."""
    if is_sharded(parameter):
        local(parameter).untyped_storage().resize_(0)
    else:
        parameter.data = parameter.new_empty(0)


def shard_group(tensor: Tensor) -> Any:
    """The processes that together hold a sharded tensor once."""
    return cast(Any, tensor).device_mesh.get_group(_shard_dim(tensor))


def same_everywhere(values: Tensor, like: Tensor, *, partial: bool) -> Tensor:
    """Sums computed from ``like``'s local rows, completed over its shards (if ``partial``), equal on all processes."""
    if not several_processes():
        return values
    if partial and is_sharded(like):
        dist.all_reduce(values, group=shard_group(like))
    dist.broadcast(values, src=0)
    return values


def total_norm(gradients: Iterable[Tensor], norm: Callable[[list[Tensor]], Tensor]) -> Tensor:
    """The 2-norm over all gradients, whole or sharded, from one small all-reduce."""
    every = list(gradients)
    sharded = [gradient for gradient in every if is_sharded(gradient)]
    if not sharded:
        return norm(every)
    assert len(sharded) == len(every), "either all gradients are sharded or none"
    held = [local(gradient) for gradient in every]
    squared = norm([piece for piece in held if piece.numel()] or held[:1]).double().square()
    dist.all_reduce(squared, group=shard_group(every[0]))
    return squared.sqrt().to(held[0].dtype)
