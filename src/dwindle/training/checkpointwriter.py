"""Checkpoints of several processes, written in the background while training goes on.

Each process copies what it holds to host memory, and a thread of its own writes and hashes it; when all have
reported their checksums through the store, the main process puts the directory in place. The format is that of one
process but for the files of sharded groups, so a run continues on any number of processes.

This is the scheme of torch's DCP without its file format: DCP describes tensors in a pickle, and its safetensors
writer does not take tied weights.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from dwindle.errors import UserError
from dwindle.training.checkpoint import (
    begin_checkpoint,
    commit_checkpoint,
    final_directory,
    temporary_directory,
    write_failure,
)
from dwindle.training.distributed import ShardedEngine, SharedEngine
from dwindle.training.pieces import piece_name
from dwindle.training.shards import is_sharded, local
from dwindle.training.tensorfile import write_tensors

_PATIENCE_S = 1800.0

Files = dict[str, dict[str, Tensor]]


class CheckpointWriter:
    """Saves are begun one at a time; an error of one is raised by the next, or at the end."""

    def __init__(self, engine: SharedEngine, run_dir: Path, keep_last: int) -> None:
        self.engine, self.run_dir, self.keep_last = engine, Path(run_dir), keep_last
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(self, step: int, state: Mapping[str, Any], tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Copy to host memory and go on; every process calls this after the same step."""
        self.wait()
        if self.engine.is_main:
            begin_checkpoint(self.run_dir, step)
        files = staged(self._files(tensors))
        self.engine.barrier()  # the directory is there
        arguments = (step, json.loads(json.dumps(state, allow_nan=False)), files)
        self._thread = threading.Thread(target=self._run, args=arguments, name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until the last save is safe; on the main process that means in place."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _files(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> Files:
        """What this process writes: its rows of sharded tensors; the main process also everything else."""
        engine = self.engine
        if not isinstance(engine, ShardedEngine):
            return {f"{group}.safetensors": dict(named) for group, named in tensors.items()} if engine.is_main else {}
        files: Files = {}
        for group, named in tensors.items():
            sharded = any(is_sharded(tensor) for tensor in named.values())
            mine = {
                name: local(tensor)
                for name, tensor in named.items()
                if (is_sharded(tensor) and engine.holds_first_replica) or (engine.is_main and not is_sharded(tensor))
            }
            name = piece_name(group, engine.shard_rank, engine.num_shards) if sharded else f"{group}.safetensors"
            if mine:
                files[name] = mine
        return files

    def _run(self, step: int, state: Mapping[str, Any], files: Files) -> None:
        try:
            folder = self._write(step, files)
            if self.engine.is_main:
                commit_checkpoint(self.run_dir, folder, state, self._checksums(step), keep_last=self.keep_last)
        except OSError as error:
            place = final_directory(temporary_directory(self.run_dir, step))
            tensors = {name: tensor for named in files.values() for name, tensor in named.items()}
            self._error = write_failure(error, self.run_dir, place, tensors)
        except BaseException as error:
            self._error = error

    def _write(self, step: int, files: Files) -> Path:
        folder = temporary_directory(self.run_dir, step)
        checksums = {name: write_tensors(folder / name, named) for name, named in files.items()}
        self.engine.world.store.set(self._key(step, self.engine.rank), json.dumps(checksums))
        return folder

    def _key(self, step: int, rank: int) -> str:
        return f"checkpoint/{step}/{rank}"

    def _checksums(self, step: int) -> dict[str, str]:
        """Of all processes' files, once they are on disk."""
        store = self.engine.world.store
        found: dict[str, Any] = {}
        deadline = time.monotonic() + _PATIENCE_S
        for rank in range(self.engine.size):
            key = self._key(step, rank)
            while not store.check([key]):
                if time.monotonic() > deadline:
                    raise UserError(
                        f"{self.run_dir}: process {rank} did not finish writing step {step}: look at its log"
                    )
                time.sleep(0.02)
            found |= json.loads(store.get(key))
            store.delete_key(key)
        return {str(name): str(digest) for name, digest in found.items()}


def staged(files: Files) -> Files:
    """Copies in host memory, tied tensors once."""
    copies: dict[tuple[Any, ...], Tensor] = {}

    def copy(tensor: Tensor) -> Tensor:
        place = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape))
        if not tensor.numel() or place not in copies:
            copies[place] = tensor.detach().to("cpu", copy=True)
        return copies[place]

    return {file: {name: copy(tensor) for name, tensor in named.items()} for file, named in files.items()}
