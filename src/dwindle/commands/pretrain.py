"""``dwindle pretrain``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from dwindle.commands.app import SHRINK, Json, app
from dwindle.commands.plan_output import Goal, Measure, Price, Tokens, split_overrides
from dwindle.commands.training_output import DryRun, Out, Overwrite, Processes, Ranks, Training, train
from dwindle.core.config import read_toml
from dwindle.core.errors import UserError
from dwindle.recipe.library import find_recipe, ready_recipes


@app.command(rich_help_panel=SHRINK)
def pretrain(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE",
            help="A .toml file, a ready-made recipe (demo), or with --to a model.",
            autocompletion=lambda: list(ready_recipes()),
        ),
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE | TEXT]...", help="prune.target=70M training.lr=3e-4; with --to also text."),
    ] = None,
    to: Annotated[str | None, typer.Option(help="Make a model this small with the settings of `dwindle new`.")] = None,
    goal: Goal = "quality",
    tokens: Tokens = None,
    out: Out = None,
    dry_run: DryRun = False,
    measure: Measure = True,
    price: Price = None,
    overwrite: Overwrite = False,
    nproc: Processes = 0,
    world: Ranks = None,
    as_json: Json = False,
) -> None:
    """Continue pretraining a model while it is pruned to a target size: from a recipe, or MODEL TEXT… --to 50%."""
    chosen, name = _chosen(recipe, arguments or [], to, goal, tokens)
    train(chosen, name, Training(out, dry_run, measure, price, overwrite, nproc, as_json, world))


def _chosen(recipe: str, arguments: list[str], to: str | None, goal: str, tokens: str | None) -> tuple[Any, str]:
    """The recipe and its name; a wrong path and wrong TOML are reported before the slow imports."""
    if to is not None:
        if recipe.endswith(".toml") or recipe in ready_recipes():
            raise UserError(f"--to {to}: needs a model and a text: with a recipe, write prune.target={to}")
        from dwindle.run.new import new_recipe, recipe_name

        texts, overrides = split_overrides(arguments)
        made = new_recipe(recipe, texts, to, goal=goal, tokens=tokens, overrides=overrides)
        return made[1], recipe_name(recipe, to)
    if tokens is not None:
        raise UserError(f"--tokens {tokens}: needs --to: with a recipe, write training.tokens={tokens}")
    if goal != "quality":
        raise UserError(f"--for {goal}: needs --to: a recipe states its own settings")
    tables = read_toml(find_recipe(recipe))
    from dwindle.recipe.recipe import recipe_from

    return recipe_from(tables, arguments, recipe), Path(recipe).name.removesuffix(".toml")
