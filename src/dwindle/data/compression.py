"""Streaming ``.gz``, ``.xz`` and ``.zst``; truncated data is an error, never a shorter text."""

from __future__ import annotations

import gzip
import importlib
import io
import lzma
from typing import IO, Any

from dwindle.core.errors import UserError

COMPRESSIONS = (".gz", ".xz", ".zst")
_BLOCK_BYTES = 1 << 17


class CorruptError(Exception):
    """Compressed data that cannot be read to its end."""


def open_compressed(raw: io.BufferedReader, compression: str | None, label: str) -> IO[bytes]:
    """The uncompressed bytes of ``raw``; ``label`` is the start of the message if a package is missing."""
    if compression is None:
        return raw
    if compression == ".gz":
        return io.BufferedReader(gzip.GzipFile(fileobj=raw, mode="rb"))
    if compression == ".xz":
        return lzma.open(raw, "rb")
    assert compression == ".zst", compression
    return _open_zstd(raw, label)


def _open_zstd(raw: io.BufferedReader, label: str) -> IO[bytes]:
    try:
        standard: Any = importlib.import_module("compression.zstd")  # Python 3.14
        return io.BufferedReader(_ZstdStream(raw, standard.ZstdDecompressor, standard.ZstdError))
    except ModuleNotFoundError:
        pass
    try:
        import zstandard
    except ImportError as error:
        raise UserError(f"{label} needs the zstandard package: pip install zstandard") from error
    return io.BufferedReader(
        _ZstdStream(raw, lambda: zstandard.ZstdDecompressor().decompressobj(), zstandard.ZstdError)
    )


class _ZstdStream(io.RawIOBase):
    """All frames of a zstd file, one after the other.

    Both libraries have the same decompressor interface (``decompress``, ``eof``, ``unused_data``). The stream reader of
    ``zstandard`` is not used, because it does not report a file that ends in the middle of a frame.
    """

    def __init__(self, raw: io.BufferedReader, new_decoder: Any, error: type[Exception]) -> None:
        self._raw = raw
        self._new_decoder = new_decoder
        self._error = error
        self._decoder: Any = None
        self._input = b""
        self._output = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._output:
            self._input = self._input or self._raw.read(_BLOCK_BYTES)
            if not self._input:
                if self._decoder is not None:
                    raise CorruptError("the data ends in the middle of a frame")
                return 0
            self._decode_block()
        count = min(len(buffer), len(self._output))
        buffer[:count] = self._output[:count]
        self._output = self._output[count:]
        return count

    def _decode_block(self) -> None:
        if self._decoder is None:
            self._decoder = self._new_decoder()
        try:
            self._output = memoryview(self._decoder.decompress(self._input))
        except self._error as error:
            raise CorruptError(str(error)) from error
        self._input = b""
        if self._decoder.eof:
            self._input = self._decoder.unused_data
            self._decoder = None
