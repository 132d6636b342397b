"""``--overwrite`` replaces a run only once the new one has begun, and never one that is being written."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from dwindle.core.errors import UserError
from dwindle.core.files import NotWritten
from dwindle.core.run_directory import RunDirectory
from dwindle.data.vocabulary_config import VocabularyConfig
from dwindle.recipe.recipe import Recipe
from dwindle.run.pretrain import begin_run, pretrain, resume
from dwindle.training.callbacks import Callback
from dwindle.training.config import CheckpointConfig, DistillConfig, ValidationConfig
from dwindle.training.loop import TrainingDiverged
from runs import tiny_recipe


def recipe(place: Path, *, train: str = "pydoc:train", **training: Any) -> Recipe:
    """Two steps of a plain loop."""
    data = {"train": [train], "valid": ["pydoc:valid"], "valid_tokens": 480, "cache_dir": None}
    return tiny_recipe(place, steps=2, data=data, training={"micro_batch": 4} | training, prune={"enabled": False})


@pytest.fixture(scope="module")
def finished(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that tests copy to where it is to be replaced."""
    run = tmp_path_factory.mktemp("finished") / "run"
    pretrain(recipe(place), run)
    return run


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_mistake_in_the_new_recipe_keeps_the_old_run(place: Path, finished: Path, tmp_path: Path) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    (tmp_path / "tiny.txt").write_text("too short")
    with pytest.raises(UserError, match="only"):
        pretrain(recipe(place, train=str(tmp_path / "tiny.txt")), run, overwrite=True)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    pretrain(recipe(place, seed=1), run, overwrite=True)
    assert "seed = 1" in (run / "recipe.toml").read_text() and (run / "model").is_dir()
    assert names(tmp_path) == ["run", "tiny.txt"]


class Fails(Callback):
    """Raises what it is given, at a hook."""

    def __init__(self, hook: str, error: BaseException) -> None:
        setattr(self, hook, self._fail)
        self.error = error

    def _fail(self, trainer: object) -> None:
        raise self.error


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize(
    ("hook", "error"),
    [
        ("on_start", UserError("no")),
        ("on_start", RuntimeError()),
        ("after_backward", UserError("no")),
        ("after_backward", MemoryError()),
        ("after_backward", KeyboardInterrupt()),
    ],
)
def test_a_failure_before_the_first_step_keeps_the_old_run(
    place: Path, finished: Path, tmp_path: Path, hook: str, error: BaseException, linked: bool
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, tmp_path / "real" if linked else run)
    if linked:
        run.symlink_to(tmp_path / "real")
    before, outside = (run / "model" / "model.safetensors").read_bytes(), names(tmp_path)
    for _ in range(2):
        with pytest.raises(type(error)):
            pretrain(recipe(place, seed=1), run, overwrite=True, callbacks=[Fails(hook, error)])
        assert (run / "model" / "model.safetensors").read_bytes() == before and names(tmp_path) == outside


def test_killed_while_it_loads_and_tried_again(place: Path, finished: Path, tmp_path: Path) -> None:
    """An attempt that never began is no reason to give up what it was to replace."""
    run = shutil.copytree(finished, tmp_path / "run")
    before = (run / "model" / "model.safetensors").read_bytes()
    for seed in (1, 2):
        begin_run(recipe(place, seed=seed), RunDirectory(run), overwrite=True)  # and no more: killed
        assert names(tmp_path) == [".run.replaced", "run"]
        assert (tmp_path / ".run.replaced" / "model" / "model.safetensors").read_bytes() == before
    assert resume(run).status == "finished" and names(tmp_path) == ["run"]
    assert (run / "model" / "model.safetensors").read_bytes() != before


