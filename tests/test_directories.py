"""A directory appears complete or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from dwindle.directories import atomic_directory
from dwindle.errors import UserError


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
