"""Checkpoints are whole or not there: killed writers, damage, full disks, and exact round trips."""

from __future__ import annotations

import errno
import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_run import tiny_llama
from torch import Tensor

from dwindle.core.errors import UserError
from dwindle.core.run_directory import RunDirectory
from dwindle.distributed import safetensors_stream as tensorfile
from dwindle.distributed.safetensors_stream import read_tensors, write_tensors
from dwindle.training import checkpoint as module
from dwindle.training.checkpoint import (
    CheckpointWarning,
    damage,
    latest_checkpoint,
    load_model_tensors,
    load_optimizer_tensors,
    open_checkpoint,
    optimizer_tensors,
    write_checkpoint,
)
from dwindle.training.config import TrainingConfig
from dwindle.training.optim import build_optimizer
from dwindle.training.rng import load_rng, rng_state, rng_tensors, seed_everything


def save(run: Path, step: int, **options: Any) -> Path:
    tensors = {"model": {"w": torch.full((3, 4), float(step))}, "optimizer": {"m": torch.arange(step)}}
    return write_checkpoint(run, step, {"step": step, "pi": 0.1 + 0.2}, tensors, **options)


def names(run: Path) -> list[str]:
    return sorted(os.listdir(RunDirectory(run).checkpoints))


def awkward_tensors() -> dict[str, Tensor]:
    base = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
    tensors = {
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "transposed": base.t(),
        "bool": torch.tensor([True, False, True]),
        "bytes": torch.arange(7, dtype=torch.uint8),
        "odd.bf16": base[0, :3].bfloat16(),
        "special": torch.tensor([float("nan"), float("inf"), -0.0, 1e-45]),
    }
    kinds = (torch.float64, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8)
    return tensors | {str(kind): base.mul(9).to(kind) for kind in kinds}


def test_tensor_files_round_trip_exactly_and_are_plain_safetensors(tmp_path: Path) -> None:
    tensors = awkward_tensors()
    write_tensors(tmp_path / "t.safetensors", tensors)
    for back in (read_tensors(tmp_path / "t.safetensors"), load_file(tmp_path / "t.safetensors")):
        assert back.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert back[name].dtype == tensor.dtype and back[name].shape == tensor.shape, name
            left, right = (t.contiguous().reshape(-1).view(torch.uint8) for t in (back[name], tensor))
            assert torch.equal(left, right), name


def test_tied_tensors_are_stored_once(tmp_path: Path) -> None:
    weight = torch.randn(50, 20)
    write_tensors(tmp_path / "t.safetensors", {"head": weight, "embed": weight, "part": weight[:25]})
    assert (tmp_path / "t.safetensors").stat().st_size < 1.6 * weight.numel() * 4
    back = read_tensors(tmp_path / "t.safetensors")
    assert back["embed"] is back["head"]
    assert torch.equal(back["head"], weight) and torch.equal(back["part"], weight[:25])


def test_write_and_read(tmp_path: Path) -> None:
    path = save(tmp_path, 100)
    assert path == tmp_path / "checkpoints" / "step-00000100"
    files = ["checksums.json", "model.safetensors", "optimizer.safetensors", "state.json"]
    assert sorted(os.listdir(path)) == files
    opened = open_checkpoint(latest_checkpoint(tmp_path))
    assert opened.step == 100 and opened.state == {"step": 100, "pi": 0.1 + 0.2}
    assert torch.equal(opened.tensors("model")["w"], torch.full((3, 4), 100.0))
    assert opened.tensors("nothing") == {}


def test_keep_last(tmp_path: Path) -> None:
    for step in (1, 2, 3, 10):
        save(tmp_path, step, keep_last=2)
    assert names(tmp_path) == ["step-00000003", "step-00000010"]


