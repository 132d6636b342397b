"""Reading untrusted files: regular files only, of limited size, JSON and TOML of limited depth."""

from __future__ import annotations

import errno
import json
import os
import stat
import tomllib
from collections.abc import Callable
from io import BufferedReader
from pathlib import Path
from typing import Any, cast

from dwindle.core.errors import UserError
from dwindle.core.sizes import format_bytes

MAX_JSON_BYTES = 1 << 25
"""Configurations and indices; those of the largest models have a few megabytes."""
MAX_STATE_BYTES = 1 << 29
"""Our own states and structures, which list every channel."""
MAX_TOML_BYTES = 1 << 20
MAX_DEPTH = 64
"""Nesting depth of tables and lists, far below Python's recursion limit."""


def open_regular(path: Path) -> BufferedReader:
    """Open for reading; a pipe or device, which may never end, is an OSError instead of a wait."""
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    try:
        mode = os.fstat(handle).st_mode
        if not stat.S_ISREG(mode):
            number = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
            raise OSError(number, "it is a directory" if stat.S_ISDIR(mode) else "it is not a regular file", str(path))
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def read_limited(path: Path, limit: int) -> bytes:
    """The content of a regular file of at most ``limit`` bytes; anything else is a ``UserError``."""
    try:
        with open_regular(path) as file:
            content = file.read(limit + 1)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({getattr(error, 'strerror', None) or error})") from error
    if len(content) > limit:
        raise UserError(f"{path} has more than {format_bytes(limit)}, which no such file has")
    return content


def read_json(path: Path, *, limit: int = MAX_JSON_BYTES) -> Any:
    """The value in a JSON file; errors name the file and the reason."""
    try:
        return parse_json(read_limited(path, limit))
    except ValueError as error:
        raise UserError(f"{path} is not readable JSON ({error})") from error


def parse_json(content: bytes | str) -> Any:
    """``json.loads``; text that is not JSON, or nested too deeply, is a ``ValueError``."""
    return _shallow(json.loads, content)


def parse_toml(text: str) -> dict[str, Any]:
    """``tomllib.loads``; text that is not TOML, or nested too deeply, is a ``ValueError``."""
    return cast(dict[str, Any], _shallow(tomllib.loads, text))


def _shallow(parse: Callable[[Any], Any], content: bytes | str) -> Any:
    try:
        value = parse(content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    check_depth(value)
    return value


def check_depth(value: Any) -> None:
    """Raise ValueError for containers nested deeper than ``MAX_DEPTH``."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level if isinstance(outer, (dict, list)) for inner in _inside(outer)]
        if not level:
            return
    raise ValueError("it is nested too deeply")


def _inside(outer: dict[str, Any] | list[Any]) -> list[Any]:
    values = outer.values() if isinstance(outer, dict) else outer
    return [value for value in values if isinstance(value, (dict, list))]
