"""Append-only files of JSON lines: metrics and ledger."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from dwindle.core.errors import UserError
from dwindle.core.json_safe import finite
from dwindle.core.run_directory import RunDirectory


def json_line(record: dict[str, Any]) -> str:
    """One record as a line; numbers that are not finite become null."""
    try:
        return json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"
    except ValueError:  # of few records; walking all of them takes longer than writing them
        return json.dumps(finite(record), ensure_ascii=False, allow_nan=False) + "\n"


class JsonLinesFile:
    """An append-only file of JSON lines; each line is handed to the operating system before ``append`` returns."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self._file: IO[bytes] | None = None

    def append(self, record: dict[str, Any]) -> None:
        line = json_line(record)
        try:
            if self._file is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self.path.open("ab")
            self._file.write(line.encode())
            self._file.flush()
        except OSError as error:
            advice = f"free space on its disk, then run {RunDirectory(self.path.parent).command_after_failure}"
            raise UserError(f"{self.path}: cannot be written ({error.strerror}): {advice}") from error

    def close(self) -> None:
        if self._file is not None:
            with suppress(OSError):  # of a line that could not be written, which ``append`` has reported
                self._file.close()
            self._file = None
