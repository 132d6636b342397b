"""Metric ``group``: the squared derivative of the loss by a mask on each group, against masks that autograd sees."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from drawn import drawn_scores
from torch import Tensor

from dwindle.anatomy.structure import Group
from dwindle.pruning import calibration
from dwindle.pruning.calibration import calibrate
from dwindle.pruning.config import PruneConfig
from dwindle.pruning.metrics import metric_named
from dwindle.pruning.pacing import Rounds
from dwindle.pruning.saliency import Scores, begin_scores
from dwindle.pruning.strategies.base import Choice
from dwindle.pruning.strategies.coupled import CoupledStrategy
from dwindle.pruning.strategies.global_mixture import GlobalStrategy
from dwindle.pruning.surgery import Prunable
from dwindle.pruning.target import Target
from tiny import tiny_model, tokens


class Masks:
    """A factor of one on the output of every query head, FFN channel and write to a hidden channel."""

    def __init__(self, model: Any) -> None:
        config, layers = model.config, model.model.layers
        self.heads = [torch.ones(config.num_attention_heads, dtype=torch.float64, requires_grad=True) for _ in layers]
        self.ffn = [torch.ones(config.intermediate_size, dtype=torch.float64, requires_grad=True) for _ in layers]
        self.hidden = torch.ones(config.hidden_size, dtype=torch.float64, requires_grad=True)
        self.handles = []
        for number, layer in enumerate(layers):
            head_dim = config.hidden_size // config.num_attention_heads
            for module, factor in (
                (layer.self_attn.o_proj, lambda n=number, d=head_dim: self.heads[n].repeat_interleave(d)),
                (layer.mlp.down_proj, lambda n=number: self.ffn[n]),
            ):
                self.handles.append(module.register_forward_pre_hook(lambda _, args, f=factor: (args[0] * f(),)))
                self.handles.append(module.register_forward_hook(self._mask_output))

    def _mask_output(self, module: Any, args: Any, output: Tensor) -> Tensor:
        """A bias is not among the weights that are scored."""
        bias = 0 if module.bias is None else module.bias
        return (output - bias) * self.hidden + bias

    def derivatives(self, model: Any, batch: Tensor) -> list[Tensor]:
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        return list(torch.autograd.grad(loss, [*self.heads, *self.ffn, self.hidden]))


def expected(model: Any, windows: Tensor) -> list[Tensor]:
    """Mean over sequences of the squared derivatives: heads, key/value heads, channels, hidden."""
    masks, sums = Masks(model), None
    for window in windows:
        found = masks.derivatives(model, window[None])
        count = len(masks.heads)
        per_kv = model.config.num_attention_heads // model.config.num_key_value_heads
        kv = [c.view(-1, per_kv).sum(1) for c in found[:count]]
        squares = [c.square() / len(windows) for c in (*found, *kv)]
        sums = squares if sums is None else [a + b for a, b in zip(sums, squares, strict=True)]
    for handle in masks.handles:
        handle.remove()
    assert sums is not None
    return sums


def parts(scores: Scores) -> list[Tensor]:
    return [*scores.attn, *scores.ffn, scores.stem, *scores.kv]


@pytest.mark.parametrize("shared", [(), ("cpu",)], ids=["alone", "together"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_calibration_averages_squared_derivatives_over_sequences(
    family: str, shared: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "_SHARING", shared)
    monkeypatch.setitem(calibration._PASS_TOKENS, "cpu", 2 * 12)
    model, windows = tiny_model(family), tokens(5, 12)
    prunable = Prunable(model)  # first: its norms compute in fp64
    wanted = expected(model, windows)
    found = calibrate(prunable, windows, metric_named("group"), PruneConfig(metric="group"))
    assert found.groups is not None
    for mine, theirs in zip(parts(found.groups), wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-15)


def test_training_squares_the_derivative_of_the_step() -> None:
    model, batch = tiny_model(), tokens(4, 12)
    prunable = Prunable(model)
    masks = Masks(model)
    derivatives = masks.derivatives(model, batch)
    for handle in masks.handles:
        handle.remove()
    model(input_ids=batch, labels=batch, use_cache=False).loss.backward()
    gradients = {name: p.grad for name, p in prunable.parameters.items() if p.grad is not None}
    scores = begin_scores(prunable, gradients, None, metric_named("group"))()
    count = model.config.num_hidden_layers
    kv = [c.view(model.config.num_key_value_heads, -1).sum(1) for c in derivatives[:count]]
    for mine, theirs in zip(parts(scores), [c.square() for c in (*derivatives, *kv)], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-15)


def brute_saved(prunable: Prunable, group: Group) -> int:
    anatomy, source = prunable.anatomy, prunable.anatomy.source
    return anatomy.count(source).total - anatomy.count(source.without(group)).total


@pytest.mark.parametrize("strategy", [CoupledStrategy, GlobalStrategy])
@pytest.mark.parametrize("seed", range(3))
def test_saved_compares_the_saliency_of_a_parameter(strategy: Any, seed: int) -> None:
    """The first group is the one whose sum over its members, per parameter that it saves, is least."""
    prunable = Prunable(tiny_model("mistral"))
    anatomy = prunable.anatomy
    scores = drawn_scores(anatomy.source, anatomy.source, seed)
    target = Target(anatomy.count(anatomy.source).total * 3 // 4)
    chosen: list[Choice] = list(
        strategy(anatomy, target, PruneConfig(compare="saved")).choose(
            scores.copy(), anatomy.source, Rounds(10**9, 0, 1), 1, 0
        )
    )
    first = chosen[0]

    def total(group: Group) -> float:
        if group.kind == "stem":
            return float(scores.stem[list(group.members[0])].sum())
        values = scores.attn if group.kind == "attn" else scores.ffn
        return sum(float(values[n][list(members)].sum()) for n, members in enumerate(group.members))

    mine = total(first.group) / brute_saved(prunable, first.group)
    assert mine == pytest.approx(first.saliency[first.group.kind])
    layers = anatomy.source.layers
    for kind, values in (("attn", scores.attn), ("ffn", scores.ffn)):
        for number in range(len(layers)):
            if kind == "attn":
                options = [layers[number].queries_of(kv) for kv in layers[number].kv_heads]
            else:
                options = [(int(values[number].argmin()),)]
            for option in options if strategy is GlobalStrategy else ():
                group = Group(kind, tuple(option if n == number else () for n in range(len(layers))))  # type: ignore[arg-type]
                assert mine <= total(group) / brute_saved(prunable, group) + 1e-15
    stem = Group("stem", ((int(scores.stem.argmin()),),))
    assert mine <= total(stem) / brute_saved(prunable, stem) + 1e-15


def test_key_value_heads_have_a_saliency_of_their_own() -> None:
    """Derivatives of the queries of one head may cancel, or add up: neither is the sum of their squares."""
    model = tiny_model("mistral")
    prunable = Prunable(model)
    found = calibrate(prunable, tokens(4, 12), metric_named("group"), PruneConfig(metric="group")).groups
    assert found is not None
    layer = prunable.anatomy.source.layers[0]
    least = min(layer.kv_heads, key=lambda kv: float(found.kv[0][kv]))
    for kv in layer.kv_heads:
        found.kv[0][kv] = 1e-12 if kv == least else 1.0
    for scores in found.attn + found.ffn:
        scores.fill_(1.0)
    found.stem.fill_(1e9)
    target = Target(prunable.num_parameters - 1)
    config = PruneConfig(metric="group", compare="saved", groups=["attn"])
    [choice, *_] = GlobalStrategy(prunable.anatomy, target, config).choose(
        found, prunable.alive, Rounds(10**9, 0, 1), 1, 0
    )
    assert choice.group.members[0] == layer.queries_of(least)
