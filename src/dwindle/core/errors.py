"""The one exception that means "the user can fix this": commands print it as one line and exit with 2."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class UserError(Exception):
    """A message for a person: names the option, key or file, and says what to do."""


def first_line(error: BaseException) -> str:
    """A library's message, short enough to quote in ours."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".:") if lines else type(error).__name__


def install_hint(extra: str) -> str:
    """The command that installs an optional group of packages; dwindle itself is installed from its checkout."""
    return f"run `pip install -c constraints.txt -e '.[{extra}]'` in dwindle's checkout"


_ARGUMENTS = {"overwrite": "overwrite=True", "round": "round_to", "no-verify": "verify=False", "as": "layout"}
"""Options whose argument in Python is written differently."""


def in_python(message: str) -> str:
    """Options as arguments: ``--out x exists: pass --overwrite`` → ``out x exists: pass overwrite=True``.

    Commands between backticks stay.
    """
    parts = re.split(r"(`[^`]*`)", message)
    parts[::2] = [
        re.sub(r"(?<![\w-])--([a-z][a-z-]*)", lambda m: _ARGUMENTS.get(m[1], m[1].replace("-", "_")), part)
        for part in parts[::2]
    ]
    return "".join(parts)


def speaks_python(function: Callable[P, R]) -> Callable[P, R]:
    """The same function for Python: its errors name arguments, not options of the command line."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except UserError as error:
            error.args = (in_python(str(error)), *error.args[1:])
            raise

    return call
