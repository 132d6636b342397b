"""The types of a GGUF file: which tensor is stored in which, as llama.cpp's quantiser chooses, and the rounding itself.

K types store rows in blocks of 256, other quantized types in blocks of 32. The rounding of K types and IQ4_NL is
llama.cpp's own, called in the library that xllamacpp brings; that of simple types is the gguf package's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dwindle.core.errors import UserError, install_hint
from dwindle.core.sizes import format_bytes

BLOCK, K_BLOCK = 32, 256
"""Values per block; a row must be a whole number of blocks."""

FILE_TYPES = {
    "f32": 0, "f16": 1, "bf16": 32, "q8_0": 7, "q4_0": 2, "q4_1": 3, "q4_k_m": 15, "q5_k_m": 17, "q6_k": 18,
    "iq4_nl": 25,
}  # fmt: skip
TYPES = tuple(FILE_TYPES)
_MAIN = {"q4_k_m": "Q4_K", "q5_k_m": "Q5_K", "q6_k": "Q6_K", "iq4_nl": "IQ4_NL"}
"""The type of most tensors, for files that mix types; llama.cpp's own quantiser rounds to them."""
_FALLBACKS = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
"""Types with blocks of 32 for rows that blocks of 256 do not divide."""

Matrix = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Fallback:
    """A tensor whose rows do not fit its type, and the bytes that this costs."""

    name: str
    kind: str
    block: int
    """Block size of the requested type."""
    more_bytes: float
    padding_bytes: float
    """What padding its rows to whole blocks would cost instead."""


def block_of(type_: str) -> int:
    """Values per block of most tensors of a file."""
    return K_BLOCK if _MAIN.get(type_, "").endswith("_K") else BLOCK


