"""Runs whose layers are sized one by one: Adapt-Accel, uniform, the global mixture; resumed, compiled, refused."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from test_pretrain import STEPS, recipe

import dwindle
from dwindle.anatomy.anatomy import Anatomy
from dwindle.anatomy.structure import Structure
from dwindle.core.config import from_dict
from dwindle.core.errors import UserError
from dwindle.pruning.compaction import rounded_up
from dwindle.pruning.ledger import read_ledger, replay_structure
from dwindle.pruning.pacing import Horizon, Pacing, Rounds, Stages
from dwindle.pruning.pruner import Pruner
from dwindle.pruning.strategies import make_strategy
from dwindle.pruning.strategies.base import Strategy
from dwindle.pruning.strategies.coupled import CoupledStrategy
from dwindle.pruning.strategies.global_mixture import GlobalStrategy
from dwindle.pruning.strategies.layerwise import AdaptStrategy, UniformStrategy
from dwindle.recipe.recipe import Recipe
from dwindle.run.plan import make_plan
from dwindle.run.pretrain import pretrain
from runs import assert_same_run, assert_same_when_killed, die_at, events, go_on, metrics, start, wait
from tiny import tiny_directory

pytestmark = pytest.mark.usefixtures("one_thread")

ADAPT: dict[str, Any] = {"method": "adapt", "interleaves": 4, "amplitude": 0.05, "horizon": None, "target": "70%"}
UNIFORM: dict[str, Any] = {"method": "uniform", "interleaves": 4, "horizon": None, "target": "70%"}
DEPTH: dict[str, Any] = {
    "selection": "global",
    "groups": ["ffn", "layer"],
    "min_ffn": 36,
    "metric": "group",
    "target": "60%",
    "horizon": 0.5,
}
SHORTGPT: dict[str, Any] = {"method": "shortgpt", "horizon": None, "target": "60%"}
GLOBAL: dict[str, Any] = {"selection": "global", "target": "60%", "horizon": 0.5}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("layers")
    tiny_directory(place / "model", num_hidden_layers=4)
    return place


def test_stages_prune_and_train(place: Path) -> None:
    run = place / "adapt"
    settings = recipe(place, prune=ADAPT, schedule="wsd", warmup=0.05)
    result = pretrain(settings, run)
    source = Anatomy.of(dwindle.load(place / "model").model)
    total = source.count(source.source).total
    goal = int(0.7 * total)
    starts = [max(1, round(STEPS * done)) for done in (0, 0.1, 0.3, 0.6)]  # shares 0.1, 0.2, 0.3, 0.4
    assert sorted({event["step"] for event in events(run, "prune")}) == starts
    by_step = {line["step"]: line["parameters"] for line in metrics(run)}
    for stage, step in enumerate(starts):
        size = goal if stage == 3 else int(total * (goal / total) ** ((stage + 1) / 4))
        assert size - 3 * 32 < by_step[step] <= size
    assert result.target_reached and result.parameters == by_step[STEPS]
    structure = Structure.from_json(json.loads((run / "model" / "structure.json").read_text()))
    assert replay_structure(source.source, read_ledger(run)) == structure and not structure.is_uniform
    assert len(structure.hidden) == 32 and len(events(run, "allocation")) == 4
    assert sum(p.numel() for p in dwindle.load(run / "model").model.parameters()) == result.parameters


def test_uniform_stages_keep_all_layers_alike(place: Path) -> None:
    """LLM-Pruner's sizes inside training, which the same strategy object as in rounds without training decides."""
    run = place / "uniform"
    result = pretrain(recipe(place, prune=UNIFORM), run)
    source = Anatomy.of(dwindle.load(place / "model").model)
    total = source.count(source.source).total
    goal = int(0.7 * total)
    by_step = {line["step"]: line["parameters"] for line in metrics(run)}
    starts = [max(1, round(STEPS * done)) for done in (0, 0.1, 0.3, 0.6)]
    assert sorted({event["step"] for event in events(run, "prune")}) == starts
    for stage, step in enumerate(starts):
        size = goal if stage == 3 else int(total * (goal / total) ** ((stage + 1) / 4))
        narrower = any(event["step"] == step and event["type"] == "ffn" for event in events(run, "prune"))
        group = 3 * 32 if narrower else 2 * (2 + 1) * 4 * 32  # a channel; a key/value head with its two queries
        assert size - 4 * group < by_step[step] <= size
    assert result.target_reached and result.parameters == by_step[STEPS]
    now = source.source
    for event in read_ledger(run)[1:]:  # every layer loses as many heads or channels as the others, at every event
        if event["event"] == "prune":
            assert len({len(members) for members in event["indices"]}) == 1
            now = replay_structure(now, [event])
            assert now.is_uniform and len(now.hidden) == 32
    structure = Structure.from_json(json.loads((run / "model" / "structure.json").read_text()))
    assert structure == now == replay_structure(source.source, read_ledger(run))
    allocated = events(run, "allocation")
    assert len(allocated) == 4 and all(len(set(line["sparsity"])) == 1 for line in allocated)


