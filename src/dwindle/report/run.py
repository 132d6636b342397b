"""A run directory as the report reads it: logs, architecture, status, and missing parts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from dwindle.core.errors import UserError
from dwindle.core.names import public_name
from dwindle.core.quality import Quality
from dwindle.core.reading import MAX_TOML_BYTES, open_regular, parse_toml
from dwindle.core.run_directory import LEDGER, METRICS, MODELS, RECIPE, RunDirectory, Status
from dwindle.core.sizes import counted
from dwindle.report.architecture import ArchitectureView, architecture_of
from dwindle.report.jsonlines import Record, read_json
from dwindle.report.logs import LedgerLog, MetricsLog
from dwindle.report.target import target_missed


class Run:
    """A run of ``dwindle pretrain``, or a model directory of ``dwindle prune``; ``refresh`` reads new records."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.directory = RunDirectory(folder)
        self.metrics = MetricsLog(self.directory.metrics)
        self.ledger = LedgerLog(self.directory.history)
        self.structure: Record = {}
        """That of the result; empty until it is written."""
        self.architecture: ArchitectureView | None = None
        self.recipe_text: str | None = None
        self.recipe: dict[str, Any] = {}
        self.quality: Quality | None = None
        self.status: Status = "stopped"

    @property
    def name(self) -> str:
        return self.folder.resolve().name or str(self.folder)

    def refresh(self) -> None:
        self.metrics.refresh()
        if self.ledger.lines.path != self.directory.history:
            self.ledger = LedgerLog(self.directory.history)
        self.ledger.refresh()
        self.structure = read_structure(self.directory)
        self.architecture = architecture_of(self.ledger, self.structure)
        self.recipe_text = recipe_text(self.directory)
        self.recipe = parse_recipe(self.recipe_text)
        self.quality = self.directory.read_quality()
        self.status = self.directory.status

    @property
    def source_name(self) -> str:
        """Name of the source model; a path is shortened to its last part."""
        named = self.ledger.source_name or setting(self.recipe, "source", "model")
        return public_name(str(named)) if named else ""

    @property
    def never_prunes(self) -> bool:
        """Whether the recipe turns pruning off, so that there is no ledger while the run trains."""
        return setting(self.recipe, "prune", "enabled") is False

    @property
    def target(self) -> str:
        return str(setting(self.recipe, "prune", "target") or "")

    @property
    def parameters_before(self) -> float | None:
        return self.ledger.source_parameters

    @property
    def parameters_after(self) -> float | None:
        prunes, trimmed = self.ledger.prunes.parameters, self.ledger.trimmed
        unpruned = self.parameters_before if trimmed is None else trimmed.parameters
        return prunes[-1] if prunes else self.metrics.last("parameters") or unpruned

    @property
    def source_loss(self) -> float | None:
        """Held-out loss of the untouched source; None if it was not measured."""
        measured = None if self.quality is None else self.quality.source_loss
        return self.metrics.last("source_valid_loss") if measured is None else measured

    @property
    def result_loss(self) -> float | None:
        """The newest held-out loss."""
        measured = None if self.quality is None else self.quality.result_loss
        return self.metrics.last("valid_loss") if measured is None else measured

    @property
    def target_missed(self) -> bool:
        """Whether the run finished above its target size."""
        return self.status == "finished" and target_missed(
            self.recipe, self.ledger.source, self.parameters_after, self.structure
        )

    def missing(self) -> list[str]:
        """What the report cannot show, and why, one line each."""
        lines = []
        for log, what in ((self.metrics, "loss and speed"), (self.ledger, "saliency and events")):
            name, found = log.lines.path.name, log.lines
            if not found.exists:
                if not (self.status in MODELS if name == METRICS else self.never_prunes):
                    lines.append(f"{name} is missing: {what} cannot be shown.")
                continue
            if found.num_bad:
                lines.append(f"{name}: skipped {counted(found.num_bad, 'line')} that could not be parsed.")
            if log.num_odd:
                lines.append(
                    f"{name}: skipped {counted(log.num_odd, 'line')} of an unknown kind (written by another version?)."
                )
            if found.unfinished:
                lines.append(f"{name} ends with an incomplete line: it is still being written, or was truncated.")
        if self.ledger.lines.exists and self.architecture is None and not self.never_prunes:
            lines.append(f"{LEDGER} does not begin with the source's sizes: the architecture cannot be shown.")
        if self.recipe_text is None and self.status not in MODELS:
            lines.append(f"{RECIPE} is missing: the recipe cannot be shown.")
        return lines


def open_run(folder: str | os.PathLike[str]) -> Run:
    """Read a run; raises unless the directory has at least one of a run's files."""
    path = Path(folder)
    if not path.is_dir():
        raise UserError(f"{path}: is not a directory: give one that dwindle pretrain or prune wrote")
    if not RunDirectory(path).has_logs:
        raise UserError(
            f"{path}: has no {RECIPE}, {METRICS} or {LEDGER}: give a directory that dwindle "
            "pretrain or prune wrote (`dwindle runs DIR` lists them)"
        )
    run = Run(path)
    run.refresh()
    return run


def read_structure(run: RunDirectory) -> Record:
    """The final model's structure; empty if it has not been written."""
    found = read_json(run.structure)
    return found if isinstance(found, dict) else {}


def parse_recipe(text: str | None) -> dict[str, Any]:
    try:
        return parse_toml(text or "")
    except ValueError:
        return {}


def setting(recipe: dict[str, Any], section: str, key: str) -> Any:
    table = recipe.get(section)
    return table.get(key) if isinstance(table, dict) else None


def recipe_text(run: RunDirectory) -> str | None:
    """The recipe as it is written; None without one."""
    try:
        with open_regular(run.recipe) as file:
            return file.read(MAX_TOML_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return None
