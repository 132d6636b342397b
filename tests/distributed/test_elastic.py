"""``torchrun --max-restarts``: a job continues its own run after a kill, and no other's."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from processes import run_ranks
from test_launcher import children_of
from test_ranks import recipe

from dwindle.core.config import write_toml
from dwindle.core.errors import UserError
from dwindle.core.run_directory import RunDirectory
from dwindle.distributed.elastic import attempt_id, job_id, said_before
from dwindle.run.pretrain import pretrain
from runs import assert_same_run
from tiny import tiny_directory

needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc to find the processes")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and two recipes: one saves every third step, one only at the end."""
    place = tmp_path_factory.mktemp("elastic")
    tiny_directory(place / "model", tie_word_embeddings=True, num_hidden_layers=2)
    for name, every in (("often", 3), ("never", 0)):
        settings = recipe(place, "fsdp", tokens=40 * 168)
        settings.checkpoint.every = every
        write_toml(settings, place / f"{name}.toml")
    return place


@pytest.fixture(scope="module")
def uninterrupted(place: Path) -> Path:
    settings = recipe(place, "fsdp", tokens=40 * 168)
    settings.checkpoint.every = 3
    run_ranks(2, lambda rank: pretrain(settings, place / "uninterrupted"))
    return place / "uninterrupted"


def torchrun(place: Path, ranks: int, *arguments: str | Path, options: Sequence[str] = ()) -> subprocess.Popen[bytes]:
    """Up to three attempts; standard error goes to a file."""
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--max-restarts=2",
        f"--nproc-per-node={ranks}",
        *options,
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with (place / "messages").open("wb") as messages:
        command = [*launcher, "-m", "dwindle", *map(str, arguments)]
        return subprocess.Popen(command, stderr=messages, stdout=subprocess.DEVNULL, env=environment)


def kill_last_rank(job: subprocess.Popen[bytes], run: RunDirectory, when: Callable[[], bool]) -> None:
    wait_until(job, when)
    os.kill(children_of(job.pid)[-1], signal.SIGKILL)
    assert not run.is_finished


def wait_until(job: subprocess.Popen[bytes], when: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not when() and job.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)


@pytest.mark.slow
@pytest.mark.parity
@needs_proc
def test_a_killed_rank_is_restarted_and_the_run_ends_bit_equal(place: Path, uninterrupted: Path) -> None:
    run = RunDirectory(place / "killed")
    job = torchrun(place, 2, "pretrain", place / "often.toml", "--out", run.path)
    kill_last_rank(job, run, lambda: bool(run.list_checkpoints()))
    assert job.wait(600) == 0, (place / "messages").read_text()
    assert_same_run(run.path, uninterrupted)


@pytest.mark.slow
@needs_proc
def test_machines_that_count_restarts_differently_agree(place: Path, uninterrupted: Path) -> None:
    """Of two agents only the one whose process was killed counts a restart; their run id is not unique."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = ("--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}", "--rdzv-id=same")
    run = RunDirectory(place / "killed-on-one-of-two")
    arguments = ("pretrain", place / "often.toml", "--out", run.path)
    jobs = [torchrun(place, 1, *arguments, options=options) for _ in range(2)]
    kill_last_rank(jobs[1], run, lambda: bool(run.list_checkpoints()))
    assert [job.wait(600) for job in jobs] == [0, 0], (place / "messages").read_text()
    assert_same_run(run.path, uninterrupted)


@pytest.mark.slow
@needs_proc
def test_one_process_killed_before_its_first_checkpoint_begins_again(place: Path) -> None:
    run_ranks(1, lambda rank: pretrain(recipe(place, tokens=40 * 168), place / "alone"))  # on one thread, too
    run = RunDirectory(place / "killed-early")
    arguments = ("pretrain", place / "never.toml", "training.parallel=auto", "--out", run.path)
    job = torchrun(place, 1, *arguments)
    kill_last_rank(job, run, lambda: run.has_begun)
    messages = place / "messages"
    assert job.wait(600) == 0, messages.read_text()
    assert messages.read_text().count("ended before its first checkpoint: begins again") == 1
    assert run.ledger.read_bytes() == (place / "alone" / "ledger.jsonl").read_bytes()


@pytest.mark.slow
def test_a_run_of_another_job_is_refused_in_every_attempt_and_said_once(place: Path, uninterrupted: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in uninterrupted.rglob("*")}
    job = torchrun(place, 2, "pretrain", place / "often.toml", "--out", uninterrupted)
    assert job.wait(600) == 1
    messages = (place / "messages").read_text()
    assert messages.count("error: ") == 1 and "a run exists there" in messages, messages
    assert {path: path.stat().st_mtime_ns for path in uninterrupted.rglob("*")} == before


@pytest.mark.slow
@needs_proc
def test_a_resumed_run_is_restarted(place: Path, uninterrupted: Path) -> None:
    run = RunDirectory(place / "killed-twice")
    job = torchrun(place, 2, "pretrain", place / "often.toml", "--out", run.path)
    wait_until(job, lambda: bool(run.list_checkpoints()))
    for process in (job.pid, *children_of(job.pid)):  # the power is cut
        os.kill(process, signal.SIGKILL)
    job.wait()
    (newest,) = run.list_checkpoints()[-1:]
    job = torchrun(place, 2, "resume", run.path)
    kill_last_rank(job, run, lambda: run.list_checkpoints()[-1] != newest)
    assert job.wait(600) == 0, (place / "messages").read_text()
    assert_same_run(run.path, uninterrupted)


def test_processes_of_an_attempt_agree_on_a_name_whatever_earlier_ones_left() -> None:
    store, limit = dist.HashStore(), timedelta(seconds=60)
    names: set[str] = set()
    for _ in range(3):
        with ThreadPoolExecutor(3) as pool:
            attempt = set(pool.map(lambda rank: attempt_id(store, rank, 3, limit), range(3)))
        assert len(attempt) == 1 and not attempt & names
        names |= attempt
        store.set("dwindle/question/1", "asked by a process that was killed before it was answered")
    with pytest.raises(UserError, match="process 1 did not join within 0 s"):
        attempt_id(store, 0, 2, timedelta(0))


def test_without_torchrun_there_is_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    assert not job_id() and not said_before("error") and not said_before("error")


def test_a_job_is_known_by_its_store_and_says_each_error_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    jobs = []
    for _ in range(2):
        agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        monkeypatch.setenv("MASTER_PORT", str(agent.port))
        assert job_id() == job_id()
        assert [said_before(text) for text in ("a", "b", "a")] == [False, False, True]
        jobs.append(job_id())
    assert jobs[0] != jobs[1] and all(jobs)
