"""``dwindle prune --method slicegpt``: a stock directory with a head of its own, its ledger, and training from it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import dwindle
from dwindle.pruning.config import PretrainPruneConfig
from dwindle.report.run import open_run
from dwindle.report.runs import list_runs
from dwindle.report.verdict import verdict
from runs import tiny_recipe
from tiny import tiny_directory


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("slicegpt")
    tiny_directory(path / "source", tie_word_embeddings=True)
    options = {"method": "slicegpt", "sequences": 4, "seq_len": 32}
    dwindle.prune(path / "source", "70%", out=path / "model", round_to=8, **options)
    return path


def test_the_written_model_is_stock_and_untied(place: Path) -> None:
    again = dwindle.prune(place / "source", "70%", method="slicegpt", round_to=8, sequences=4, seq_len=32)
    loaded = AutoModelForCausalLM.from_pretrained(place / "model")
    assert loaded.config.model_type == "llama" and loaded.config.hidden_size % 8 == 0
    assert loaded.lm_head.weight is not loaded.model.embed_tokens.weight
    assert all(bool((p == 1).all()) for name, p in loaded.named_parameters() if name.endswith("norm.weight"))
    batch = torch.arange(1, 20)[None]
    with torch.no_grad():
        torch.testing.assert_close(loaded(batch).logits, again.model(batch).logits, atol=1e-6, rtol=0)
    assert sum(p.numel() for p in loaded.parameters()) == again.after.total <= 0.7 * again.before.total
    assert again.after.embedding == 2 * 257 * loaded.config.hidden_size


def test_the_ledger_says_what_was_done_and_cannot_be_replayed(place: Path) -> None:
    source, rotation = map(json.loads, (place / "model" / "ledger.jsonl").read_text().splitlines())
    assert source["options"]["method"] == "slicegpt" and "metric" not in source["options"]
    assert rotation["event"] == "rotate" and rotation["of"] == 32 and rotation["head"] == "untied"
    structure = json.loads((place / "model" / "structure.json").read_text())
    assert structure["rotated"] and len(structure["hidden"]) == rotation["hidden"] < 32
    card = (place / "model" / "README.md").read_text()
    assert f"| hidden channels | 32 | {rotation['hidden']} |" in card and "head is not tied" in card
    run = open_run(place / "model")
    assert run.parameters_after == rotation["parameters"] and run.ledger.num_gone("stem") == 32 - rotation["hidden"]
    assert not run.missing() and "not pruned" not in verdict(run)
    assert list_runs(place / "model")[0].parameters == rotation["parameters"]
    with pytest.raises(dwindle.UserError, match="slicegpt rotated this model, which no indices can repeat"):
        dwindle.replay(place / "source", place / "model")


def test_it_can_be_trained_and_pruned_further(place: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe(place, steps=2, prune={"enabled": False})
    trained = dwindle.pretrain(recipe, tmp_path / "run")
    assert trained.status == "finished" and trained.model is not None
    smaller = dwindle.prune(trained.model, "80%", metric="magnitude", measure=False)
    assert smaller.after.total <= 0.8 * smaller.before.total


@pytest.mark.parametrize(
    ("to", "options", "said"),
    [
        ("70%", {"metric": "taylor"}, "metric: is a setting of method .*, not slicegpt"),
        ("70%", {"rounds": 3}, "rounds: is a setting of method .*, not slicegpt"),
        ("ffn=20", {}, "slicegpt changes the hidden size alone"),
        ("20%", {"min_hidden": 16}, "below the smallest model that slicegpt reaches"),
        ("layers=2", {}, "slicegpt changes the hidden size alone"),
        ("hidden=16,layers=2", {}, "slicegpt changes the hidden size alone"),
        ("hidden=31", {}, r"hidden=31: with a head of its own the result has .*, not fewer than the source's"),
        ("hidden=20", {"round_to": 8}, "hidden=20: is not a multiple of round_to 8"),
        ("hidden=20", {"min_hidden": 24}, "hidden=20: is below min_hidden 24"),
        ("70%", {"min_ffn": 16}, "min_ffn: is a setting of method .*, not slicegpt"),
        ("70%", {"groups": ["attn", "stem"]}, "groups: attn: slicegpt keeps all heads: choose stem"),
    ],
)
def test_what_it_cannot_do_is_refused_in_one_line(place: Path, to: str, options: dict[str, object], said: str) -> None:
    with pytest.raises(dwindle.UserError, match=said):
        dwindle.prune(place / "source", to, method="slicegpt", **options)


def test_inside_training_it_is_refused() -> None:
    with pytest.raises(dwindle.UserError, match="slicegpt prunes before training"):
        PretrainPruneConfig(method="slicegpt", target="60%")
