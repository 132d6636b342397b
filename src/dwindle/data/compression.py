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
_INPUT_BYTES = 1 << 12
"""Decoded at once: a few kilobytes can expand to a hundred megabytes."""
_MAX_RATIO = 250
_TRUSTED_BYTES = 1 << 26
_MAX_XZ_MEMORY = 1 << 28
_MAX_ZST_WINDOW = 1 << 31
"""The longest there is (``zstd --long=31``); memory is used as far as the text fills it."""


class CorruptError(Exception):
    """Compressed data that cannot be read to its end."""


def open_compressed(raw: io.BufferedReader, compression: str | None, label: str) -> IO[bytes]:
    """The uncompressed bytes of ``raw``; ``label`` is the start of the message if a package is missing."""
    if compression is None:
        return raw
    if compression == ".gz":
        opened: Any = gzip.GzipFile(fileobj=raw, mode="rb")
    elif compression == ".xz":
        opened = _Frames(raw, lambda: lzma.LZMADecompressor(memlimit=_MAX_XZ_MEMORY), lzma.LZMAError)
    else:
        assert compression == ".zst", compression
        opened = _zstd(raw, label)
    return io.BufferedReader(_Measured(opened, raw), buffer_size=_BLOCK_BYTES)


def _zstd(raw: io.BufferedReader, label: str) -> io.RawIOBase:
    try:
        standard: Any = importlib.import_module("compression.zstd")  # Python 3.14
        longest = {standard.DecompressionParameter.window_log_max: _MAX_ZST_WINDOW.bit_length() - 1}
        return _Frames(raw, lambda: standard.ZstdDecompressor(options=longest), standard.ZstdError)
    except ModuleNotFoundError:
        pass
    try:
        import zstandard
    except ImportError as error:
        raise UserError(f"{label} needs the zstandard package: pip install zstandard") from error
    decoder = zstandard.ZstdDecompressor(max_window_size=_MAX_ZST_WINDOW)
    return _Frames(raw, decoder.decompressobj, zstandard.ZstdError)


class _Measured(io.RawIOBase):
    """Refuses what expands far more than text does, before it fills the memory."""

    def __init__(self, inner: Any, raw: io.BufferedReader) -> None:
        self._inner = inner
        self._raw = raw
        self._count = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count: int = self._inner.readinto(buffer) or 0
        self._count += count
        if self._count > _TRUSTED_BYTES and self._count > _MAX_RATIO * self._raw.tell():
            raise CorruptError(f"it expands more than {_MAX_RATIO} times, which no text does")
        return count


class _Frames(io.RawIOBase):
    """All frames of a file, one after the other.

    The decoders of xz and of both libraries for zstd have the same interface (``decompress``, ``eof``,
    ``unused_data``). The stream reader of ``zstandard`` is not used, because it does not report a file that ends in the
    middle of a frame.
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
            self._input = self._input or self._raw.read(_INPUT_BYTES)
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
            self._input = self._input.lstrip(b"\0")  # padding between the streams of an xz file
            if not self._input:
                return
            self._decoder = self._new_decoder()
        try:
            self._output = memoryview(self._decoder.decompress(self._input))
        except self._error as error:
            raise CorruptError(str(error)) from error
        self._input = b""
        if self._decoder.eof:
            self._input = self._decoder.unused_data
            self._decoder = None
