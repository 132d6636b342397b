"""Agreement of two engines: what differs is counted and named, and nothing else is."""

from __future__ import annotations

from pathlib import Path

import pytest
from eval_sets import write_sets

from dwindle.evaluation.evaluate import EvalData, load_data
from studies.agreement import agreement

NAMES = ("harness", "dwindle")


@pytest.fixture
def data(tmp_path: Path) -> EvalData:
    return load_data(["piqa", "arc_easy"], [str(write_sets(tmp_path / "sets"))])


def test_differences_and_answers_are_named(data: EvalData) -> None:
    first = {("piqa", 0): [-3.0, -4.0], ("piqa", 1): [-2.0, -1.0], ("arc_easy", 2): [-1.0, -1.5]}
    second = {("piqa", 0): [-3.0, -4.00005], ("piqa", 1): [-2.0, -1.2], ("arc_easy", 2): [-1.6, -1.5]}
    found = agreement(first, second, data.tasks, names=NAMES)
    assert found["num_items"] == 3
    assert found["largest_difference"] == pytest.approx(0.6)
    assert found["largest_difference_by_task"] == pytest.approx({"piqa": 0.2, "arc_easy": 0.6})
    assert [(entry["task"], entry["item"]) for entry in found["beyond_tolerance"]] == [("arc_easy", 2), ("piqa", 1)]
    assert found["beyond_tolerance"][1]["harness"] == [-2.0, -1.0]
    assert found["beyond_tolerance"][1]["dwindle"] == [-2.0, -1.2]
    assert found["num_beyond_tolerance"] == 2
    [changed] = found["answered_differently"]
    assert (changed["task"], changed["item"]) == ("arc_easy", 2) and found["num_answered_differently"] == 1


def test_an_answer_that_changes_only_per_character_counts(data: EvalData) -> None:
    lengths = [len(choice) for choice in data.tasks[0].items[0].question.choices]
    assert lengths[0] > lengths[1]
    tie = [-1.0 * lengths[0], -1.0 * lengths[1]]
    first = {("piqa", 0): [tie[0] + 1e-5, tie[1]]}
    second = {("piqa", 0): [tie[0] - 1e-5, tie[1]]}
    found = agreement(first, second, data.tasks, names=NAMES)
    assert found["num_beyond_tolerance"] == 0 and found["num_answered_differently"] == 1
    assert agreement(first, first, data.tasks, names=NAMES)["largest_difference"] == 0.0


def test_a_number_that_is_none_is_beyond_every_tolerance(data: EvalData) -> None:
    found = agreement({("piqa", 0): [float("nan"), -1.0]}, {("piqa", 0): [-1.0, -1.0]}, data.tasks, names=NAMES)
    assert found["num_beyond_tolerance"] == 1
