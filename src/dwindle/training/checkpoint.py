"""Checkpoints: directories that appear atomically.

A checkpoint holds ``<group>.safetensors`` files (sharded groups: one file per process, see ``sharded_safetensors``),
``state.json`` and ``checksums.json`` (the sha256 of each of the others). It is written under a temporary name, fsynced
and renamed, so the process may be killed at any time; older checkpoints are deleted only once the new one is on disk.
"""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from dwindle.core.errors import UserError, first_line
from dwindle.core.files import fsync_path
from dwindle.core.reading import MAX_STATE_BYTES, open_regular, read_json
from dwindle.core.run_directory import STATE, RunDirectory, checkpoint_step, unlist_checkpoint
from dwindle.core.sizes import format_bytes
from dwindle.distributed.safetensors_stream import read_tensors, write_tensors
from dwindle.distributed.sharded_safetensors import TensorPieces, files_of
from dwindle.distributed.shards import is_sharded, local, row_range
from dwindle.training.moments import AdamW
from dwindle.training.muon import ALIVE_SIZES

CHECKSUMS_FILE = "checksums.json"
_NOT_MOMENTS = ("step", ALIVE_SIZES)
"""Optimizer state that does not have the shape of its parameter."""
_MISFITS = (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, AssertionError, SafetensorError)
"""What reading state of wrong types, names or sizes raises; torch's own errors are RuntimeErrors."""
_FULL = (errno.ENOSPC, errno.EDQUOT)


class CheckpointWarning(UserWarning):
    """A damaged checkpoint was skipped."""


def write_checkpoint(
    run_dir: Path,
    step: int,
    state: Mapping[str, Any],
    tensors: Mapping[str, Mapping[str, Tensor]],
    *,
    keep_last: int = 2,
) -> Path:
    """Write one checkpoint atomically, then delete all but the last ``keep_last``; returns its directory.

    ``state`` must be JSON without NaN; ``tensors`` maps a group (a file) to named tensors. A run has one writer, so any
    temporary directory is left over from a killed process and is removed first.
    """
    assert keep_last >= 1
    run = RunDirectory(run_dir)
    folder = run.unfinished_checkpoint(step)
    try:
        begin_checkpoint(run, step)
        checksums = {
            f"{group}.safetensors": write_tensors(folder / f"{group}.safetensors", named)
            for group, named in tensors.items()
        }
        return commit_checkpoint(run, step, state, checksums, keep_last=keep_last)
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError):
            every = {f"{group}/{name}": t for group, named in tensors.items() for name, t in named.items()}
            raise write_failure(error, run, run.checkpoint(step), every) from error
        raise


def begin_checkpoint(run: RunDirectory, step: int) -> None:
    """Create the temporary directory, after removing those of killed processes."""
    if not run.checkpoints.is_dir():
        run.checkpoints.mkdir(parents=True, exist_ok=True)
        fsync_path(run.path)  # or a power cut could take the directory with the first checkpoint in it
    run.remove_unfinished_checkpoints()
    run.unfinished_checkpoint(step).mkdir()


def commit_checkpoint(
    run: RunDirectory, step: int, state: Mapping[str, Any], checksums: dict[str, str], *, keep_last: int
) -> Path:
    """Add the JSON files to a directory whose tensors are on disk, and rename it into place."""
    temporary, final = run.unfinished_checkpoint(step), run.checkpoint(step)
    checksums = checksums | {STATE: _write_json(temporary / STATE, state)}
    _write_json(temporary / CHECKSUMS_FILE, checksums)
    fsync_path(temporary)
    unlist_checkpoint(final)
    temporary.rename(final)
    fsync_path(run.checkpoints)
    run.note_checkpoint(step)
    _apply_keep_last(run, final, keep_last)
    return final


def _write_json(path: Path, data: Mapping[str, Any]) -> str:
    content = json.dumps(data, indent=1, allow_nan=False).encode()
    path.write_bytes(content)
    fsync_path(path)
    return hashlib.sha256(content).hexdigest()


def write_failure(error: OSError, run: RunDirectory, place: Path, tensors: Mapping[str, Tensor]) -> UserError:
    """An error that says what could not be written, which checkpoint is the last good one, and how to continue."""
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    good = [path for path in run.list_checkpoints() if path != place]
    survivor = f"the last good checkpoint is {good[-1].name}" if good else "there is no earlier checkpoint"
    reason = "the disk is full" if error.errno in _FULL else (error.strerror or str(error))
    remedy = f"free at least {format_bytes(size)}" if error.errno in _FULL else "make it writable"
    advice = f"{remedy}, then run {run.command_after_failure}"
    return UserError(f"{place}: could not be written, {reason}; {survivor}: {advice}")


def _apply_keep_last(run: RunDirectory, newest: Path, keep_last: int) -> None:
    """Delete the oldest checkpoints, and those later than the one just written: they were damaged and skipped."""
    existing = run.list_checkpoints()
    until_now = [path for path in existing if checkpoint_step(path) <= checkpoint_step(newest)]
    for path in set(existing) - set(until_now[-keep_last:]):
        unlist_checkpoint(path)
    run.remove_unfinished_checkpoints()


def damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint, naming the file; None if every checksum matches."""
    try:
        checksums = read_json(checkpoint / CHECKSUMS_FILE)
        expected = {str(name): str(digest) for name, digest in checksums.items()}
    except (UserError, AttributeError):
        return f"{CHECKSUMS_FILE} is missing or unreadable"
    if STATE not in expected:
        return f"{CHECKSUMS_FILE} does not list {STATE}"
    for name, digest in expected.items():
        if Path(name).name != name:
            return f"{CHECKSUMS_FILE} names a file elsewhere"
        try:
            with open_regular(checkpoint / name) as file:
                actual = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError:
            return f"{name} is missing or unreadable"
        if actual != digest:
            return f"{name} does not match its checksum"
    return None


def latest_checkpoint(run_dir: Path) -> Path:
    """The newest checkpoint whose checksums match; each damaged newer one gives a warning."""
    run = RunDirectory(run_dir)
    existing = run.list_checkpoints()
    if not existing:
        raise UserError(f"{run.checkpoints}: holds no checkpoint: start the run with `dwindle pretrain`")
    for path in reversed(existing):
        problem = damage(path)
        if problem is None:
            return path
        warnings.warn(
            f"checkpoint {path} is damaged ({problem}): using the one before it",
            CheckpointWarning,
            stacklevel=2,
        )
    raise UserError(
        f"{run.checkpoints}: all {len(existing)} checkpoints are damaged: "
        "restore one from a copy, or start the run again"
    )


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A verified checkpoint opened for reading; tensors are read on demand, group by group."""

    path: Path
    state: dict[str, Any]

    @property
    def step(self) -> int:
        return checkpoint_step(self.path)

    def tensors(self, group: str) -> dict[str, Tensor]:
        """The tensors of one group; empty if the group has no file."""
        files = files_of(self.path, group)
        return read_tensors(files[0]) if len(files) == 1 else dict(TensorPieces(files))

    def pieces(self, group: str) -> TensorPieces:
        """The same, read on demand, tensor by tensor or row by row."""
        return TensorPieces(files_of(self.path, group))


def open_checkpoint(path: Path) -> Checkpoint:
    """Open one checkpoint directory (usually from ``latest_checkpoint``) and read its JSON state."""
    try:
        state = read_json(path / STATE, limit=MAX_STATE_BYTES)
    except UserError as error:
        raise UserError(f"{error}: choose another checkpoint") from error
    with fitting(path):
        if state.get("step", checkpoint_step(path)) != checkpoint_step(path):
            raise ValueError(f"{STATE} belongs to step {state['step']!r:.30}")
    return Checkpoint(path, state)


@contextmanager
def fitting(checkpoint: Path) -> Iterator[None]:
    """A checkpoint whose checksums match and whose content does not fit was edited, or written by another version."""
    try:
        yield
    except _MISFITS as error:
        reason = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else first_line(error)
        raise UserError(
            f"{checkpoint}: does not fit this run ({reason}): it was edited, or written by another version; delete it "
            "to resume from the one before"
        ) from error


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Optimizer state by parameter name: ``exp_avg/<name>``, ``exp_avg_sq/<name>``, ``step/<name>``.

    Names rather than positions, so that moments can be sliced together with their weights. A parameter that was never
    updated has no entry.
    """
    return {
        f"{key}/{name}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


def load_optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Inverse of ``optimizer_tensors``; replaces all state, step counters included."""
    parameters = dict(model.named_parameters())
    step_on_device = {
        parameter: bool(group.get("fused") or group.get("capturable"))
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    optimizer.state.clear()
    for full_name in tensors:
        key, name = full_name.split("/", 1)
        parameter = parameters[name]
        is_moment = key not in _NOT_MOMENTS
        if is_moment and is_sharded(parameter):
            dtype = optimizer.moment_dtype(parameter) if isinstance(optimizer, AdamW) else parameter.dtype
            moment = torch.empty_like(parameter.detach(), dtype=dtype)
            _copy_rows(moment, full_name, tensors)
            optimizer.state[parameter][key] = moment
            continue
        tensor = tensors[full_name]
        assert not is_moment or tensor.shape == parameter.shape, f"{full_name}: {tuple(tensor.shape)}"
        on_device = is_moment or (key == "step" and step_on_device[parameter])
        optimizer.state[parameter][key] = tensor.to(parameter.device if on_device else "cpu", copy=True)


def load_model_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy weights and buffers into a model with the same names, shapes and dtypes."""
    own = model.state_dict()
    assert own.keys() == tensors.keys(), f"names differ: {sorted(own.keys() ^ tensors.keys())[:5]}"
    with torch.no_grad():
        for name, target in own.items():
            if is_sharded(target):
                _copy_rows(target, name, tensors)
                continue
            source = tensors[name]
            assert target.shape == source.shape, f"{name}: {tuple(source.shape)} into {tuple(target.shape)}"
            assert target.dtype == source.dtype, f"{name}: {source.dtype} into {target.dtype}"
            target.copy_(source)


def _copy_rows(target: Tensor, name: str, tensors: Mapping[str, Tensor]) -> None:
    """Copy this process's rows; from files, only those rows are read."""
    first, count = row_range(target)
    if not count:
        return
    rows = (
        tensors.rows(name, first, count) if isinstance(tensors, TensorPieces) else tensors[name][first : first + count]
    )
    held = local(target)
    assert held.shape == rows.shape and held.dtype == rows.dtype, f"{name}: {tuple(rows.shape)}, {rows.dtype}"
    held.copy_(rows)
