"""Accuracies and perplexities from log-likelihoods, by the formulas of lm-evaluation-harness."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dwindle.core.quality import bits_per_byte
from dwindle.evaluation.tasks import Question


@dataclass(slots=True, kw_only=True)
class Accuracy:
    """Share of questions whose correct choice is the likeliest: as is, and per character (``acc_norm``)."""

    acc: float
    acc_stderr: float | None
    acc_norm: float
    acc_norm_stderr: float | None


def accuracy(questions: Sequence[Question], loglikelihoods: Sequence[Sequence[float]]) -> Accuracy:
    """Accuracies over all questions; ties go to the first choice, as in the harness."""
    right, right_norm = [], []
    for question, scores in zip(questions, loglikelihoods, strict=True):
        answer, answer_norm = answers(question, scores)
        right.append(float(answer == question.gold))
        right_norm.append(float(answer_norm == question.gold))
    return Accuracy(
        acc=_mean(right),
        acc_stderr=standard_error(right),
        acc_norm=_mean(right_norm),
        acc_norm_stderr=standard_error(right_norm),
    )


def answers(question: Question, scores: Sequence[float]) -> tuple[int, int]:
    """The likeliest choice, and the likeliest per character."""
    lengths = np.array([float(len(choice)) for choice in question.choices])
    return int(np.argmax(scores)), int(np.argmax(np.array(scores) / lengths))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def standard_error(values: Sequence[float]) -> float | None:
    """Standard error of the mean; None for a single value."""
    if len(values) < 2:
        return None
    mean = _mean(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values))


@dataclass(slots=True, kw_only=True)
class Perplexity:
    """How well a text is predicted, per word, byte and token."""

    word_perplexity: float
    byte_perplexity: float
    bits_per_byte: float
    nats_per_token: float
    num_words: int
    num_bytes: int
    num_tokens: int


def perplexity(loglikelihood: float, *, num_words: int, num_bytes: int, num_tokens: int) -> Perplexity:
    """Perplexities from the log-likelihood of a whole text, in nats."""
    return Perplexity(
        word_perplexity=_exp(-loglikelihood / num_words),
        byte_perplexity=_exp(-loglikelihood / num_bytes),
        bits_per_byte=bits_per_byte(-loglikelihood, num_bytes),
        nats_per_token=-loglikelihood / num_tokens,
        num_words=num_words,
        num_bytes=num_bytes,
        num_tokens=num_tokens,
    )


def _exp(value: float) -> float:
    """exp, or infinity where it would overflow (for a broken model)."""
    return math.exp(value) if value < 700 else math.inf
