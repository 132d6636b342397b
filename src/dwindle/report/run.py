"""A run directory as the report reads it: logs, architecture, status, and missing parts."""

from __future__ import annotations

import os
import time
import tomllib
from pathlib import Path
from typing import Any, Literal

from dwindle.core.errors import UserError
from dwindle.report.architecture import ArchitectureView, find_architecture
from dwindle.report.jsonlines import read_json
from dwindle.report.logs import LedgerLog, MetricsLog
from dwindle.report.target import target_missed

Status = Literal["finished", "running", "stopped", "pruned", "unpruned"]
MODELS: tuple[Status, ...] = ("pruned", "unpruned")
"""Model directories without metrics or recipe."""

_RECIPE_LIMIT_BYTES = 100_000
_FRESH_S = 120.0


class Run:
    """A run of ``dwindle pretrain``, or a model directory of ``dwindle prune``; ``refresh`` reads new records."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.metrics = MetricsLog(folder / "metrics.jsonl")
        self.ledger = LedgerLog(folder / "ledger.jsonl")
        self.architecture: ArchitectureView | None = None
        self.recipe_text: str | None = None
        self.recipe: dict[str, Any] = {}
        self.status: Status = "stopped"

    @property
    def name(self) -> str:
        return self.folder.resolve().name or str(self.folder)

    def refresh(self) -> None:
        self.metrics.refresh()
        self.ledger.refresh()
        self.architecture = find_architecture(self.folder, self.ledger)
        self.recipe_text = _read_text(self.folder / "recipe.toml")
        self.recipe = parse_recipe(self.recipe_text)
        self.status = status_of(self.folder)

    def signature(self) -> object:
        """Changes when a file changes that ``refresh`` or the result tables read."""
        names = ("metrics.jsonl", "ledger.jsonl", "recipe.toml", "structure.json", "model/structure.json")
        folders = (".", "model", "evaluation", "model/evaluation", "checkpoints", "milestones")
        return status_of(self.folder), [_stamp(self.folder / name) for name in (*names, *folders)]

    @property
    def source_name(self) -> str:
        """Name of the source model; a path is shortened to its last part."""
        named = self.ledger.source_name or setting(self.recipe, "source", "model")
        return short_name(str(named)) if named else ""

    @property
    def target(self) -> str:
        return str(setting(self.recipe, "prune", "target") or "")

    @property
    def parameters_before(self) -> float | None:
        return self.ledger.source_parameters

    @property
    def parameters_after(self) -> float | None:
        prunes = self.ledger.prunes.parameters
        return prunes[-1] if prunes else self.metrics.last("parameters") or self.parameters_before

    @property
    def target_missed(self) -> bool:
        """Whether the run finished above its target size."""
        return self.status == "finished" and target_missed(
            self.recipe, self.ledger.source, self.parameters_after, read_structure(self.folder)
        )

    def missing(self) -> list[str]:
        """What the report cannot show, and why, one line each."""
        lines = []
        for log, what in ((self.metrics, "loss and speed"), (self.ledger, "saliency and events")):
            name, found = log.lines.path.name, log.lines
            if not found.exists:
                if not (name == "metrics.jsonl" and self.status in MODELS):
                    lines.append(f"{name} is missing: {what} cannot be shown.")
                continue
            if found.num_bad:
                lines.append(f"{name}: {_lines(found.num_bad)} could not be parsed and {_were(found.num_bad)} skipped.")
            if log.num_odd:
                lines.append(
                    f"{name}: {_lines(log.num_odd)} of an unknown kind {_were(log.num_odd)} skipped "
                    "(written by another version?)."
                )
            if found.unfinished:
                lines.append(f"{name} ends with an incomplete line: it is still being written, or was truncated.")
        if self.ledger.lines.exists and not self.ledger.source:
            lines.append("ledger.jsonl has no source event: shares of the source cannot be shown.")
        if self.ledger.lines.exists and self.architecture is None:
            lines.append("No structure.json or checkpoint fits the ledger yet: the architecture cannot be shown.")
        if self.recipe_text is None and self.status not in MODELS:
            lines.append("recipe.toml is missing: the recipe cannot be shown.")
        return lines


def open_run(folder: str | os.PathLike[str]) -> Run:
    """Read a run; raises unless the directory has at least one of a run's files."""
    path = Path(folder)
    if not path.is_dir():
        raise UserError(f"{path}: is not a directory: give one that dwindle pretrain or prune wrote")
    if not is_run(path):
        raise UserError(
            f"{path}: has no recipe.toml, metrics.jsonl or ledger.jsonl: give a directory that dwindle "
            "pretrain or prune wrote (`dwindle runs DIR` lists them)"
        )
    run = Run(path)
    run.refresh()
    return run


def is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("recipe.toml", "metrics.jsonl", "ledger.jsonl"))


def status_of(folder: Path) -> Status:
    """A run is finished once its model is written; a model directory is ``pruned`` if its ledger has prune events."""
    if (folder / "config.json").is_file() and (folder / "structure.json").is_file():
        return "unpruned" if _has_only_source(folder / "ledger.jsonl") else "pruned"
    if (folder / "model" / "config.json").is_file():
        return "finished"
    return "running" if _is_locked(folder / ".lock", folder / "metrics.jsonl") else "stopped"


def _has_only_source(ledger: Path) -> bool:
    """Whether a ledger has one line only, like that of an unpruned export."""
    try:
        with ledger.open("rb") as file:
            return bool(file.readline()) and not file.readline()
    except OSError:
        return False


def _is_locked(lock: Path, log: Path) -> bool:
    """Whether a process holds the run's lock, from the kernel's list: trying the lock could interfere with the run."""
    try:
        inode = lock.stat().st_ino
    except OSError:
        return False
    try:
        held = Path("/proc/locks").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return _age_s(log) < _FRESH_S
    places = (line.split()[5] for line in held if " FLOCK " in line and len(line.split()) > 5)
    return any(place.rsplit(":", 1)[-1] == str(inode) for place in places)


def read_structure(folder: Path) -> dict[str, Any] | None:
    """The final model's structure; None if it has not been written."""
    found = read_json(folder / "model" / "structure.json")
    return found if isinstance(found, dict) else None


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


def parse_recipe(text: str | None) -> dict[str, Any]:
    try:
        return tomllib.loads(text or "")
    except tomllib.TOMLDecodeError:
        return {}


def setting(recipe: dict[str, Any], section: str, key: str) -> Any:
    table = recipe.get(section)
    return table.get(key) if isinstance(table, dict) else None


def short_name(source: str) -> str:
    """The last part of a local path; hub ids and aliases unchanged."""
    if source.startswith(("/", ".", "~")) or "\\" in source:
        return source.replace("\\", "/").rstrip("/").rsplit("/", 1)[-1]
    return source


def _read_text(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            return file.read(_RECIPE_LIMIT_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return None


def _lines(count: int) -> str:
    return f"{count:,} line" if count == 1 else f"{count:,} lines"


def _were(count: int) -> str:
    return "was" if count == 1 else "were"
