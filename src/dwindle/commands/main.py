"""Entry point of ``dwindle``: user errors become one line and exit code 2, warnings one line."""

from __future__ import annotations

import errno
import importlib
import os
import pkgutil
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn, TextIO

from dwindle import commands
from dwindle.commands.app import app
from dwindle.core.errors import UserError
from dwindle.core.terminal import plain, say, shortened
from dwindle.distributed.elastic import said_before

_OUTPUT_ERRORS = (errno.ENOSPC, errno.EIO, errno.EPIPE)


def main() -> None:
    """Run one command."""
    _quiet_libraries()
    run_command(_run)


def _run() -> None:
    for room in pkgutil.iter_modules(commands.__path__):
        importlib.import_module(f"dwindle.commands.{room.name}")
    app()


def run_command(command: Callable[[], object]) -> None:
    """Call it; what its user can mend is one line and exit code 2. Scripts beside the package run in it, too."""
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            try:
                command()
            finally:
                sys.stdout.flush()  # here, where a full disk behind a redirection can still be reported
    except UserError as error:
        if said_before(str(error)):
            sys.exit(2)
        _fail(str(error))
    except OSError as error:  # of a file that no other message names
        _fail(f"{_named(error)}{error.strerror or error}")
    except MemoryError:
        _fail("there is not enough memory: use a smaller model, or fewer tokens at a time")
    except (KeyboardInterrupt, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not isinstance(error.__cause__, KeyboardInterrupt):
            raise  # Python 3.11 wraps what interrupts the body of a class, as during imports
        say("interrupted", error=True)
        sys.exit(130)


def _named(error: OSError) -> str:
    names = [os.fsdecode(name) for name in (error.filename, error.filename2) if isinstance(name, (str, bytes))]
    return f"{names[-1]}: " if names else "standard output: " if error.errno in _OUTPUT_ERRORS else ""


def _fail(message: str) -> NoReturn:
    """One line on standard error; output that cannot be written is not tried again on exit."""
    with suppress(OSError):
        say(shortened(plain(f"error: {message}")), error=True)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    sys.exit(2)


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
        say(plain(f"warning: {message}"), error=True)
    else:
        _show_others(message, category, filename, lineno, file, line)


def _quiet_libraries() -> None:
    """Silence other libraries, whose warnings are for developers."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
