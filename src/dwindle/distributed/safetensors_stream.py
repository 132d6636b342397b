"""safetensors files written tensor by tensor.

The library's writer copies every tensor to host memory first, raises its own exception on a full disk, and needs a
second pass for hashing. A checkpoint should avoid all three, and the format is simple: the length of a JSON header, the
header, the bytes. Reading uses the library.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
ALIASES_KEY = "aliases"


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write and fsync a safetensors file, tied tensors once; returns its sha256."""
    stored, aliases = _deduplicate(tensors)
    digest = hashlib.sha256()
    with path.open("wb") as file:
        header = _header(stored, aliases)
        for block in (len(header).to_bytes(8, "little"), header):
            digest.update(block)
            file.write(block)
        for tensor in stored.values():
            data = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().data
            digest.update(data)
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


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
    entries: dict[str, Any] = {"__metadata__": {"format": "pt", ALIASES_KEY: json.dumps(aliases)}}
    offset = 0
    for name, tensor in stored.items():
        end = offset + tensor.numel() * tensor.element_size()
        entries[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    header = json.dumps(entries).encode()
    return header + b" " * (-len(header) % 8)
