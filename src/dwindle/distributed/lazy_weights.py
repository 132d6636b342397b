"""Weights for models that no process need hold whole: one tensor at a time, by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from dwindle.distributed.engines import World
from dwindle.distributed.sharded_safetensors import TensorPieces
from dwindle.sources import load


def source_tensors(source: str, dtype: torch.dtype, world: World) -> Callable[[str], Tensor]:
    """Tensors of a source by name: read one at a time where the format allows, else loaded by the main process.

    Every process calls the result in the same order.
    """
    files = sorted(Path(source).expanduser().glob("model*.safetensors"))
    if files:
        named = {name: pieces for pieces in map(TensorPieces, [[file] for file in files]) for name in pieces}
        return lambda name: named[name][name].to(dtype)
    return from_main(lambda: load(source, dtype=dtype).model, world)


def from_main(make: Callable[[], nn.Module], world: World) -> Callable[[str], Tensor]:
    """Tensors by name of a model that only the main process makes; every process asks in the same order."""
    whole = dict(make().named_parameters()) if world.is_main else {}

    def broadcast(name: str) -> Tensor:
        return world.broadcast(whole[name].detach() if world.is_main else None)

    return broadcast
