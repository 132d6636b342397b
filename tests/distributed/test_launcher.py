"""``--nproc``: real processes, one of them killed: the others and the launcher end, and the run resumes."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from test_ranks import recipe

from dwindle.commands import main as cli
from dwindle.core.config import write_toml
from dwindle.core.run_directory import RunDirectory
from dwindle.run.pretrain import pretrain, resume
from hostile import assert_refused, command
from runs import assert_same, start, wait
from tiny import tiny_directory


def children_of(parent: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == parent:
            found.append(int(stat.parent.name))
    return sorted(found)


def launch(messages: Path, *arguments: str) -> int:
    """The command in a forked process, which has its imports; the processes that it starts are new ones."""

    def task() -> None:
        os.dup2(os.open(messages, os.O_WRONLY | os.O_CREAT), 2)
        sys.argv, sys.stderr = ["dwindle", *arguments], os.fdopen(2, "w", buffering=1)
        try:
            cli.main()
        except SystemExit as done:
            os._exit(int(done.code or 0))

    return start(task)


def has_ended(child: int) -> bool:
    return bool(os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT))


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc to find the processes")
def test_a_killed_process_ends_the_launcher_and_the_run_resumes(tmp_path: Path) -> None:
    tiny_directory(tmp_path / "model", tie_word_embeddings=True, num_hidden_layers=2)
    settings = recipe(tmp_path, "fsdp", tokens=12 * 168)
    settings.checkpoint.every = 3
    pretrain(settings, tmp_path / "alone")
    write_toml(settings, tmp_path / "recipe.toml")
    run = tmp_path / "run"
    arguments = ("pretrain", str(tmp_path / "recipe.toml"), "--out", str(run), "--nproc", "2")
    launcher = launch(tmp_path / "messages", *arguments)
    deadline = time.monotonic() + 300
    while not RunDirectory(run).list_checkpoints() and time.monotonic() < deadline and not has_ended(launcher):
        time.sleep(0.02)
    os.kill(children_of(launcher)[-1], signal.SIGKILL)
    status, messages = wait(launcher), (tmp_path / "messages").read_text()
    assert status and "was killed by SIGKILL" in messages and "Traceback" not in messages
    assert RunDirectory(run).list_checkpoints() and not (run / "model").exists()
    resume(run)
    assert_same(run, tmp_path / "alone")


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc to find the processes")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP])
def test_processes_end_with_their_launcher(tmp_path: Path, number: int) -> None:
    tiny_directory(tmp_path / "model", tie_word_embeddings=True, num_hidden_layers=2)
    settings = recipe(tmp_path, "ddp", tokens=4000 * 168)
    write_toml(settings, tmp_path / "recipe.toml")
    run = RunDirectory(tmp_path / "run")
    arguments = ("pretrain", str(tmp_path / "recipe.toml"), "--out", str(run.path), "--nproc", "2")
    launcher = launch(tmp_path / "messages", *arguments)
    deadline = time.monotonic() + 300
    while not run.has_begun and time.monotonic() < deadline and not has_ended(launcher):
        time.sleep(0.02)
    ranks = children_of(launcher)
    os.kill(launcher, number)
    assert wait(launcher) is not None
    deadline = time.monotonic() + 300
    while any(Path(f"/proc/{rank}/stat").exists() for rank in ranks) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [rank for rank in ranks if Path(f"/proc/{rank}/stat").exists()] and len(ranks) == 2
    assert run.status == "stopped" and run.list_checkpoints() and not run.is_finished
    with run.locked():
        pass


def test_mistakes_are_found_before_any_process_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dwindle.distributed.launch._start", None)
    tiny_directory(tmp_path / "model")
    settings = recipe(tmp_path)
    settings.data.train = [str(tmp_path / "nothing.txt")]
    write_toml(settings, tmp_path / "recipe.toml")
    line = assert_refused(command("pretrain", tmp_path / "recipe.toml", "--out", tmp_path / "run", "--nproc", "2"))
    assert "nothing.txt" in line
    assert not (tmp_path / "run").exists()
