"""Masks of ``sheared`` against sampling, plain formulas and autograd; masked ≡ cut."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from dwindle.anatomy.shrink import Float64Throughout
from dwindle.anatomy.structure import Layer, Structure
from dwindle.pruning.masks import MaskedModel, Masks, Part, aim_at, open_share, parts_of, sampled
from dwindle.pruning.surgery import Prunable
from dwindle.pruning.target import Shape
from tiny import FAMILIES, shrunk, tiny_model, tokens


def test_the_expected_number_of_open_masks_is_that_of_samples() -> None:
    """Closed form, and a hundred thousand draws of a plain computation."""
    rng = np.random.default_rng(0)
    for log_alpha in (-3.0, -1.0, 0.0, 2.0):
        u = rng.uniform(1e-9, 1 - 1e-9, 100_000)
        s = 1 / (1 + np.exp(-(np.log(u) - np.log(1 - u) + log_alpha) * 1.5))
        z = np.clip(s * 1.2 - 0.1, 0, 1)
        ours = sampled(torch.full((len(u),), log_alpha, dtype=torch.float64), torch.from_numpy(u))
        np.testing.assert_allclose(ours.numpy(), z, atol=1e-12)
        share = float(open_share(torch.tensor(log_alpha, dtype=torch.float64)))
        assert share == pytest.approx(float((z > 0).mean()), abs=0.005)
        assert share == pytest.approx(1 / (1 + math.exp(-(log_alpha - 2 / 3 * math.log(0.1 / 1.1)))))


def test_the_aim_ramps_over_a_fifth_of_the_phase() -> None:
    assert [aim_at(0.5, step, 50) for step in (1, 5, 10, 11, 50)] == [0.95, 0.75, 0.5, 0.5, 0.5]


def test_a_step_follows_the_gradient_of_the_plain_objective() -> None:
    """log α after Adam's first steps and the multipliers after ascent, from autograd on the formulas of the paper."""
    parts = [Part("attn", 0, 3, 2 / 3), Part("ffn", 0, 5, 0.4), Part("stem", 0, 4, 0.5)]
    masks = Masks(parts, num_steps=100)
    plain = torch.full((12,), 5.0, requires_grad=True)
    adam = torch.optim.Adam([plain], lr=0.5, betas=(0.9, 0.95), eps=1e-12)  # 10 in the first 20 steps
    first, second = [0.0] * 3, [0.0] * 3
    bounds = [(0, 3), (3, 8), (8, 12)]
    for step in range(1, 31):
        u, g = masks.noise(step), torch.randn(12, generator=torch.Generator().manual_seed(step)) * 0.01
        shift = (2 / 3) * math.log(0.1 / 1.1)
        z = torch.clamp(torch.sigmoid((torch.log(u / (1 - u)) + plain) * 1.5) * 1.2 - 0.1, 0, 1)
        total, shares = (z * g).sum(), list[float]()
        for number, ((low, high), part) in enumerate(zip(bounds, parts, strict=True)):
            goal = 1 - (1 - part.share) * min(1, step / 20)
            share = torch.sigmoid(plain[low:high] - shift).mean()
            total = total + first[number] * (share - goal) + second[number] * (share - goal) ** 2
            shares.append(float(share.detach()))
            first[number] += float(share.detach()) - goal
            second[number] += (float(share.detach()) - goal) ** 2
        adam.zero_grad()
        total.backward()
        adam.step()
        expected = masks.learn([g[low:high] for low, high in bounds], u, step)
        assert expected.tolist() == pytest.approx(shares, abs=1e-5)
    torch.testing.assert_close(masks.log_alpha.detach(), plain.detach(), atol=1e-3, rtol=0)
    assert masks.multipliers_2C.flatten().tolist() == pytest.approx([*first, *second], abs=1e-4)
    assert float(masks.log_alpha.detach().min()) < 0  # they moved


def test_masks_reach_the_shape_and_keep_what_the_loss_needs() -> None:
    """A loss whose derivatives are known: the channels with the largest ones are kept."""
    need = torch.rand(64, generator=torch.Generator().manual_seed(1)).pow(2) / 16
    masks = Masks([Part("ffn", 0, 64, 0.5)], num_steps=600)
    for step in range(1, 601):
        expected = masks.learn([-need], masks.noise(step), step)
    assert float(expected) == pytest.approx(0.5, abs=0.1)
    kept = masks.log_alpha.detach().topk(32).indices.tolist()
    assert len({*kept} & {*need.topk(32).indices.tolist()}) >= 29


