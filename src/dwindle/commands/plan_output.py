"""Options that ``dwindle new`` and ``dwindle pretrain`` share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Measure = Annotated[bool, typer.Option(help="In a plan: run a few steps to predict time and memory.")]
Price = Annotated[float | None, typer.Option(help="In a plan: price of an hour of this machine, to state the cost.")]
Goal = Annotated[
    str, typer.Option("--for", help="quality (the lowest loss), speed (round widths) or stock (a plain model).")
]
Tokens = Annotated[str | None, typer.Option(help="Training tokens; default: the text up to 4 times, at most 16M.")]


def split_overrides(arguments: list[str]) -> tuple[list[str], list[str]]:
    """(Texts, overrides): ``section.key=value`` is an override unless a file has that name."""
    overrides = [one for one in arguments if "=" in one and "." in one.partition("=")[0] and not Path(one).exists()]
    return [one for one in arguments if one not in overrides], overrides
