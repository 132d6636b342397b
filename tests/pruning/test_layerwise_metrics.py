"""obd, wanda and obc equal loops over elements, and layers can be added up and compared."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dwindle.pruning.calibration import calibrate
from dwindle.pruning.config import PruneConfig
from dwindle.pruning.metrics import metric_named
from dwindle.pruning.saliency import ElementScores, Scores, score_model
from dwindle.pruning.surgery import Prunable
from tiny import random_group, tiny_model, tokens

LAYERWISE = ("wanda", "obc")


def recorded(prunable: Prunable, windows: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Inputs and mean squared per-example gradients of every output projection, by plain hooks and backward passes."""
    model = prunable.model
    inputs: dict[str, list[Tensor]] = {}
    squares: dict[str, Tensor] = {}
    names = [n for n, _ in model.named_parameters() if n.endswith(("o_proj.weight", "down_proj.weight"))]

    def keep(name: str):  # type: ignore[no-untyped-def]
        return lambda module, args: inputs.setdefault(name, []).append(args[0].detach().flatten(0, -2))

    handles = [
        model.get_submodule(name.removesuffix(".weight")).register_forward_pre_hook(keep(name)) for name in names
    ]
    for window in windows:
        model.zero_grad()
        model(input_ids=window[None], labels=window[None]).loss.backward()
        for name in names:
            squares[name] = squares.get(name, 0) + model.get_parameter(name).grad.square() / len(windows)
    model.zero_grad()
    for handle in handles:
        handle.remove()
    return {name: torch.cat(parts) for name, parts in inputs.items()}, squares


def by_hand(prunable: Prunable, windows: Tensor, metric: str) -> tuple[list[Tensor], list[Tensor], Tensor]:
    inputs, squares = recorded(prunable, windows)
    model, size = prunable.model, prunable.anatomy.head_dim
    attn, ffn, stem = [], [], torch.zeros(len(prunable.physical.hidden), dtype=torch.float64)
    for name, x in inputs.items():
        weight = model.get_parameter(name).detach()
        h = x.T @ x / len(x)
        inverse = torch.linalg.inv(h + 0.01 * h.diagonal().mean() * torch.eye(len(h), dtype=h.dtype))
        element = torch.zeros_like(weight)
        for row in range(weight.shape[0]):
            for column in range(weight.shape[1]):
                w = weight[row, column]
                element[row, column] = {
                    "obd": 0.5 * w**2 * squares[name][row, column],
                    "wanda": w**2 * h[column, column],
                    "obc": w**2 / inverse[column, column],
                }[metric]
        if metric != "obd":
            element /= element.sum()
        stem += element.sum(1)
        if name.endswith("o_proj.weight"):
            attn.append(element.sum(0).view(-1, size).sum(1))
        else:
            ffn.append(element.sum(0))
    return attn, ffn, stem


@pytest.mark.parametrize("name", ["obd", "wanda", "obc"])
@pytest.mark.parametrize("family", ["llama", "phi3", "olmo2"])
def test_scores_equal_a_loop(family: str, name: str) -> None:
    prunable = Prunable(tiny_model(family, intermediate_size=12, num_hidden_layers=2))
    windows = tokens(6, 9, seed=4)
    metric = metric_named(name)
    found = calibrate(prunable, windows, metric, PruneConfig())
    scores = score_model(prunable, found.gradients, found.fishers, metric)
    attn, ffn, stem = by_hand(prunable, windows, name)
    for mine, other in zip([*scores.attn, *scores.ffn, scores.stem], [*attn, *ffn, stem], strict=True):
        assert torch.allclose(mine, other, rtol=1e-7)
    frozen = ElementScores(prunable, found.gradients, found.fishers, metric).current
    assert torch.allclose(frozen.stem, scores.stem, rtol=1e-12)


def scores_of(prunable: Prunable, windows: Tensor, name: str) -> Scores:
    metric = metric_named(name)
    found = calibrate(prunable, windows, metric, PruneConfig())
    return score_model(prunable, found.gradients, found.fishers, metric)


@pytest.mark.parametrize("name", LAYERWISE)
def test_layers_count_alike_whatever_their_scale(name: str) -> None:
    """Every projection's scores sum to one, so the scale of its inputs or of its weights says nothing."""
    windows = tokens(8, 16)
    plain, scaled = (Prunable(tiny_model("olmo2")) for _ in range(2))
    with torch.no_grad():
        layer = scaled.model.model.layers[2]  # the last one, behind whose norms no scale is seen
        layer.mlp.down_proj.weight *= 100
        layer.self_attn.v_proj.weight *= 30
    before, after = scores_of(plain, windows, name), scores_of(scaled, windows, name)
    for values in (before, after):
        assert [float(v.sum()) for v in (*values.attn, *values.ffn)] == pytest.approx([1.0] * 6)
        assert float(values.stem.sum()) == pytest.approx(6.0)
    for mine, other in zip([*before.attn, *before.ffn], [*after.attn, *after.ffn], strict=True):
        assert torch.allclose(mine, other, rtol=1e-3)
    assert torch.allclose(before.stem, after.stem, rtol=1e-3)


@pytest.mark.parametrize("name", LAYERWISE)
def test_dead_parts_do_not_count(name: str) -> None:
    """A masked model and the compacted one score what is alive alike."""
    windows = tokens(8, 16)
    masked, sliced = (Prunable(tiny_model("llama")) for _ in range(2))
    for prunable in (masked, sliced):
        for seed, kind in enumerate(["ffn", "attn", "stem", "ffn"]):
            prunable.prune(random_group(kind, prunable.alive, seed))
    sliced.compact()
    big, small = scores_of(masked, windows, name).restricted(masked.alive), scores_of(sliced, windows, name)
    for mine, other in zip([*big.attn, *big.ffn, big.stem], [*small.attn, *small.ffn, small.stem], strict=True):
        assert torch.allclose(mine, other, rtol=1e-6)


def test_only_the_forward_pass_is_needed() -> None:
    prunable = Prunable(tiny_model("llama"))
    with torch.no_grad():
        for parameter in prunable.model.parameters():
            parameter.requires_grad_(False)
        found = calibrate(prunable, tokens(2, 8), metric_named("wanda"), PruneConfig())
    assert not found.gradients and len(found.fishers) == 6