@pytest.mark.parametrize("file", ["model.safetensors", "state.json", "checksums.json"])
@pytest.mark.parametrize("how", ["flip", "cut", "remove"])
def test_a_damaged_newest_is_passed_over_with_a_warning(tmp_path: Path, file: str, how: str) -> None:
    good, bad = save(tmp_path, 1), save(tmp_path, 2)
    content = (bad / file).read_bytes()
    if how == "flip":
        (bad / file).write_bytes(content[:-2] + bytes([content[-2] ^ 1]) + content[-1:])
    elif how == "cut":
        (bad / file).write_bytes(content[: len(content) // 2])
    else:
        (bad / file).unlink()
    with pytest.warns(CheckpointWarning, match=r"step-00000002 is damaged"):
        assert latest_checkpoint(tmp_path) == good
    if file != "checksums.json":
        assert file in str(damage(bad))


def test_a_damaged_one_makes_room_for_its_repetition(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (save(tmp_path, 4) / "state.json").write_text("{}")
    assert save(tmp_path, 2, keep_last=1).name in names(tmp_path)
    assert names(tmp_path) == ["step-00000002"]
    (save(tmp_path, 4) / "state.json").write_text("{}")
    save(tmp_path, 4)
    assert damage(latest_checkpoint(tmp_path)) is None
    assert names(tmp_path) == ["step-00000002", "step-00000004"]


def test_no_good_checkpoint_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no checkpoint"):
        latest_checkpoint(tmp_path)
    assert RunDirectory(tmp_path).list_checkpoints() == []
    (save(tmp_path, 1) / "model.safetensors").write_bytes(b"")
    with pytest.warns(CheckpointWarning), pytest.raises(UserError, match="all 1 checkpoints are damaged"):
        latest_checkpoint(tmp_path)


class Killed(BaseException):
    """Stands for SIGKILL: nothing after it runs, so clean-up is switched off as well."""


@pytest.mark.parametrize("moment", range(12))
def test_killed_anywhere_while_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: int) -> None:
    save(tmp_path, 1, keep_last=1)
    calls = 0

    def count(function: Any) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > moment:
                raise Killed
            return function(*args, **kwargs)

        return wrapped

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", count(os.fsync))
        patch.setattr(Path, "rename", count(Path.rename))
        patch.setattr(module.shutil, "rmtree", lambda *args, **kwargs: None)
        try:
            save(tmp_path, 2, keep_last=1)
        except Killed:
            pass
        else:
            assert moment >= 7
    survivor = latest_checkpoint(tmp_path)
    assert damage(survivor) is None and survivor.name in ("step-00000001", "step-00000002")
    save(tmp_path, 3, keep_last=1)
    assert names(tmp_path) == ["step-00000003"]


@pytest.mark.parametrize("file", ["model.safetensors", "state.json"])
def test_disk_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    save(tmp_path, 1)
    real = os.fsync

    def full(descriptor: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(file):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(UserError, match=r"disk is full; the last good checkpoint is step-00000001: free"):
            save(tmp_path, 2, keep_last=1)
    assert names(tmp_path) == ["step-00000001"]
    assert damage(latest_checkpoint(tmp_path)) is None


def test_disk_full_in_the_middle_of_a_tensor(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    with pytest.raises(OSError) as caught:
        tensorfile.write_tensors(Path("/dev/full"), {"w": torch.zeros(100_000)})
    assert caught.value.errno == errno.ENOSPC


def test_optimizer_state_by_name_round_trips(tmp_path: Path) -> None:
    model = tiny_llama()
    optimizer = build_optimizer(model, TrainingConfig(tokens=1, lr=1e-3, optimizer="adamw"))
    for p in list(model.parameters())[1:]:
        p.grad = torch.randn_like(p)
    optimizer.step()
    tensors = optimizer_tensors(model, optimizer)
    weights = [name for name, _ in model.named_parameters()][1:]
    assert tensors.keys() == {f"{key}/{n}" for key in ("exp_avg", "exp_avg_sq", "step") for n in weights}
    write_checkpoint(tmp_path, 1, {}, {"model": model.state_dict(), "optimizer": tensors})

    other = tiny_llama()
    fresh = build_optimizer(other, TrainingConfig(tokens=1, lr=1e-3, optimizer="adamw"))
    saved = open_checkpoint(latest_checkpoint(tmp_path))
    load_model_tensors(other, saved.tensors("model"))
    load_optimizer_tensors(other, fresh, saved.tensors("optimizer"))
    for _ in range(2):
        for left, right in zip(model.parameters(), other.parameters(), strict=True):
            left.grad = torch.randn_like(left)
            right.grad = left.grad.clone()
        optimizer.step()
        fresh.step()
    assert all(map(torch.equal, model.parameters(), other.parameters()))


def test_random_generators_continue_where_they_were(tmp_path: Path) -> None:
    def draw() -> list[float]:
        return [random.gauss(0, 1), random.random(), np.random.randn(), np.random.rand(), float(torch.randn(()))]

    seed_everything(7)
    first = draw()
    write_checkpoint(tmp_path, 1, {"rng": rng_state()}, {"rng": rng_tensors()})
    expected = draw() + draw()
    seed_everything(7)
    assert draw() == first
    saved = open_checkpoint(latest_checkpoint(tmp_path))
    load_rng(json.loads(json.dumps(saved.state["rng"])), saved.tensors("rng"))
    assert draw() + draw() == expected
