"""The process group: who this process is, joining the group, and running something on the main process first."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from dwindle.core.errors import UserError
from dwindle.distributed.launch import stop_with_launcher

T = TypeVar("T")

_TIMEOUT = timedelta(minutes=10)
"""Limit of one collective; a process that died is noticed sooner, by its launcher or its connections."""
_LOST_CONNECTION = re.compile(r"gloo|Connection (closed|reset|refused)|Broken pipe|NCCL.*remote process exited", re.I)
"""How torch's libraries say that a process has died."""
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class World:
    """Rank and size of the process group; the default is a single process."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    store: Any = None

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and prints."""
        return self.rank == 0

    @property
    def num_nodes(self) -> int:
        return self.size // self.local_size

    def barrier(self) -> None:
        """Wait for all processes."""
        if self.size > 1:
            dist.barrier()

    def broadcast(self, tensor: Tensor | None) -> Tensor:
        """The main process's tensor, on every process; dtype and shape are sent ahead of the values."""
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        header = torch.zeros(10, dtype=torch.int64)
        if tensor is not None:
            header[: tensor.ndim + 2] = torch.tensor([_DTYPES.index(tensor.dtype), tensor.ndim, *tensor.shape])
        header = header.to(device)
        dist.broadcast(header, src=0)
        dtype, ndim, *shape = header.tolist()
        if tensor is None:
            tensor = torch.empty(shape[:ndim], dtype=_DTYPES[dtype])
        values = tensor.to(device).contiguous()
        dist.broadcast(values, src=0)
        return values

    def main_first(self, name: str, task: Callable[[], T]) -> T:
        """Run ``task`` on the main process, then on the others, which find the files that it wrote.

        There is no timeout, because tokenizing may take hours. If the task fails on the main process, the others exit
        without a message of their own.
        """
        if self.size == 1:
            return task()
        key = f"dwindle/{name}"
        if self.is_main:
            try:
                result = task()
            except BaseException:
                self.store.set(key, "failed")
                raise
            self.store.set(key, "done")
            return result
        try:
            while not self.store.check([key]):
                time.sleep(0.05)
            done = self.store.get(key) == b"done"
        except dist.DistError:  # the main process hosts the store and has exited
            done = False
        if not done:
            raise SystemExit(2)
        return task()


@contextmanager
def joined(device: str) -> Iterator[World]:
    """The process group that the environment describes (torchrun, ``--nproc``), or a single process."""
    launched = all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
    if not launched or int(os.environ["WORLD_SIZE"]) == 1:
        yield World()
        return
    stop_with_launcher()
    rank = int(os.environ["RANK"])
    try:
        yield _join(device)
    except UserError as error:
        raise error if rank == 0 else UserError(f"process {rank}: {error}") from error
    except (dist.DistError, RuntimeError) as error:
        if not _LOST_CONNECTION.search(str(error)):
            raise
        message = f"process {rank}: another process has ended, and this one cannot continue alone"
        raise UserError(message) from error
    dist.destroy_process_group()  # not after an error: other ranks may be waiting in a collective


def _join(device: str) -> World:
    from torch._C._distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    size = int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    if device == "cuda":
        if local_rank >= torch.cuda.device_count():
            raise UserError(
                f"--nproc: {local_size} processes on this machine, which has {torch.cuda.device_count()} GPUs: "
                "start one process per GPU"
            )
        torch.cuda.set_device(local_rank)
    store, rank, size = next(iter(rendezvous("env://", timeout=_TIMEOUT)))
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        store=PrefixStore("collectives", store),
        rank=rank,
        world_size=size,
        timeout=_TIMEOUT,
        device_id=torch.device("cuda", local_rank) if device == "cuda" else None,
    )
    dist.barrier()  # a process that ends in an error now must not break the connections of one that still joins
    return World(rank, size, local_rank, local_size, PrefixStore("dwindle", store))
