"""The layout of a run directory. No other module knows these names.

RUN/recipe.toml                      the recipe, with what was chosen for the machine
RUN/metrics.jsonl, RUN/ledger.jsonl  append-only logs
RUN/checkpoints/step-00000100/       state.json and tensors (``training.checkpoint``)
RUN/milestones/120M/, RUN/model/     Hugging Face directories, each with its structure.json and ledger.jsonl
RUN/tokens/                          tokenized text
RUN/tensorboard/, wandb/, mlflow/    what those tools write (``training.trackers``)
RUN/vocabulary.json                  token ids of the source that are kept, if some are not (``run.start``)
RUN/quality.json                     held-out loss and greedy samples of source and result (``core.quality``)
RUN/evaluation/, RUN/report.html     results
RUN/.lock                            held by the process that writes the run; holds the last checkpoint's step
RUN/.job                             the torchrun job that began the run; its restarts continue it (``run.pretrain``)
.RUN.replaced                        the run that ``--overwrite`` replaces, until the new one has made a step
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from shlex import quote
from typing import Any, Literal

from dwindle.core.errors import UserError
from dwindle.core.files import atomic_directory, refuse_place, remove_abandoned, resolved
from dwindle.core.quality import Quality, read_quality
from dwindle.core.reading import parse_json, read_limited

RECIPE = "recipe.toml"
METRICS = "metrics.jsonl"
LEDGER = "ledger.jsonl"
STRUCTURE = "structure.json"
"""Marks our own model directories: unlike ``config.json``, no other tool writes it. Only these are overwritten."""
QUANTIZATION = "quantization.json"
"""Marks directories of quantised weights in the same way."""
STATE = "state.json"
REPORT = "report.html"
QUALITY = "quality.json"
VOCABULARY = "vocabulary.json"

LOGS = (METRICS, LEDGER)
TOOLS = ("tensorboard", "trackio", "wandb", "mlflow")
"""Tools that show a run's numbers; each has a folder of its name."""
FOLDERS = ("model", "checkpoints", "milestones", "tokens", *TOOLS)

_STEP = "step-"
_STEP_NAME = re.compile(r"step-[0-9]{1,15}")
_MAX_NOTES_BYTES = 4096
_TEMPORARY = ".tmp-"
_FRESH_S = 120.0

Status = Literal["finished", "running", "stopped", "pruned", "unpruned"]
MODELS: tuple[Status, ...] = ("pruned", "unpruned")
"""Of model directories by themselves, which have neither metrics nor a recipe."""


