"""Files and directories appear complete or not at all."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from safetensors import SafetensorError

from dwindle.core.errors import UserError
from dwindle.core.files import NotWritten, atomic_directory, owner, refuse_existing, remove_abandoned


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_faster_process_wins_in_a_cache(tmp_path: Path) -> None:
    target = tmp_path / "cache" / "a"
    with atomic_directory(target, marker="index", keep_existing=True) as folder:
        (folder / "index").write_text("late")
        target.mkdir()
        (target / "index").write_text("early")
    assert (target / "index").read_text() == "early"
    assert names(target.parent) == ["a"]


def test_failure_keeps_the_old_one(tmp_path: Path) -> None:
    target = tmp_path / "a"
    target.mkdir()
    (target / "index").write_text("old")
    with pytest.raises(RuntimeError), atomic_directory(target, marker="index", overwrite=True):
        raise RuntimeError
    assert (target / "index").read_text() == "old"
    with pytest.raises(UserError, match="No space left"), atomic_directory(target, marker="index", overwrite=True):
        raise OSError(28, "No space left on device")
    assert (target / "index").read_text() == "old" and names(tmp_path) == ["a"]
    with atomic_directory(target, marker="index", overwrite=True) as folder:
        (folder / "index").write_text("new")
    assert (target / "index").read_text() == "new" and names(tmp_path) == ["a"]


@pytest.mark.parametrize(
    "error",
    [
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
        Exception("No space left on device (os error 28)"),  # of tokenizers
    ],
)
def test_libraries_in_rust_hide_what_the_system_said(tmp_path: Path, error: Exception) -> None:
    said = r"^data.cache_dir .*/a could not be written \(No space left on device\): "
    place = atomic_directory(tmp_path / "a", marker="index", option="data.cache_dir")
    with pytest.raises(NotWritten, match=said) as caught, place:
        raise error
    assert caught.value.error.errno == 28 and names(tmp_path) == []


@pytest.mark.parametrize("error", [Exception("something else"), UserError("a.bin: Is a directory (os error 21)")])
def test_other_errors_stay_what_they_are(tmp_path: Path, error: Exception) -> None:
    with pytest.raises(type(error)) as caught, atomic_directory(tmp_path / "a", marker="index"):
        raise error
    assert caught.value is error and names(tmp_path) == []


def test_what_a_killed_process_left_is_removed_or_put_back(tmp_path: Path) -> None:
    """Killed while it wrote, while the old one was removed, and between the two renames; another still runs."""
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    dead, alive = owner(child), owner(os.getppid())
    for name in (f".a.writing-{dead}", f".b.writing-{dead}-old", f".c.writing-{dead}-old", f".d.writing-{alive}", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "index").write_text(name)
    (tmp_path / ".hidden").mkdir()
    remove_abandoned(tmp_path, "other")
    assert len(names(tmp_path)) == 6
    remove_abandoned(tmp_path)
    assert names(tmp_path) == [f".d.writing-{alive}", ".hidden", "b", "c"]
    assert (tmp_path / "b" / "index").read_text() == "b"
    assert (tmp_path / "c" / "index").read_text() == f".c.writing-{dead}-old"
    remove_abandoned(tmp_path / "nowhere")


def test_places_that_are_never_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "a" / "b"
    here.mkdir(parents=True)
    (tmp_path / "link").symlink_to(here)
    monkeypatch.chdir(here)
    for place in ("/", ".", "..", "../..", str(here), str(tmp_path / "link")):
        said = "root of a file system" if place == "/" else "current directory"
        with pytest.raises(UserError, match=rf"^--out {place} .*{said}.*: give a directory"):
            refuse_existing(Path(place), marker="index", overwrite=True)
        with pytest.raises(UserError, match=said), atomic_directory(Path(place), marker="index", overwrite=True):
            pass
    for place in ("new", "../new", str(tmp_path / "a" / "b2")):
        refuse_existing(Path(place), marker="index", overwrite=True)
    here.rmdir()  # whoever stands in a folder that is gone can still name others
    refuse_existing(tmp_path / "new", marker="index", overwrite=True)


def test_what_is_read_is_never_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out" / "inner").mkdir(parents=True)
    (tmp_path / "out" / "index").touch()
    (tmp_path / "link").symlink_to(tmp_path / "out")
    (tmp_path / "beside").mkdir()
    for source in ("out", "link", "out/inner", "link/index", "o*/ind*", str(tmp_path / "out")):
        for place in ("out", "link", "beside/../out"):
            with pytest.raises(UserError, match=rf"^--out {place} .*the input {re.escape(source)}: choose"):
                refuse_existing(Path(place), marker="index", overwrite=True, sources=["beside", source])
    for source in (".", "beside", "nowhere", "org/out", "hf:out", ""):
        refuse_existing(Path("out"), marker="index", overwrite=True, sources=[source])
    with pytest.raises(UserError, match="out already exists: choose another directory or pass --overwrite"):
        refuse_existing(Path("out"), marker="index", overwrite=False, sources=["beside"])
