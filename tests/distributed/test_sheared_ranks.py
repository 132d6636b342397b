"""Learned masks on two ranks, whole and sharded: sampled alike, and moved by the derivatives of all tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_ranks
from safetensors.torch import load_file

from dwindle.pruning.ledger import read_ledger
from dwindle.recipe.recipe import Recipe
from dwindle.run.pretrain import pretrain, resume
from dwindle.training.callbacks import Callback
from runs import choices, metrics, tiny_recipe
from tiny import tiny_directory


def recipe(place: Path, parallel: str = "auto") -> Recipe:
    """Seven sequences a step, two at a time: ranks have unequal shares, and one of them sometimes has none."""
    return tiny_recipe(
        place,
        steps=12,
        sequences=7,
        data={"valid": ["pydoc:valid"], "valid_tokens": 264},
        training={"micro_batch": 2, "parallel": parallel},
        prune={"method": "sheared", "target": "hidden=24,heads=4,ffn=20", "horizon": 0.7, "compact_multiple": 4},
        validation={"every": 4},
    )


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("sheared-ranks")
    tiny_directory(place / "model", tie_word_embeddings=True)
    pretrain(recipe(place), place / "alone")
    return place


class Stop(Callback):
    """Ends a run in its mask phase."""

    def after_step(self, trainer: Any) -> None:
        trainer.stop.requested = trainer.step == 5


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_ranks_learn_the_masks_of_one_process(parallel: str, place: Path) -> None:
    run, alone = place / parallel, place / "alone"
    run_ranks(2, lambda rank: pretrain(recipe(place, parallel), run, callbacks=[Stop()]))
    run_ranks(2, lambda rank: resume(run, callbacks=[Stop()]))
    ours, theirs = metrics(run), metrics(alone)
    keys = ("loss", "grad_norm", "valid_loss", "open_attn", "open_ffn", "open_stem")
    for key in keys:
        values = [(a[key], b[key]) for a, b in zip(ours, theirs, strict=True) if key in b]
        assert values and [a for a, _ in values] == pytest.approx([b for _, b in values], abs=2e-5, rel=2e-5), key
    assert choices(run) == choices(alone) and len(read_ledger(run)) > 20
    weights, expected = (load_file(r / "model" / "model.safetensors") for r in (run, alone))
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected[name], atol=2e-3, rtol=0)  # Adam amplifies small gradients
