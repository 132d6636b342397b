"""Layers of different sizes on several ranks: the importance of layers and the choices are those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from processes import run_ranks
from test_ranks import recipe

from dwindle.run.pretrain import pretrain
from runs import assert_same, choices, metrics
from tiny import tiny_directory

METHODS: dict[str, dict[str, Any]] = {
    "adapt": {"method": "adapt", "interleaves": 4, "amplitude": 0.05, "horizon": None, "target": "60%"},
    "global": {"selection": "global", "target": "60%"},
    "random": {"selection": "global", "target": "60%", "metric": "random"},
    "depth": {"selection": "global", "target": "60%", "groups": ["ffn", "layer"], "min_ffn": 36, "metric": "group"},
    "shortgpt": {"method": "shortgpt", "horizon": None, "target": "60%"},
}


@pytest.mark.parametrize("name", METHODS)
def test_two_ranks_give_layers_the_sizes_of_one_process(name: str, tmp_path: Path) -> None:
    family = "olmo2" if name == "depth" else "llama"  # norms behind blocks are sharded, too
    tiny_directory(tmp_path / "model", family, tie_word_embeddings=True)
    prune = METHODS[name] | {"attention": "regular", "smoothing": 0.0}
    steps = {"tokens": 8 * 168}
    pretrain(recipe(tmp_path, prune=prune, **steps), tmp_path / "alone")
    how = "ddp" if name == "shortgpt" else "fsdp"
    run_ranks(2, lambda rank: pretrain(recipe(tmp_path, how, prune=prune, **steps), tmp_path / "two"))
    if name in ("depth", "shortgpt"):
        assert any(event.get("type") == "layer" for event in choices(tmp_path / "alone"))
    if name in ("adapt", "shortgpt"):
        _importance_agrees(tmp_path / "two", tmp_path / "alone")
    else:
        assert_same(tmp_path / "two", tmp_path / "alone")


def _importance_agrees(two: Path, alone: Path) -> None:
    """The last digits of the measured importance differ, so those lines are compared apart from the others."""
    ours, theirs = choices(two), choices(alone)
    assert [event["event"] for event in ours] == [event["event"] for event in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        if mine["event"] == "allocation":
            assert mine["importance"] == pytest.approx(other["importance"], abs=1e-5)
            assert mine["sparsity"] == pytest.approx(other["sparsity"], abs=1e-4)
        else:
            assert mine == other
    losses = [[line["loss"] for line in metrics(run)] for run in (two, alone)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