@pytest.mark.parametrize("role", ["source", "teacher", "text", "wildcard", "validation", "tasks", "vocabulary"])
def test_what_the_new_run_reads_is_not_replaced(place: Path, finished: Path, tmp_path: Path, role: str) -> None:
    """It would be put aside before it is read, and gone after the first step."""
    run, settings = shutil.copytree(finished, tmp_path / "run"), recipe(place)
    (run / "books.txt").write_text("It was a bright cold day in April. " * 200)
    if role == "source":
        settings.source.model = str(run / "model")
    elif role == "teacher":
        settings.distill = DistillConfig(weight=0.5, teacher=str(run / "model"))
    elif role == "vocabulary":
        settings.vocabulary = VocabularyConfig(size=300, text=[str(run / "books.txt")])
    elif role == "tasks":
        settings.validation.data = [str(run)]
    elif role == "validation":
        settings.data.valid = [str(run / "books.txt")]
    else:
        settings.data.train = [str(run / ("books.txt" if role == "text" else "b*.txt"))]
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match=r"^--out .*/run (is|holds) the input .*: choose another place"):
        pretrain(settings, run, overwrite=True)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_a_folder_with_a_recipe_of_ones_own_is_not_a_run(place: Path, tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text("# my notes")
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(UserError, match="exists and is not a run"):
        pretrain(recipe(place), tmp_path, overwrite=True)
    assert names(tmp_path) == ["recipe.toml", "thesis.txt"]


def test_a_run_is_not_put_where_the_shell_stands(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for out in (".", str(tmp_path), "/"):
        with pytest.raises(UserError, match=r"^--out .* is the (current directory|root of a file system)"):
            pretrain(recipe(place), out)
    assert names(tmp_path) == []
    begin_run(recipe(place), RunDirectory(Path("run")), overwrite=False)
    monkeypatch.chdir(tmp_path / "run")
    assert resume(".").status == "finished"
    monkeypatch.chdir(tmp_path / "run" / "model")
    with pytest.raises(UserError, match=r"^output \.\./model is the current directory"):
        resume("..")  # a finished run writes its model again: refused before any training


def test_a_run_that_is_being_written_is_not_replaced(place: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    begin_run(recipe(place), RunDirectory(run), overwrite=False)
    with RunDirectory(run).locked(), pytest.raises(UserError, match="another process is writing this run"):
        begin_run(recipe(place, seed=1), RunDirectory(run), overwrite=True)
    assert "seed = 0" in (run / "recipe.toml").read_text() and names(tmp_path) == ["run"]


def test_killed_between_the_old_and_the_new(place: Path, tmp_path: Path) -> None:
    """What was put aside comes back when nothing has taken its place, and goes when something has."""
    run, aside = tmp_path / "run", tmp_path / ".run.replaced"
    begin_run(recipe(place), RunDirectory(run), overwrite=False)
    os.rename(run, aside)
    assert resume(run).status == "finished" and names(tmp_path) == ["run"]
    aside.mkdir()
    assert resume(run).status == "finished" and names(tmp_path) == ["run"]


def test_a_link_stays_a_link(place: Path, tmp_path: Path) -> None:
    """The usual link to a larger disk: empty at first, replaced later."""
    real, link = tmp_path / "disk" / "real", tmp_path / "link"
    real.mkdir(parents=True)
    link.symlink_to(real)
    for seed in range(2):
        pretrain(recipe(place, seed=seed), link, overwrite=bool(seed))
        assert link.is_symlink() and f"seed = {seed}" in (real / "recipe.toml").read_text()
        assert names(tmp_path) == ["disk", "link"] and names(real.parent) == ["real"]


def test_divergence_is_said_even_when_validation_diverges(place: Path, tmp_path: Path) -> None:
    settings = recipe(place, tokens=40 * 192, lr=1e13, max_bad_steps=8)
    settings.validation, settings.checkpoint = ValidationConfig(every=2), CheckpointConfig(every=100)
    with pytest.raises(TrainingDiverged, match="it has no checkpoint: begin again with"):
        pretrain(settings, tmp_path / "run")
    settings.checkpoint.every = 1
    with pytest.raises(TrainingDiverged, match="continues from step-00000001"):
        pretrain(settings, tmp_path / "run", overwrite=True)
    assert names(tmp_path / "run" / "checkpoints") == ["step-00000001"]


def test_skipped_steps_are_counted(place: Path, tmp_path: Path) -> None:
    result = pretrain(recipe(place, tokens=8 * 192, lr=1e13), tmp_path / "run")
    assert result.status == "finished" and result.skipped_steps > 4
    assert result.loss is None and result.valid_loss is None


def test_what_depends_on_the_machine_is_kept(place: Path, tmp_path: Path) -> None:
    pretrain(recipe(place, micro_batch=0), tmp_path / "run")
    assert 'precision = "fp32"' in (tmp_path / "run" / "recipe.toml").read_text()


def test_a_full_disk_while_that_is_written(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new run leaves nothing behind, so what is advised fits ``pretrain`` as well as ``resume``."""
    run, real = tmp_path / "run", os.replace
    said = r"run/recipe\.toml: could not be written \(No space left on device\): free space .* the same command again"

    def full(source: Path, target: Path) -> None:
        if target == run / "recipe.toml":
            raise OSError(errno.ENOSPC, "No space left on device")
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(NotWritten, match=said):
            pretrain(recipe(place, micro_batch=0), run)
        assert names(tmp_path) == []
        begin_run(recipe(place, micro_batch=0), RunDirectory(run), overwrite=False)
        with pytest.raises(NotWritten, match=said):
            resume(run)
    assert resume(run).status == "finished"
