"""What to do next, printed after a command: on standard error, ready to be pasted."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import quote

from dwindle.core.errors import UserError
from dwindle.core.reading import MAX_STATE_BYTES, read_json
from dwindle.core.run_directory import RunDirectory
from dwindle.core.terminal import plain, say

_BLOCK = 32
"""Rows of quantized GGUF files are stored in blocks of this."""


def say_next(commands: Mapping[str, str]) -> None:
    """``next: dwindle export …  # for llama.cpp``: a reason and its command each."""
    width = max(map(len, commands.values()), default=0)
    for reason, command in commands.items():
        say(plain(f"next: {command:{min(width, 90)}}  # {reason}"), error=True)


def export_command(model: str | Path, out: str | Path) -> str:
    """For llama.cpp at 8 bits; widths that are not in blocks of 32 are padded, which is exact. Imports no torch."""
    widths = _widths(RunDirectory(Path(model)).structure)
    rounded = f" --round {_BLOCK}" if any(width % _BLOCK for width in widths) else ""
    return f"dwindle export {quote(str(model))} --to gguf --type q8_0{rounded} --out {quote(f'{out}.gguf')}"


def _widths(structure: Path) -> list[int]:
    """Hidden and FFN sizes of one of our models; empty for any other file."""
    try:
        found = read_json(structure, limit=MAX_STATE_BYTES)
        return [len(found["hidden"]), *(len(layer["ffn"]) for layer in found["layers"])]
    except (UserError, TypeError, KeyError):
        return []


def pretrain_command(model: str, texts: Sequence[str], to: str) -> str:
    return " ".join(["dwindle pretrain", quote(model), *map(quote, texts), "--to", quote(to)])


def served_by_vllm(model: str) -> str:
    """vLLM must be allowed to run the modelling file of a model that has one."""
    flag = " --trust-remote-code" if (Path(model) / "modeling_dwindle.py").is_file() else ""
    return f"vllm serve {quote(model)}{flag}"


def is_main_process() -> bool:
    return os.environ.get("RANK", "0") == "0"
