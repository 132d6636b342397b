"""Progress of training: a live panel on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING

from rich.columns import Columns
from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from dwindle.core.sizes import format_count, format_duration
from dwindle.training.callbacks import Callback

if TYPE_CHECKING:
    from dwindle.training.loop import Trainer

_PLAIN_LINE_EVERY_S = 10.0


class Display(Callback):
    """Step, tokens, loss, throughput, time left, and the ``notes`` that other callbacks put on the trainer."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self._live: Live | None = None
        self._started = self._last_line = 0.0
        self._first_step = 0

    def on_start(self, trainer: Trainer) -> None:
        self._started = self._last_line = time.monotonic()
        self._first_step = trainer.step
        if self.console.is_terminal and not self.console.is_dumb_terminal:
            waiting = Spinner("dots", "measuring the start, then the first step")
            self._live = Live(waiting, console=self.console, refresh_per_second=4)
            self._live.start(refresh=True)

    def after_step(self, trainer: Trainer) -> None:
        fields = self.fields(trainer)
        if self._live is not None:
            with suppress(OSError):
                self._live.update(_panel(fields, trainer.step, trainer.num_steps))
            return
        now = time.monotonic()
        if now - self._last_line >= _PLAIN_LINE_EVERY_S or trainer.status != "running":
            self._last_line = now
            line = "  ".join(f"{name} {value}" for name, value in fields.items())
            with suppress(OSError):  # the terminal may be gone, the run goes on
                print(line, file=self.console.file, flush=True)

    def fields(self, trainer: Trainer) -> dict[str, str]:
        """Name and text of each field, in order."""
        last = trainer.last
        assert last is not None
        steps_done = max(trainer.step - self._first_step, 1)
        seconds_per_step = (time.monotonic() - self._started) / steps_done
        left = format_duration(seconds_per_step * (trainer.num_steps - trainer.step))
        shown = {
            "step": f"{trainer.step}/{trainer.num_steps}",
            "tokens": format_count(trainer.tokens),
            "loss": "skipped" if last.skipped else f"{last.loss:.4f}",
            "lr": f"{last.lr:.2e}",
            "tokens/s": format_count(last.num_tokens / max(last.seconds, 1e-9)),
            **trainer.notes,
            "left": left,
        }
        if trainer.bad_steps:
            shown["skipped steps"] = str(trainer.bad_steps)
        return shown

    def on_end(self, trainer: Trainer) -> None:
        if self._live is not None:
            with suppress(OSError):
                self._live.stop()
            self._live = None


def _panel(fields: dict[str, str], step: int, num_steps: int) -> Table:
    values = [Text.assemble((f"{name} ", "dim"), value) for name, value in fields.items()]
    panel = Table.grid()
    panel.add_row(ProgressBar(total=max(num_steps, 1), completed=step))
    panel.add_row(Columns(values, padding=(0, 2)))
    return panel
