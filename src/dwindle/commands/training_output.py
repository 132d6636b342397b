"""What ``dwindle pretrain``, ``tune`` and ``resume`` share: options, processes, and how the end of a run is printed."""

from __future__ import annotations

import signal
from pathlib import Path
from shlex import quote
from typing import Annotated, Any, NamedTuple

import typer

from dwindle.commands.app import note_odd_sizes, show
from dwindle.commands.guidance import export_command, is_main_process, say_next
from dwindle.core.errors import UserError
from dwindle.core.run_directory import RunDirectory
from dwindle.core.terminal import say

Processes = Annotated[int, typer.Option(min=0, help="Processes on this machine (one per GPU); 0: only this one.")]


Out = Annotated[str | None, typer.Option(help="Directory of the run; default: runs/<name>.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the plan, with time and memory, and stop.")]
Ranks = Annotated[
    int | None,
    typer.Option(
        "--world", help="With --dry-run: count what each of so many ranks sends and holds (--nproc per machine, or 8)."
    ),
]
Overwrite = Annotated[bool, typer.Option(help="Replace an existing run.")]


class Training(NamedTuple):
    """The options of a command that trains."""

    out: str | None
    dry_run: bool
    measure: bool
    price: float | None
    overwrite: bool
    nproc: int
    as_json: bool
    world: int | None = None


def train(recipe: Any, name: str, options: Training) -> None:
    """Print the plan of a recipe, or start its run: here or in processes of its own."""
    if options.world is not None:
        _print_world(recipe, options.world, options)
        return
    if options.dry_run:
        from dwindle.run.rehearsal import planned

        plan = planned(recipe, measure=options.measure, price=options.price)
        show(plan, options.as_json)
        return
    run = Path(options.out) if options.out is not None else Path("runs") / name
    if options.nproc:
        _launch_new_run(recipe, RunDirectory(run), options)
        return
    from dwindle.run.pretrain import pretrain

    print_run(pretrain(recipe, run, overwrite=options.overwrite), options.as_json)


def _print_world(recipe: Any, world: int, options: Training) -> None:
    if not options.dry_run:
        raise UserError(f"--world {world}: counts and does not train: add --dry-run (--nproc starts processes)")
    if options.price is not None:
        raise UserError("--price: needs the time of measured steps, and --world measures none: use one of them")
    from dwindle.run.simulation import RANKS_PER_NODE, simulate

    plan = simulate(recipe, world, ranks_per_node=options.nproc or RANKS_PER_NODE)
    show(plan, options.as_json)


def _launch_new_run(recipe: Any, run: RunDirectory, options: Training) -> None:
    """Check everything once, before any process is started."""
    from dwindle.recipe.recipe import resolve_recipe
    from dwindle.run.plan import check_processes
    from dwindle.run.pretrain import begin_run

    check_processes(recipe, options.nproc)
    begin_run(resolve_recipe(recipe), run, overwrite=options.overwrite)
    try:
        launch_resume(str(run.path), options.nproc, options.as_json)
    finally:
        run.forget_if_not_begun()


def launch_resume(run: str, nproc: int, as_json: bool) -> None:
    from dwindle.distributed.launch import launch

    code = launch(nproc, ["resume", run, *(["--json"] if as_json else [])])
    if code:
        raise typer.Exit(code)


def print_run(result: Any, as_json: bool) -> None:
    """How a run ended, how good its model is, and what to do next; printed by the first of several processes."""
    if not is_main_process():
        return
    show(result, as_json)
    if not as_json and result.status != "stopped":
        prune = result.recipe.prune
        note_odd_sizes(result.model, prune, prune.target if prune.enabled else None, "prune.round_to=32")
        if result.target_reached:
            report = f"dwindle report {quote(str(result.run))}"
            say_next({"look at it": report, "a file for llama.cpp": export_command(result.run, result.run)})
    _exit(result)


def _exit(result: Any) -> None:
    """A non-zero status for a run that was stopped or missed its target, so that scripts do not use its model."""
    if result.skipped_steps:
        skipped = f"{result.skipped_steps:,} of {result.step:,} steps were skipped"
        say(f"warning: {skipped}: their loss or gradient was not finite", error=True)
    if result.status == "stopped":
        raise typer.Exit(128 + (result.signal or signal.SIGINT))
    if not result.target_reached:
        left = f"{result.parameters:,} parameters are left"
        say(f"error: the target was not reached, {left}: give it more tokens or a faster pace", error=True)
        raise typer.Exit(1)
