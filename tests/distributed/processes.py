"""Ranks as forked processes: the imports are done, so a group starts in milliseconds."""

from __future__ import annotations

import gc
import os
import socket
import time
import traceback
from collections.abc import Callable

import torch
import torch.distributed.fsdp
import torch.distributed.tensor  # imported once, before the ranks are forked


def start_ranks(size: int, task: Callable[[int], object], *, per_node: int | None = None) -> list[int]:
    """Process ids of ``size`` ranks that run the task with torchrun's environment; they exit with 0 when done."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children = []
    for rank in range(size):
        child = os.fork()
        if not child:
            local = per_node or size
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank % local)}
            os.environ |= {"LOCAL_WORLD_SIZE": str(local), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            _run(rank, task)
        children.append(child)
    return children


def _run(rank: int, task: Callable[[int], object]) -> None:
    code = 1
    try:
        gc.freeze()  # as in runs.start
        torch.set_num_threads(1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        task(rank)
        code = 0
    except SystemExit as error:
        code = int(error.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def wait_ranks(children: list[int], seconds: float = 600) -> list[int]:
    """Exit statuses; a rank that still runs after that time hangs: it is killed and fails the test."""
    deadline, statuses = time.monotonic() + seconds, dict.fromkeys(children, -1)
    running = set(children)
    while running and time.monotonic() < deadline:
        for child in list(running):
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                statuses[child] = status
                running.discard(child)
        time.sleep(0.005)
    for child in running:
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert not running, f"{len(running)} ranks did not end within {seconds} s"
    return list(statuses.values())


def run_ranks(size: int, task: Callable[[int], object], *, per_node: int | None = None) -> None:
    assert wait_ranks(start_ranks(size, task, per_node=per_node)) == [0] * size
