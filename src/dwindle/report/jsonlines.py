"""Append-only files of JSON lines that another process may still be writing."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_FINGERPRINT_BYTES = 512
_LINES_AT_ONCE = 1000

Record = dict[str, Any]


class GrowingJsonLines:
    """Hands out each complete line once; a line without its end waits for the next read.

    A file that was cut back (a resumed run drops what lies past its checkpoint) is read from the start again:
    ``read`` then says so, and the caller forgets what it had.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_bad = 0
        self.unfinished = False
        """Whether the file ends inside a line."""
        self._offset = 0
        self._before_offset = b""

    @property
    def exists(self) -> bool:
        return self.path.is_file()

    def read(self) -> tuple[bool, list[Record]]:
        """(whether it begins anew, the records that came since the last call)."""
        try:
            with self.path.open("rb") as file:
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
        with _no_garbage_collection():
            return restarted, self._records(complete.split(b"\n"))

    def _still_there(self, file: Any) -> bool:
        """Whether what was read before is still the beginning of the file."""
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


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A hundred thousand new dictionaries hold no cycles; looking for them takes as long as the parsing."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _parsed(lines: list[bytes]) -> list[Any]:
    """One value for each line, None for a broken one; whole ones are parsed together, which is three times as fast."""
    try:
        values = json.loads(b"[" + b",".join(lines) + b"]")
    except (ValueError, RecursionError):
        values = []
    return values if len(values) == len(lines) else [_value(line) for line in lines]


def _value(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def read_json(path: Path) -> Any:
    """The value in a JSON file, or None where there is none that can be read."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None


def number(value: Any) -> float | None:
    """A finite number, or None for anything else: files of other versions may hold anything."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        result = float(value)
    except OverflowError:
        return None
    return result if result - result == 0 else None