class RunDirectory:
    """The directory of a run: its places, its lock, its status, and how it is replaced."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.recipe = path / RECIPE
        self.metrics = path / METRICS
        self.ledger = path / LEDGER
        self.report = path / REPORT
        self.quality = path / QUALITY
        self.vocabulary = path / VOCABULARY
        self.lock = path / ".lock"
        self.job = path / ".job"
        self.model = path / "model"
        self.checkpoints = path / "checkpoints"
        self.milestones = path / "milestones"
        self.tokens = path / "tokens"

    @classmethod
    def of_model(cls, model: Path) -> RunDirectory | None:
        """The run whose final model this directory is; None for any other directory."""
        run = cls(model.parent)
        is_run = run.recipe.is_file() and run.metrics.is_file()  # a recipe may lie beside any model
        return run if model == run.model and is_run and not (model / RECIPE).is_file() else None

    # Places ------------------------------------------------------------------------------------------------

    def milestone(self, name: str) -> Path:
        """Where the model of a milestone, such as ``120M``, is written."""
        return self.milestones / name.replace("/", "-")

    def tool(self, name: str) -> Path:
        """Where a tool that shows the run's numbers writes."""
        assert name in TOOLS
        return self.path / name

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"{_STEP}{step:08d}"

    def unfinished_checkpoint(self, step: int) -> Path:
        """Where a checkpoint is written before it is renamed to its place."""
        return self.checkpoints / f"{_TEMPORARY}{_STEP}{step:08d}"

    def list_checkpoints(self) -> list[Path]:
        """Oldest first, damaged ones included; empty for a run that was killed before its first."""
        found = [p for p in self.checkpoints.glob(f"{_STEP}*") if p.is_dir() and _STEP_NAME.fullmatch(p.name)]
        return sorted(found, key=checkpoint_step)

    @property
    def history(self) -> Path:
        """The ledger; of a run that does not prune, which has none, that of its final model."""
        return self.ledger if self.ledger.is_file() or not self.is_finished else self.model / LEDGER

    @property
    def structure(self) -> Path:
        """The structure of a single model directory, or of a run's final model."""
        own = self.path / STRUCTURE
        return own if own.is_file() else self.model / STRUCTURE

    def result_files(self) -> Iterator[Path]:
        """Results in the run and its model, as ``dwindle eval --out`` and ``dwindle bench`` write them."""
        for folder in (self.path, self.model):
            for pattern in ("eval*.json", "evaluation/*.json", "latency*.json", "bench*.json"):
                yield from sorted(folder.glob(pattern))

    def signature(self) -> object:
        """A value that changes whenever a report of the run would."""
        files = (self.metrics, self.ledger, self.recipe, self.quality, self.structure)
        folders = (self.path, self.model, self.path / "evaluation", self.model / "evaluation")
        return self.status, [_stamp(path) for path in (*files, *folders)]

    def read_quality(self) -> Quality | None:
        """Loss and samples of source and result, of a run or of a single model directory; None if not measured."""
        return read_quality(self.quality)

    # Status ------------------------------------------------------------------------------------------------

    @property
    def has_logs(self) -> bool:
        """Whether there is anything that a report can show."""
        return any(path.is_file() for path in (self.recipe, self.metrics, self.ledger))

    @property
    def has_begun(self) -> bool:
        """Whether the run has made a step or written a checkpoint, so that work would be lost with it."""
        return bool(self.list_checkpoints()) or (self.metrics.is_file() and self.metrics.stat().st_size > 0)

    @property
    def is_finished(self) -> bool:
        """Whether the final model is written."""
        return (self.model / "config.json").is_file()

    @property
    def status(self) -> Status:
        """Status of a run or of a single model directory, which is ``pruned`` if its ledger lists any event."""
        if (self.path / "config.json").is_file() and (self.path / STRUCTURE).is_file():
            return "unpruned" if _has_one_line(self.ledger) else "pruned"
        if self.is_finished:
            return "finished"
        return "running" if self._is_locked() else "stopped"

    @property
    def resume_command(self) -> str:
        return f"dwindle resume {quote(str(self.path))}"

    @property
    def restart_command(self) -> str:
        """The command that replaces the run by a new one with the same recipe."""
        return f"`dwindle pretrain {quote(str(self.recipe))} --out {quote(str(self.path))} --overwrite`"

    @property
    def command_after_failure(self) -> str:
        """What to run again: a new run that has not begun is removed, so there is nothing to resume."""
        return f"`{self.resume_command}`" if self.has_begun else "the same command again"

    def check_is_run(self) -> None:
        """Refuse a directory without a recipe."""
        if not self.recipe.is_file():
            raise UserError(f"{self.path}: has no {RECIPE}: give the directory that dwindle pretrain wrote")

    def check_free(self, *, overwrite: bool) -> None:
        """Refuse to replace anything but a run, and a run only with ``overwrite``."""
        refuse_place(self.path)
        if not self.path.exists() or (self.path.is_dir() and not any(self.path.iterdir())):
            return
        if not self.recipe.is_file() or not (self.lock.exists() or self.has_begun):
            raise UserError(f"--out {self.path}: exists and is not a run: choose another directory")
        if not overwrite:
            resume = f"`{self.resume_command}` continues it"
            raise UserError(f"--out {self.path}: a run exists there: {resume}, --overwrite replaces it")

    # Notes, in the lock file: it stays with the run when a disk that holds the checkpoints does not --------------

    def note_checkpoint(self, step: int) -> None:
        """Record that a checkpoint was written."""
        self._note({"checkpoint": step})

    def note_divergence(self, step: int) -> None:
        """Record that the loss was not finite; until the next checkpoint, ``resume`` may change the rate."""
        self._note(self._notes() | {"diverged": step})

    @property
    def last_checkpoint_step(self) -> int | None:
        """Step of the last checkpoint that was written, whether or not it still exists."""
        return _whole(self._notes().get("checkpoint"))

    @property
    def diverged_at(self) -> int | None:
        """The step at which training diverged; None if it did not, or continued since."""
        return _whole(self._notes().get("diverged"))

    def _notes(self) -> dict[str, Any]:
        try:
            found = parse_json(read_limited(self.lock, _MAX_NOTES_BYTES))
        except (UserError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def _note(self, notes: dict[str, Any]) -> None:
        """Write in place: the lock belongs to the file itself."""
        with suppress(OSError):  # a note is for later advice; what matters is in the checkpoint
            self.lock.write_text(json.dumps(notes) + "\n", encoding="utf-8")

    # Lock --------------------------------------------------------------------------------------------------

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the run for one writer; the operating system releases the lock whenever and however the process ends."""
        import fcntl  # not on Windows, where reports can still be read

        try:
            file = self.lock.open("ab")
        except OSError as error:
            reason = error.strerror or error
            raise UserError(f"{self.path}: cannot be written ({reason}): check its owner and rights") from error
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise UserError(f"{self.path}: another process is writing this run: stop it first") from error
            yield

    def _is_locked(self) -> bool:
        """Whether a process holds the lock, from the kernel's list: trying to take it could disturb that process."""
        try:
            inode = self.lock.stat().st_ino
        except OSError:
            return False
        try:
            held = Path("/proc/locks").read_text(encoding="ascii", errors="replace").splitlines()
        except OSError:
            return _age_s(self.metrics) < _FRESH_S
        places = (line.split()[5] for line in held if " FLOCK " in line and len(line.split()) > 5)
        return any(place.rsplit(":", 1)[-1] == str(inode) for place in places)

    # Beginning and replacing -------------------------------------------------------------------------------

    def create(self, recipe: str, vocabulary: str = "", job: str = "") -> None:
        """Make the directory of a new run; the run that it replaces is put aside until the first step.

        ``vocabulary`` is the record of the tokens that it keeps, if it does not keep all; ``job`` names its launcher.
        """
        aside = self._put_aside() if self.recipe.is_file() else nullcontext()
        with aside, atomic_directory(self.path, marker=RECIPE, overwrite=True) as folder:  # no kill leaves half a run
            new = RunDirectory(folder)
            new.recipe.write_text(recipe, encoding="utf-8", newline="\n")
            if vocabulary:
                new.vocabulary.write_text(vocabulary, encoding="utf-8", newline="\n")
            if job:
                new.job.write_text(job, encoding="utf-8")
            new.lock.touch()  # marks a run: anyone may have a recipe.toml

    def belongs_to(self, job: str) -> bool:
        """Whether this job created the run."""
        return bool(job) and self.job.is_file() and self.job.read_text(encoding="utf-8") == job

    @property
    def _aside(self) -> Path:
        real = resolved(self.path)  # a symbolic link is kept where it is
        return real.parent / f".{real.name}.replaced"

    @contextmanager
    def _put_aside(self) -> Iterator[None]:
        """Put the old run aside while the new one is created; refused while a process writes the old one."""
        with self.locked():
            if self._aside.is_dir() and not self.has_begun:
                shutil.rmtree(resolved(self.path))  # a failed attempt: the run it was to replace is still aside
            else:
                self.discard_replaced()
                os.rename(resolved(self.path), self._aside)
            try:
                yield
            except BaseException:
                self.restore_replaced()
                raise

    def restore_replaced(self) -> None:
        """Put back the replaced run if the new one never began, or its process was killed between the renames."""
        if self._aside.is_dir() and not self.path.exists():
            os.rename(self._aside, resolved(self.path))

    def discard_replaced(self) -> None:
        """Delete the replaced run, once the new one has begun."""
        shutil.rmtree(self._aside, ignore_errors=True)

    def forget_if_not_begun(self, *, only_replacing: bool = False) -> None:
        """Remove a run that failed before its first step, and restore the one it was to replace.

        ``only_replacing``: a run that replaces nothing is kept, for ``resume``.
        """
        if self.has_begun or (only_replacing and not self._aside.is_dir()):
            return
        shutil.rmtree(resolved(self.path), ignore_errors=True)
        self.restore_replaced()
        if self.path.is_symlink() and not self.path.exists():
            resolved(self.path).mkdir()  # a link to an empty directory, as before

    # Leftovers ---------------------------------------------------------------------------------------------

    def tidy(self) -> None:
        """Remove what a killed process left half written or half deleted.

        Also refuses, before any training, to replace a model directory that holds the current directory.
        """
        for folder in (self.model, *sorted(self.milestones.glob("*"))):
            refuse_place(folder, "output")
        for folder in (self.path, self.milestones):
            remove_abandoned(folder)
        self.remove_unfinished_checkpoints()
        if self.has_begun:
            self.discard_replaced()

    def remove_unfinished_checkpoints(self) -> None:
        """Remove checkpoints that a killed process was writing or deleting."""
        for path in self.checkpoints.glob(f"{_TEMPORARY}*"):
            shutil.rmtree(path, ignore_errors=True)


def checkpoint_step(checkpoint: Path) -> int:
    """The step of a checkpoint, from the name of its directory."""
    return int(checkpoint.name.removeprefix(_STEP))


def unlist_checkpoint(checkpoint: Path) -> None:
    """Rename a checkpoint, so that no half-deleted one is ever listed; ``remove_unfinished_checkpoints`` deletes it."""
    if checkpoint.exists():
        aside = checkpoint.with_name(f"{_TEMPORARY}old-{checkpoint.name}")
        shutil.rmtree(aside, ignore_errors=True)
        checkpoint.rename(aside)


def model_title(model: Path) -> str:
    """A model directory's name; the models of a run are named after the run."""
    model = resolved(model)
    run = RunDirectory(model.parent.parent)
    if model.parent == run.milestones:
        return f"{run.path.name}, {model.name}"
    return (model.parent.name if model == RunDirectory(model.parent).model else "") or model.name


def _has_one_line(ledger: Path) -> bool:
    """Whether a ledger ends with its source line, as that of an unpruned model does."""
    try:
        with ledger.open("rb") as file:
            return bool(file.readline()) and not file.readline()
    except OSError:
        return False


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _age_s(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return float("inf")
