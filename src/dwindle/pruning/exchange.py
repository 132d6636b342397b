"""Who solves a layer's problem when there are several processes, and how its inputs and its result travel.

Problem ``number`` belongs to one process, the next to the next one: Grams are added up (or sampled tokens collected)
there, and only the small result goes back to all.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from dwindle.training.shards import several_processes


class Exchange(Protocol):
    """All processes call the same methods in the same order."""

    def is_mine(self, number: int) -> bool:
        """Whether this process solves problem ``number``."""

    def sum_to_owner(self, number: int, tensor: Tensor) -> Tensor:
        """The sum over processes, at the owner; what the others get is not used."""

    def rows_to_owner(self, number: int, tensor: Tensor) -> Tensor:
        """The rows of all processes, at the owner; how many each has may differ."""

    def from_owner(self, number: int, tensor: Tensor) -> Tensor:
        """The owner's tensor, everywhere; the others pass one of its shape."""


class Alone:
    """One process owns everything."""

    def is_mine(self, number: int) -> bool:
        return True

    def sum_to_owner(self, number: int, tensor: Tensor) -> Tensor:
        return tensor

    def rows_to_owner(self, number: int, tensor: Tensor) -> Tensor:
        return tensor

    def from_owner(self, number: int, tensor: Tensor) -> Tensor:
        return tensor


class Together:
    """The processes of the default group take turns as owners."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def is_mine(self, number: int) -> bool:
        return number % self.size == self.rank

    def sum_to_owner(self, number: int, tensor: Tensor) -> Tensor:
        total = tensor.clone()
        dist.reduce(total, dst=number % self.size)
        return total

    def rows_to_owner(self, number: int, tensor: Tensor) -> Tensor:
        counts = [torch.zeros(1, dtype=torch.int64, device=tensor.device) for _ in range(self.size)]
        dist.all_gather(counts, torch.tensor([len(tensor)], device=tensor.device))
        most = int(torch.cat(counts).max())
        padded = torch.cat([tensor, tensor.new_zeros(most - len(tensor), *tensor.shape[1:])])
        mine = self.is_mine(number)
        parts = [torch.empty_like(padded) for _ in range(self.size)] if mine else None
        dist.gather(padded.contiguous(), parts, dst=number % self.size)
        if parts is None:
            return tensor
        return torch.cat([part[: int(count)] for part, count in zip(parts, counts, strict=True)])

    def from_owner(self, number: int, tensor: Tensor) -> Tensor:
        dist.broadcast(tensor, src=number % self.size)
        return tensor


def exchange_here() -> Exchange:
    """For this process as it was started."""
    return Together() if several_processes() else Alone()


def num_processes() -> int:
    return dist.get_world_size() if several_processes() else 1
