"""Tensors of safetensors files, each read when it is needed and straight to the device of the model.

transformers maps the files into memory, where what has been read stays until all of it has, and converts on the CPU: of
bf16 weights that a GPU wants in float32, host memory holds three times their size. Here a tensor is read through a
buffer of a few megabytes, one for each of transformers' threads, copied to the device as it is stored, and converted
there. On the CPU and in the stored dtype it is read where it belongs.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_utils import str_to_torch_dtype

DTYPES = str_to_torch_dtype | {"F8_E8M0": torch.float8_e8m0fnu, "C64": torch.complex64}
"""Dtypes by their names in a safetensors file."""

_BUFFER_BYTES = 2**23
_KEPT = threading.local()


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a file; transformers takes it in place of a tensor, as it does a slice of a mapped file."""

    path: Path
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    place: torch.device

    def __getitem__(self, index: EllipsisType) -> StoredTensor:
        """``tensor[...]``, with which transformers reads; the dtype to read it in follows with ``to``."""
        assert index is ...
        return self

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> Tensor:
        """The tensor at its place. ``device`` is what transformers says: the CPU, for want of a device map."""
        tensor = torch.empty(self.shape, dtype=dtype or self.dtype, device=self.place)
        flat, width = tensor.view(-1), self.dtype.itemsize
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.offset)
            if self.place.type == "cpu" and tensor.dtype == self.dtype:
                _fill(flat.view(torch.uint8), file)
                return tensor
            for part in torch.split(flat, _BUFFER_BYTES // width):
                read = _buffer()[: len(part) * width]
                _fill(read, file)
                part.copy_(read.view(self.dtype).to(self.place))
        return tensor


def _fill(target: Tensor, file: FileIO) -> None:
    """Read as many bytes as the tensor has; a single call reads at most 2 GB."""
    left: memoryview = target.numpy().data
    while left:
        count = file.readinto(left)
        if not count:
            raise EOFError(f"{file.name} has become shorter")
        left = left[count:]


def _buffer() -> Tensor:
    """This thread's buffer, kept: allocating one for every tensor would fragment the heap."""
    if not hasattr(_KEPT, "buffer"):
        _KEPT.buffer = torch.empty(_BUFFER_BYTES, dtype=torch.uint8)
    found: Tensor = _KEPT.buffer
    return found


def stored_tensors(files: Iterable[Path], device: torch.device) -> dict[str, StoredTensor]:
    """All tensors of complete safetensors files, to be read to ``device``."""
    if device.type == "cuda":  # threads that read have a current device of their own
        device = torch.empty(0, device=device).device
    found: dict[str, StoredTensor] = {}
    for path in files:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            if (dtype := DTYPES.get(entry["dtype"])) is None:
                raise ValueError(f"tensor {name} is stored as {entry['dtype']}")
            begin = 8 + length + entry["data_offsets"][0]
            found[name] = StoredTensor(path, begin, tuple(entry["shape"]), dtype, device)
    return found
