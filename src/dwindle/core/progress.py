"""Progress for anything that takes more than two seconds: a bar on a terminal, plain lines elsewhere.

Everything goes to standard error, so that ``--json`` on standard output stays clean.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

T = TypeVar("T")

_PLAIN_LINE_EVERY_S = 10.0


class Bar:
    """``with Bar("calibrating", total=64) as bar: … bar.advance()``"""

    def __init__(self, description: str, total: int) -> None:
        self.description = description
        self.total = total
        self.done = 0
        self._started = self._last_line = time.monotonic()
        self._rich: Progress | None = None
        if sys.stderr.isatty():
            self._rich = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._task = self._rich.add_task(description, total=total)

    def __enter__(self) -> Bar:
        if self._rich is not None:
            self._rich.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._rich is not None:
            self._rich.stop()

    def advance(self, amount: int = 1) -> None:
        self.done += amount
        if self._rich is not None:
            self._rich.advance(self._task, amount)
            return
        now = time.monotonic()
        if now - self._last_line >= _PLAIN_LINE_EVERY_S:
            self._last_line = now
            remaining = (now - self._started) / max(self.done, 1) * (self.total - self.done)
            print(f"{self.description}: {self.done}/{self.total}, {remaining:.0f} s left", file=sys.stderr)


@contextmanager
def status(description: str) -> Iterator[None]:
    """A spinner on a terminal for a wait whose length is not known; nothing elsewhere."""
    if not sys.stderr.isatty():
        yield
        return
    with Console(stderr=True).status(description):
        yield


def track(items: Iterable[T], description: str, total: int) -> Iterator[T]:
    """Iterate with a bar."""
    with Bar(description, total) as bar:
        for item in items:
            yield item
            bar.advance()
