"""ShortGPT: block influence equals a loop over tokens, and the layers that matter least are removed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import dwindle
from dwindle.anatomy.anatomy import Anatomy
from dwindle.core.errors import UserError
from dwindle.pruning.config import PostTrainingConfig, PruneConfig
from dwindle.pruning.pruner import Pruner
from dwindle.pruning.rounds import prune_in_rounds
from dwindle.pruning.strategies import make_strategy
from dwindle.pruning.surgery import Prunable
from dwindle.pruning.target import Target, parse_target
from tiny import tiny_directory, tiny_model, tokens

WINDOWS = tokens(5, 12, seed=4)


def influence(model: Any) -> list[float]:
    """1 − mean cosine of every layer's input and output, token by token."""
    found: list[list[torch.Tensor]] = [[] for _ in model.model.layers]

    def hook(place: int) -> Any:
        def listen(layer: Any, args: Any, kwargs: Any, output: Any) -> None:
            before, after = args[0] if args else kwargs["hidden_states"], output
            for x, y in zip(before.flatten(0, 1), after.flatten(0, 1), strict=True):
                found[place].append(1 - x @ y / (x.norm() * y.norm()))

        return listen

    handles = [la.register_forward_hook(hook(n), with_kwargs=True) for n, la in enumerate(model.model.layers)]
    with torch.no_grad():
        for window in WINDOWS:
            model(input_ids=window[None])
    for handle in handles:
        handle.remove()
    return [float(torch.stack(values).mean()) for values in found]


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "lfm2"])
def test_the_layers_of_the_lowest_influence_are_removed(family: str) -> None:
    kinds = {"lfm2": {"layer_types": ["conv", "full_attention"] * 3}}.get(family, {})
    options: dict[str, Any] = {"num_hidden_layers": 6, **({"layer_types": None} if family == "gemma3_text" else {})}
    model = tiny_model(family, **(options | kinds))
    expected = influence(model)
    prunable = Prunable(model)
    anatomy = prunable.anatomy
    target = parse_target("layers=3", anatomy)
    events = prune_in_rounds(prunable, target, PostTrainingConfig(method="shortgpt"), WINDOWS, "tiny")
    allocation = next(event for event in events if event["event"] == "allocation")
    assert allocation["importance"] == pytest.approx(expected, abs=1e-6)
    order = sorted(range(6), key=expected.__getitem__)
    removed = [[n for n, members in enumerate(e["indices"]) if members] for e in events if e["event"] == "prune"]
    assert [n for (n,) in removed] == order[:3] and "metric" not in events[0]["options"]
    assert [n for n, share in enumerate(allocation["sparsity"]) if share] == sorted(order[:3])
    assert len(prunable.compacted().model.layers) == 3


def test_a_layer_of_every_kind_is_kept() -> None:
    """Two layers of six are left: a convolution and an attention, whatever their influence."""
    for kinds in (["conv", "full_attention"] + ["conv"] * 4, ["full_attention"] * 5 + ["conv"]):
        prunable = Prunable(tiny_model("lfm2", num_hidden_layers=6, layer_types=kinds))
        target = parse_target("layers=2", prunable.anatomy)
        prune_in_rounds(prunable, target, PostTrainingConfig(method="shortgpt"), WINDOWS, "tiny")
        assert sorted(prunable.compacted().config.layer_types) == ["conv", "full_attention"]
        with pytest.raises(UserError, match="at least 2 must be kept"):
            make_strategy(prunable.anatomy, parse_target("layers=1", prunable.anatomy), PruneConfig(method="shortgpt"))


def test_it_lands_within_one_layer_of_a_size(tmp_path: Path) -> None:
    tiny_directory(tmp_path / "model", num_hidden_layers=6)
    anatomy = Anatomy.of(dwindle.load(tmp_path / "model").model)
    layer = anatomy.layer_counts(anatomy.source)[0]
    for to in ("90%", "60%"):
        goal = parse_target(to, anatomy).num_parameters
        found = dwindle.prune(tmp_path / "model", to, method="shortgpt", sequences=4, seq_len=32)
        assert goal - layer < found.after.total <= goal
        assert found.model.config.model_type == "llama"
    again = dwindle.prune(tmp_path / "model", "layers=3", method="shortgpt", rounds=3, sequences=4, seq_len=32)
    assert [event["step"] for event in again.ledger if event["event"] == "prune"] == [1, 2, 3]


def test_it_asks_for_no_metric_and_refuses_a_broken_stream() -> None:
    model = tiny_model("llama")
    assert PostTrainingConfig(method="shortgpt").has_own_score
    model.model.layers[1].mlp.down_proj.weight.data.fill_(float("nan"))
    prunable = Prunable(model)
    target = parse_target("layers=2", prunable.anatomy)
    with pytest.raises(UserError, match="the residual stream is not finite"):
        prune_in_rounds(prunable, target, PostTrainingConfig(method="shortgpt"), WINDOWS, "tiny")


def test_in_another_loop() -> None:
    """What it observes in a step decides after it; gradients do not."""
    model = tiny_model("llama").float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-9)
    pruner = Pruner.attach(model, optimizer, num_steps=2, target="layers=2", method="shortgpt")
    expected = influence(model)
    for _ in range(2):
        model(input_ids=WINDOWS, labels=WINDOWS).loss.backward()
        pruner.after_backward()
        optimizer.step()
        pruner.after_step(WINDOWS.numel())
        optimizer.zero_grad()
    gone = [n for n, layer in enumerate(pruner.pruner.prunable.alive.layers) if len(layer.absent) == 2]
    assert pruner.finished and gone == [expected.index(min(expected))]


def test_bounds_are_the_number_of_layers() -> None:
    anatomy = Anatomy.of(tiny_model("llama", num_hidden_layers=6))
    full, layer = anatomy.count(anatomy.source).total, anatomy.layer_counts(anatomy.source)[0]
    strategy = make_strategy(anatomy, Target(full - 2 * layer - 1), PruneConfig(method="shortgpt"))
    bounds = strategy.event_bounds(None)  # type: ignore[arg-type]
    assert (bounds.fewest, bounds.most) == (3, 3)


@pytest.mark.parametrize(
    ("to", "options", "reason"),
    [
        ("10%", {}, "below the smallest model that method shortgpt can reach, 23,456 parameters in 1 layer"),
        ("layers=2,ffn=8", {}, "shortgpt removes layers alone"),
        ("layers=9", {}, "layers must lie between 1 and the source's 3"),
        ("layers=2", {"metric": "taylor"}, "metric: is a setting of method .*, not shortgpt"),
        ("layers=2", {"groups": ["ffn"]}, "groups: ffn: shortgpt keeps all FFN channels: choose layer"),
        ("layers=2", {"groups": ["attn", "ffn", "stem"]}, "groups: attn: shortgpt keeps all heads: choose layer"),
        ("layers=2", {"second_order": True}, "second_order: is a setting of method .*, not shortgpt"),
        ("layers=2", {"min_ffn": 4}, "min_ffn: is a setting of method .*, not shortgpt"),
    ],
)
def test_bad_settings_are_refused_in_one_line(to: str, options: dict[str, Any], reason: str, tmp_path: Path) -> None:
    tiny_directory(tmp_path / "model")
    with pytest.raises(UserError, match=reason) as error:
        dwindle.prune(tmp_path / "model", to, method="shortgpt", out=tmp_path / "out", **options)
    assert "\n" not in str(error.value) and not (tmp_path / "out").exists()
