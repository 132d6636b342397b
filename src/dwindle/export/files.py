"""One output file that appears complete or not at all."""

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
    """Before long work: a wrong name, an existing file, one that is read, or a place that cannot be written."""
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
    """Yields a temporary path beside ``target``, with its suffix, that takes its place if nothing is raised."""
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
            f"--out {target} could not be written ({error.strerror or error}): nothing was changed, free space or "
            "choose another place"
        ) from error
    finally:
        with suppress(OSError):
            temporary.unlink()


def _remove_abandoned(target: Path) -> None:
    """Temporary files of processes of this machine that no longer run."""
    pattern = re.compile(re.escape(f".{target.stem}.writing-{owner(0)[:-1]}") + r"(\d+)" + re.escape(target.suffix))
    for path in list(target.parent.iterdir()):
        match = pattern.fullmatch(path.name)
        if match and not is_running(int(match[1])):
            path.unlink(missing_ok=True)
