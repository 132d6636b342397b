"""A file layer with faults, for one process: a disk that fills up, a power cut, a slow disk, a clock that jumps.

Whatever asks the system to change something below a folder is an operation and is counted: writes (of a whole buffer),
truncations, renames, fsyncs, new and deleted names. Rust code (safetensors, tokenizers) writes around Python: each of
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
            if not set(mode) & set("wax+") or not layer._is_ours(file):
                return real_open(file, mode, *args, **options)
            return _opened(_Counted(file, mode, layer), mode, *args, **options)

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


class _Counted(io.FileIO):
    """A file whose writes are counted when they reach the system, so that a full disk is often found at a close."""

    def __init__(self, file: Any, mode: str, disk: FaultyDisk) -> None:
        super().__init__(file, mode.replace("b", "").replace("t", ""))
        self._disk = disk

    def write(self, some: Any) -> int:
        self._disk.operate()
        return super().write(some)

    def truncate(self, size: int | None = None) -> int:
        self._disk.operate()
        return super().truncate(size)


def _opened(
    raw: io.FileIO, mode: str, buffering: int = -1, encoding: Any = None, errors: Any = None, newline: Any = None
) -> Any:
    """What ``open`` puts around a raw file."""
    if "b" in mode and buffering == 0:
        return raw
    file = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
    return file if "b" in mode else io.TextIOWrapper(file, encoding or "utf-8", errors, newline)


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
