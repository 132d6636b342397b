"""Weights by name, one tensor at a time, for models that no process holds whole."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

from dwindle.distributed.sharded_safetensors import TensorPieces
from dwindle.distributed.world import World
from dwindle.sources.loading import load
from dwindle.sources.text_tower import text_name

Fetch = Callable[[str], Tensor]
"""A whole tensor by name; every process requests the same names in the same order."""


def source_tensors(source: str, dtype: torch.dtype, world: World) -> Fetch:
    """Tensors of a source: read one at a time from safetensors; other formats are loaded by the main process."""
    files = sorted(Path(source).expanduser().glob("model*.safetensors"))
    if files:
        all_pieces = map(TensorPieces, [[file] for file in files])
        named = {text_name(stored) or stored: (pieces, stored) for pieces in all_pieces for stored in pieces}

        def read(name: str) -> Tensor:
            pieces, stored = named[name]
            return pieces[stored].to(dtype)

        return read
    return from_main(lambda: load(source, dtype=dtype).model, world)


def from_main(make: Callable[[], nn.Module], world: World) -> Fetch:
    """Tensors of a model that only the main process builds."""
    whole = dict(make().named_parameters()) if world.is_main else {}

    def broadcast(name: str) -> Tensor:
        return world.broadcast(whole[name].detach() if world.is_main else None)

    return broadcast


def on_first_use(opening: Callable[[], Fetch]) -> Fetch:
    """The same tensors, opened with the first request: an engine with whole models requests none."""
    opened = cache(opening)
    return lambda name: opened()(name)
