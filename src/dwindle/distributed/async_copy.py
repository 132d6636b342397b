"""Asynchronous copies of small tensors between host and device.

When groups are pruned, the whole optimizer step is queued on the GPU. A plain copy would wait for all of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Fetched:
    """A copy to the host that does not wait for work queued later on the device."""

    def __init__(self, values: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._copy = values
        if values.is_cuda:
            self._copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._copy.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def result(self) -> Tensor:
        """The values; waits until they have arrived."""
        if self._event is not None:
            self._event.synchronize()
        return self._copy


def sent(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Host tensors of one dtype on the device, sent as one copy."""
    if device.type != "cuda" or not tensors:
        return [tensor.to(device) for tensor in tensors]
    together = torch.cat([tensor.flatten() for tensor in tensors]).pin_memory().to(device, non_blocking=True)
    parts = torch.split(together, [tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
