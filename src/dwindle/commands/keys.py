"""``dwindle keys``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from dwindle.commands.app import LOOK, app, print_result
from dwindle.core.errors import UserError


@app.command(rich_help_panel=LOOK)
def keys(
    word: Annotated[str, typer.Argument(help="Only keys that contain this, such as prune. or lr.")] = "",
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print all as tables of a page.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list.")] = False,
) -> None:
    """Every key of a recipe: what it may be, its default, what it means."""
    from rich.table import Table
    from rich.text import Text

    from dwindle.recipe.reference import markdown, recipe_keys

    if as_markdown:
        if word or as_json:
            raise UserError("--markdown: prints all keys: omit the word and --json")
        print(markdown(), end="")
        return
    found = recipe_keys(word)
    if not found:
        raise UserError(f"{word}: no key of a recipe contains it: run `dwindle keys` for all")
    if as_json:
        print_result([asdict(key) for key in found], as_json)
        return
    table = Table("key", "default", "meaning", box=None, padding=(0, 2, 0, 0))
    for key in found:
        table.add_row(key.name, Text(key.default), Text(f"{key.meaning} ({key.values})"))
    print_result(table, as_json)
