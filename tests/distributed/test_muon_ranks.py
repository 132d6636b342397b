"""Muon and group saliency in whole runs: ranks compute what one process does, a killed run resumes to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import run_ranks

from dwindle.recipe.recipe import Recipe
from dwindle.run.pretrain import pretrain
from runs import COMPACT_OFTEN, assert_same, assert_same_when_killed, tiny_recipe
from tiny import tiny_directory

pytestmark = pytest.mark.usefixtures("one_thread")


def recipe(place: Path, parallel: str = "auto", moments: str = "fp32", **prune: object) -> Recipe:
    """12 steps of 7 sequences, which no number of ranks divides."""
    settings = {"target": "60%", "horizon": 0.7, "metric": "group", "smoothing": 0.5, "milestones": ["70%"]}
    return tiny_recipe(
        place,
        steps=12,
        sequences=7,
        data={"valid": ["pydoc:valid"], "valid_tokens": 264},
        training={"micro_batch": 2, "parallel": parallel, "optimizer": "muon", "moments": moments},
        prune=settings | COMPACT_OFTEN | prune,
        validation={"every": 6},
        checkpoint={"every": 3, "keep_last": 9},
    )


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("muon")
    tiny_directory(place / "model", num_hidden_layers=2)
    tiny_directory(place / "fused" / "model", "phi3", num_hidden_layers=2)
    return place


@pytest.mark.parametrize(
    ("family", "parallel", "moments"),
    [(".", "ddp", "fp32"), ("fused", "fsdp", "fp32"), (".", "ddp", "bf16"), ("fused", "fsdp", "bf16")],
)
def test_two_ranks_equal_one_process(place: Path, family: str, parallel: str, moments: str) -> None:
    here = place / family
    alone, both = here / f"alone-{moments}", here / f"{parallel}-{moments}"
    run_ranks(1, lambda rank: pretrain(recipe(here, moments=moments), alone))
    run_ranks(2, lambda rank: pretrain(recipe(here, parallel, moments), both))
    assert_same(both, alone, tolerance=1e-4)


@pytest.mark.parity
@pytest.mark.parametrize(("selection", "moments"), [("coupled", "fp32"), ("global", "bf16")])
def test_killed_and_resumed_equals_uninterrupted(place: Path, selection: str, moments: str) -> None:
    settings = recipe(place, moments=moments, selection=selection, compare="saved")
    reference, run = place / f"whole-{selection}", place / f"killed-{selection}"
    assert_same_when_killed(settings, run, reference, kills=(6, 2))
