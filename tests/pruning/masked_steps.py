"""A few training steps of a model of which groups may be masked."""

from __future__ import annotations

import torch
from torch import nn

from dwindle.anatomy.shrink import Float64Throughout
from dwindle.pruning.surgery import Prunable
from dwindle.training.config import TrainingConfig
from dwindle.training.optim import build_optimizer
from tiny import tokens


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def muon(model: nn.Module) -> torch.optim.Optimizer:
    return build_optimizer(model, TrainingConfig(tokens=1, lr=1e-2, optimizer="muon"))


def adamw_bf16(model: nn.Module) -> torch.optim.Optimizer:
    return build_optimizer(model, TrainingConfig(tokens=1, lr=1e-2, optimizer="adamw", moments="bf16"))


def muon_bf16(model: nn.Module) -> torch.optim.Optimizer:
    return build_optimizer(model, TrainingConfig(tokens=1, lr=1e-2, optimizer="muon", moments="bf16"))


def train(prunable: Prunable, optimizer: torch.optim.Optimizer, steps: int, seed: int) -> list[float]:
    losses = []
    for step in range(steps):
        batch = tokens(2, 12, seed=seed + step)
        with Float64Throughout():
            loss = prunable.model(input_ids=batch, labels=batch, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        prunable.mask_gradients()
        torch.nn.utils.clip_grad_norm_(prunable.model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    return losses
