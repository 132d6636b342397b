"""Accuracies, standard errors and perplexities against numbers worked out by hand."""

from __future__ import annotations

import math
import statistics

import pytest

from dwindle.evaluation.metrics import accuracy, perplexity
from dwindle.evaluation.tasks import Question


def question(gold: int, *choices: str) -> Question:
    return Question(tuple(("x", choice) for choice in choices), choices, gold)


def test_accuracy_by_hand() -> None:
    questions = [
        question(0, "a", "bbbb"),  # likeliest by both
        question(1, "a", "bbbb"),  # likeliest per character only
        question(0, "a", "b"),  # a tie goes to the first
        question(1, "a", "b"),
    ]
    scores = [[-1.0, -9.0], [-1.0, -2.0], [-3.0, -3.0], [-3.0, -3.0]]
    found = accuracy(questions, scores)
    assert (found.acc, found.acc_norm) == (0.5, 0.75)
    assert found.acc_stderr == pytest.approx(statistics.stdev([1, 0, 1, 0]) / 2)
    assert found.acc_norm_stderr == pytest.approx(statistics.stdev([1, 1, 1, 0]) / 2)


def test_a_single_item_has_no_standard_error() -> None:
    assert accuracy([question(0, "a", "b")], [[-1.0, -2.0]]).acc_stderr is None


def test_perplexity_by_hand() -> None:
    found = perplexity(-20.0, num_words=4, num_bytes=25, num_tokens=10)
    assert found.word_perplexity == pytest.approx(math.exp(5))
    assert found.bits_per_byte == pytest.approx(0.8 / math.log(2))
    assert found.nats_per_token == 2.0
    assert perplexity(-1e6, num_words=4, num_bytes=25, num_tokens=10).word_perplexity == math.inf
