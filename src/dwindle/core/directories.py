"""A directory that appears complete or not at all."""

from __future__ import annotations

import glob
import os
import re
import shutil
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from os import PathLike
from pathlib import Path

from dwindle.core.errors import UserError

_TEMPORARY = re.compile(r"\.(?P<name>.+)\.writing-(?P<host>.+)-(?P<pid>[0-9]+)(?P<old>-old)?")
_OF_RUST = re.compile(r"(?P<reason>[^:]+) \(os error (?P<number>[0-9]+)\)")


class NotWritten(UserError):
    """The operating system refused to write; ``error`` is what it said, for callers that know better advice."""

    def __init__(self, message: str, error: OSError) -> None:
        super().__init__(message)
        self.error = error

    @classmethod
    def file(cls, path: Path, error: OSError) -> NotWritten:
        """A single file, where the same command can simply be given again."""
        advice = "free space on its disk or make it writable, then run the same command again"
        return cls(f"{path}: could not be written ({error.strerror or error}): {advice}", error)


@contextmanager
def atomic_directory(
    target: Path, *, marker: str, overwrite: bool = False, keep_existing: bool = False, option: str = "--out"
) -> Iterator[Path]:
    """Yields a temporary directory beside ``target`` that takes its place at the end.

    An existing target is refused without ``overwrite``, and even then replaced only if it holds ``marker``, which
    nobody else writes (or nothing), so that a mistyped path cannot delete anything else. With ``keep_existing`` a
    target that appeared meanwhile wins. A link stays: what it points to is replaced. What killed processes left
    behind is removed. Messages name ``option``, where the place was chosen.
    """
    if not keep_existing:
        refuse_existing(target, marker=marker, overwrite=overwrite, option=option)
    target = target.resolve() if target.is_symlink() else target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned(target.parent, target.name)
        temporary = target.parent / f".{target.name}.writing-{owner(os.getpid())}"
        temporary.mkdir()
    except OSError as error:
        why = error.strerror or error
        raise NotWritten(f"{option} {target} cannot be written ({why}): choose another place", error) from error
    try:
        yield temporary
        for path in temporary.rglob("*"):
            _sync(path)
        _sync(temporary)
        _put_in_place(temporary, target, keep_existing)
    except Exception as error:
        if (refusal := _of_the_system(error)) is None:
            raise
        why = refusal.strerror or refusal
        advice = "nothing was changed, free space or choose another place"
        raise NotWritten(f"{option} {target} could not be written ({why}): {advice}", refusal) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _of_the_system(error: Exception) -> OSError | None:
    """What the operating system said; libraries in Rust (safetensors, tokenizers) say it in errors of their own."""
    if isinstance(error, OSError):
        return error
    said = None if isinstance(error, UserError) else _OF_RUST.search(str(error))
    return None if said is None else OSError(int(said["number"]), said["reason"].strip())


def refuse_existing(
    target: Path,
    *,
    marker: str,
    overwrite: bool,
    option: str = "--out",
    sources: Sequence[str | PathLike[str]] = (),
) -> None:
    """Refuse an existing target, and a place that cannot be written; long work calls this before it starts.

    ``sources`` are what the work reads: a target whose replacement would delete one is refused in any case.
    """
    refuse_place(target, option)
    refuse_sources(target, sources, option)
    if not target.exists():
        if why := why_unwritable(target):
            raise UserError(f"{option} {target} cannot be written: {why}")
        return
    if not target.is_dir():
        raise UserError(f"{option} {target} already exists and is not a directory: choose another place")
    if any(target.iterdir()) and not (target / marker).is_file():
        raise UserError(
            f"{option} {target} already exists and has no {marker}, as what dwindle writes there would have: it is "
            "left alone, choose another directory"
        )
    if not overwrite:
        raise UserError(f"{option} {target} already exists: choose another directory or pass --overwrite")


def refuse_place(target: Path, option: str = "--out") -> None:
    """Refuse what cannot be renamed, or not without pulling the floor from under the shell that it is asked in."""
    if os.path.ismount(target.resolve()):
        raise UserError(f"{option} {target} is the root of a file system: give a folder inside it")
    with suppress(FileNotFoundError):  # a current folder that was deleted: nothing can hold it
        here, real = Path.cwd(), target.resolve()
        if here.is_relative_to(real):
            what = "is" if here == real else "holds"
            raise UserError(f"{option} {target} {what} the current folder: give a folder inside it, or go elsewhere")


def refuse_sources(target: Path, sources: Sequence[str | PathLike[str]], option: str = "--out") -> None:
    """Refuse a target that is, or holds, something that is read, wildcards spelled out; other names are passed over."""
    whole = target.resolve()
    for source in sources:
        name = os.path.expanduser(source)
        found = [name] if os.path.exists(name) else glob.glob(name, recursive=True)
        for path in (Path(one).resolve() for one in found):
            if path.is_relative_to(whole):
                what = "is" if path == whole else "holds"
                raise UserError(f"{option} {target} {what} {source}, which this is made from: choose another place")


def why_unwritable(target: Path) -> str:
    """Why nothing can be made at a path; empty where something can."""
    nearest = next(parent for parent in target.resolve().parents if parent.exists())
    if nearest.is_dir() and os.access(nearest, os.W_OK):
        return ""
    return f"{nearest} is not a directory that may be written to"


def _put_in_place(temporary: Path, target: Path, keep_existing: bool) -> None:
    if target.exists():
        if keep_existing:
            return
        old = temporary.with_name(temporary.name + "-old")
        os.rename(target, old)
        try:
            os.rename(temporary, target)
        except OSError:
            os.rename(old, target)
            raise
        shutil.rmtree(old, ignore_errors=True)
    else:
        try:
            os.rename(temporary, target)
        except OSError:
            if not (keep_existing and target.exists()):
                raise
    _sync(target.parent)


def _sync(path: Path) -> None:
    if os.name != "posix":  # elsewhere a directory cannot be opened
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def owner(pid: int) -> str:
    """What temporary names end in, so that whoever comes later can tell whether their process still runs."""
    return f"{socket.gethostname()}-{pid}"


def remove_abandoned(folder: Path, name: str = "") -> None:
    """What killed processes of this machine left in a folder while they wrote ``name``, or anything.

    A directory that was being replaced comes back if the new one had not taken its place.
    """
    for path in list(folder.iterdir()) if folder.is_dir() else []:
        match = _TEMPORARY.fullmatch(path.name)
        if match is None or match["host"] != socket.gethostname() or (name and match["name"] != name):
            continue
        if is_running(int(match["pid"])):
            continue
        if match["old"] and not (folder / match["name"]).exists():
            os.rename(path, folder / match["name"])
        else:
            shutil.rmtree(path, ignore_errors=True)


def is_running(pid: int) -> bool:
    """Another process of this machine; this one has no abandoned files."""
    if pid == os.getpid():
        return False
    if os.name != "posix":  # there a signal 0 is not a harmless question
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
