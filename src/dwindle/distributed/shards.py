"""The same functions for plain tensors and for DTensors that FSDP2 shards by rows.

Sharding is always along dimension 0, like ``torch.chunk``: the last processes may hold fewer rows, or none. A plain
tensor is held whole by every process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn


def several_processes() -> bool:
    """Whether this process belongs to a group of more than one."""
    return _in_group() and dist.get_world_size() > 1


def _in_group() -> bool:
    return dist.is_available() and dist.is_initialized()


@contextmanager
def idle(model: Any) -> Iterator[None]:
    """Around the forward pass of a process that has no sequence and only joins collectives; hooks must ignore it."""
    model.model.is_idle = True
    try:
        yield
    finally:
        del model.model.is_idle


def is_idle(backbone: nn.Module) -> bool:
    """Whether the current forward pass only joins collectives (see ``idle``)."""
    return getattr(backbone, "is_idle", False)


def is_sharded(tensor: Tensor) -> bool:
    """Whether this process holds only its rows, which are all in a group of one."""
    if type(tensor) in (Tensor, nn.Parameter) or not _in_group():  # avoids the slow import below
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def local(tensor: Tensor) -> Tensor:
    """The rows of this process, as a view: writing into them changes the tensor."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        return cast(Tensor, cast(Any, tensor).to_local())


def _shard_dim(tensor: Tensor) -> int:
    """The dimension of the device mesh over which the rows are sharded."""
    placements = cast(Any, tensor).placements
    dims = [dim for dim, placement in enumerate(placements) if placement.is_shard(0)]
    assert len(dims) == 1, f"not sharded by rows: {placements}"
    return dims[0]


def row_range(tensor: Tensor) -> tuple[int, int]:
    """First row and number of rows of this process."""
    total = tensor.shape[0] if tensor.ndim else 1
    if not is_sharded(tensor):
        return 0, total
    each = -(-total // _num_shards(tensor))
    first = min(cast(Any, tensor).device_mesh.get_local_rank(_shard_dim(tensor)) * each, total)
    return first, min(each, total - first)


def gathered(tensor: Tensor) -> Tensor:
    """The whole tensor; every process must call this in the same order. A sharded one is copied (see ``release``)."""
    if not is_sharded(tensor):
        return tensor.detach()
    whole = cast(Tensor, cast(Any, tensor.detach()).full_tensor())
    return whole.clone() if _num_shards(tensor) == 1 else whole  # of a single shard, torch returns the shard


def _num_shards(tensor: Tensor) -> int:
    return int(cast(Any, tensor).device_mesh.size(_shard_dim(tensor)))


def shaped_like(parameter: Tensor, whole: Tensor) -> Tensor:
    """A tensor sharded like ``parameter``, with the values and the dtype of ``whole``."""
    if not is_sharded(parameter):
        return whole
    empty = torch.empty_like(parameter.detach(), dtype=whole.dtype)
    first, rows = row_range(empty)
    if rows:
        local(empty).copy_(whole.narrow(0, first, rows))
    return empty


def narrowed(tensor: Tensor, axis: int, start: int, length: int) -> Tensor | None:
    """The part of ``tensor.narrow(axis, start, length)`` on this process, as a view; None if it has no such rows."""
    if not is_sharded(tensor):
        return tensor.narrow(axis, start, length)
    first, rows = row_range(tensor)
    if not rows:
        return None
    if axis:
        return local(tensor).narrow(axis, start, length)
    begin, end = max(start, first), min(start + length, first + rows)
    return local(tensor).narrow(0, begin - first, end - begin) if begin < end else None


def fill_zero(tensor: Tensor, axis: int, index: Tensor) -> None:
    """Zero the entries ``index`` of one axis in place, on this process."""
    if is_sharded(tensor) and axis == 0:
        first, rows = row_range(tensor)
        index = index[(index >= first) & (index < first + rows)] - first
    local(tensor).index_fill_(axis, index, 0)


def release(parameter: nn.Parameter) -> None:
    """Free the memory of a parameter even if there are other references to it."""
    if is_sharded(parameter):
        local(parameter).untyped_storage().resize_(0)
    else:
        parameter.data = parameter.new_empty(0)


def shard_group(tensor: Tensor) -> Any:
    """The process group over which a tensor is sharded."""
    return cast(Any, tensor).device_mesh.get_group(_shard_dim(tensor))


def same_everywhere(values: Tensor, like: Tensor) -> Tensor:
    """Sums over the local rows of ``like``, summed over its shards and bit-equal on all processes."""
    if not several_processes():
        return values
    if is_sharded(like):
        dist.all_reduce(values, group=shard_group(like))
    dist.broadcast(values, src=0)
    return values


def total_norm(gradients: Iterable[Tensor], norm: Callable[[list[Tensor]], Tensor]) -> Tensor:
    """The 2-norm of all gradients, plain or sharded, with one all-reduce of a scalar."""
    every = list(gradients)
    sharded = [gradient for gradient in every if is_sharded(gradient)]
    if not sharded:
        return norm(every)
    assert len(sharded) == len(every), "either all gradients are sharded or none"
    held = [local(gradient) for gradient in every]
    squared = norm([piece for piece in held if piece.numel()] or held[:1]).double().square()
    dist.all_reduce(squared, group=shard_group(every[0]))
    return squared.sqrt().to(held[0].dtype)
