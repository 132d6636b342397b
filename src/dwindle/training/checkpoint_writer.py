"""Checkpoints of several processes, written in the background while training continues.

Each process copies its tensors to host memory, and a thread writes and hashes them. Once all processes have reported
their checksums through the store, the main process renames the directory into place. Write errors are reported through
the store too, and the main process raises them for all. The format is that of one process, except that a sharded group
has one file per process, so a run can be resumed on any number of processes.

This is the scheme of torch's DCP without its file format: DCP describes tensors in a pickle, and its safetensors
writer does not support tied weights.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import NoneType
from typing import Any

from torch import Tensor
from torch.distributed import DistError

from dwindle.core.errors import UserError
from dwindle.core.run_directory import RunDirectory
from dwindle.distributed.engines import Engine, Files
from dwindle.distributed.safetensors_stream import write_tensors
from dwindle.training.checkpoint import begin_checkpoint, commit_checkpoint, write_failure

_TIMEOUT_S = 1800.0


class CheckpointWriter:
    """One save at a time; an error in one ends all processes at the next save, or at the end of the run."""

    def __init__(self, engine: Engine, run_dir: Path, keep_last: int) -> None:
        self.engine, self.run, self.keep_last = engine, RunDirectory(Path(run_dir)), keep_last
        self._thread: threading.Thread | None = None
        self._step = 0
        self._error: BaseException | None = None

    def save(self, step: int, state: Mapping[str, Any], tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Copy to host memory and return; every process calls this after the same step."""
        self.wait()
        self._step = step
        files = _on_host(self.engine.files(tensors))
        self.engine.world.main_first(f"begin checkpoint {step}", lambda: self._begin(step, files))
        arguments = (step, json.loads(json.dumps(state, allow_nan=False)), files)
        self._thread = threading.Thread(target=self._run, args=arguments, name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the last save is in place on every process; if it failed on one, raise or exit on all."""
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        if not self.engine.is_main and not isinstance(self._error, (UserError, NoneType)):
            raise self._error  # a bug: only its own traceback shows where
        self.engine.world.main_first(f"checkpoint {self._step}", self._raise_error)
        self.engine.world.barrier()  # the main process hosts the store and must not exit before all have read it

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _begin(self, step: int, files: Files) -> None:
        if self.engine.is_main:
            with self._write_errors(step, files):
                begin_checkpoint(self.run, step)

    def _run(self, step: int, state: Mapping[str, Any], files: Files) -> None:
        folder, store = self.run.unfinished_checkpoint(step), self.engine.world.store
        report: dict[str, Any] = {}
        try:
            with self._write_errors(step, files):
                report["checksums"] = {name: write_tensors(folder / name, named) for name, named in files.items()}
                if self.engine.is_main:
                    checksums = report["checksums"] | self._checksums_of_others(step)
                    commit_checkpoint(self.run, step, state, checksums, keep_last=self.keep_last)
        except BaseException as error:
            self._error = error
            report["failure"] = str(error) or type(error).__name__
        if not self.engine.is_main:
            with suppress(DistError):  # the main process has exited, which ``wait`` notices
                store.set(self._key(step, self.engine.rank), json.dumps(report))

    @contextmanager
    def _write_errors(self, step: int, files: Files) -> Iterator[None]:
        """An OSError becomes a UserError that says how to continue."""
        try:
            yield
        except OSError as error:
            tensors = {name: tensor for named in files.values() for name, tensor in named.items()}
            raise write_failure(error, self.run, self.run.checkpoint(step), tensors) from error

    def _key(self, step: int, rank: int) -> str:
        return f"checkpoint/{step}/{rank}"

    def _checksums_of_others(self, step: int) -> dict[str, str]:
        """Checksums of the other processes' files, once they are on disk."""
        store = self.engine.world.store
        found: dict[str, str] = {}
        deadline = time.monotonic() + _TIMEOUT_S
        for rank in range(1, self.engine.size):
            key = self._key(step, rank)
            while not store.check([key]):
                if time.monotonic() > deadline:
                    raise UserError(
                        f"{self.run.path}: process {rank} did not finish writing step {step}: look at its log"
                    )
                time.sleep(0.02)
            report = json.loads(store.get(key))
            store.delete_key(key)
            if "failure" in report:
                raise UserError(f"process {rank}: {report['failure']}")
            found |= report["checksums"]
        return found


def _on_host(files: Files) -> Files:
    """Copies in host memory, tied tensors once."""
    copies: dict[tuple[Any, ...], Tensor] = {}

    def copy(tensor: Tensor) -> Tensor:
        place = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape))
        if not tensor.numel() or place not in copies:
            copies[place] = tensor.detach().to("cpu", copy=True)
        return copies[place]

    return {file: {name: copy(tensor) for name, tensor in named.items()} for file, named in files.items()}
