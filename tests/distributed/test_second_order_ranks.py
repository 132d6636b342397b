"""Several ranks make the same second-order updates and layer-wise scores as one process with all their tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_ranks
from safetensors.torch import load_file
from test_ranks import recipe

from dwindle.run.pretrain import pretrain
from runs import choices, metrics
from tiny import tiny_directory

# 168 tokens are those of a step: two ranks have 96 and 72
OPTIONS: dict[str, dict[str, Any]] = {
    "taylor": {"second_order": True, "gram_tokens": 168, "milestones": []},
    "obc": {"metric": "obc", "second_order": True, "smoothing": 0.0, "milestones": []},
    "sampled": {"second_order": True, "gram_tokens": 70, "milestones": []},
    "few": {"second_order": True, "groups": ["ffn"], "target": "85%", "gram_tokens": 8, "milestones": []},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("second-order-ranks")
    tiny_directory(place / "model", tie_word_embeddings=True, num_hidden_layers=2)
    return place


@pytest.mark.parametrize(("name", "parallel", "ranks"), [("taylor", "ddp", 2), ("obc", "fsdp", 3)])
def test_ranks_equal_one_process(place: Path, name: str, parallel: str, ranks: int) -> None:
    alone, run = place / f"{name}-alone", place / f"{name}-{parallel}"
    training = {"tokens": 8 * 168}
    pretrain(recipe(place, prune=OPTIONS[name], **training), alone)
    run_ranks(ranks, lambda rank: pretrain(recipe(place, parallel, prune=OPTIONS[name], **training), run))
    assert choices(run) == choices(alone)
    ours, theirs = ([line["loss"] for line in metrics(r)] for r in (run, alone))
    assert ours == pytest.approx(theirs, abs=1e-4, rel=1e-4)
    weights, expected = (load_file(r / "model" / "model.safetensors") for r in (run, alone))
    for key, weight in weights.items():
        torch.testing.assert_close(weight, expected[key], atol=5e-3, rtol=0)  # Adam amplifies small gradients


@pytest.mark.parametrize("name", ["sampled", "few"])
def test_a_sample_of_a_step_follows_neither_ranks_nor_micro_batches(place: Path, name: str) -> None:
    """Grams, or rows that travel if there are few tokens."""

    def losses(how: str, micro_batch: int, ranks: int) -> list[float]:
        run = place / f"{name}-{how}-{micro_batch}"
        settings = recipe(place, how, prune=OPTIONS[name], tokens=8 * 168, micro_batch=micro_batch)
        run_ranks(ranks, lambda rank: pretrain(settings, run))
        return [line["loss"] for line in metrics(run)]

    whole = losses("none", 7, 1)
    for how, micro_batch, ranks in (("none", 2, 1), ("ddp", 2, 3), ("fsdp", 1, 2)):
        assert losses(how, micro_batch, ranks) == pytest.approx(whole, abs=1e-4, rel=1e-4), how
