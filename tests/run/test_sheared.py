"""``method = "sheared"`` in a run: masks for the horizon, then exactly the shape; resumed, on two ranks, refused."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import dwindle
from dwindle.anatomy.anatomy import Anatomy
from dwindle.anatomy.structure import Structure
from dwindle.core.config import from_dict
from dwindle.pruning.config import PretrainPruneConfig
from dwindle.pruning.ledger import read_ledger, replay_structure
from dwindle.pruning.target import Shape
from dwindle.recipe.recipe import Recipe
from dwindle.run.pretrain import pretrain, resume
from dwindle.training.callbacks import Callback
from runs import metrics, tiny_recipe
from tiny import tiny_directory

SHEARED: dict[str, Any] = {"method": "sheared", "target": "hidden=24,heads=4,ffn=20", "horizon": 0.6}
COMPACT = {"compact_threshold": 0.1, "compact_multiple": 4}
STEPS = 10


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sheared")
    tiny_directory(path / "model", tie_word_embeddings=True)
    return path


def recipe(place: Path, prune: dict[str, Any] | None = None, **tables: Any) -> Recipe:
    return tiny_recipe(
        place,
        steps=STEPS,
        prune=SHEARED | COMPACT | (prune or {}),
        validation={"every": 3},
        **({"data": {"train": ["pydoc:train"], "holdout": 0.02, "seq_len": 24}} | tables),
    )


class Watch(Callback):
    """The hidden size that is trained with, step by step, and when the run said that it would prune."""

    def __init__(self) -> None:
        self.hidden: list[int] = []
        self.said: list[str] = []

    def after_step(self, trainer: Any) -> None:
        self.hidden.append(trainer.model.config.hidden_size)
        self.said.append(f"{trainer.notes['parameters']}, {trainer.notes['next event']}")


def test_masks_for_the_horizon_then_exactly_the_shape(place: Path) -> None:
    run, watch = place / "run", Watch()
    result = pretrain(recipe(place), run, callbacks=[watch])
    assert result.target_reached and result.model is not None
    model = dwindle.load(result.model).model
    anatomy = Anatomy.of(dwindle.load(place / "model").model)
    structure = Structure.from_json(json.loads((result.model / "structure.json").read_text()))
    assert Shape.of(structure) == Shape(24, 4, 20, 3) and structure.is_uniform
    assert replay_structure(anatomy.source, read_ledger(run)) == structure
    assert model.config.hidden_size == 24 and model.config.num_key_value_heads == 4  # every key/value group stays
    removed = [event for event in read_ledger(run) if event["event"] == "prune"]
    assert {event["step"] for event in removed} == {6} and len(removed) == 8 + 1 + 20
    assert watch.hidden == [32] * 5 + [24] * 5  # rebuilt after the cut
    assert watch.said == ["29.2k → 15.3k, step 6"] * 5 + ["15.3k, none, target reached"] * 5
    lines = metrics(run)
    assert all({"open_attn", "open_ffn", "open_stem"} <= line.keys() for line in lines[:6])
    assert not any("open_ffn" in line for line in lines[6:])
    assert lines[5]["open_ffn"] < lines[0]["open_ffn"] == pytest.approx(1, abs=0.01)
    assert sum(p.numel() for p in model.parameters()) == result.parameters == anatomy.count(structure).total


def test_a_size_becomes_one_shape_of_all_layers(place: Path) -> None:
    result = pretrain(recipe(place, {"target": "60%", "horizon": 0.3}), place / "size")
    assert result.model is not None
    structure = Structure.from_json(json.loads((result.model / "structure.json").read_text()))
    total = (
        Anatomy.of(dwindle.load(place / "model").model)
        .count(Structure.full(hidden=32, ffn=[40] * 3, kv_of_query=[[n // 2 for n in range(8)]] * 3))
        .total
    )
    assert structure.is_uniform and result.parameters <= 0.6 * total < result.parameters + 3 * 3 * len(structure.hidden)


@pytest.mark.parametrize("at", [3, 6, 8])
def test_resumed_in_and_after_the_mask_phase_it_is_the_same_run(place: Path, at: int, tmp_path: Path) -> None:
    class Stop(Callback):
        def after_step(self, trainer: Any) -> None:
            if trainer.step == at:
                trainer.stop.requested = True

    reference = place / "reference"
    if not reference.exists():
        pretrain(recipe(place), reference)
    run = tmp_path / "run"
    stopped = pretrain(recipe(place), run, callbacks=[Stop()])
    assert stopped.status == "stopped" and resume(run).status == "finished"
    assert metrics(run) == metrics(reference)
    for file in ("ledger.jsonl", "model/model.safetensors", "model/structure.json"):
        assert (run / file).read_bytes() == (reference / file).read_bytes(), file


def test_compacted_or_not_it_is_the_same_model(place: Path) -> None:
    """What was cut stays zero, so a run that is never rebuilt before its end trains the same weights."""
    pretrain(recipe(place, {"compact_threshold": 1.0}), place / "masked")
    if not (place / "reference").exists():
        pretrain(recipe(place), place / "reference")
    ours, theirs = (load_file(place / name / "model" / "model.safetensors") for name in ("masked", "reference"))
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        torch.testing.assert_close(weight, theirs[name], atol=2e-4, rtol=0)


@pytest.mark.parametrize("first", [0, 2])
def test_compiled_layers_compute_with_masks_and_later_without(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    """The same model before masks, with them and after the cut (it is not rebuilt), with graphs that dynamo made."""
    monkeypatch.setattr("dwindle.training.compiling.torch.compile", functools.partial(torch.compile, backend="eager"))
    prune = {"compact_threshold": 1.0, "horizon": 0.3, "warmup_steps": first}
    settings = recipe(place, prune, training={"compile": True})
    pretrain(settings, tmp_path / "compiled")
    torch.compiler.reset()
    settings.training.compile = False
    pretrain(settings, tmp_path / "not-compiled")
    ours, theirs = metrics(tmp_path / "compiled"), metrics(tmp_path / "not-compiled")
    for key in ("loss", "valid_loss", "open_ffn"):
        pairs = [(a[key], b[key]) for a, b in zip(ours, theirs, strict=True) if key in b]
        assert pairs and [a for a, _ in pairs] == pytest.approx([b for _, b in pairs], abs=1e-5), key


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"ratio": "1:1", "horizon": None}, "ratio: sheared removes everything after its mask phase"),
        ({"milestones": ["70%"]}, "milestones: sheared removes everything"),
        ({"metric": "taylor"}, "metric: is a setting of method"),
        ({"attention": "cluster"}, "attention: is a setting of method"),
    ],
)
def test_settings_that_it_has_no_use_for_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(dwindle.UserError, match=said):
        from_dict(PretrainPruneConfig, SHEARED | settings)


def test_what_it_cannot_do_is_refused_in_one_line(place: Path) -> None:
    with pytest.raises(dwindle.UserError, match="method: sheared prunes while it trains"):
        dwindle.prune(place / "model", "60%", method="sheared")
    with pytest.raises(dwindle.UserError, match=r"sheared keeps all 4 key/value heads: choose one of \[4, 8\]"):
        pretrain(recipe(place, {"target": "heads=6"}), place / "refused")
    model = dwindle.load(place / "model").model
    with pytest.raises(dwindle.UserError, match="sheared runs in dwindle's own loop"):
        dwindle.Pruner.attach(model, torch.optim.AdamW(model.parameters()), num_steps=10, **SHEARED)
