"""Reads JSON lines files that another process may still be appending to."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from dwindle.core import reading
from dwindle.core.errors import UserError
from dwindle.core.garbage import no_garbage_collection
from dwindle.core.reading import open_regular, parse_json

_FINGERPRINT_BYTES = 512
_LINES_AT_ONCE = 1000

Record = dict[str, Any]


class GrowingJsonLines:
    """Returns each complete line once; an incomplete last line is left for the next read.

    A truncated file (a resumed run drops what lies past its checkpoint) is read from the start again; ``read`` reports
    this, and the caller must discard earlier records.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_bad = 0
        self.unfinished = False
        """Whether the file ends with an incomplete line."""
        self._offset = 0
        self._before_offset = b""

    @property
    def exists(self) -> bool:
        return self.path.is_file()

    def read(self) -> tuple[bool, list[Record]]:
        """(whether reading restarted, new records since the last call)."""
        try:
            with open_regular(self.path) as file:
                restarted = not self._still_there(file)
                if restarted:
                    self._offset, self._before_offset, self.num_bad = 0, b"", 0
                file.seek(self._offset)
                new = file.read()
        except OSError:
            gone = self._offset > 0
            self._offset, self._before_offset, self.num_bad, self.unfinished = 0, b"", 0, False
            return gone, []
        complete = new[: new.rfind(b"\n") + 1]
        self.unfinished = bool(new[len(complete) :].strip())
        self._offset += len(complete)
        self._before_offset = (self._before_offset + complete)[-_FINGERPRINT_BYTES:]
        with no_garbage_collection():
            return restarted, self._records(complete.split(b"\n"))

    def _still_there(self, file: Any) -> bool:
        """Whether the file still starts with what was read before."""
        if os.fstat(file.fileno()).st_size < self._offset:
            return False
        file.seek(self._offset - len(self._before_offset))
        return bool(file.read(len(self._before_offset)) == self._before_offset)

    def _records(self, lines: list[bytes]) -> list[Record]:
        records: list[Record] = []
        for start in range(0, len(lines), _LINES_AT_ONCE):
            some = [line for line in lines[start : start + _LINES_AT_ONCE] if line.strip()]
            for record in _parsed(some):
                if isinstance(record, dict):
                    records.append(record)
                else:
                    self.num_bad += 1
        return records


def _parsed(lines: list[bytes]) -> list[Any]:
    """One value per line, None for an invalid one; valid lines are parsed together, which is three times as fast."""
    try:
        values = parse_json(b"[" + b",".join(lines) + b"]")
    except ValueError:
        values = []
    return values if len(values) == len(lines) else [_value(line) for line in lines]


def _value(line: bytes) -> Any:
    try:
        return parse_json(line)
    except ValueError:
        return None


def read_json(path: Path) -> Any:
    """The value in a JSON file, or None if it cannot be read."""
    try:
        return reading.read_json(path, limit=reading.MAX_STATE_BYTES)
    except UserError:
        return None


def number(value: Any) -> float | None:
    """A finite number as float, or None for anything else: files of other versions may contain anything."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        result = float(value)
    except OverflowError:
        return None
    return result if result - result == 0 else None
