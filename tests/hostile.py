"""Hostile inputs: a GGUF writer that writes whatever it is told, and commands whose end must be one line."""

from __future__ import annotations

import contextlib
import io
import json
import signal
import struct
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from dwindle.commands import main as cli

U8, U32, I32, F32, BOOL, STRING, ARRAY, U64 = 0, 4, 5, 6, 7, 8, 9, 10
_SCALARS = {U8: "B", U32: "I", I32: "i", F32: "f", BOOL: "?", U64: "Q"}

Pair = tuple[str, int, Any]
Tensor = tuple[str, tuple[int, ...], int, int]
"""Name, dimensions in the file's order, ggml type, offset."""


SECONDS_PER_INPUT = 20
"""Of the processor, so that a busy machine changes nothing."""
BYTES_PER_INPUT = 1 << 30
_HANGS = 300


class OverLimit(AssertionError):
    """An input took too much time or memory."""


@contextlib.contextmanager
def limited_time() -> Iterator[None]:
    """Stop after so many seconds of the processor, or after minutes of waiting for something."""

    def stop(number: int, frame: Any) -> None:
        raise OverLimit(f"more than {SECONDS_PER_INPUT} s of the processor, or a hang")

    before = [signal.signal(number, stop) for number in (signal.SIGPROF, signal.SIGALRM)]
    signal.setitimer(signal.ITIMER_PROF, SECONDS_PER_INPUT)
    signal.alarm(_HANGS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        for number, handler in zip((signal.SIGPROF, signal.SIGALRM), before, strict=True):
            signal.signal(number, handler)


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Time, and memory at its peak above what the process held before (Linux; elsewhere time alone)."""
    forget_peak = Path("/proc/self/clear_refs")
    if forget_peak.exists():
        forget_peak.write_text("5")
    before = _resident("VmRSS")
    with limited_time():
        yield
    grown = _resident("VmHWM") - before
    if grown > BYTES_PER_INPUT:
        raise OverLimit(f"{grown / 1e9:.1f} GB of memory")


def _resident(field: str) -> int:
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(field)), 0)


def command(*arguments: str | Path) -> tuple[int, str, str]:
    """``shell`` for hostile input: more time or memory than is promised is an error."""
    with limited():
        return shell(*arguments)


def shell(*arguments: str | Path) -> tuple[int, str, str]:
    """Run a command in this process: exit code, standard output, standard error.

    Any other exception would be a traceback.
    """
    out, err, code = io.StringIO(), io.StringIO(), 0
    typed = mock.patch.object(sys, "argv", ["dwindle", *map(str, arguments)])
    with typed, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            cli.main()
        except SystemExit as done:
            code = int(done.code or 0)
    return code, out.getvalue(), err.getvalue()


def assert_refused(result: tuple[int, str, str]) -> str:
    """Exit code 2 and one line that can be printed; returns it."""
    code, _, err = result
    lines = err.splitlines()
    assert code == 2, (code, err[-2000:])
    assert lines[-1].startswith("error: ") and all(line.startswith("warning: ") for line in lines[:-1]), err
    assert all(line.isprintable() for line in lines), err
    return lines[-1]


def assert_ended_well(result: tuple[int, str, str]) -> None:
    """Either refused, or done; nothing raw on the terminal."""
    code, out, err = result
    if code:
        assert_refused(result)
    assert all(letter.isprintable() or letter in "\n\t" for letter in out + err)


def _string(text: str | bytes) -> bytes:
    raw = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(kind: int, value: Any) -> bytes:
    if kind == STRING:
        return _string(value)
    if kind == ARRAY:
        element, items = value
        return struct.pack("<IQ", element, len(items)) + b"".join(_value(element, item) for item in items)
    return struct.pack("<" + _SCALARS[kind], value)


def gguf_bytes(pairs: Sequence[Pair], tensors: Sequence[Tensor], data: bytes, alignment: int = 32) -> bytes:
    """A GGUF file with exactly these entries, true or not."""
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(pairs))
    header += b"".join(_string(key) + struct.pack("<I", kind) + _value(kind, value) for key, kind, value in pairs)
    for name, shape, kind, offset in tensors:
        header += _string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)
    return header + b"\0" * (-len(header) % alignment) + data


def llama_gguf() -> tuple[list[Pair], list[Tensor], bytes]:
    """A valid llama of two layers, to be changed."""
    hidden, ffn, heads, kv, vocab = 8, 12, 2, 1, 16
    pairs: list[Pair] = [
        ("general.architecture", STRING, "llama"),
        ("llama.block_count", U32, 2),
        ("llama.context_length", U32, 64),
        ("llama.embedding_length", U32, hidden),
        ("llama.feed_forward_length", U32, ffn),
        ("llama.attention.head_count", U32, heads),
        ("llama.attention.head_count_kv", U32, kv),
        ("llama.attention.layer_norm_rms_epsilon", F32, 1e-5),
        ("llama.rope.freq_base", F32, 10000.0),
        ("tokenizer.ggml.bos_token_id", U32, 1),
    ]
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (hidden, vocab), "output_norm.weight": (hidden,)}
    for layer in range(2):
        own = {"attn_norm": (hidden,), "ffn_norm": (hidden,), "attn_q": (hidden, hidden), "attn_k": (hidden, 4)}
        own |= {"attn_v": (hidden, 4), "attn_output": (hidden, hidden), "ffn_gate": (hidden, ffn)}
        own |= {"ffn_up": (hidden, ffn), "ffn_down": (ffn, hidden)}
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in own.items()}
    tensors, data = [], b""
    for name, shape in shapes.items():
        tensors.append((name, shape, 0, len(data)))
        values = np.random.default_rng(len(data)).normal(size=int(np.prod(shape))).astype("<f4").tobytes()
        data += values + b"\0" * (-len(values) % 32)
    return pairs, tensors, data


def changed(pairs: Sequence[Pair], key: str, kind: int, value: Any) -> list[Pair]:
    """The same entries with one replaced, or added."""
    return [pair for pair in pairs if pair[0] != key] + [(key, kind, value)]


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
