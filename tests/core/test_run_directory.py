"""The run directory: whose it is, how far it has come, and what its models are called."""

from __future__ import annotations

from pathlib import Path

import pytest

from dwindle.core.errors import UserError
from dwindle.core.run_directory import LEDGER, STRUCTURE, RunDirectory, checkpoint_step, model_title


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path / "a run")
    run.create("[source]\n")
    return run


def finish(run: RunDirectory) -> None:
    run.model.mkdir()
    (run.model / "config.json").touch()


def test_one_writer(run: RunDirectory) -> None:
    with run.locked():
        with pytest.raises(UserError, match="another process is writing this run"), run.locked():
            pass
        with pytest.raises(UserError, match="another process is writing this run"):
            run.create("[source]\n")
    with run.locked():
        pass


def test_a_place_that_cannot_be_locked(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"nowhere: cannot be written \(No such file"), run.locked():
        pass


def test_status(run: RunDirectory) -> None:
    assert run.status == "stopped" and not run.has_begun and run.has_logs
    with run.locked():
        assert run.status == "running"
    finish(run)
    assert run.status == "finished"
    model = RunDirectory(run.model)
    (run.model / STRUCTURE).touch()
    model.ledger.write_text("{}\n")
    assert model.status == "unpruned"
    model.ledger.write_text("{}\n{}\n")
    assert model.status == "pruned"


def test_what_to_run_after_a_failure(run: RunDirectory) -> None:
    assert run.command_after_failure == "the same command again"
    run.metrics.write_text("{}\n")
    assert run.command_after_failure == f"`dwindle resume '{run.path}'`"


def test_places_that_are_not_free(run: RunDirectory, tmp_path: Path) -> None:
    RunDirectory(tmp_path / "new").check_free(overwrite=False)
    run.check_free(overwrite=True)
    with pytest.raises(UserError, match=r"a run exists there: `dwindle resume .*` continues it, --overwrite"):
        run.check_free(overwrite=False)
    run.lock.unlink()
    with pytest.raises(UserError, match="exists and is not a run"):
        run.check_free(overwrite=True)
    run.check_is_run()
    with pytest.raises(UserError, match=r"new: has no recipe\.toml: give the directory that dwindle pretrain wrote"):
        RunDirectory(tmp_path / "new").check_is_run()


def test_checkpoints_are_listed_by_step(run: RunDirectory) -> None:
    for step in (100, 20, 3):
        run.checkpoint(step).mkdir(parents=True)
    run.unfinished_checkpoint(200).mkdir()
    (run.checkpoints / "step-notes").mkdir()
    assert [checkpoint_step(path) for path in run.list_checkpoints()] == [3, 20, 100] and run.has_begun
    run.tidy()
    assert not run.unfinished_checkpoint(200).exists() and len(run.list_checkpoints()) == 3


def test_the_run_of_a_model(run: RunDirectory, tmp_path: Path) -> None:
    finish(run)
    assert RunDirectory.of_model(run.model) is None  # a recipe beside a model is not a run
    run.metrics.touch()
    found = RunDirectory.of_model(run.model)
    assert found is not None and found.path == run.path
    assert RunDirectory.of_model(run.path) is None and RunDirectory.of_model(tmp_path / "model") is None
    assert model_title(run.model) == "a run" and model_title(run.milestone("1/2")) == "a run, 1-2"
    assert model_title(tmp_path / "other") == "other" and run.ledger.name == LEDGER


def test_a_signature_changes_with_the_files(run: RunDirectory) -> None:
    before = run.signature()
    assert run.signature() == before
    run.metrics.write_text("{}\n")
    assert run.signature() != before