def test_both_drivers_ask_the_same_strategy(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One class for each method, made by one function, called by the training callback and by rounds alike."""
    made: list[Strategy] = []

    def recorded(*args: Any) -> Strategy:
        made.append(make_strategy(*args))
        return made[-1]

    monkeypatch.setattr("dwindle.pruning.pruner.make_strategy", recorded)
    monkeypatch.setattr("dwindle.pruning.rounds.make_strategy", recorded)
    for number, (wanted, settings) in enumerate(
        {
            CoupledStrategy: {},
            GlobalStrategy: {"selection": "global"},
            AdaptStrategy: {"method": "adapt"},
            UniformStrategy: {"method": "uniform"},
        }.items()
    ):
        asked: list[tuple[type[Strategy], type[Pacing]]] = []

        def choose(
            self: Strategy,
            scores: Any,
            alive: Any,
            pacing: Pacing,
            *rest: Any,
            real: Any = wanted.choose,
            to: Any = asked,
        ) -> Any:
            to.append((type(self), type(pacing)))
            return real(self, scores, alive, pacing, *rest)

        made.clear()
        monkeypatch.setattr(wanted, "choose", choose)
        horizon = {"horizon": None, "interleaves": 2} if "method" in settings else {"horizon": 0.5}
        pretrain(recipe(place, steps=8, prune={"target": "80%", **settings, **horizon}), tmp_path / str(number))
        assert {type(strategy) for strategy in made} == {wanted}
        assert set(asked) == {(wanted, Stages if "method" in settings else Horizon)}
        made.clear()
        asked.clear()
        dwindle.prune(place / "model", "80%", **settings, rounds=2, sequences=2, seq_len=16)
        assert {type(strategy) for strategy in made} == {wanted} and set(asked) == {(wanted, Rounds)}


def test_the_global_selection_removes_single_groups(place: Path) -> None:
    run = place / "global"
    result = pretrain(recipe(place, prune=GLOBAL), run)
    assert result.target_reached
    removed = events(run, "prune")
    assert {event["type"] for event in removed} >= {"ffn", "stem"}
    for event in removed:
        assert sum(bool(members) for members in event["indices"]) == 1
    source = Anatomy.of(dwindle.load(place / "model").model)
    structure = Structure.from_json(json.loads((run / "model" / "structure.json").read_text()))
    assert replay_structure(source.source, read_ledger(run)) == structure and not structure.is_uniform


def test_sizes_are_looked_for_once_for_what_is_alive(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not after every step once the target is reached."""
    seen: list[int] = []

    def counted(alive: Structure, *more: Any) -> Structure:
        seen.append(len(alive.hidden) + sum(len(la.ffn) + len(la.query_heads) for la in alive.layers))
        return rounded_up(alive, *more)

    monkeypatch.setattr("dwindle.pruning.pruner.rounded_up", counted)
    assert pretrain(recipe(place, prune=GLOBAL | {"horizon": 0.2}), place / "looked").target_reached
    assert seen and len(seen) == len(set(seen))


@pytest.mark.parametrize("second_order", [False, True])
def test_the_global_selection_lands_on_multiples(place: Path, second_order: bool) -> None:
    """40 channels of four layers and 32 hidden ones, in blocks of 16; the 8 that round widths go first."""
    run = place / f"rounded-{second_order}"
    prune = GLOBAL | {"round_to": 16, "second_order": second_order}
    assert pretrain(recipe(place, prune=prune), run).target_reached
    removed = [(e["type"], sorted(map(len, e["indices"]))) for e in events(run, "prune")]
    assert removed[:4] == [("ffn", [0, 0, 0, 8])] * 4
    assert all(sizes == [0, 0, 0, 16] for kind, sizes in removed[4:] if kind == "ffn")
    assert all(sizes == [16] for kind, sizes in removed if kind == "stem")
    structure = Structure.from_json(json.loads((run / "model" / "structure.json").read_text()))
    assert all(len(la.ffn) % 16 == 0 for la in structure.layers) and len(structure.hidden) % 16 == 0


@pytest.mark.parametrize(
    "prune",
    [ADAPT, UNIFORM, GLOBAL, GLOBAL | {"round_to": 8}, DEPTH],
    ids=["adapt", "uniform", "global", "rounded", "depth"],
)
def test_killed_and_resumed_layers_equal_uninterrupted(place: Path, prune: dict[str, Any]) -> None:
    settings = recipe(place, prune=prune | {"target": "60%", "milestones": ["70%"], "smoothing": 0.4})
    name = f"{prune.get('method', 'global')}-{prune.get('round_to', 1)}-{'groups' in prune}"
    reference, run = place / f"whole-{name}", place / f"killed-{name}"
    assert_same_when_killed(settings, run, reference, kills=(3, 1))
    if prune is DEPTH:
        assert any(event["type"] == "layer" for event in events(run, "prune"))


def test_layers_removed_at_the_start_are_gone(place: Path) -> None:
    """ShortGPT before training: one stage, a stock model of fewer layers, resumed and replayed exactly."""
    settings = recipe(place, prune=SHORTGPT | {"milestones": ["70%"]})
    reference, run = place / "whole-shortgpt", place / "killed-shortgpt"
    assert wait(start(lambda: pretrain(settings, reference))) == 0
    child = start(lambda: (die_at(Pruner, "after_step", 20), go_on(settings, run)))
    assert os.WIFSIGNALED(wait(child) or 0)
    assert wait(start(lambda: go_on(settings, run))) == 0
    assert_same_run(run, reference)
    removed = events(run, "prune")
    assert {event["step"] for event in removed} == {1} and {event["type"] for event in removed} == {"layer"}
    model = dwindle.load(run / "model").model
    assert model.config.model_type == "llama" and model.config.num_hidden_layers == 4 - len(removed)
    again = dwindle.replay(place / "model", run)
    assert again.after.total == sum(p.numel() for p in model.parameters())
    assert "layers" in str(events(run, "compact"))


@pytest.mark.parametrize("prune", [ADAPT, GLOBAL], ids=["adapt", "global"])
def test_a_source_without_some_blocks_is_pruned_further(place: Path, prune: dict[str, Any], tmp_path: Path) -> None:
    """Blocks of its own that a run removed, or ``dwindle prune`` did."""
    groups: dict[str, Any] = {"groups": ["layer"], "selection": "global", "compare": "saved", "metric": "group"}
    source = dwindle.prune(place / "model", "70%", out=tmp_path / "model", sequences=2, seq_len=16, **groups)
    assert any(layer.absent and not layer.is_gone for layer in source.structure.layers)
    result = pretrain(recipe(tmp_path, prune=prune | {"target": "80%"}), tmp_path / "run")
    assert result.target_reached and result.parameters <= 0.8 * source.after.total
    with pytest.raises(UserError, match="method uniform: the source's layers already have different sizes"):
        pretrain(recipe(tmp_path, prune=UNIFORM | {"target": "80%"}), tmp_path / "refused")
    assert not (tmp_path / "refused").exists()


def test_few_graphs_for_layers_of_many_sizes(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced without code generation; one graph for the first model and for every rebuilt one, whose layers differ."""
    monkeypatch.setattr("dwindle.training.compiling.torch.compile", functools.partial(torch.compile, backend="eager"))
    torch._dynamo.utils.counters.clear()
    run = place / "compiled"
    settings = recipe(place, prune=GLOBAL | {"groups": ["ffn"], "target": "78%", "horizon": 1.0}, compile=True)
    settings.data.valid, settings.validation.every = [], 0
    pretrain(settings, run)
    rebuilt = len(events(run, "compact"))
    assert rebuilt >= 2
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 1 + rebuilt
    eager = place / "not-compiled"
    settings.training.compile = False
    pretrain(settings, eager)
    assert [e["indices"] for e in events(run, "prune")] == [e["indices"] for e in events(eager, "prune")]
    assert [line["loss"] for line in metrics(run)] == pytest.approx([line["loss"] for line in metrics(eager)], abs=1e-5)
    torch.compiler.reset()


def test_layers_with_dead_channels_train_alike(place: Path) -> None:
    """All layers are rebuilt at multiples, with dead channels in them; or never rebuilt at all."""
    losses, shapes = [], []
    for threshold in (0.1, 1.0):
        run = place / f"filled-{threshold}"
        prune = GLOBAL | {"groups": ["attn", "ffn"], "target": "65%", "compact_threshold": threshold, "compare": "sum"}
        pretrain(recipe(place, prune=prune | {"compact_multiple": 4, "compact_wait": 0}), run)
        losses.append([line["loss"] for line in metrics(run)])
        shapes.append(json.loads((run / "model" / "structure.json").read_text())["layers"])
    assert shapes[0] == shapes[1] and len({len(la["query_heads"]) for la in shapes[0]}) > 1
    rebuilt = events(place / "filled-0.1", "compact")
    assert rebuilt and all(width % 4 == 0 for width in rebuilt[0]["ffn"])
    assert losses[0] == pytest.approx(losses[1], abs=2e-4)


@pytest.mark.parametrize(
    ("prune", "message"),
    [
        (ADAPT | {"interleaves": 0}, "prune.interleaves: 0 must be at least 1"),
        (ADAPT | {"interleaves": 25}, "prune.interleaves: 25 must be between 1 and the 24 steps"),
        (ADAPT | {"amplitude": 2.0}, "prune.amplitude: 2.0 must be at least 0 and at most 1"),
        (ADAPT | {"horizon": 0.5}, "prune.horizon: method adapt prunes in prune.interleaves stages: remove it"),
        (ADAPT | {"ratio": "1:9"}, "prune.ratio: method adapt prunes in prune.interleaves stages: remove it"),
        (ADAPT | {"selection": "global"}, "prune.selection: is a setting of method efficientllm, not adapt"),
        (ADAPT | {"groups": ["stem"]}, "prune.groups: stem: adapt keeps the hidden size"),
        (ADAPT | {"warmup_steps": -50}, "prune.warmup_steps: -50 must be at least 0"),
        (ADAPT | {"compare": "sum"}, "prune.compare: is a setting of method efficientllm, not adapt"),
        (UNIFORM | {"amplitude": 0.5}, "prune.amplitude: is a setting of method adapt, not uniform"),
        (UNIFORM | {"horizon": 0.5}, "prune.horizon: method uniform prunes in prune.interleaves stages"),
        (UNIFORM | {"target": "45%"}, "smallest model that method uniform can reach"),
        (GLOBAL | {"amplitude": 0.5}, "prune.amplitude: is a setting of method adapt, not efficientllm"),
        (
            GLOBAL | {"interleaves": 4},
            "prune.interleaves: is a setting of method adapt or uniform, not efficientllm: remove it",
        ),
        (ADAPT | {"target": "hidden=16"}, "prune.target"),
        (ADAPT | {"target": "45%"}, "smallest model that method adapt can reach"),
        (ADAPT | {"round_to": 8}, "prune.round_to: is a setting of method efficientllm or minitron or .*, not adapt"),
        (GLOBAL | {"round_to": 64}, "prune.round_to 64: no multiple lies between"),
        (GLOBAL | {"round_to": 16, "target": "99.9%"}, "prune.round_to 16: the largest model with such widths has"),
        (GLOBAL | {"target": "0.5%"}, "smallest"),
        (SHORTGPT | {"horizon": 0.5}, "prune.horizon: method shortgpt prunes once, at the start"),
        (SHORTGPT | {"interleaves": 3}, "prune.interleaves: is a setting of method adapt or uniform, not shortgpt"),
        (SHORTGPT | {"target": "layers=0"}, "layers must be at least 1"),
        (GLOBAL | {"selection": "coupled", "target": "layers=5"}, "layers must lie between 1 and the source's 4"),
    ],
)
def test_what_cannot_work_is_refused_before_training(place: Path, prune: dict[str, Any], message: str) -> None:
    given = {name: value for name, value in prune.items() if value is not None}
    with pytest.raises(UserError, match=f"(^| ){message}"):
        pretrain(from_dict(Recipe, recipe(place).model_dump(exclude_none=True) | {"prune": given}), place / "refused")
    assert not (place / "refused").exists()


@pytest.mark.parametrize(
    "prune",
    [
        ADAPT,
        UNIFORM,
        UNIFORM | {"interleaves": 20},
        GLOBAL,
        GLOBAL | {"ratio": "4:1", "horizon": None},
        GLOBAL | {"round_to": 8},
    ],
)
def test_plans_know_the_methods(place: Path, tmp_path: Path, prune: dict[str, Any]) -> None:
    plan = make_plan(recipe(place, prune=prune))
    share = float(prune["target"].removesuffix("%")) / 100
    assert plan.parameters_target == int(share * plan.parameters_before) and plan.shape_target is None
    run = tmp_path / "planned"
    pretrain(recipe(place, prune=prune), run)
    least = 2 if "round_to" in prune else 1 if prune.get("method") == "uniform" else 4
    assert least <= plan.events_fewest <= len(events(run, "prune")) <= plan.events_most
