"""``slicegpt``: the rotated model equals the source, the sliced one the source with its stream projected."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dwindle.anatomy.anatomy import Anatomy
from dwindle.anatomy.shrink import Float64Throughout
from dwindle.core.errors import UserError
from dwindle.pruning.config import PostTrainingConfig
from dwindle.pruning.rotation import check_rotatable, principal_directions, rotated, slice_model, stream_moment
from dwindle.pruning.target import Target
from tiny import FAMILIES, tiny_model, tokens

REFUSED = {"olmo2": "stands after", "olmo3": "stands after", "exaone4": "stands after", "glm4": "stands after"}
REFUSED |= {"gemma3_text": "stands after", "lfm2": "single hidden channels"}


def logits(model: Any, batch: torch.Tensor) -> torch.Tensor:
    with torch.no_grad(), Float64Throughout():
        found: torch.Tensor = model(input_ids=batch).logits
    return found


def plain_moment(model: Any, batch: torch.Tensor) -> np.ndarray:
    """E[x xᵀ] of what enters every norm, divided by its root mean square: in numpy, from recorded activations."""
    seen: list[np.ndarray] = []
    modules = [m for name, m in model.named_modules() if name == "model.norm" or name.endswith("layernorm")]
    handles = [m.register_forward_pre_hook(lambda _, args: seen.append(args[0].numpy())) for m in modules]
    for row in batch:  # one at a time: the sum does not depend on batches
        logits(model, row[None])
    for handle in handles:
        handle.remove()
    epsilon = model.config.rms_norm_eps
    x = np.concatenate([part.reshape(-1, part.shape[-1]) for part in seen])
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon)
    return np.asarray(x.T @ x / len(x))


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in REFUSED])
def test_all_directions_give_the_source_and_fewer_its_projected_stream(family: str) -> None:
    model = tiny_model(family)
    anatomy, batch = Anatomy.of(model), tokens(3, 12)
    with Float64Throughout():
        energy, basis = principal_directions(stream_moment(model, anatomy, batch))
    assert energy.tolist() == sorted(energy.tolist(), reverse=True)
    whole = rotated(model, anatomy, basis)
    torch.testing.assert_close(logits(whole, batch), logits(model, batch), atol=1e-10, rtol=0)
    gains = [p for name, p in whole.named_parameters() if p.shape == (32,) and name.endswith("norm.weight")]
    assert gains and all(bool((gain == 1 - anatomy.family.gain_offset).all()) for gain in gains)

    smaller = rotated(model, anatomy, basis[:, :19])
    assert smaller.config.hidden_size == 19 and not smaller.config.tie_word_embeddings
    onto = basis[:, :19] @ basis[:, :19].T
    outputs = [model.get_submodule(row.module) for _, row in anatomy.outputs]
    for module in (model.model.embed_tokens, *outputs):
        module.register_forward_hook(lambda _, args, output: output @ onto)
    torch.testing.assert_close(logits(smaller, batch), logits(model, batch), atol=1e-10, rtol=0)


def test_the_moment_and_the_directions_are_those_of_a_plain_computation() -> None:
    model, batch = tiny_model("llama"), tokens(5, 9)
    with Float64Throughout():
        moment = stream_moment(model, Anatomy.of(model), batch)
    plain = plain_moment(model, batch)
    np.testing.assert_allclose(moment.numpy(), plain, atol=1e-12)
    values, vectors = np.linalg.eigh(plain)
    energy, basis = principal_directions(moment)
    np.testing.assert_allclose(energy.numpy(), values[::-1], atol=1e-12)
    onto, expected = basis[:, :20] @ basis[:, :20].T, vectors[:, -20:] @ vectors[:, -20:].T
    np.testing.assert_allclose(onto.numpy(), expected, atol=1e-9)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("share", [0.9, 0.6, 0.43])
def test_the_size_lands_within_one_channel_of_the_target(tied: bool, share: float) -> None:
    model = tiny_model("llama", tie_word_embeddings=tied)
    total = Anatomy.of(model).count(Anatomy.of(model).source).total
    found = slice_model(model, Target(int(share * total)), PostTrainingConfig(method="slicegpt"), tokens(2, 8))
    count = sum(p.numel() for p in found.model.parameters())
    assert count == found.count.total == found.event["parameters"]
    assert found.count == Anatomy.of(found.model).count(found.structure)
    wider = rotated(model, Anatomy.of(model), torch.eye(32, dtype=torch.float64)[:, : len(found.structure.hidden) + 1])
    assert count <= share * total < sum(p.numel() for p in wider.parameters())
    assert found.event["head"] == ("untied" if tied else "own") and 0 < found.event["energy"] < 1


@pytest.mark.parametrize("family", REFUSED)
def test_what_does_not_commute_with_a_rotation_is_refused(family: str) -> None:
    with pytest.raises(UserError, match=f"^method slicegpt: .*{REFUSED[family]}.*: choose another method$"):
        check_rotatable(Anatomy.of(tiny_model(family)))
