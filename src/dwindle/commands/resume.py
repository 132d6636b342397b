"""``dwindle resume``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dwindle.commands.app import SHRINK, Json, app
from dwindle.commands.training_output import Processes, launch_resume, print_run
from dwindle.core.run_directory import RunDirectory


@app.command(rich_help_panel=SHRINK)
def resume(
    run: Annotated[str, typer.Argument(help="Directory of a run.")], nproc: Processes = 0, as_json: Json = False
) -> None:
    """Continue a run from its newest good checkpoint, on any number of processes."""
    if nproc:
        from dwindle.recipe.recipe import load_recipe
        from dwindle.run.plan import check_processes

        directory = RunDirectory(Path(run))
        directory.check_is_run()
        check_processes(load_recipe(directory.recipe), nproc)
        launch_resume(run, nproc, as_json)
        return
    from dwindle.run.pretrain import resume

    print_run(resume(run), as_json)
