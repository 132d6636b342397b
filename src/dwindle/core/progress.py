"""Progress on standard error: a bar on a terminal, elsewhere a line every ten seconds."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from dwindle.core.sizes import format_duration
from dwindle.core.terminal import plain

T = TypeVar("T")

_PLAIN_LINE_EVERY_S = 10.0
_spinners = ContextVar("spinners", default=True)


@cache
def _console(is_terminal: bool) -> Console:
    """One for all: displays of one console are drawn below each other, those of two overwrite each other."""
    return Console(stderr=True, force_interactive=is_terminal)


def _can_draw() -> bool:
    """On a terminal that can redraw lines; Emacs's shell, for one, cannot."""
    return sys.stderr.isatty() and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")


class Bar:
    """``with Bar("calibrating", total=64) as bar: … bar.advance()``"""

    def __init__(self, description: str, total: int) -> None:
        name = TextColumn("{task.description}", markup=False)
        columns = (name, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        draws = _can_draw()
        self._progress = Progress(*columns, console=_console(draws), transient=True, disable=not draws)
        self._progress.add_task(plain(description), total=total)
        self._task = self._progress.tasks[0]
        self._last_line = time.monotonic()

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def advance(self, amount: int = 1, description: str | None = None) -> None:
        """Count ``amount`` more of the total as done; ``description`` replaces the one shown."""
        if description is not None:
            self._progress.update(self._task.id, description=plain(description))
        self._progress.advance(self._task.id, amount)
        if self._progress.disable and time.monotonic() - self._last_line >= _PLAIN_LINE_EVERY_S:
            self._last_line = time.monotonic()
            done, total = self._task.completed, self._task.total or 0
            left_s = (self._task.elapsed or 0) / max(done, 1) * (total - done)
            print(f"{self._task.description}: {done:.0f}/{total:.0f}, {format_duration(left_s)} left", file=sys.stderr)


@contextmanager
def status(description: str) -> Iterator[None]:
    """A spinner on a terminal for a wait of unknown length; nothing elsewhere, nor within ``without_spinners``."""
    if not (_can_draw() and _spinners.get()):
        yield
        return
    with _console(True).status(Text(plain(description))):
        yield


@contextmanager
def without_spinners() -> Iterator[None]:
    """For ``--json``."""
    before = _spinners.set(False)
    try:
        yield
    finally:
        _spinners.reset(before)


def track(items: Iterable[T], description: str, total: int) -> Iterator[T]:
    """Iterate with a bar."""
    with Bar(description, total) as bar:
        for item in items:
            yield item
            bar.advance()