SHAPE = Shape(hidden=20, heads=4, ffn=24, layers=3)


def cut_structure(source: Structure, shape: Shape, seed: int = 0) -> Structure:
    """Any structure of the shape: one query of every key/value head."""
    draw = torch.Generator().manual_seed(seed)

    def some(items: tuple[int, ...], count: int) -> tuple[int, ...]:
        return tuple(sorted(items[int(n)] for n in torch.randperm(len(items), generator=draw)[:count]))

    layers = []
    for layer in source.layers:
        pairs = [
            (q, kv) for kv in layer.kv_heads for q in some(layer.queries_of(kv), shape.heads // len(layer.kv_heads))
        ]
        heads = sorted(pairs) if layer.query_heads else []
        layers.append(Layer(tuple(q for q, _ in heads), tuple(kv for _, kv in heads), some(layer.ffn, shape.ffn)))
    return Structure(some(source.hidden, shape.hidden), tuple(layers))


@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in ("olmo2", "olmo3", "qwen3_5_text")])
def test_a_model_with_closed_masks_equals_the_cut_model(family: str) -> None:
    model = tiny_model(family, num_key_value_heads=4)
    prunable = Prunable(model)
    source, batch = prunable.anatomy.source, tokens(2, 9)
    keep = cut_structure(source, SHAPE)
    parts = parts_of(source, SHAPE)
    masks = Masks(parts, num_steps=10)
    masked = MaskedModel(prunable, masks)
    kept_of = {"attn": lambda n: keep.layers[n].query_heads, "ffn": lambda n: keep.layers[n].ffn}
    masked.measured = [
        torch.tensor(
            [float(i in (keep.hidden if p.kind == "stem" else kept_of[p.kind](p.layer))) for i in range(p.size)]
        )
        for p in parts
    ]
    with torch.no_grad(), Float64Throughout():
        with_masks = model(input_ids=batch).logits
        smaller = prunable.anatomy and Prunable(tiny_model(family, num_key_value_heads=4))
        smaller.prune_to(keep)
        torch.testing.assert_close(with_masks, smaller.compacted()(input_ids=batch).logits, atol=1e-10, rtol=0)
        masked.remove()
        prunable.prune_to(keep)
        torch.testing.assert_close(model(input_ids=batch).logits, with_masks, atol=1e-10, rtol=0)


def test_layers_that_differ_close_as_many_masks_as_are_removed() -> None:
    source = Prunable(shrunk("llama", "ffn")[0]).anatomy.source
    assert [len(layer.ffn) for layer in source.layers] == [40, 35, 30]
    assert parts_of(source, Shape(24, 8, 30, 3)) == [Part("stem", 0, 32, 24 / 32)]
    parts = parts_of(source, Shape(32, 8, 20, 3))
    assert parts == [Part("ffn", n, size, (size - 10) / size) for n, size in enumerate((40, 35, 30))]


def test_the_derivative_by_a_mask_is_that_of_the_weights_it_scales() -> None:
    """∂loss/∂z, for masks between 0 and 1: a head's scales its columns of ``o``, so it is Σ w·∂loss/∂(z·w)."""
    model = tiny_model("llama", attention_bias=False, mlp_bias=False)
    prunable = Prunable(model)
    masks = Masks(parts_of(prunable.anatomy.source, Shape(32, 4, 24, 3)), num_steps=10)
    masks.log_alpha.data.fill_(0.3)
    masked = MaskedModel(prunable, masks)
    masked.sample(0)
    model.train()
    batch = tokens(2, 9)
    model(input_ids=batch, labels=batch).loss.backward()
    found = masked.gradients()
    zs = [z.detach().double() for z in masked.trained]
    masked.remove()
    model.zero_grad()
    rows = {}
    with torch.no_grad():
        for part, z in zip(masks.parts, zs, strict=True):
            weight = prunable.parameters[prunable.anatomy.output_row(part.layer, part.kind).name]
            times = weight.shape[1] // part.size
            rows[part.kind, part.layer] = (weight, weight.clone(), times)
            weight *= z.repeat_interleave(times)
    model(input_ids=batch, labels=batch).loss.backward()
    for part, gradient in zip(masks.parts, found, strict=True):
        weight, original, times = rows[part.kind, part.layer]
        by_hand = (original * weight.grad).sum(0).view(part.size, times).sum(1)
        torch.testing.assert_close(gradient.double(), by_hand, atol=1e-6, rtol=1e-4)
