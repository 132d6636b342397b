"""Ctrl-C, SIGTERM and SIGHUP (a closed terminal) ask the loop to finish its step, save and exit.

A second Ctrl-C exits at once.
"""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from types import FrameType
from typing import Any

from dwindle.distributed.launch import STOPPING

_MESSAGE = b"\nstopping after this step and a checkpoint (Ctrl-C again: abort now)\n"


class StopSignal:
    """``with StopSignal() as stop: Trainer(..., stop=stop).run()``

    Python delivers signals to the main thread only; in other threads this is a flag that ``request()`` sets.
    """

    def __init__(self) -> None:
        self.requested = False
        self.number: int | None = None
        """The signal that requested the stop, if any."""
        self._previous: dict[int, Any] = {}

    def request(self) -> None:
        self.requested = True

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():
            for number in STOPPING:
                if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                    self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.requested:
            self.requested, self.number = True, number
            with suppress(OSError):  # the terminal may be gone
                os.write(2, _MESSAGE)  # not print: a signal may interrupt a buffered write
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
