"""Runs that several tests read."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_runs import make_run

import hostile


@pytest.fixture(scope="session")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of days: 100,000 steps and 10,000 events."""
    shape = {"hidden": 2048, "layers": 16, "heads": 32, "kv": 8, "ffn": 12_000}
    return make_run(tmp_path_factory.mktemp("long") / "run", steps=100_000, events=10_000, shape=shape)


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs a command in this process; returns exit code, output, errors."""
    monkeypatch.chdir(tmp_path)
    return hostile.shell
