"""Files and directories that appear complete or not at all, and the checks that long work makes before it starts."""

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

_TEMPORARY = re.compile(r"\.(?P<name>.+)\.writing-(?P<host>.+)-(?P<pid>[0-9]+)(?P<old>-old)?(?:\.[^.]+)?")
_RUST_ERROR = re.compile(r"(?P<reason>[^:]+) \(os error (?P<number>[0-9]+)\)")


class NotWritten(UserError):
    """The operating system refused a write; ``error`` is its reason, for callers that have better advice."""

    def __init__(self, place: str, error: OSError, advice: str = "choose another place") -> None:
        super().__init__(f"{place} could not be written ({error.strerror or error}): {advice}")
        self.error = error


# Writing ---------------------------------------------------------------------------------------------------


def write_text_atomic(path: Path, text: str, *, option: str = "") -> None:
    """Write a text file that is complete and on disk, or not there; see ``atomic_file``."""
    with atomic_file(path, option=option) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n")


@contextmanager
def atomic_file(target: Path, *, option: str = "--out") -> Iterator[Path]:
    """Yield a temporary path beside ``target``, with its suffix; synced and renamed to ``target`` at the end.

    Temporary files of killed processes are removed. ``option`` names where the user chose the place, if anywhere.
    """
    temporary = target.parent / f".{target.stem}.writing-{owner(os.getpid())}{target.suffix}"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned(target.parent, target.stem)
        yield temporary
        fsync_path(temporary)
        os.replace(temporary, target)
        fsync_path(target.parent)
    except OSError as error:
        if option:
            advice = "nothing was changed, free space or choose another place"
            raise NotWritten(f"{option} {target}", error, advice) from error
        advice = "free space on its disk or make it writable, then run the same command again"
        raise NotWritten(f"{target}:", error, advice) from error
    finally:
        with suppress(OSError):
            temporary.unlink()


@contextmanager
def atomic_directory(
    target: Path, *, marker: str, overwrite: bool = False, keep_existing: bool = False, option: str = "--out"
) -> Iterator[Path]:
    """Yield a temporary directory beside ``target``; synced and renamed to ``target`` at the end.

    An existing target is refused without ``overwrite``. Even then it is only replaced if it is empty or holds
    ``marker``, a file that only dwindle writes, so that a mistyped path deletes nothing else. With ``keep_existing``,
    a target that appeared in the meantime is kept. A symbolic link is kept and its target replaced. Temporary
    directories of killed processes are removed. ``option`` names where the user chose the place.
    """
    if not keep_existing:
        refuse_existing(target, marker=marker, overwrite=overwrite, option=option)
    target = resolved(target) if target.is_symlink() else target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned(target.parent, target.name)
        temporary = target.parent / f".{target.name}.writing-{owner(os.getpid())}"
        temporary.mkdir()
    except OSError as error:
        raise NotWritten(f"{option} {target}", error) from error
    try:
        yield temporary
        for path in temporary.rglob("*"):
            fsync_path(path)
        fsync_path(temporary)
        _put_in_place(temporary, target, keep_existing)
    except Exception as error:
        if (reason := _os_error(error)) is None:
            raise
        advice = "nothing was changed, free space or choose another place"
        raise NotWritten(f"{option} {target}", reason, advice) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _os_error(error: Exception) -> OSError | None:
    """The operating system's error; libraries in Rust (safetensors, tokenizers) put it into the text of their own."""
    if isinstance(error, OSError):
        return error
    found = None if isinstance(error, UserError) else _RUST_ERROR.search(str(error))
    return None if found is None else OSError(int(found["number"]), found["reason"].strip())


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
    fsync_path(target.parent)


def fsync_path(path: Path) -> None:
    """Flush a file, or the names in a directory, to disk."""
    if os.name != "posix":  # Windows cannot open a directory
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# Checks before long work -----------------------------------------------------------------------------------


