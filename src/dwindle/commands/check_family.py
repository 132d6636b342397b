"""``dwindle check-family``."""

from __future__ import annotations

from typing import Annotated

import typer

from dwindle.commands.app import LOOK, Json, app, show


@app.command(rich_help_panel=LOOK)
def check_family(
    model: Annotated[str, typer.Argument(help="A model directory, hub id or config.json; weights are not read.")],
    family: Annotated[
        str | None, typer.Option(help="A family's table (.toml or .json) that is not beside the model yet.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Prune a tiny random model of this configuration in every way, train it zeroed and sliced, and compare."""
    from dwindle.run.family_check import check_family

    found = check_family(model, family=family)
    show(found, as_json)
    if not found.passed:
        raise typer.Exit(2)
