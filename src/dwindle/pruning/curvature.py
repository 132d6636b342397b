"""The curvature f of a score, by tensor name, computed one tensor at a time: layer-wise, or Adam's second moment.

Shapes: O hidden rows of an output projection, I its input columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from dwindle.anatomy.anatomy import Row
from dwindle.distributed.collectives import Exchange
from dwindle.distributed.shards import local, same_everywhere
from dwindle.pruning.gram import Inputs
from dwindle.pruning.metrics import Metric
from dwindle.pruning.surgery import Prunable


class LayerCurvature(Mapping[str, Tensor]):
    """f of the layer-wise metrics, by tensor name; computed one tensor at a time, on access.

    A layer-wise score measures the change of one layer's output, in that layer's scale, but stem scores add layers and
    the choice between kinds compares them. So every projection's scores are divided by their sum: an element's score
    is its share of its projection's total, whatever the scale of inputs and weights.
    """

    def __init__(self, prunable: Prunable, inputs: Mapping[str, Inputs], metric: Metric, damping: float) -> None:
        self._prunable, self._inputs, self._metric, self._damping = prunable, inputs, metric, damping
        self._exchange = Exchange()
        rows = [row for kind, row in prunable.outputs if kind != "whole"]
        self._rows = {row.name: (number, row) for number, row in enumerate(rows)}

    def __getitem__(self, name: str) -> Tensor:
        number, row = self._rows[name]
        parameter: Tensor = self._prunable.parameters[name]
        weight = local(parameter.detach())
        f_I = weight.new_zeros(weight.shape[1])
        assert row.module in self._inputs, f"inputs of {row.module} were not recorded"  # get() would hide a KeyError
        seen = self._inputs[row.module].at_owner(number, self._exchange)
        if self._exchange.is_mine(number):
            f_I.copy_(self._curvature(seen, row))
        f_I = self._exchange.from_owner(number, f_I)
        total = (weight.square().sum(0) * f_I).sum()
        total = same_everywhere(total, parameter)
        return (f_I / total.clamp(min=torch.finfo(f_I.dtype).tiny))[None]

    def _curvature(self, seen: Inputs, row: Row) -> Tensor:
        f_I = seen.mean_square()
        if self._metric.curvature == "diagonal":
            return f_I
        prunable = self._prunable
        alive = prunable.anatomy.positions(row, 1, prunable.alive, prunable.physical).to(f_I.device)
        return torch.zeros_like(f_I).index_copy(0, alive, 1 / seen.inverse_diagonal(alive, self._damping))

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


class AdamFisher(Mapping[str, Tensor]):
    """Adam's second moment as diagonal Fisher, by tensor name; computed one tensor at a time, without a sync."""

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor]) -> None:
        """Empty before Adam's first step, when there is only the gradient."""
        self._states = {
            n: optimizer.state[p] for n, p in parameters.items() if "exp_avg_sq" in optimizer.state.get(p, {})
        }
        self._beta = optimizer.param_groups[0].get("betas", (0.0, 0.0))[1]

    def __getitem__(self, name: str) -> Tensor:
        state = self._states[name]
        stored = local(state["exp_avg_sq"])
        wide = stored.to(torch.promote_types(stored.dtype, torch.float32))
        moment: Tensor = wide / (1 - self._beta ** torch.as_tensor(state["step"]).double())
        return moment

    def __iter__(self) -> Iterator[str]:
        return iter(self._states)

    def __len__(self) -> int:
        return len(self._states)
