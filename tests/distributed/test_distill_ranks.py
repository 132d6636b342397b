"""Several ranks with a teacher compute what one process computes, whether it is copied or sharded."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import run_ranks
from test_ranks import recipe

from dwindle.recipe.recipe import Recipe
from dwindle.run.pretrain import pretrain
from dwindle.training.config import DistillConfig
from runs import metrics
from tiny import tiny_directory


def settings(place: Path, parallel: str) -> Recipe:
    """6 steps of 7 sequences, which no number of ranks divides, with events and a compaction; from random weights."""
    prune = {"target": "75%", "milestones": [], "horizon": 0.5}
    found = recipe(place, parallel, prune=prune, tokens=6 * 168)
    found.source.random_init = True
    found.data.valid, found.validation.every = [], 0
    found.distill = DistillConfig(weight=0.6, temperature=2.0, top_k=50)
    return found


def test_two_ranks_equal_one_process(tmp_path: Path) -> None:
    tiny_directory(tmp_path / "model", tie_word_embeddings=True, num_hidden_layers=2)
    pretrain(settings(tmp_path, "auto"), tmp_path / "alone")
    alone = metrics(tmp_path / "alone")
    assert alone[-1]["parameters"] < alone[0]["parameters"]
    for parallel in ("ddp", "fsdp"):
        run = tmp_path / parallel
        run_ranks(2, lambda rank, p=parallel, r=run: pretrain(settings(tmp_path, p), r))  # type: ignore[misc]
        for key in ("loss", "distill_loss", "grad_norm", "parameters"):
            ours, theirs = ([line[key] for line in lines] for lines in (metrics(run), alone))
            assert ours == pytest.approx(theirs, abs=1e-5, rel=1e-5), (parallel, key)
