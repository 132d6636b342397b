"""Gemma's embedding factor, gains and windows in whole runs: compacted at other times, resumed, or sharded."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from processes import run_ranks
from transformers import AutoModelForCausalLM

from dwindle.anatomy.anatomy import Anatomy
from dwindle.core.run_directory import RunDirectory
from dwindle.recipe.recipe import Recipe
from dwindle.run.pretrain import pretrain, resume
from dwindle.sources.loading import load
from runs import COMPACT_OFTEN, assert_same, events, metrics, tiny_recipe
from tiny import tiny_directory


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("gemma")
    tiny_directory(place / "model", "gemma3_text", tie_word_embeddings=True)
    return place


def recipe(place: Path, parallel: str = "auto", *, threshold: float = 0.1, precision: str = "fp32") -> Recipe:
    prune = {"target": "50%", "horizon": 0.7, "groups": ["ffn", "stem"], "round_to": 8, "milestones": ["70%"]}
    prune |= {**COMPACT_OFTEN, "compact_threshold": threshold}
    return tiny_recipe(
        place,
        steps=8,
        data={"valid": ["pydoc:valid"], "valid_tokens": 240},
        training={"micro_batch": 4, "parallel": parallel, "precision": precision},
        prune=prune,
        validation={"every": 4},
        checkpoint={"every": 3},
    )


@pytest.fixture(scope="module")
def alone(place: Path) -> Path:
    run = place / "alone"
    pretrain(recipe(place), run)
    assert {event["type"] for event in events(run, "prune")} == {"ffn", "stem"}
    assert events(run, "compact")
    return run


def test_when_it_is_compacted_does_not_matter(place: Path) -> None:
    losses = []
    for threshold in (1e-9, 1.0):
        run = place / f"compact-{threshold}"
        pretrain(recipe(place, threshold=threshold, precision="fp64"), run)
        losses.append([line["loss"] for line in metrics(run)])
    assert losses[0] == pytest.approx(losses[1], abs=1e-10, rel=0)


def test_the_result_is_stock(alone: Path) -> None:
    stock = AutoModelForCausalLM.from_pretrained(alone / "model", dtype=torch.float32)
    assert stock.config.model_type == "gemma3_text" and stock.config.hidden_size < 32
    assert Anatomy.of(stock).source.is_uniform and not (alone / "model" / "modeling_dwindle.py").exists()
    batch = torch.randint(0, 257, (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(load(alone / "model").model(input_ids=batch).logits, stock(input_ids=batch).logits)


@pytest.mark.slow
def test_sharded_ranks_equal_one_process_and_resume(place: Path, alone: Path) -> None:
    run = place / "fsdp-2"
    run_ranks(2, lambda rank: pretrain(recipe(place, "fsdp"), run))
    assert_same(run, alone)
    shutil.rmtree(run / "model")  # as if it had been killed before the last checkpoint
    shutil.rmtree(RunDirectory(run).list_checkpoints()[-1])
    resume(run)
    assert_same(run, alone)
