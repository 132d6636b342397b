"""Atomic writes of a single output file."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from os import PathLike
from pathlib import Path

from dwindle.core.directories import is_running, owner, refuse_sources, why_unwritable
from dwindle.core.errors import UserError


def refuse_existing_file(
    target: Path, *, suffix: str, overwrite: bool, sources: Sequence[str | PathLike[str]] = ()
) -> None:
    """Refuse a wrong suffix, an existing or input file, or an unwritable directory, before any work."""
    if target.suffix != suffix:
        raise UserError(f"--out {target}: give a file name that ends in {suffix}")
    if target.is_dir():
        raise UserError(f"--out {target} is a directory: give a file name that ends in {suffix}")
    refuse_sources(target, sources)
    if target.exists() and not overwrite:
        raise UserError(f"--out {target} already exists: choose another file or pass --overwrite")
    if why := why_unwritable(target):
        raise UserError(f"--out {target} cannot be written: {why}")


@contextmanager
def atomic_file(target: Path) -> Iterator[Path]:
    """Yields a temporary path beside ``target`` that replaces it if the block does not raise."""
    temporary = target.parent / f".{target.stem}.writing-{owner(os.getpid())}{target.suffix}"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(target)
        yield temporary
        with temporary.open("rb") as handle:
            os.fsync(handle.fileno())
        os.replace(temporary, target)
    except OSError as error:
        raise UserError(
            f"--out {target} could not be written ({error.strerror or error}): nothing was changed; free space or "
            "choose another directory"
        ) from error
    finally:
        with suppress(OSError):
            temporary.unlink()


def _remove_abandoned(target: Path) -> None:
    """Delete temporary files of processes on this machine that are no longer running."""
    pattern = re.compile(re.escape(f".{target.stem}.writing-{owner(0)[:-1]}") + r"(\d+)" + re.escape(target.suffix))
    for path in list(target.parent.iterdir()):
        match = pattern.fullmatch(path.name)
        if match and not is_running(int(match[1])):
            path.unlink(missing_ok=True)
