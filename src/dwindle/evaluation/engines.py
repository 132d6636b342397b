"""The interface of the evaluation engines, and our own engine."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Protocol

from torch import nn

from dwindle.core.progress import Bar
from dwindle.distributed.precision import Precision
from dwindle.evaluation.data import TaskData
from dwindle.evaluation.encoding import Pair
from dwindle.evaluation.metrics import Accuracy, accuracy
from dwindle.evaluation.perplexity import TextData
from dwindle.evaluation.scoring import Scorer


class Scored(NamedTuple):
    """A task's result, and the log-likelihood of every choice of every item."""

    accuracy: Accuracy
    loglikelihoods: list[list[float]]


class EvalEngine(Protocol):
    """Scores items that were already checked, so that all engines score the same ones."""

    name: str
    batch: int

    def score_questions(self, data: TaskData, pairs: Sequence[Sequence[Pair]]) -> Scored: ...

    def score_texts(self, data: TextData, windows: Sequence[Sequence[Pair]]) -> list[float]:
        """Log-likelihood of every document, each given as the windows that cover it."""


class OwnEngine:
    """Our engine: no extra dependencies, shared prefixes are computed once."""

    name = "dwindle"

    def __init__(
        self, model: nn.Module, *, max_length: int, batch: int = 0, precision: Precision = "fp32", quiet: bool = False
    ) -> None:
        self.scorer = Scorer(model, max_length=max_length, batch=batch, precision=precision)
        self.batch, self._quiet = self.scorer.batch, quiet

    def score_questions(self, data: TaskData, pairs: Sequence[Sequence[Pair]]) -> Scored:
        with self._bar(data.task.title, sum(map(len, pairs))) as bar:
            scores = self.scorer.choices(pairs, bar)
        return Scored(accuracy([item.question for item in data.items], scores), scores)

    def score_texts(self, data: TextData, windows: Sequence[Sequence[Pair]]) -> list[float]:
        flat = [[window] for document in windows for window in document]
        with self._bar(data.name, len(flat)) as bar:
            scores = iter(self.scorer.choices(flat, bar))
        return [sum(next(scores)[0] for _ in document) for document in windows]

    def _bar(self, name: str, total: int) -> AbstractContextManager[Bar | None]:
        return nullcontext() if self._quiet else Bar(name, total)
