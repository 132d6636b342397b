"""``dwindle families``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from dwindle.commands.app import LOOK, Json, app, print_result
from dwindle.core.errors import UserError


@app.command(rich_help_panel=LOOK)
def families(
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print the tables of the documentation.")] = False,
    as_json: Json = False,
) -> None:
    """What can be pruned in each family, and to what its models can be exported."""
    from dwindle.run.family_table import family_rows, keys_markdown, markdown, render

    if as_markdown and as_json:
        raise UserError("--markdown: cannot be combined with --json: omit one of them")
    if as_markdown:
        print(markdown(), keys_markdown(), sep="\n", end="")
        return
    print_result([asdict(row) for row in family_rows()] if as_json else render(), as_json)
