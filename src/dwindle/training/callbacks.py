"""Callbacks of the training loop: small classes with their own state, called in list order.

A callback whose state must survive a restart returns JSON from ``state_dict`` and named tensors from ``tensors``; the
checkpoint stores both under the callback's ``name``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from dwindle.core.errors import UserError
from dwindle.core.files import fsync_path
from dwindle.core.json_safe import finite
from dwindle.core.run_directory import RunDirectory
from dwindle.distributed.engines import Engine
from dwindle.training.checkpoint import write_checkpoint, write_failure
from dwindle.training.checkpoint_writer import CheckpointWriter

if TYPE_CHECKING:
    from dwindle.training.loop import Trainer


class Callback:
    """Base class of all callbacks; every hook does nothing by default."""

    must_be_last: ClassVar[bool] = False

    @property
    def is_watching(self) -> bool:
        """Whether the passes of the next step must run as Python: something in them is observed, or changes."""
        return False

    @property
    def name(self) -> str:
        """Key of this callback's state in a checkpoint: unique in a run, the same after a restart."""
        return type(self).__name__

    def on_start(self, trainer: Trainer) -> None:
        """Before the first step of this process, after a checkpoint was loaded; open files here."""

    def edit_gradients(self, trainer: Trainer) -> None:
        """The gradients of the whole step are complete and may be changed; their norm is computed afterwards, once."""

    def after_backward(self, trainer: Trainer) -> None:
        """The gradients of the whole step are finite, not yet clipped, and may be read.

        Not called for a step that is skipped because its loss or gradient is not finite.
        """

    def after_step(self, trainer: Trainer) -> None:
        """Weights are updated and gradients cleared; ``trainer.last`` describes the step, ``step`` counts it."""

    def on_checkpoint(self, trainer: Trainer) -> None:
        """Before state is collected for a checkpoint; flush buffers here."""

    def on_end(self, trainer: Trainer) -> None:
        """After the last step of this process, also on an error, and even if ``on_start`` was not called."""

    def state_dict(self) -> dict[str, Any]:
        """JSON-able state."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of ``state_dict``."""

    def tensors(self) -> dict[str, Tensor]:
        """Tensor state by name."""
        return {}

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Inverse of ``tensors``; receives CPU tensors."""


class FirstStep(Callback):
    """Runs an action after the first step of this process."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action: Callable[[], None] | None = action

    def after_step(self, trainer: Trainer) -> None:
        if self._action is not None:
            self._action()
            self._action = None


class Validator(Callback):
    """Loss on held-out windows every ``every`` steps and after the last: ``valid_loss`` in the metrics.

    The model is also measured before the first step: ``source_valid_loss``, repeated beside each ``valid_loss``, so
    that every tool can draw it as a line.
    """

    def __init__(self, windows_NT: Tensor, every: int, *, batch: int = 8) -> None:
        self.windows_NT = windows_NT
        self.every = every
        self.batch = batch
        self.source: float | None = None
        """Before the first step; None in a run that an older version began."""
        self.last: float | None = None

    def on_start(self, trainer: Trainer) -> None:
        if trainer.step == 0 and trainer.num_steps:
            self.source = self.measure(trainer)

    def after_step(self, trainer: Trainer) -> None:
        at_end = trainer.step == trainer.num_steps
        measured = at_end or (self.every and trainer.step % self.every == 0)
        if measured:
            self.last = self.measure(trainer)
            trainer.extra_metrics["valid_loss"] = self.last
            trainer.notes["valid loss"] = f"{self.last:.4f}"
        if self.source is not None and (measured or trainer.step == 1):
            trainer.extra_metrics["source_valid_loss"] = self.source

    def measure(self, trainer: Trainer) -> float:
        """The current loss of the model."""
        return trainer.engine.evaluate(
            trainer.model,
            self.windows_NT,
            batch=self.batch,
            chunk_tokens=trainer.config.ce_chunk_tokens,
            precision=trainer.precision,
        )

    def state_dict(self) -> dict[str, Any]:
        return {"last": finite(self.last), "source": finite(self.source)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.last, self.source = state["last"], state.get("source")


class Checkpointer(Callback):
    """Saves a checkpoint every ``every`` steps and after the last step of this process.

    While steps are skipped because their loss is not finite, nothing is saved: the checkpoints of a run that diverges
    are from before, and it can be resumed from them with a lower rate.

    Append-only files (metrics, ledger) are not copied into the checkpoint: they are fsynced, and their length is
    recorded. Loading a checkpoint truncates them to it, so that a resumed run writes each line exactly once.
    """

    must_be_last: ClassVar[bool] = True

    def __init__(
        self,
        run_dir: Path,
        every: int,
        keep_last: int = 2,
        extra_files: Sequence[str] = (),
        *,
        engine: Engine | None = None,
    ) -> None:
        self.run_dir = Path(run_dir)
        self.every = every
        self.keep_last = keep_last
        self.is_main = engine is None or engine.is_main
        self._writer = CheckpointWriter(engine, self.run_dir, keep_last) if engine and engine.world.is_group else None
        """A process group writes in the background; one process writes before it continues."""
        self.extra_files = extra_files
        """Names inside the run directory."""
        self._lengths: dict[str, int] = {}

    def after_step(self, trainer: Trainer) -> None:
        is_due = trainer.status != "running" or (self.every and trainer.step % self.every == 0)
        if is_due and (trainer.status in ("finished", "stopped") or not trainer.bad_steps_in_a_row):
            self.save(trainer)
        if self._writer is not None and trainer.status != "running":
            self._writer.wait()

    def save(self, trainer: Trainer) -> None:
        """Write a checkpoint, or start to write it in the background; only between steps."""
        for callback in trainer.callbacks:
            callback.on_checkpoint(trainer)
        if self.is_main:
            self._lengths = self._sync_logs(trainer)
        step, state, tensors = trainer.step, trainer.state_dict(), trainer.tensors()
        if self._writer is not None:
            self._writer.save(step, state, tensors)
        else:
            write_checkpoint(self.run_dir, step, state, tensors, keep_last=self.keep_last)

    def _sync_logs(self, trainer: Trainer) -> dict[str, int]:
        """Lengths of the append-only files, once they are on disk."""
        try:
            return {name: synced_length(self.run_dir / name) for name in self.extra_files}
        except OSError as error:
            tensors = dict(trainer.model.named_parameters())
            raise write_failure(error, RunDirectory(self.run_dir), self.run_dir, tensors) from error

    def state_dict(self) -> dict[str, Any]:
        return {"lengths": self._lengths}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._lengths = {str(name): int(length) for name, length in state["lengths"].items()}
        for name, length in self._lengths.items() if self.is_main else ():
            truncate_to(self.run_dir / name, length)


def synced_length(path: Path) -> int:
    """Length in bytes of an append-only file after an fsync; 0 if it does not exist yet."""
    try:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            length = os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        return 0
    fsync_path(path.parent)
    return length


def truncate_to(path: Path, length: int) -> None:
    """Truncate an append-only file to a recorded length; a shorter file has lost data, which is an error."""
    size = path.stat().st_size if path.exists() else 0
    if size < length:
        raise UserError(
            f"{path}: has {size} bytes and the checkpoint expects at least {length}: restore the file from a copy"
        )
    if size > length:
        with path.open("r+b") as file:
            file.truncate(length)
            os.fsync(file.fileno())
