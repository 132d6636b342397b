"""Shared fixtures: tiny models built from configs in code; the optional data folder beside the checkout.

The whole suite must end in eight minutes on two quiet cores (900 CPU seconds). How a test stays cheap:

- One strong test of a promise, not every option times every family: options that do not interact share a test.
- Tiny models (``tiny.py``), a few steps, one process. A run that several tests compare with is a module's fixture;
  ``--dist worksteal`` keeps a module on one worker.
- A new interpreter imports torch and transformers for four seconds: call ``hostile.command`` or ``CliRunner`` in this
  process, or fork (``runs.start``, ``processes.run_ranks``), unless the process is what is tested.
- Never assert wall-clock; time limits are for hangs (minutes). Mark what takes over five seconds ``slow``, and what
  must agree on any CPU ``parity``: CI runs those with other instructions and numbers of threads (``settings.py``).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

from dwindle.training import sampling
from tiny import tiny_directory

sampling.NEW_TOKENS = 8  # every run ends with samples: of 32 tokens they would cost as much as its steps
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:  # as of background jobs and under nohup; tests interrupt runs
        signal.signal(number, usual)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The data folder that some tests use when it is there (README, Development)."""
    folder = Path(os.environ.get("DWINDLE_SHARED", Path(__file__).resolve().parents[2] / "shared")) / "data"
    if not folder.is_dir():
        pytest.skip(f"optional data folder {folder.name!r} is not beside the checkout")
    return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model, where runs are written."""
    place = tmp_path_factory.mktemp("place")
    tiny_directory(place / "model")
    return place


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For modules that compare bits with a forked process, which has one thread (``runs.start``)."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
