"""One writer for one run: a lock that the operating system releases when the process ends, however it ends."""

from __future__ import annotations

import fcntl
from pathlib import Path
from types import TracebackType
from typing import IO

from dwindle.core.errors import UserError


class RunLock:
    """``with RunLock(run): …``; a second process is refused."""

    def __init__(self, run: Path) -> None:
        self.path = run / ".lock"
        self._file: IO[bytes] | None = None

    def __enter__(self) -> RunLock:
        try:
            self._file = self.path.open("ab")
        except OSError as error:
            reason = error.strerror or error
            raise UserError(f"{self.path.parent}: cannot be written ({reason}): check its owner and rights") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.close()
            raise UserError(f"{self.path.parent}: another process is writing this run: stop it first") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()
