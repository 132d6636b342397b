"""Work that a killed process can continue: a header that names the work, then a synced line for every finished part."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from dwindle.core.errors import UserError
from dwindle.core.files import NotWritten, fsync_path, write_text_atomic
from dwindle.core.jsonl import json_line
from dwindle.core.reading import parse_json


class Journal:
    """A file of JSON lines; ``rows`` are those that an earlier process wrote."""

    def __init__(self, path: Path, header: dict[str, Any], *, overwrite: bool) -> None:
        """``header`` has a ``format`` and everything that determines the work: a file with another header is not
        continued."""
        self.path = path
        self.rows: list[dict[str, Any]] = []
        self._header = json_line(header)
        """Header of a new file, written with the first row."""
        if overwrite or not path.exists():
            return
        content = path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        first, *lines = whole.splitlines() or [b""]
        check_header(first, header, path)
        self._header = ""
        try:
            self.rows = [parse_json(line) for line in lines]
        except ValueError as error:
            raise UserError(f"--out {path}: is damaged ({error}): pass --overwrite to begin again") from error
        if len(whole) < len(content):  # a line that a killed process did not finish
            os.truncate(path, len(whole))

    def append(self, row: dict[str, Any]) -> None:
        """Write a row; it is on disk when this returns."""
        line = json_line(row)
        if self._header:
            write_text_atomic(self.path, self._header + line, option="--out")
            self._header = ""
            return
        try:
            with self.path.open("a", encoding="utf-8", newline="\n") as file:
                file.write(line)
            fsync_path(self.path)
        except OSError as error:
            advice = "free space, then run the same command again"
            raise NotWritten(f"--out {self.path}", error, advice) from error

    def remove(self) -> None:
        with suppress(OSError):
            self.path.unlink()


def check_header(line: bytes, header: dict[str, Any], path: Path) -> None:
    """Raise if work was begun with another header than this, by the names of what differs."""
    found: Any = None
    with suppress(ValueError):
        found = parse_json(line)
    if not isinstance(found, dict) or found.get("format") != header["format"]:
        raise UserError(f"--out {path}: was not begun by this command: choose another name")
    if other := [name for name in {**found, **header} if found.get(name) != header.get(name)]:
        what = ", ".join(other)
        raise UserError(f"--out {path}: was begun with another {what}: repeat that command, or pass --overwrite")