def folder_size(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def refuse_file(
    target: Path,
    option: str = "--out",
    *,
    suffix: str = "",
    overwrite: bool = True,
    sources: Sequence[str | PathLike[str]] = (),
) -> None:
    """Refuse a file with a wrong suffix, an existing one without ``overwrite``, an input, or an unwritable place."""
    advice = f"give a file name that ends in {suffix}" if suffix else "give a file name"
    if not target.name.endswith(suffix):
        raise UserError(f"{option} {target}: {advice}")
    if target.is_dir():
        raise UserError(f"{option} {target} is a directory: {advice}")
    refuse_sources(target, sources, option)
    if target.exists() and not overwrite:
        raise UserError(f"{option} {target} already exists: choose another file or pass --overwrite")
    refuse_unwritable(target, option)


def refuse_existing(
    target: Path,
    *,
    marker: str,
    overwrite: bool,
    option: str = "--out",
    sources: Sequence[str | PathLike[str]] = (),
) -> None:
    """Refuse an existing directory without ``overwrite`` or without ``marker``, and an unwritable place.

    ``sources`` are the inputs: a target that holds one is refused in any case.
    """
    refuse_place(target, option)
    refuse_sources(target, sources, option)
    if not target.exists():
        refuse_unwritable(target, option)
        return
    if not target.is_dir():
        raise UserError(f"{option} {target} already exists and is not a directory: choose another place")
    if any(target.iterdir()) and not (target / marker).is_file():
        raise UserError(
            f"{option} {target} already exists and has no {marker}, which every directory of dwindle's has: choose "
            "another directory"
        )
    if not overwrite:
        raise UserError(f"{option} {target} already exists: choose another directory or pass --overwrite")


def refuse_place(target: Path, option: str = "--out") -> None:
    """Refuse a directory that cannot be replaced by a rename: a mount point, or a parent of the current one."""
    if os.path.ismount(resolved(target, option)):
        raise UserError(f"{option} {target} is the root of a file system: give a directory inside it")
    with suppress(FileNotFoundError):  # the current directory was deleted, so no directory holds it
        here, real = Path.cwd(), resolved(target, option)
        if here.is_relative_to(real):
            what = "is" if here == real else "holds"
            raise UserError(
                f"{option} {target} {what} the current directory: give a directory inside it, or change directory"
            )


def refuse_sources(target: Path, sources: Sequence[str | PathLike[str]], option: str = "--out") -> None:
    """Refuse a target that is, or holds, an input; wildcards are expanded, names that are not files are skipped."""
    whole = resolved(target, option)
    for source in sources:
        name = os.path.expanduser(source)
        found = [name] if os.path.exists(name) else glob.glob(name, recursive=True)
        for path in (resolved(Path(one), option) for one in found):
            if path.is_relative_to(whole):
                what = "is" if path == whole else "holds"
                raise UserError(f"{option} {target} {what} the input {source}: choose another place")


def refuse_unwritable(target: Path, option: str) -> None:
    """Refuse a path below something that is not a writable directory."""
    nearest = next(parent for parent in resolved(target, option).parents if parent.exists())
    if not (nearest.is_dir() and os.access(nearest, os.W_OK)):
        why = f"{nearest} is not a writable directory"
        raise UserError(f"{option} {target} cannot be written ({why}): choose another place")


def resolved(path: Path, option: str = "--out") -> Path:
    """``path.resolve()``; a loop of links, or a name that no file can have, is a ``UserError``."""
    try:
        return path.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: a loop, before Python 3.13
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{option} {path} cannot be used ({reason}): choose another place") from error


# Leftovers of killed processes -----------------------------------------------------------------------------


def owner(pid: int) -> str:
    """Host and process, at the end of temporary names: a later process can tell whether the writer still runs."""
    return f"{socket.gethostname()}-{pid}"


def remove_abandoned(folder: Path, name: str = "") -> None:
    """Remove what killed processes of this host left in a folder while they wrote ``name`` (default: anything).

    A directory that was being replaced is put back if the new one had not taken its place.
    """
    for path in list(folder.iterdir()) if folder.is_dir() else []:
        match = _TEMPORARY.fullmatch(path.name)
        if match is None or match["host"] != socket.gethostname() or (name and match["name"] != name):
            continue
        if _is_running(int(match["pid"])):
            continue
        if match["old"] and not (folder / match["name"]).exists():
            os.rename(path, folder / match["name"])
        elif path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _is_running(pid: int) -> bool:
    """Whether another process of this host runs; False for this one, which has no abandoned files."""
    if pid == os.getpid():
        return False
    if os.name != "posix":  # on Windows, signal 0 is not a harmless question
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
