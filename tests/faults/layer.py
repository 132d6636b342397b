"""A file layer with faults, for one process: a disk that fills up, a power cut, a slow disk, a clock that jumps.

Writes, renames and fsyncs below a folder are counted. Rust code (safetensors, tokenizers) writes around Python: each of
its calls counts as one write.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import random
import shutil
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors.torch
import transformers.modeling_utils
from transformers import PreTrainedTokenizerFast

CUT = 77
"""Exit code of a process whose power was cut."""


class FaultyDisk:
    """Counts operations on files below ``folder``; ``fault`` is called before each with its number."""

    def __init__(self, folder: Path, fault: Callable[[FaultyDisk, int], None]) -> None:
        self.folder = str(folder.resolve())
        self.fault = fault
        self.count = 0
        self.names: dict[int, dict[str, int]] = {}
        """Durable entries of each directory, by inode, as of its last fsync."""
        self.data: dict[int, bytes] = {}
        """Durable content of each file, by inode, as of its last fsync."""
        self._fsync = os.fsync
        for path in [folder, *folder.rglob("*")]:  # whatever was there before is durable
            self._remember(path)

    def install(self) -> None:
        """From now on, in this process."""
        real_open, layer = builtins.open, self

        def opened(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
            found = real_open(file, mode, *args, **options)
            if set(mode) & set("wax+") and layer._is_ours(file):
                real_write = found.write

                def write(some: Any) -> Any:
                    layer.operate()
                    return real_write(some)

                found = _Writing(found, write)
            return found

        builtins.open = io.open = opened  # type: ignore[assignment]
        for name in ("rename", "replace", "mkdir", "unlink", "rmdir"):
            setattr(os, name, self._counted(getattr(os, name)))
        os.fsync = self._synced
        for owner, name in (
            (safetensors.torch, "save_file"),
            (transformers.modeling_utils, "safe_save_file"),
            (PreTrainedTokenizerFast, "save_pretrained"),
        ):
            setattr(owner, name, self._counted(getattr(owner, name), always=True))

    def operate(self) -> None:
        self.count += 1
        self.fault(self, self.count)

    def _counted(self, real: Callable[..., Any], *, always: bool = False) -> Callable[..., Any]:
        def operation(*args: Any, **options: Any) -> Any:
            if always or any(self._is_ours(one) for one in args):
                self.operate()
            return real(*args, **options)

        return operation

    def _synced(self, handle: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        if self._is_ours(path):
            self.operate()
            self._remember(path)
        self._fsync(handle)

    def _remember(self, path: Path) -> None:
        if path.is_dir():
            self.names[path.stat().st_ino] = {entry.name: entry.inode() for entry in os.scandir(path)}
        elif path.is_file():
            self.data[path.stat().st_ino] = path.read_bytes()

    def _is_ours(self, path: Any) -> bool:
        return isinstance(path, (str, os.PathLike)) and os.path.abspath(path).startswith(self.folder)

    def cut_power(self) -> None:
        """Leave only what was fsynced: names of directories that were, contents of files that were; then end."""
        kinds = {path.stat().st_ino: path.is_dir() for path in Path(self.folder).rglob("*") if path.exists()}
        after = Path(f"{self.folder}.after")
        os.makedirs(after)
        self._restore(Path(self.folder).stat().st_ino, after, kinds)
        shutil.rmtree(self.folder)
        after.rename(self.folder)
        os._exit(CUT)

    def _restore(self, inode: int, folder: Path, kinds: dict[int, bool]) -> None:
        for name, entry in self.names.get(inode, {}).items():
            if kinds.get(entry, entry in self.names):
                os.makedirs(folder / name)
                self._restore(entry, folder / name, kinds)
            else:
                descriptor = os.open(folder / name, os.O_WRONLY | os.O_CREAT)
                os.write(descriptor, self.data.get(entry, b""))
                os.close(descriptor)


class _Writing:
    """A file whose writes are counted."""

    def __init__(self, file: Any, write: Callable[[Any], Any]) -> None:
        self._file, self.write = file, write

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _Writing:
        self._file.__enter__()
        return self

    def __exit__(self, *error: Any) -> Any:
        return self._file.__exit__(*error)


def full_from(number: int) -> Callable[[FaultyDisk, int], None]:
    """The disk is full from this operation on; deleting still works, and makes no room."""

    def fault(disk: FaultyDisk, count: int) -> None:
        if count >= number:
            raise OSError(errno.ENOSPC, "No space left on device")

    return fault


def power_cut_at(number: int) -> Callable[[FaultyDisk, int], None]:
    def fault(disk: FaultyDisk, count: int) -> None:
        if count == number:
            disk.cut_power()

    return fault


def slow(seconds: float) -> Callable[[FaultyDisk, int], None]:
    def fault(disk: FaultyDisk, count: int) -> None:
        time.sleep(seconds)

    return fault


@contextmanager
def jumping_clock(seed: int) -> Any:
    """The wall clock jumps by up to a year, forwards and backwards, whenever it is read."""
    real, numbers = time.time, random.Random(seed)
    time.time = lambda: real() + numbers.uniform(-3e7, 3e7)
    try:
        yield
    finally:
        time.time = real
