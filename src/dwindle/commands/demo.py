"""``dwindle demo``: what ``make demo`` runs."""

from __future__ import annotations

from typing import Annotated

import typer

from dwindle.commands.app import LOOK, Json, app, show


@app.command(rich_help_panel=LOOK)
def demo(
    recipe: Annotated[str, typer.Option(help="The recipe of the pruning-aware column.")] = "demo",
    out: Annotated[str, typer.Option(help="Directory for the models.")] = "runs/demo-models",
    sequences: Annotated[int, typer.Option(help="Calibration sequences of the post-training column.")] = 16,
    overwrite: Annotated[bool, typer.Option(help="Replace the models of an earlier demo.")] = False,
    as_json: Json = False,
) -> None:
    """Prune a real model in a few minutes on a CPU and show it before and after."""
    from pathlib import Path

    from dwindle.recipe.recipe import load_recipe
    from dwindle.run.demo import run_demo

    found = run_demo(load_recipe(recipe), Path(out), sequences=sequences, overwrite=overwrite)
    show(found, as_json)