class TypeChoice:
    """The type of every tensor of one file; what could not have its type is collected in ``fallbacks``."""

    def __init__(self, gguf: Any, type_: str, names: Sequence[str], queries_per_kv: int) -> None:
        self._kinds, self._sizes = gguf.GGMLQuantizationType, gguf.GGML_QUANT_SIZES
        self._type, self._queries_per_kv = type_, queries_per_kv
        self._tied = "output.weight" not in names
        self._order = {
            part: [name for name in names if part in name]
            for part in ("attn_v.weight", "attn_qkv.weight", "ffn_down.weight")
        }
        self.fallbacks: list[Fallback] = []

    def __call__(self, name: str, shape: Sequence[int]) -> Any:
        """f32 for gains and biases; in the simple 4-bit files q8_0 for embedding and head."""
        if len(shape) == 1 or ".shortconv.conv." in name:
            return self._kinds.F32
        if self._type in ("f32", "f16", "bf16"):
            return self._kinds[self._type.upper()]
        is_outer = name in ("token_embd.weight", "output.weight")
        wanted = self._mixed(name) if self._type in _MAIN else "Q8_0" if is_outer else self._type.upper()
        return self._that_fits(name, wanted, shape)

    def _mixed(self, name: str) -> str:
        """llama.cpp's choice: more bits for the head, and in some layers for value and down projections."""
        main = _MAIN[self._type]
        if name == "output.weight" or (self._tied and name == "token_embd.weight"):
            return "Q6_K"
        for part, names in self._order.items():
            if name in names:
                place, count = names.index(name), len(names)
                if self._type == "iq4_nl":
                    first = part == "ffn_down.weight" and place < count // 8
                    return "Q5_K" if first or (part != "ffn_down.weight" and self._queries_per_kv >= 4) else main
                return "Q6_K" if more_bits(place, count) else main
        return main

    def _that_fits(self, name: str, wanted: str, shape: Sequence[int]) -> Any:
        width, kind, count = shape[-1], wanted, prod(shape)
        if width % self._sizes[self._kinds[kind]][0]:
            kind = _FALLBACKS.get(kind, "F16")
        if kind != "F16" and width % self._sizes[self._kinds[kind]][0]:
            kind = "F16"
        if kind != wanted:
            block, bytes_each = self._sizes[self._kinds[wanted]][0], self._bytes_each(wanted)
            more = count * (self._bytes_each(kind) - bytes_each)
            padding = -width % block / width * count * bytes_each
            self.fallbacks.append(Fallback(name, kind.lower(), block, more, padding))
        return self._kinds[kind]

    def num_bytes(self, kind: Any, shape: Sequence[int]) -> int:
        """Bytes of a tensor in a type."""
        block, size = self._sizes[kind]
        return int(prod(shape) // block * size)

    def _bytes_each(self, kind: str) -> float:
        block, size = self._sizes[self._kinds[kind]]
        return float(size / block)


def more_bits(place: int, count: int) -> bool:
    """The first and last eighth of the layers, and every third between."""
    return place < count // 8 or place >= 7 * count // 8 or (place - count // 8) % 3 == 2


def largest_block(fallbacks: Sequence[Fallback]) -> int:
    """The block that would fit all of them: blocks are powers of two."""
    return max(fallback.block for fallback in fallbacks)


def describe_fallbacks(type_: str, fallbacks: Sequence[Fallback], odd: Sequence[str]) -> str:
    """One line: what is stored with more bits and why, what that costs, and what avoids it.

    ``odd`` names the sizes that are not multiples of the largest block.
    """
    block = largest_block(fallbacks)
    rows = "rows" if block == block_of(type_) else "some rows"
    are = "are not multiples" if len(odd) > 1 or " to " in "".join(odd) else "is not a multiple"
    because = f", and {' and '.join(odd)} {are} of it" if odd else ""
    kinds = " and ".join(sorted({fallback.kind for fallback in fallbacks}))
    more, padding = (sum(getattr(one, key) for one in fallbacks) for key in ("more_bytes", "padding_bytes"))
    fixes = [f"`dwindle prune --round-to {block}` avoids it"]
    if padding < more:
        fixes.insert(0, f"--round {block} pads widths with zeros")
    fix = "" if all(size.startswith("heads") for size in odd) else f"; {', '.join(fixes)}"
    tensors = "1 tensor is" if len(fallbacks) == 1 else f"{len(fallbacks)} tensors are"
    cost = f"{tensors} stored as {kinds} ({format_bytes(round(more))} more)"
    return f"{type_} stores {rows} in blocks of {block}{because}: {cost}{fix}"


def quantize(gguf: Any, values: Matrix, kind: Any, threads: int = 1) -> npt.NDArray[Any]:
    """The bytes of a tensor in a type."""
    if kind.name == "F32":
        return values
    if kind.name not in _MAIN.values():
        packed: npt.NDArray[Any] = gguf.quants.quantize(values, kind)
        return packed
    block, size = gguf.GGML_QUANT_SIZES[kind]
    rows, width = values.shape
    out = np.zeros((rows, width // block * size), np.uint8)
    function, values = _llamacpp_quantizer(), np.ascontiguousarray(values, np.float32)

    def part(first: int) -> None:
        some, into = values[first : first + step], out[first : first + step]
        written = function(int(kind), some.ctypes.data, into.ctypes.data, 0, len(some), width, None)
        assert written == into.nbytes

    step = -(-rows // threads)
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(part, range(0, rows, step)))
    return out


@cache
def _llamacpp_quantizer() -> Any:
    """``ggml_quantize_chunk`` of the library that xllamacpp brings; xllamacpp itself is not imported here."""
    found = find_spec("xllamacpp")
    if found is None or not found.submodule_search_locations:
        raise UserError(f"--type: K types and iq4_nl need xllamacpp, which is not installed: {install_hint('gguf')}")
    folder = Path(next(iter(found.submodule_search_locations)))
    for path in [*folder.glob("*.so"), *folder.glob("*.dylib"), *folder.glob("*.pyd")]:
        try:
            function = ctypes.CDLL(str(path)).ggml_quantize_chunk
        except (OSError, AttributeError):
            continue
        function.restype = ctypes.c_size_t
        function.argtypes = [ctypes.c_int, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 3, ctypes.c_void_p]
        return function
    raise UserError("--type: this build of xllamacpp does not show llama.cpp's quantiser: choose q8_0, q4_0 or q4_1")


def check_quantizer(type_: str) -> None:
    """Raise if the type needs a quantiser that is missing, before any work."""
    if type_ in _MAIN:
        _llamacpp_quantizer()
