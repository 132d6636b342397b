"""Layer-wise problems (second-order repair and scores) distributed over processes.

Problem ``number`` is owned by one process, in turn. Gram matrices are summed (or sampled rows gathered) at the owner,
and only the small result is broadcast.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from dwindle.distributed.shards import several_processes


class Exchange:
    """Communication over the default process group; all processes call the same methods in the same order."""

    def __init__(self) -> None:
        self.size = num_processes()
        self.rank = dist.get_rank() if self.size > 1 else 0
        self._counts: list[int] = []

    def is_mine(self, number: int) -> bool:
        """Whether this process solves problem ``number``."""
        return number % self.size == self.rank

    def counts(self, own: int, device: torch.device) -> list[int]:
        """Number of tokens of each process (``own`` for this one), the same in all problems of one exchange.

        Exchanged once, because every layer sees the same tokens and reading the counts synchronises the device.
        """
        if self.size == 1:
            return [own]
        if not self._counts:
            every = torch.zeros(self.size, dtype=torch.int64, device=device)
            every[self.rank] = own
            dist.all_reduce(every)
            self._counts = every.tolist()
        assert self._counts[self.rank] == own, "layers saw different numbers of tokens"
        return self._counts

    def sum_to_owner(self, number: int, tensor: Tensor) -> Tensor:
        """The sum over processes, at the owner; undefined elsewhere."""
        if self.size == 1:
            return tensor
        total = tensor.clone()
        dist.reduce(total, dst=number % self.size)
        return total

    def rows_to_owner(self, number: int, tensor: Tensor) -> Tensor:
        """The rows of all processes, at the owner; their number may differ between processes."""
        if self.size == 1:
            return tensor
        counts = self.counts(len(tensor), tensor.device)
        most = max(counts)
        padded = torch.cat([tensor, tensor.new_zeros(most - len(tensor), *tensor.shape[1:])])
        parts = [torch.empty_like(padded) for _ in range(self.size)] if self.is_mine(number) else None
        dist.gather(padded.contiguous(), parts, dst=number % self.size)
        if parts is None:
            return tensor
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    def from_owner(self, number: int, tensor: Tensor) -> Tensor:
        """The owner's tensor, on all processes; the others pass one of the same shape."""
        if self.size > 1:
            dist.broadcast(tensor, src=number % self.size)
        return tensor


def num_processes() -> int:
    """Size of the process group; 1 without one."""
    return dist.get_world_size() if several_processes() else 1
