"""Tiny runs: their recipes, their logs without the clock, processes that are killed, and runs that must be equal."""

from __future__ import annotations

import gc
import json
import os
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dwindle.core.config import from_dict
from dwindle.pruning.ledger import read_ledger
from dwindle.pruning.surgery import Prunable
from dwindle.recipe.recipe import Recipe
from dwindle.run.pretrain import pretrain, resume
from dwindle.training.checkpoint import latest_checkpoint

COMPACT_OFTEN = {"compact_threshold": 0.1, "compact_multiple": 4, "compact_wait": 0}
"""[prune] settings with which even a run of a few steps compacts."""


def tiny_recipe(place: Path, *, steps: int, sequences: int = 8, seq_len: int = 24, **tables: dict[str, Any]) -> Recipe:
    """A run of the model in ``place`` on CPython's documentation; ``tables`` add to the recipe or replace its keys."""
    tokens = sequences * seq_len
    base: dict[str, dict[str, Any]] = {
        "source": {"model": str(place / "model"), "device": "cpu"},
        "data": {"train": ["pydoc:train"], "seq_len": seq_len, "cache_dir": str(place / "cache")},
        "training": {"tokens": steps * tokens, "tokens_per_step": tokens, "lr": 3e-3, "optimizer": "adamw"},
        "prune": {"warmup_steps": 0, "smoothing": 0.0},
        "distill": {"weight": 0.0},
    }
    if "method" not in tables.get("prune", {}):
        base["prune"] |= {"selection": "coupled", "metric": "taylor"}
    return from_dict(Recipe, base | {name: base.get(name, {}) | table for name, table in tables.items()})


def metrics(run: Path) -> list[dict[str, Any]]:
    """All lines without what depends on the clock."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "time"} for line in lines]


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_ledger(run) if event["event"] == kind]


def choices(run: Path) -> list[dict[str, Any]]:
    """The ledger but for the last digits of scores, and for the settings of the first line."""
    return [{k: v for k, v in event.items() if k != "saliency"} for event in read_ledger(run)[1:]]


def start(task: Callable[[], object]) -> int:
    """A real process that runs the task on one thread; it exits with 0 when it is done."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        gc.freeze()  # collections neither visit nor copy what all processes share
        torch.set_num_threads(1)  # OpenMP's threads do not survive a fork: a child that waits for them hangs
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, 1)
        task()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def wait(child: int, seconds: float = 600) -> int | None:
    """The exit status, or None if it still runs after that time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status
        time.sleep(0.002)
    return None


def kill(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def go_on(settings: Recipe, run: Path) -> None:
    if (run / "recipe.toml").exists():
        resume(run)
    else:
        pretrain(settings, run)


def die_at(owner: Any, name: str, count: int, *, before: bool = False) -> None:
    """From now on, in this process: SIGKILL at the count-th call of a function."""
    original, calls = getattr(owner, name), 0

    def fatal(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if before and calls == count:
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*args, **kwargs)
        if calls == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, fatal)


def assert_same_when_killed(settings: Recipe, run: Path, reference: Path, kills: tuple[int, int]) -> None:
    """A run that is killed twice, after so many groups were removed, and resumed equals an uninterrupted one."""
    assert wait(start(lambda: pretrain(settings, reference))) == 0
    for count in kills:
        child = start(lambda n=count: (die_at(Prunable, "prune_to", n), go_on(settings, run)))  # type: ignore[misc]
        assert os.WIFSIGNALED(wait(child) or 0)
    assert wait(start(lambda: go_on(settings, run))) == 0
    assert_same_run(run, reference)


def assert_same_run(run: Path, reference: Path) -> None:
    """Weights, moments, generators, ledger and metrics, to the byte."""
    for folder in ("model", "milestones/70%"):
        for file in ("model.safetensors", "structure.json", "config.json", "ledger.jsonl"):
            assert (run / folder / file).read_bytes() == (reference / folder / file).read_bytes(), f"{folder}/{file}"
    ours, theirs = latest_checkpoint(run), latest_checkpoint(reference)
    assert ours.name == theirs.name
    for path in theirs.glob("*.safetensors"):
        assert (ours / path.name).read_bytes() == path.read_bytes(), path.name
    assert (run / "ledger.jsonl").read_bytes() == (reference / "ledger.jsonl").read_bytes()
    assert metrics(run) == metrics(reference)
    assert (run / "quality.json").read_bytes() == (reference / "quality.json").read_bytes()
    assert not [path for path in run.rglob(".*") if path.name not in (".lock", ".job")], "leftovers"


def assert_same(run: Path, alone: Path, tolerance: float = 1e-5) -> None:
    ours, theirs = metrics(run), metrics(alone)
    assert [line["step"] for line in ours] == [line["step"] for line in theirs]
    for key in ("loss", "valid_loss", "grad_norm"):
        values = [(a[key], b[key]) for a, b in zip(ours, theirs, strict=True) if key in b]
        assert [a for a, _ in values] == pytest.approx([b for _, b in values], abs=tolerance, rel=tolerance), key
    assert choices(run) == choices(alone)
    for folder in ("model", "milestones/70%"):
        assert (run / folder / "structure.json").read_bytes() == (alone / folder / "structure.json").read_bytes()
        weights, expected = (load_file(r / folder / "model.safetensors") for r in (run, alone))
        assert weights.keys() == expected.keys()
        for name, weight in weights.items():
            torch.testing.assert_close(weight, expected[name], atol=2e-3, rtol=0)  # Adam amplifies small gradients
