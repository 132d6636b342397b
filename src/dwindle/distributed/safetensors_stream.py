"""safetensors files written tensor by tensor.

The library's writer copies every tensor to host memory first, raises its own exception on a full disk, and needs a
second pass for hashing. Models and checkpoints should avoid that, and the format is simple: the length of a JSON
header, the header, the bytes. Reading uses the library.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from dwindle.sources.stored_tensors import DTYPES

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
ALIASES_KEY = "aliases"


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write and fsync a safetensors file, tied tensors once; returns its sha256."""
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for block in file_blocks(tensors):
            digest.update(block)
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def file_blocks(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file: the header, then tensor by tensor, of which one at a time is copied to the host.

    Without tied tensors they are those that the library writes.
    """
    stored, aliases = _deduplicate(tensors)
    header = _header(stored, aliases)
    yield len(header).to_bytes(8, "little")
    yield header
    for tensor in stored.values():
        yield tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().data


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors by name, on the CPU; tied names share one tensor."""
    with safe_open(str(path), framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        aliases = json.loads((file.metadata() or {}).get(ALIASES_KEY, "{}"))
    return tensors | {name: tensors[of] for name, of in aliases.items()}


def _deduplicate(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    stored: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    owner: dict[tuple[Any, ...], str] = {}
    for name, tensor in sorted(tensors.items()):  # the file does not depend on the order of the mapping
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if tensor.numel() and place in owner:
            aliases[name] = owner[place]
        else:
            owner[place] = name
            stored[name] = tensor
    # wide dtypes first, so that every tensor is aligned to its element size
    return dict(sorted(stored.items(), key=lambda item: -item[1].element_size())), aliases


def _header(stored: Mapping[str, Tensor], aliases: Mapping[str, str]) -> bytes:
    tied = {ALIASES_KEY: json.dumps(aliases)} if aliases else {}
    entries: dict[str, Any] = {"__metadata__": {"format": "pt", **tied}}
    offset = 0
    for name, tensor in stored.items():
        end = offset + tensor.numel() * tensor.element_size()
        entries[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    header = json.dumps(entries, separators=(",", ":")).encode()
    return header + b" " * (-len(header) % 8)
