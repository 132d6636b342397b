"""Compares two engines on the same items: differences of log-likelihoods, and items answered differently."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from dwindle.evaluation.data import TaskData
from dwindle.evaluation.metrics import answers

MOST_LISTED = 20
"""Items beyond the tolerance that are listed; all are counted."""
Scores = Mapping[tuple[str, int], Sequence[float]]
"""Log-likelihoods of an item's choices, by (task, item number)."""


def agreement(
    first: Scores, second: Scores, tasks: Sequence[TaskData], *, names: tuple[str, str], tolerance: float = 1e-4
) -> dict[str, Any]:
    """The largest difference per task, the items furthest beyond ``tolerance``, and all items answered differently.

    Items are listed because equal accuracies may hide different answers.
    """
    assert first.keys() == second.keys(), "the engines scored different items"
    questions = {(data.task.name, item.index): item.question for data in tasks for item in data.items}
    largest: dict[str, float] = {}
    apart: list[dict[str, Any]] = []
    answered: list[dict[str, Any]] = []
    for key, mine in first.items():
        other = second[key]
        difference = max(abs(a - b) for a, b in zip(mine, other, strict=True))
        largest[key[0]] = max(largest.get(key[0], 0.0), difference)
        entry: dict[str, Any] = {"task": key[0], "item": key[1], "difference": difference}
        entry |= {names[0]: list(mine), names[1]: list(other)}
        if not difference <= tolerance:
            apart.append(entry)
        if answers(questions[key], mine) != answers(questions[key], other):
            answered.append(entry)
    return {
        "num_items": len(first),
        "tolerance": tolerance,
        "largest_difference": max(largest.values()),
        "largest_difference_by_task": largest,
        "num_beyond_tolerance": len(apart),
        "beyond_tolerance": sorted(apart, key=_furthest_first)[:MOST_LISTED],
        "num_answered_differently": len(answered),
        "answered_differently": answered,
    }


def _furthest_first(entry: dict[str, Any]) -> tuple[bool, float]:
    """Sort key: NaN first, then the largest difference."""
    return not math.isnan(entry["difference"]), -entry["difference"]
