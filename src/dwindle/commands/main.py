"""Entry point of ``dwindle``: user errors become one line and exit code 2, warnings one line."""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
import warnings
from typing import TextIO

from dwindle import commands
from dwindle.commands.app import app
from dwindle.core.errors import UserError


def main() -> None:
    """Run one command."""
    _quiet_libraries()
    for room in pkgutil.iter_modules(commands.__path__):
        importlib.import_module(f"dwindle.commands.{room.name}")
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            app()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


_show_others = warnings.showwarning


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Print our own warnings as one line, without the source location."""
    if category.__module__.partition(".")[0] == "dwindle":
        print(f"warning: {message}", file=sys.stderr)
    else:
        _show_others(message, category, filename, lineno, file, line)


def _quiet_libraries() -> None:
    """Silence the libraries underneath: their warnings are for developers."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
