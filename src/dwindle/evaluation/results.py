"""Results of an evaluation, rendered as tables or saved as JSON that can be read back."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from rich.console import Group as Stack
from rich.console import RenderableType
from rich.table import Table

from dwindle.core.errors import UserError
from dwindle.core.files import write_text_atomic
from dwindle.core.json_safe import finite
from dwindle.core.notebook import Shown
from dwindle.core.reading import read_json
from dwindle.core.sizes import format_count
from dwindle.core.terminal import right
from dwindle.evaluation.data import Items
from dwindle.evaluation.metrics import Accuracy, Perplexity
from dwindle.evaluation.tasks import COMMONSENSE

FORMAT = "dwindle-eval-1"


@dataclass(slots=True, kw_only=True)
class TaskResult(Accuracy, Items):
    """Result of a task: both accuracies, and what is needed to compare them with other results."""

    task: str
    title: str
    metric: str
    """The main metric, used in tables and averages."""
    num_items: int
    prompt: str

    @property
    def value(self) -> float:
        return self.acc_norm if self.metric == "acc_norm" else self.acc

    @property
    def stderr(self) -> float | None:
        return self.acc_norm_stderr if self.metric == "acc_norm" else self.acc_stderr


@dataclass(slots=True, kw_only=True)
class GenerationResult(Items):
    """Result of a task whose answers were generated: shares of what is right, by metric."""

    task: str
    title: str
    metric: str
    """The main one."""
    values: dict[str, float]
    stderrs: dict[str, float | None]
    num_items: int
    left_out: dict[str, int]
    """What could not be checked and why, with its number."""
    prompt: str

    @property
    def value(self) -> float:
        return self.values[self.metric]


@dataclass(slots=True, kw_only=True)
class TextResult(Perplexity, Items):
    """Perplexity of one text."""

    name: str
    num_documents: int
    prompt: str


@dataclass(slots=True)
class EvalResult(Shown):
    """Results of one model."""

    model: str
    parameters: int
    engine: str
    dtype: str
    device: str
    batch: int
    max_length: int
    limit: int | None
    tasks: list[TaskResult]
    texts: list[TextResult]
    generated: list[GenerationResult] = field(default_factory=list)
    tokens: int | None = None
    """Tokens it was trained on, if known."""
    seconds: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)

    def scores(self) -> dict[str, float]:
        """The main metric of every task."""
        return {one.task: one.value for one in self.tasks} | {one.task: one.value for one in self.generated}

    def task(self, name: str) -> TaskResult | None:
        return next((result for result in self.tasks if result.task == name), None)

    def average(self, metric: str = "") -> float | None:
        """Mean of the main metrics (or of ``metric``) of the seven commonsense tasks; None if one is missing."""
        found = [self.task(name) for name in COMMONSENSE]
        values = [getattr(result, metric) if metric else result.value for result in found if result is not None]
        return sum(values) / len(values) if len(values) == len(COMMONSENSE) else None

    def average_stderr(self) -> float | None:
        """Standard error of ``average()``, assuming independent tasks."""
        errors = [result.stderr for name in COMMONSENSE if (result := self.task(name)) is not None]
        known = [error for error in errors if error is not None]
        if len(known) < len(COMMONSENSE):
            return None
        return math.sqrt(sum(error**2 for error in known)) / len(known)

    def to_json(self) -> dict[str, Any]:
        averages = {"value": self.average(), "acc": self.average("acc"), "acc_norm": self.average("acc_norm")}
        averages["stderr"] = self.average_stderr()
        found: dict[str, Any] = finite(asdict(self))
        return {"format": FORMAT} | found | {"average": averages}

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Write the same file as ``dwindle eval --out``, for ``dwindle table``."""
        out = Path(path)
        if out.exists() and (not overwrite or out.is_dir()):
            raise UserError(f"{out}: already exists: choose another file or pass overwrite=True")
        write_text_atomic(out, json.dumps(self.to_json()) + "\n", option="save")
        return out

    @staticmethod
    def from_json(data: Any, name: str) -> EvalResult:
        """Inverse of ``to_json``; ``name`` is the file, for error messages."""
        try:
            if data["format"] != FORMAT:
                raise ValueError("another format")
            texts = [_with_infinity(row) for row in data["texts"]]
            return TypeAdapter(EvalResult).validate_python(data | {"texts": texts})
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UserError(f"{name}: is not a result of `dwindle eval --out`: give one, or a model") from error

    def render(self) -> RenderableType:
        """Tables for a terminal."""
        parts: list[RenderableType] = [self._headline()]
        if self.tasks:
            parts += ["", self._task_table()]
        if (average := self.average()) is not None:
            value = _percent(average, self.average_stderr())
            parts.append(f"average of the seven main metrics: {value}")
        if self.texts:
            parts += ["", self._text_table()]
        if self.generated:
            parts += ["", self._generation_table()]
        parts.append("")
        parts += [f"{result.title} prompt: {result.prompt}" for result in self.tasks]
        parts += [f"{one.title} prompt: {one.prompt}" for one in self.generated]
        parts += [f"{text.name}: {text.prompt}" for text in self.texts]
        for name, count, reasons in self.skipped():
            parts.append(f"{name}: {count} skipped: {reasons}")
        for one in self.generated:
            parts += [f"{one.title}: {count} left out: {reason}" for reason, count in one.left_out.items()]
        return Stack(*parts)

    def skipped(self) -> list[tuple[str, int, str]]:
        """(task or text, number of skipped items, reasons for the first few)."""
        named: list[tuple[str, Items]] = [(one.title, one) for one in self.tasks]
        named += [(one.name, one) for one in self.texts] + [(one.title, one) for one in self.generated]
        return [(name, one.num_skipped, "; ".join(one.skipped)) for name, one in named if one.num_skipped]

    def _headline(self) -> str:
        limited = f", first {self.limit} items of each" if self.limit is not None else ""
        if not self.parameters:
            return f"{self.model}: answers of a file{limited}"
        return (
            f"{self.model}: {format_count(self.parameters)} parameters, {self.engine} engine, {self.dtype} "
            f"on {self.device}, batch {self.batch}{limited}, {self.seconds:.1f} s"
        )

    def _task_table(self) -> Table:
        numbers = right("items", "skipped", "acc", "acc_norm", no_wrap=True)
        table = Table("task", "split", *numbers, "main metric", box=None, padding=(0, 2, 0, 0))
        for result in self.tasks:
            table.add_row(
                result.title,
                result.split,
                str(result.num_items),
                str(result.num_skipped),
                _percent(result.acc, result.acc_stderr),
                _percent(result.acc_norm, result.acc_norm_stderr),
                result.metric,
            )
        if self.average() is not None:
            table.add_row("average", "", "", "", _percent(self.average("acc")), _percent(self.average("acc_norm")))
        return table

    def _generation_table(self) -> Table:
        items, skipped, score = right("items", "skipped", "score", no_wrap=True)
        table = Table("generated", "split", items, skipped, "metric", score, box=None, padding=(0, 2, 0, 0))
        for one in self.generated:
            first: tuple[str, ...] = (one.title, one.split, str(one.num_items), str(one.num_skipped))
            for name, value in one.values.items():
                table.add_row(*first, name, _percent(value, one.stderrs.get(name)))
                first = ("",) * 4
        return table

    def _text_table(self) -> Table:
        numbers = right("pages", "tokens", "word ppl", "byte ppl", "bits/byte", "nats/token", no_wrap=True)
        table = Table("text", *numbers, box=None, padding=(0, 2, 0, 0))
        for text in self.texts:
            scores = (text.word_perplexity, text.byte_perplexity, text.bits_per_byte, text.nats_per_token)
            table.add_row(text.name, str(text.num_documents), f"{text.num_tokens:,}", *(f"{x:.4f}" for x in scores))
        return table


def read_result(path: Path) -> EvalResult:
    """Read a file written by ``dwindle eval --out``."""
    try:
        data = read_json(path)
    except UserError as error:
        raise UserError(f"{error}: give a result of `dwindle eval --out`") from error
    return EvalResult.from_json(data, str(path))


def _percent(value: float | None, stderr: float | None = None) -> str:
    if value is None:
        return ""
    return f"{100 * value:.2f}" + ("" if stderr is None else f" ±{100 * stderr:.2f}")


def _with_infinity(row: Any) -> dict[str, Any]:
    """Restore the infinities that ``finite`` turned into null; no other field of a text can be null."""
    return {key: math.inf if value is None else value for key, value in row.items()}
