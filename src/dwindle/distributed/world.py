"""The process group: who this process is, joining the group, and running something on the main process first."""

from __future__ import annotations

import os
import re
import threading
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
from dwindle.distributed.elastic import attempt_id, shares_store
from dwindle.distributed.launch import stop_with_launcher

T = TypeVar("T")

_LOST_CONNECTION = re.compile(r"gloo|Connection (closed|reset|refused)|Broken pipe|NCCL.*remote process exited", re.I)
"""How torch's libraries say that a process has died."""
_TIMED_OUT = re.compile(r"timed? ?out", re.I)
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class World:
    """Rank and size of the process group; the default is a single process."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    store: Any = None
    timeout_s: float = 0.0
    """Limit of one collective; a process that died is noticed sooner, by its launcher or its connections."""

    @property
    def is_group(self) -> bool:
        """Whether there is a process group, if only of this process."""
        return self.store is not None

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

        The task may take any time, because tokenizing takes hours. If it fails on the main process, the others exit
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
        if self._read(key) != b"done":
            raise SystemExit(2)
        return task()

    def _read(self, key: str) -> bytes:
        """The value of a key, once it has one; empty if the main process, which hosts the store, has exited.

        Asks in a thread: across a broken link a question is not answered, and blocks until the kernel gives up.
        """
        found: list[bytes] = []
        heard = time.monotonic()

        def ask() -> None:
            nonlocal heard
            try:
                while not self.store.check([key]):
                    heard = time.monotonic()
                    time.sleep(0.05)
                found.append(self.store.get(key))
            except dist.DistError:
                found.append(b"")

        thread = threading.Thread(target=ask, name="store", daemon=True)
        thread.start()
        while not found:
            thread.join(0.05)
            if not found and time.monotonic() - heard > self.timeout_s:
                raise UserError(_no_answer(self.timeout_s))
        return found[0]


@contextmanager
def joined(device: str, timeout_s: float, *, also_alone: bool = False) -> Iterator[World]:
    """The process group that the environment describes (torchrun, ``--nproc``), or a single process.

    ``also_alone``: one process that was launched makes a group, too.
    """
    launched = all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
    if not launched or (int(os.environ["WORLD_SIZE"]) == 1 and not also_alone):
        yield World()
        return
    stop_with_launcher()
    rank = int(os.environ["RANK"])
    try:
        yield _join(device, timeout_s)
    except UserError as error:
        raise error if rank == 0 else UserError(f"process {rank}: {error}") from error
    except (dist.DistError, RuntimeError) as error:
        if not _LOST_CONNECTION.search(str(error)):
            raise
        ended = "another process has ended, and this one cannot continue alone"
        happened = _no_answer(timeout_s) if _TIMED_OUT.search(str(error)) else ended
        raise UserError(f"process {rank}: {happened}") from error
    dist.destroy_process_group()  # not after an error: other ranks may be waiting in a collective


def _no_answer(timeout_s: float) -> str:
    return (
        f"the other processes did not answer for {timeout_s:g} s (training.timeout_s): check the network between the "
        "machines, then resume the run"
    )


def _join(device: str, timeout_s: float) -> World:
    from torch._C._distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    size, timeout = int(os.environ["WORLD_SIZE"]), timedelta(seconds=timeout_s)
    local_rank = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    if device == "cuda":
        if local_rank >= torch.cuda.device_count():
            raise UserError(
                f"--nproc: {local_size} processes on this machine, which has {torch.cuda.device_count()} GPUs: "
                "start one process per GPU"
            )
        torch.cuda.set_device(local_rank)
    store, rank, size = next(iter(rendezvous("env://", timeout=timeout)))
    if shares_store():
        store = PrefixStore(attempt_id(store, rank, size, timeout), store)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        store=PrefixStore("collectives", store),
        rank=rank,
        world_size=size,
        timeout=timeout,
        device_id=torch.device("cuda", local_rank) if device == "cuda" else None,
    )
    dist.barrier()  # a process that ends in an error now must not break the connections of one that still joins
    return World(rank, size, local_rank, local_size, PrefixStore("dwindle", store), timeout_s)
