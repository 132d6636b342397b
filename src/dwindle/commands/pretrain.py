"""``dwindle pretrain``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from dwindle.commands.app import SHRINK, Json, app, print_result
from dwindle.commands.plan_output import Goal, Measure, Price, Tokens, split_overrides
from dwindle.commands.training_output import Processes, launch_resume, print_run
from dwindle.core.errors import UserError
from dwindle.core.run_directory import RunDirectory
from dwindle.recipe.library import ready_recipes


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
    out: Annotated[str | None, typer.Option(help="Directory of the run; default: runs/<recipe's name>.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan, with time and memory, and stop.")] = False,
    measure: Measure = True,
    price: Price = None,
    overwrite: Annotated[bool, typer.Option(help="Replace an existing run.")] = False,
    nproc: Processes = 0,
    as_json: Json = False,
) -> None:
    """Continue pretraining a model while it is pruned to a target size: from a recipe, or MODEL TEXT… --to 50%."""
    chosen, name = _chosen(recipe, arguments or [], to, goal, tokens)
    if dry_run:
        from dwindle.run.rehearsal import planned

        plan = planned(chosen, measure=measure, price=price)
        print_result(plan.to_json() if as_json else plan.render(), as_json)
        return
    run = Path(out) if out is not None else Path("runs") / name
    if nproc:
        _launch_new_run(chosen, RunDirectory(run), nproc, overwrite, as_json)
        return
    from dwindle.run.pretrain import pretrain

    print_run(pretrain(chosen, run, overwrite=overwrite), as_json)


def _chosen(recipe: str, arguments: list[str], to: str | None, goal: str, tokens: str | None) -> tuple[Any, str]:
    """The recipe and its name; errors appear before the slow imports where a file is read."""
    if to is not None:
        from dwindle.run.new import new_recipe, recipe_name

        texts, overrides = split_overrides(arguments)
        made = new_recipe(recipe, texts, to, goal=goal, tokens=tokens, overrides=overrides)
        return made[1], recipe_name(recipe, to)
    from dwindle.recipe.recipe import load_recipe

    if tokens is not None:
        raise UserError(f"--tokens {tokens}: needs --to: with a recipe, write training.tokens={tokens}")
    if goal != "quality":
        raise UserError(f"--for {goal}: needs --to: a recipe states its own settings")
    return load_recipe(recipe, arguments), Path(recipe).name.removesuffix(".toml")


def _launch_new_run(recipe: Any, run: RunDirectory, nproc: int, overwrite: bool, as_json: bool) -> None:
    """Check everything once, before any process is started."""
    from dwindle.recipe.recipe import resolve_recipe
    from dwindle.run.plan import check_processes
    from dwindle.run.pretrain import begin_run

    check_processes(recipe, nproc)
    begin_run(resolve_recipe(recipe), run, overwrite=overwrite)
    try:
        launch_resume(str(run.path), nproc, as_json)
    finally:
        run.forget_if_not_begun()
