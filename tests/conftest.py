"""Shared fixtures: tiny models built from configs in code; the optional data folder beside the checkout."""

from __future__ import annotations

import os
import signal
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell starts background jobs so; tests interrupt runs
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The data folder that some tests use when it is there (README, Development)."""
    folder = Path(os.environ.get("DWINDLE_SHARED", Path(__file__).resolve().parents[2] / "shared")) / "data"
    if not folder.is_dir():
        pytest.skip(f"optional data folder {folder.name!r} is not beside the checkout")
    return folder
