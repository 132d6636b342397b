"""``--nproc N``: N processes on this machine, with the environment variables of ``torchrun --standalone``.

With torchrun, each process receives Ctrl-C twice (from the terminal and from torchrun) and is killed after 30 seconds.
Here every process gets each signal once, and as much time as it needs to finish its step and write a checkpoint. A
launcher that is killed cannot forward anything: its processes notice that it is gone (``stop_with_launcher``).
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from types import FrameType

_LAUNCHER = "DWINDLE_LAUNCHER"
"""Environment variable: process id of the launcher."""
STOPPING = tuple(
    number for name in ("SIGINT", "SIGTERM", "SIGHUP") if (number := getattr(signal, name, None)) is not None
)
"""Signals that ask a run to save and exit; Windows has no SIGHUP."""
_ORPHAN_GRACE_S = 60.0
"""Time for a process whose launcher is gone to finish its step and write a checkpoint."""
_GRACE_S = 20.0
"""Time for the other processes to exit by themselves after one has failed."""


def launch(num_processes: int, arguments: Sequence[str]) -> int:
    """Run ``python -m dwindle <arguments>`` in N processes; returns the exit code of the first that failed, or 0."""
    port = _free_port()
    processes = [_start(rank, num_processes, port, arguments) for rank in range(num_processes)]

    def forward(number: int, frame: FrameType | None) -> None:
        for process in processes:
            if process.poll() is None:
                process.send_signal(number)

    heard = [number for number in STOPPING if signal.getsignal(number) is not signal.SIG_IGN]  # not under nohup
    previous = {number: signal.signal(number, forward) for number in heard}
    try:
        return _wait(processes)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()


def _start(rank: int, size: int, port: int, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    environment = os.environ | {name: str(value) for name, value in numbers.items()} | {"MASTER_ADDR": "127.0.0.1"}
    environment[_LAUNCHER] = str(os.getpid())
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // size)))
    # a new session, so that Ctrl-C reaches the process through this launcher only, once
    return subprocess.Popen([sys.executable, "-m", "dwindle", *arguments], env=environment, start_new_session=True)


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> int:
    while True:
        codes = [process.poll() for process in processes]
        failed = [(rank, code) for rank, code in enumerate(codes) if code]
        if failed:
            break
        if all(code == 0 for code in codes):
            return 0
        time.sleep(0.05)
    rank, code = failed[0]
    if code < 0:
        print(f"error: process {rank} was killed by {signal.Signals(-code).name}: stopping the others", file=sys.stderr)
    deadline = time.monotonic() + _GRACE_S
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        time.sleep(0.05)
    return code if code > 0 else 128 - code


def stop_with_launcher() -> None:
    """In a process of ``launch``: stop as on SIGTERM when the launcher is gone, however it ended."""
    launcher = os.environ.get(_LAUNCHER, "")
    if launcher.isdecimal():
        threading.Thread(target=_watch, args=(int(launcher),), name="launcher", daemon=True).start()


def _watch(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_ORPHAN_GRACE_S)
    os._exit(128 + signal.SIGTERM)  # it waits for a process that has already exited


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
