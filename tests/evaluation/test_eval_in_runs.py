"""``[validation] tasks`` of a recipe: real runs with task scores in ``metrics.jsonl``."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from eval_sets import DOCUMENTS, write_sets

import dwindle
from dwindle.core.run_directory import RunDirectory
from dwindle.evaluation import callback
from dwindle.recipe.recipe import Recipe
from dwindle.run.pretrain import pretrain, resume
from runs import metrics, tiny_recipe
from tiny import tiny_directory

NUM_STEPS = 8
TASKS = ["arc_easy", "wikitext"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("place")
    tiny_directory(place / "model")
    write_sets(place / "sets")
    return place


def recipe(place: Path, **validation: Any) -> Recipe:
    settings = {"every": 3, "tasks": TASKS, "data": [str(place / "sets")], "limit": 2, "batch": 3} | validation
    return tiny_recipe(
        place,
        steps=NUM_STEPS,
        sequences=2,
        seq_len=16,
        prune={"target": "70%", "horizon": 0.6},
        validation=settings,
        checkpoint={"every": 2, "keep_last": 9},
    )


@pytest.fixture(scope="module")
def run(place: Path) -> Path:
    assert pretrain(recipe(place), place / "run").status == "finished"
    return place / "run"


def test_scores_are_those_of_the_written_model(place: Path, run: Path) -> None:
    lines = metrics(run)
    scored = [line["step"] for line in lines if any(name.startswith("tasks/") for name in line)]
    assert scored == [3, 6, NUM_STEPS]
    assert all({"tasks/arc_easy", "tasks/wikitext"} <= line.keys() for line in lines if line["step"] in scored)
    alone = dwindle.evaluate(run / "model", TASKS, data=[str(place / "sets")], limit=2)
    assert len(DOCUMENTS["arc_easy"]) > alone.tasks[0].num_items == 2
    assert lines[-1]["tasks/arc_easy"] == alone.tasks[0].acc
    # The run's model is masked, the written one is cut: the same function in another order of additions.
    assert lines[-1]["tasks/wikitext"] == pytest.approx(alone.texts[0].bits_per_byte, rel=1e-5)
    before = dwindle.evaluate(place / "model", TASKS, data=[str(place / "sets")], limit=2)
    assert abs(before.texts[0].bits_per_byte - alone.texts[0].bits_per_byte) > 1e-2


def test_a_resumed_run_writes_the_same_scores(run: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    shutil.copytree(run, again)
    shutil.rmtree(again / "model")
    for checkpoint in RunDirectory(again).list_checkpoints():
        if int(checkpoint.name.removeprefix("step-")) > 4:
            shutil.rmtree(checkpoint)
    assert resume(again).status == "finished"
    assert metrics(again) == metrics(run)


def test_batch_reaches_the_scorer(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def watched(*args: Any, **options: Any) -> Any:
        seen.append((options["batch"], evaluate_model(*args, **options)))
        return seen[-1][1]

    evaluate_model = callback.evaluate_model
    monkeypatch.setattr(callback, "evaluate_model", watched)
    pretrain(recipe(place, every=0), tmp_path / "run")
    assert [(batch, result.batch) for batch, result in seen] == [(3, 3)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data": ["nowhere"]}, "validation.data: .*nowhere is not a folder"),
        ({"tasks": ["arc_esy"]}, "validation.tasks: unknown task 'arc_esy'"),
        ({"data": ["empty"]}, r"validation.data: arc_easy not found in .*empty: put arc_easy.test.jsonl"),
    ],
)
def test_what_is_missing_is_said_before_anything_is_made(
    settings: dict[str, Any], message: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Path, "mkdir", lambda *_, **__: pytest.fail("made a directory"))
    with pytest.raises(dwindle.UserError, match=message):
        pretrain(recipe(place, **settings), tmp_path / "run")
    assert not (tmp_path / "run").exists()
