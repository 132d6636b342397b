"""``dwindle inspect``."""

from __future__ import annotations

from dwindle.commands.app import LOOK, Json, Model, app, print_result, resolve_model


@app.command(rich_help_panel=LOOK)
def inspect(model: Model, as_json: Json = False) -> None:
    """Show layers, heads, widths, parameters by part, and the size of a group of each kind."""
    from dwindle.run.inspection import inspect

    found = inspect(resolve_model(model))
    print_result(found.to_json() if as_json else found.render(), as_json)
