"""``dwindle pretrain``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from dwindle.commands.app import Json, app, print_result
from dwindle.commands.training_output import Processes, launch_resume, print_run
from dwindle.core.run_directory import RunDirectory


@app.command()
def pretrain(
    recipe: Annotated[str, typer.Argument(help="A recipe, such as recipes/demo.toml.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="section.key=value …, such as prune.target=70M training.lr=3e-4.")
    ] = None,
    out: Annotated[str | None, typer.Option(help="Directory of the run; default: runs/<recipe's name>.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and stop.")] = False,
    overwrite: Annotated[bool, typer.Option(help="Replace an existing run.")] = False,
    nproc: Processes = 0,
    as_json: Json = False,
) -> None:
    """Continue pretraining a model while it is pruned to a target size."""
    from dwindle.recipe.recipe import load_recipe

    chosen = load_recipe(recipe, overrides or [])  # before the slow imports: errors appear at once
    if dry_run:
        from dwindle.run.plan import make_plan

        plan = make_plan(chosen)
        print_result(plan.to_json() if as_json else plan.render(), as_json)
        return
    run = Path(out) if out is not None else Path("runs") / Path(recipe).stem
    if nproc:
        _launch_new_run(chosen, RunDirectory(run), nproc, overwrite, as_json)
        return
    from dwindle.run.pretrain import pretrain

    print_run(pretrain(chosen, run, overwrite=overwrite), as_json)


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
