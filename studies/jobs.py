"""Makes several rows of a study at once: one small model leaves the GPU mostly idle.

Every row runs in its own process with the same options; all of them add to the same JSON file.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

JOBS_VARIABLE = "DWINDLE_STUDY_JOBS"
STOPPED = 143
"""Exit code of a process that was asked to stop, or had no time left; it continues when called again."""
Place = tuple[int, str, str]
"""(seed, size, row)"""


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """A lock between processes; the operating system releases it however the process ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@dataclass
class Running:
    place: Place
    process: subprocess.Popen[bytes]
    log: Path


@dataclass
class Outcome:
    """How the rows of a call ended."""

    out_of_time: bool = False
    failed: int = 0


def jobs_around() -> int:
    """Number of rows that are made concurrently, including this one."""
    return int(os.environ.get(JOBS_VARIABLE, "1"))


def environment(jobs: int) -> dict[str, str]:
    """The environment of one of several processes that share the CPU."""
    share = str(max(1, (os.cpu_count() or 1) // jobs))
    return {**os.environ, "OMP_NUM_THREADS": share, "TORCHINDUCTOR_COMPILE_THREADS": share, JOBS_VARIABLE: str(jobs)}


def run_jobs(places: Sequence[Place], jobs: int, left: Callable[[], float], logs: Path) -> Outcome:
    """Start a process for every place, at most ``jobs`` at once, while time is ``left``."""
    logs.mkdir(parents=True, exist_ok=True)
    waiting, running, outcome = list(places), list[Running](), Outcome()
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(STOPPED))  # so that `finally` runs
    try:
        while waiting or running:
            while waiting and len(running) < jobs and left() > 0:
                running.append(start(waiting.pop(0), jobs, left(), logs))
            if not running:
                outcome.out_of_time = True
                break
            time.sleep(0.2)
            for job in [job for job in running if job.process.poll() is not None]:
                running.remove(job)
                report(job, outcome)
    finally:
        for job in running:
            job.process.terminate()  # a run saves itself and stops
        for job in running:
            job.process.wait()
        signal.signal(signal.SIGTERM, before)
    return outcome


def start(place: Place, jobs: int, left: float, logs: Path) -> Running:
    """Run the same command for one row; for a repeated option the last value counts."""
    seed, size, row = place
    one = ["--rows", row, "--sizes", size, "--seeds", str(seed), "--budget", f"{left:.0f}", "--jobs", "1"]
    log = logs / f"{row}-{size}-{seed}.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, *sys.argv, *one],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment(jobs),
            start_new_session=True,
        )
    return Running(place, process, log)


def report(job: Running, outcome: Outcome) -> None:
    """Print the record of a finished row, or why there is none."""
    lines = job.log.read_text(encoding="utf-8", errors="replace").splitlines()
    code, row = job.process.returncode, " ".join(map(str, reversed(job.place)))
    if code == STOPPED:
        outcome.out_of_time = True
        return
    if code:
        print(f"{row}: failed with {code}", *lines[-12:], sep="\n", flush=True)
        outcome.failed += 1
        return
    print(*[line for line in lines if line.startswith("{")], sep="\n", flush=True)
