"""``dwindle inspect``."""

from __future__ import annotations

from dwindle.commands.app import LOOK, Json, Model, app, resolve_model, show


@app.command(rich_help_panel=LOOK)
def inspect(model: Model, as_json: Json = False) -> None:
    """Show layers, heads, widths, parameters by part, and the size of a group of each kind."""
    from dwindle.run.inspection import inspect

    found = inspect(resolve_model(model))
    show(found, as_json)
