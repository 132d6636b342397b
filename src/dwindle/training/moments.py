"""AdamW whose moments can be stored in bf16, with half the memory.

An update reads the moments in the dtype of the weights, computes in it, and rounds them to the nearest bf16 at the end,
some parameters at a time. Rounding to 8 bits loses changes below 0.2 to 0.4 %: an average with a factor of 0.999 could
never fall. Such factors are refused; with the default ones the loss is that of fp32 (docs/log.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

Moments = Literal["fp32", "bf16"]
MOST_ELEMENTS = 2**27
"""Elements of the parameters whose temporary tensors exist at the same time."""
_ADAM = ("exp_avg", "exp_avg_sq")


class AdamW(torch.optim.AdamW):
    """``torch.optim.AdamW``, to the bit unless ``moments`` is ``bf16``."""

    def __init__(self, groups: list[dict[str, Any]], *, moments: Moments = "fp32", **settings: Any) -> None:
        super().__init__(groups, **settings)
        self._in_bf16 = moments == "bf16"

    def moment_dtype(self, parameter: Tensor) -> torch.dtype:
        """How the moments of a parameter are stored."""
        return torch.bfloat16 if self._in_bf16 else parameter.dtype

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "the gradients are there already"
        if not self._in_bf16:
            super().step()
            return
        everything = self.param_groups
        try:
            for group in everything:
                for some in in_batches(group["params"]):
                    self.param_groups = [group | {"params": some}]
                    self._convert(some, lambda parameter: parameter.dtype)
                    super().step()
                    self._convert(some, self.moment_dtype)
        finally:
            self.param_groups = everything

    def _convert(self, parameters: Sequence[nn.Parameter], dtype_of: Callable[[Tensor], torch.dtype]) -> None:
        for parameter in parameters:
            state = self.state.get(parameter, {})
            state.update({key: state[key].to(dtype_of(parameter)) for key in _ADAM if key in state})


def in_batches(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """The parameters in order, up to ``MOST_ELEMENTS`` at a time, or one that has more; the same on all processes."""
    some, size = list[nn.Parameter](), 0
    for parameter in parameters:
        count = parameter.numel()
        if some and size + count > MOST_ELEMENTS:
            yield some
            some, size = [], 0
        some.append(parameter)
        size += count
    if some:
        yield some
