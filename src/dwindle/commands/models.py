"""``dwindle inspect`` and ``dwindle prune``."""

from __future__ import annotations

import sys
from pathlib import Path

from dwindle.commands.app import Json, Model, app, print_result


def taken_model(name: str) -> str:
    """The model that is meant: of a run its own, which is said on standard error."""
    from dwindle.sources import model_of_run

    model = model_of_run(Path(name))
    if model is None:
        return name
    print(f"{name} is a run: its model, {model}, is taken", file=sys.stderr)
    return str(model)


def say_odd_sizes(model: str | Path, remedy: str | None) -> None:
    """Those who want a quantised file of what was just made should know before they measure it.

    ``remedy`` is what would have made the sizes round; None for the methods that cannot.
    """
    from dwindle.anatomy import Anatomy
    from dwindle.export.exporting import odd_sizes
    from dwindle.sources import load_config

    if odd := odd_sizes(Anatomy.of_config(load_config(str(model))).source):
        what = f"{' and '.join(odd)}: not in blocks of 32, so most rows of a quantised GGUF file stay f16"
        padding = "padding by `dwindle export --round 32`"
        ways = padding if remedy is None else f"{remedy}, or {padding},"
        print(f"note: {what}; {ways} avoids it", file=sys.stderr)


@app.command()
def inspect(model: Model, as_json: Json = False) -> None:
    """Show layers, heads, widths, parameters by part, and what a group of each type weighs."""
    from dwindle.run.inspection import inspect

    found = inspect(taken_model(model))
    print_result(found.to_json() if as_json else found.render(), as_json)
