"""Tensors from one safetensors file, or from several that hold consecutive rows of each tensor.

``model.safetensors`` is a whole group; ``model-00002-of-00003.safetensors`` holds the rows of the second of three
processes. Tensors that were not sharded are in the first file only.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from dwindle.distributed.safetensors_stream import ALIASES_KEY


def piece_name(group: str, number: int, count: int) -> str:
    """The file name of process ``number`` (from 0) of ``count``."""
    return f"{group}-{number + 1:05d}-of-{count:05d}.safetensors"


def files_of(folder: Path, group: str) -> list[Path]:
    """The files of a group, ordered by rows; empty if the group was not saved."""
    whole = folder / f"{group}.safetensors"
    return [whole] if whole.exists() else sorted(folder.glob(f"{group}-?????-of-?????.safetensors"))


class TensorPieces(Mapping[str, Tensor]):
    """Tensors by name, read on demand, whole or by rows; on the CPU."""

    def __init__(self, files: list[Path]) -> None:
        self._files: list[Any] = [safe_open(str(file), framework="pt") for file in files]
        self._aliases = [json.loads((f.metadata() or {}).get(ALIASES_KEY, "{}")) for f in self._files]
        self._stored = [set(f.keys()) for f in self._files]
        self._names = dict.fromkeys(sorted(set().union(*self._stored, *self._aliases)))

    def __getitem__(self, name: str) -> Tensor:
        pieces: list[Tensor] = [self._files[i].get_tensor(key) for i, key in self._places(name)]
        if not pieces:
            raise KeyError(name)
        if len(pieces) == 1:
            return pieces[0]
        return torch.cat([piece for piece in pieces if piece.numel()] or pieces[:1])

    def rows(self, name: str, first: int, count: int) -> Tensor:
        """``self[name][first : first + count]`` without reading the rest."""
        found, offset = [], 0
        for index, key in self._places(name):
            piece = self._files[index].get_slice(key)
            length = piece.get_shape()[0]
            begin, end = max(first - offset, 0), min(first + count - offset, length)
            if begin < end:
                found.append(piece[begin:end])
            offset += length
        assert sum(len(piece) for piece in found) == count, f"{name}: rows {first} to {first + count} are missing"
        return torch.cat(found) if len(found) > 1 else found[0]

    def _places(self, name: str) -> Iterator[tuple[int, str]]:
        for index, (stored, aliases) in enumerate(zip(self._stored, self._aliases, strict=True)):
            key = aliases.get(name, name)
            if key in stored:
                yield index, key

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
