"""Fewer tokens on two ranks: every rank cuts its own rows, of the model and of its teacher, to the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from processes import run_ranks
from test_ranks import recipe

from dwindle.recipe.recipe import Recipe
from dwindle.run.pretrain import pretrain
from runs import assert_same, choices
from tiny import merged_directory


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_ranks_trim_like_one_process(parallel: str, tmp_path: Path) -> None:
    merged_directory(tmp_path / "model", tie_word_embeddings=parallel == "ddp")
    (tmp_path / "text.txt").write_text("Two sheep sleep, four goats graze. " * 50)
    prune: dict[str, Any] = {"selection": "global", "target": "60%", "attention": "regular", "smoothing": 0.0}

    def settings(how: str) -> Recipe:
        made = recipe(tmp_path, how, prune=prune, tokens=8 * 168)
        vocabulary = made.vocabulary.model_copy(update={"size": 512, "text": [str(tmp_path / "text.txt")]})
        distill = made.distill.model_copy(update={"weight": 0.5})
        return made.model_copy(update={"vocabulary": vocabulary, "distill": distill})

    pretrain(settings("auto"), tmp_path / "alone")
    run_ranks(2, lambda rank: pretrain(settings(parallel), tmp_path / "two"))
    assert "vocabulary" in {event["event"] for event in choices(tmp_path / "alone")}
    assert_same(tmp_path / "two", tmp_path / "alone")
