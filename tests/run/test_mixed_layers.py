"""Models whose layers are not all attention (LFM2, Qwen 3.5): scored, pruned, trained, compacted, resumed, reported."""

from __future__ import annotations

import functools
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import dwindle
from dwindle.anatomy.anatomy import Anatomy, cut
from dwindle.core.errors import UserError
from dwindle.pruning.config import PruneConfig
from dwindle.pruning.event_bounds import coupled_events, global_events
from dwindle.pruning.metrics import metric_named
from dwindle.pruning.pruner import Pruner
from dwindle.pruning.saliency import ElementScores, score_model
from dwindle.pruning.surgery import Prunable
from dwindle.pruning.target import parse_target
from dwindle.report.plots import write_plots
from dwindle.report.run import open_run
from dwindle.report.summary import summarise
from dwindle.run.pretrain import pretrain
from runs import COMPACT_OFTEN, assert_same_run, die_at, go_on, start, tiny_recipe, wait
from tiny import random_group, tiny_directory, tiny_model, tokens

pytestmark = pytest.mark.usefixtures("one_thread")

MIXED = ("lfm2", "qwen3_5_text")
WAYS: list[dict[str, Any]] = [
    {},
    {"attention": "cluster"},
    {"selection": "global"},
    {"method": "adapt", "rounds": 2},
    {"metric": "group"},
    {"metric": "obc", "second_order": True},
    {"round_to": 8},
]


@pytest.fixture(scope="module", params=MIXED)
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp(request.param)
    tiny_directory(place / "model", request.param)
    return place


@pytest.mark.parametrize("family", MIXED)
def test_hidden_channels_are_scored_by_every_projection_into_the_residual_stream(family: str) -> None:
    """Against a loop over the modules: attention, convolution or linear attention, and FFN of each layer."""
    prunable = Prunable(tiny_model(family))
    expected = torch.zeros(32, dtype=torch.float64)
    for layer in prunable.model.model.layers:
        mixer = getattr(layer, "self_attn", None) or getattr(layer, "conv", None) or layer.linear_attn
        mixed = mixer.o_proj if hasattr(mixer, "o_proj") else mixer.out_proj
        ffn = layer.mlp.down_proj if hasattr(layer, "mlp") else layer.feed_forward.w2
        for projection in (mixed, ffn):
            expected += projection.weight.detach().square().sum(1)
    for make in (score_model, ElementScores):
        found = make(prunable, {}, {}, metric_named("magnitude")).current
        torch.testing.assert_close(found.stem, expected)


def test_removing_a_hidden_channel_takes_its_column_of_a_convolution_along() -> None:
    """Scores after a removal equal the scores of the model without that channel."""
    model = tiny_model("lfm2")
    prunable, anatomy = Prunable(model), Anatomy.of(model)
    scores = ElementScores(prunable, {}, {}, metric_named("magnitude"))
    group = random_group("stem", anatomy.source, 3)
    scores.remove(group)
    keep = anatomy.source.without(group)
    again = ElementScores(
        Prunable(cut(tiny_model("lfm2"), anatomy, keep, anatomy.source)), {}, {}, metric_named("magnitude")
    )
    alive = scores.current.stem.isfinite()
    torch.testing.assert_close(scores.current.stem[alive], again.current.stem)


@pytest.mark.parametrize("options", WAYS, ids=str)
def test_pruned_in_every_way(place: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    source = place / "model"
    goal = parse_target("70%nonemb", Anatomy.of_config(dwindle.load(source).model.config)).num_parameters
    pruned = dwindle.prune(source, "70%nonemb", sequences=4, seq_len=24, out=tmp_path / "out", **options)
    assert pruned.after.total <= goal
    assert pruned.after.total == sum(p.numel() for p in pruned.model.parameters())
    loaded, batch = dwindle.load(tmp_path / "out").model, tokens(2, 12)
    assert torch.equal(loaded(batch).logits, pruned.model(batch).logits)
    assert "query heads per layer" in (tmp_path / "out/README.md").read_text()
    assert dwindle.replay(source, tmp_path / "out").structure == pruned.structure


@pytest.mark.parametrize("events", [coupled_events, global_events])
@pytest.mark.parametrize("family", MIXED)
def test_bounds_of_events_hold_where_tensors_have_two_hidden_axes(family: str, events: Any, tmp_path: Path) -> None:
    source = tiny_directory(tmp_path / "model", family)
    selection = "coupled" if events is coupled_events else "global"
    anatomy = Anatomy.of_config(dwindle.load(source).model.config)
    config = PruneConfig(selection=selection).for_family(anatomy.family)
    for to, metric in (("90%", "magnitude"), ("60%", "random"), ("45%", "magnitude")):
        bounds = events(anatomy, parse_target(to, anatomy), config)
        ledger = dwindle.prune(source, to, metric=metric, selection=selection, measure=False).ledger
        count = sum(event["event"] == "prune" for event in ledger)
        assert bounds.fewest <= count <= bounds.most, (to, metric)


def test_groups_that_are_kept_whole(tmp_path: Path) -> None:
    source = tiny_directory(tmp_path / "model", "qwen3_5_text")
    assert set(dwindle.inspect(source).groups) == {"ffn", "stem", "layer"}
    with pytest.raises(
        UserError, match="groups: attn: this family keeps such groups whole: choose among ffn, stem, layer"
    ):
        dwindle.prune(source, "80%", metric="magnitude", groups=["attn", "ffn"])


def test_a_run_prunes_compacts_resumes_and_is_drawn(place: Path) -> None:
    prune = {"target": "60%", "horizon": 0.6, "selection": "global", "milestones": ["70%"], **COMPACT_OFTEN}
    settings = tiny_recipe(place, steps=10, prune=prune, checkpoint={"every": 3})
    assert wait(start(lambda: pretrain(settings, place / "whole"))) == 0

    def dies() -> None:
        die_at(Pruner, "compact", 1)
        pretrain(settings, place / "killed")

    assert wait(start(dies)) == signal.SIGKILL
    assert wait(start(functools.partial(go_on, settings, place / "killed"))) == 0
    assert_same_run(place / "killed", place / "whole")
    summary = summarise(open_run(place / "whole"))
    assert summary["architecture"] is not None and "layers" in {figure["id"] for figure in summary["figures"]}
    assert "architecture.png" in write_plots(open_run(place / "whole"), place / "plots", dpi=50)
