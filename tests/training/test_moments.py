"""Moments in bf16: stored so, rounded once a step, and otherwise the arithmetic of AdamW."""

from __future__ import annotations

import pytest
import torch
from tiny_run import tiny_llama

from dwindle.core.config import from_dict
from dwindle.core.errors import UserError
from dwindle.pruning.curvature import AdamFisher
from dwindle.training.config import TrainingConfig
from dwindle.training.moments import AdamW
from dwindle.training.optim import build_optimizer

MOMENTS = ("exp_avg", "exp_avg_sq")


def test_a_step_is_that_of_adamw_with_rounded_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit, however many parameters are updated at a time; the count of steps is not rounded."""
    ours, theirs = tiny_llama(), tiny_llama()
    config = TrainingConfig(tokens=1, lr=1e-2, optimizer="adamw", moments="bf16")
    mine, reference = (
        build_optimizer(ours, config),
        build_optimizer(theirs, config.model_copy(update={"moments": "fp32"})),
    )
    assert isinstance(mine, AdamW)
    for step in range(5):
        monkeypatch.setattr("dwindle.training.moments.MOST_ELEMENTS", 10 ** (step + 1))
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            one.grad = torch.randn(one.shape, generator=torch.Generator().manual_seed(step))
            other.grad = one.grad.clone()
        mine.step()
        reference.step()
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            state = reference.state[other]
            assert torch.equal(one, other) and mine.state[one]["step"] == state["step"] == step + 1
            for key in MOMENTS:
                assert mine.state[one][key].dtype == torch.bfloat16
                state[key] = state[key].bfloat16().float()
                assert torch.equal(mine.state[one][key].float(), state[key])
    assert len(mine.param_groups) == len(reference.param_groups)


def test_scores_from_adam_are_in_fp32() -> None:
    model = tiny_llama()
    optimizer = build_optimizer(model, TrainingConfig(tokens=1, lr=1e-2, optimizer="adamw", moments="bf16"))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    fisher = AdamFisher(optimizer, dict(model.named_parameters()))
    assert all(f.dtype == torch.float32 and torch.allclose(f, torch.ones(()), rtol=4e-3) for f in fisher.values())


@pytest.mark.parametrize(
    ("settings", "is_refused"),
    [
        ({"betas": [0.9, 0.999]}, True),
        ({"betas": [0.9, 0.999], "moments": "fp32"}, False),
        ({"momentum": 0.99}, True),
        ({"momentum": 0.99, "optimizer": "adamw"}, False),
        ({}, False),
    ],
)
def test_averages_that_would_stand_still_are_refused(settings: dict[str, object], is_refused: bool) -> None:
    values = {"tokens": 1, "optimizer": "muon", "moments": "bf16", **settings}
    if not is_refused:
        from_dict(TrainingConfig, values)
        return
    with pytest.raises(UserError, match=r"moments: in bf16 an average with factor 0\.99"):
        from_dict(TrainingConfig, values)
