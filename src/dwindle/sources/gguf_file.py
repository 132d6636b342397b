"""Reading a GGUF file: metadata, the tensor table, and tensors as float32.

The header is parsed with ``struct`` over a memory map: the reader of the ``gguf`` package creates several numpy arrays
per vocabulary string and takes seconds instead of a tenth of a second. The package is only needed to dequantise blocks.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dwindle.core.errors import UserError, install_hint
from dwindle.core.limits import MAX_ITEMS

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_FLOAT32_VALUE = 6

_F32, _F16, _F64, _BF16 = 0, 1, 28, 30
_PLAIN_BYTES = {_F32: 4, _F16: 2, _F64: 8, _BF16: 2}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Shape, type and location of one tensor."""

    shape: tuple[int, ...]
    """In torch order (GGUF writes the fastest axis first)."""
    ggml_type: int
    offset: int
    """From the start of the file."""


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A parsed header; tensor data is read on demand."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    blob: mmap.mmap

    @property
    def architecture(self) -> str:
        return str(self.metadata["general.architecture"])

    @property
    def is_quantised(self) -> bool:
        """Whether any tensor is stored in blocks of rounded values."""
        return any(map(self.is_rounded, self.tensors))

    def get(self, key: str, default: Any = None) -> Any:
        """A value under the architecture's prefix: ``get("block_count")`` is ``llama.block_count``."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def number(self, key: str, default: float) -> float:
        """A finite number under the architecture's prefix."""
        value = self.get(key, default)
        if type(value) not in (int, float) or not math.isfinite(value):
            raise damaged(self.path, f"{self.architecture}.{key} is {value!r:.40}, not a number")
        return float(value)

    def whole(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if isinstance(value, list):
            if any(one != value[0] for one in value):
                raise unsupported(self, f"has a different {key} in every layer")
            value = value[0] if value else None
        if type(value) is not int or value <= 0:
            what = f"{self.architecture}.{key} is {value!r:.60}"
            raise UserError(f"source {self.path}: {what}: the file is not a usable model")
        return value

    def check_complete(self) -> None:
        """Raise UserError if a tensor overlaps another or the end of the file, before minutes of dequantising."""
        end = 0
        for name, info in sorted(self.tensors.items(), key=lambda item: item[1].offset):
            if info.offset < end:
                raise damaged(self.path, f"the data of tensor {name} lies inside that of another tensor")
            end = info.offset + _num_bytes(info, name, self.path)
            if end > len(self.blob):
                raise damaged(self.path, f"it ends before the data of tensor {name}")

    def is_rounded(self, name: str) -> bool:
        """Whether a tensor is stored in blocks of rounded values."""
        return self.tensors[name].ggml_type not in _PLAIN_BYTES

    def num_bytes(self, name: str) -> int:
        """Bytes of a tensor as it is stored."""
        return _num_bytes(self.tensors[name], name, self.path)

    def read(self, name: str, rows: int | None = None) -> npt.NDArray[np.float32]:
        """One tensor, or its first rows, as float32, copied."""
        info = self.tensors[name]
        if rows is not None:
            info = replace(info, shape=(min(rows, info.shape[0]), *info.shape[1:]))
        raw = np.frombuffer(self.blob, np.uint8, _num_bytes(info, name, self.path), info.offset)
        if info.ggml_type == _F32:
            values = raw.view(np.float32).copy()
        elif info.ggml_type in (_F16, _F64):
            values = raw.view(np.float16 if info.ggml_type == _F16 else np.float64).astype(np.float32)
        elif info.ggml_type == _BF16:
            values = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            values = _dequantize(raw, info, name, self.path)
        return values.reshape(info.shape)


def open_gguf(path: Path) -> GgufFile:
    """Parse the header; a file that is not GGUF, or whose header is truncated, is an error."""
    try:
        with path.open("rb") as handle:
            blob = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise damaged(path, "it is empty or not readable") from error
    try:
        metadata, tensors = _Header(blob, path).parse()
    except (struct.error, ValueError, TypeError, OverflowError, KeyError, MemoryError) as error:
        raise damaged(path, "its header is truncated or inconsistent") from error
    if not isinstance(metadata.get("general.architecture"), str):
        raise damaged(path, "its header has no general.architecture")
    if metadata.get("split.count", 1) not in (0, 1):
        raise UserError(f"source {path}: is one part of a split GGUF: merge the parts with `llama-gguf-split --merge`")
    return GgufFile(path, metadata, tensors, blob)


def unsupported(file: GgufFile, what: str) -> UserError:
    """A healthy file that holds something that our models have not."""
    return UserError(f"source {file.path}: this GGUF {what}: give the Hugging Face directory of the model instead")


def damaged(path: Path, reason: str) -> UserError:
    """The error for a file that cannot be read."""
    return UserError(f"source {path}: not a readable GGUF file ({reason}): fetch it again")


class _Header:
    """A cursor over the bytes of the header; every length is checked against the size of the file."""

    def __init__(self, blob: mmap.mmap, path: Path) -> None:
        self.blob = blob
        self.path = path
        self.position = 0

    def parse(self) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
        if self.blob[:4] != _MAGIC:
            raise damaged(self.path, "it does not start with GGUF")
        self.position = 4
        (version,) = self.unpack("I")
        if version not in _VERSIONS:
            endian = "big-endian files are unsupported" if version > 0xFFFF else f"version {version} is unsupported"
            raise damaged(self.path, endian)
        tensor_count, metadata_count = self.unpack("QQ")
        self.check_count(tensor_count + metadata_count)
        metadata = {}
        for _ in range(metadata_count):
            key = self.string()
            if key in metadata:
                raise damaged(self.path, f"its header has {key!r:.60} twice")
            metadata[key] = self.value(self.unpack("I")[0])
        tensors = self.tensor_table(tensor_count, int(metadata.get("general.alignment", 32)))
        return metadata, tensors

    def tensor_table(self, count: int, alignment: int) -> dict[str, TensorInfo]:
        if alignment <= 0 or alignment & (alignment - 1):
            raise damaged(self.path, f"alignment {alignment} is not a power of two")
        entries = []
        for _ in range(count):
            name = self.string()
            (num_dims,) = self.unpack("I")
            if not 1 <= num_dims <= 8:
                raise damaged(self.path, f"tensor {name} has {num_dims} dimensions")
            shape = tuple(reversed(self.unpack(f"{num_dims}Q")))
            if not all(1 <= length < 1 << 40 for length in shape):
                raise damaged(self.path, f"tensor {name!r:.60} has an impossible shape")
            entries.append((name, shape, *self.unpack("IQ")))
        if len({name for name, *_ in entries}) != len(entries):
            raise damaged(self.path, "two of its tensors have the same name")
        start = -(-self.position // alignment) * alignment
        return {name: TensorInfo(shape, kind, start + offset) for name, shape, kind, offset in entries}

    def unpack(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + layout, self.blob, self.position)
        self.position += struct.calcsize("<" + layout)
        return values

    def string(self) -> str:
        (length,) = self.unpack("Q")
        end = self.position + length
        if end > len(self.blob):
            raise damaged(self.path, "it ends inside its header")
        text = self.blob[self.position : end].decode("utf-8")
        self.position = end
        return text

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            element, count = self.unpack("IQ")
            self.check_count(count)
            if count > MAX_ITEMS or element == _ARRAY:
                raise damaged(self.path, "it has a list of lists, or one that is longer than any vocabulary")
            if element in _SCALARS:
                return list(self.unpack(f"{count}{_SCALARS[element]}"))
            return [self.value(element) for _ in range(count)]
        (scalar,) = self.unpack(_SCALARS[kind])
        # 1e-05 was stored as float32: return the decimal, not 9.999999747378752e-06
        return float(str(np.float32(scalar))) if kind == _FLOAT32_VALUE else scalar

    def check_count(self, count: int) -> None:
        if count > len(self.blob) - self.position:
            raise damaged(self.path, "it ends inside its header")


def _block_sizes(ggml_type: int, name: str, path: Path) -> tuple[int, int]:
    """Elements and bytes of one block of a quantised type."""
    gguf = import_gguf()
    try:
        elements, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(ggml_type)]
    except (ValueError, KeyError) as error:
        raise UserError(
            f"source {path}: tensor {name} has ggml type {ggml_type}, which the installed gguf package does not "
            "know: upgrade it with `pip install -U gguf`"
        ) from error
    return int(elements), int(size)


def _num_bytes(info: TensorInfo, name: str, path: Path) -> int:
    count = math.prod(info.shape)
    if info.ggml_type in _PLAIN_BYTES:
        return count * _PLAIN_BYTES[info.ggml_type]
    elements, size = _block_sizes(info.ggml_type, name, path)
    if not info.shape or info.shape[-1] % elements:
        raise damaged(path, f"the row length of tensor {name} is not a multiple of {elements}")
    return count // elements * size


def _dequantize(raw: npt.NDArray[np.uint8], info: TensorInfo, name: str, path: Path) -> npt.NDArray[np.float32]:
    gguf = import_gguf()
    kind = gguf.GGMLQuantizationType(info.ggml_type)
    elements, size = _block_sizes(info.ggml_type, name, path)
    blocks = raw.reshape(-1, info.shape[-1] // elements * size)
    try:
        values: npt.NDArray[np.float32] = gguf.quants.dequantize(blocks, kind)
    except NotImplementedError as error:
        raise UserError(
            f"source {path}: tensor {name} is stored as {kind.name}, which the gguf package cannot dequantise: "
            "give a file in another type, such as Q8_0 or F16"
        ) from error
    return values


def import_gguf(purpose: str = "reading quantised GGUF files") -> Any:
    """The ``gguf`` package; without it, an error that says what it is needed for."""
    try:
        import gguf
        import gguf.quants
    except ImportError as error:
        raise UserError(f"{purpose} needs the gguf package: {install_hint('gguf')}") from error
    return gguf
