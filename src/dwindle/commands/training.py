"""``dwindle pretrain``, ``dwindle resume`` and ``dwindle tokenize``."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from dwindle.commands.app import Json, TextField, app, print_result
from dwindle.commands.models import say_odd_sizes
from dwindle.core.run_directory import RunDirectory

Processes = Annotated[int, typer.Option(min=0, help="Processes on this machine (one per GPU); 0: this one alone.")]


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

    chosen = load_recipe(recipe, overrides or [])  # before the slow imports, so that mistakes are told at once
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

    _print_run(pretrain(chosen, run, overwrite=overwrite), as_json)


@app.command()
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
        _launch(run, nproc, as_json)
        return
    from dwindle.run.pretrain import resume

    _print_run(resume(run), as_json)


def _launch_new_run(recipe: Any, run: RunDirectory, nproc: int, overwrite: bool, as_json: bool) -> None:
    """Check everything once, before any process is started."""
    from dwindle.recipe.recipe import resolve_recipe
    from dwindle.run.plan import check_processes
    from dwindle.run.pretrain import begin_run

    check_processes(recipe, nproc)
    begin_run(resolve_recipe(recipe), run, overwrite=overwrite)
    try:
        _launch(str(run.path), nproc, as_json)
    finally:
        run.forget_if_not_begun()


def _launch(run: str, nproc: int, as_json: bool) -> None:
    from dwindle.distributed.launch import launch

    code = launch(nproc, ["resume", run, *(["--json"] if as_json else [])])
    if code:
        raise typer.Exit(code)


@app.command()
def tokenize(
    inputs: Annotated[list[str], typer.Argument(help="Text files (.txt, .jsonl, .parquet, compressed), or hf: ids.")],
    model: Annotated[str, typer.Option(help="Whose tokenizer to use.")],
    out: Annotated[str, typer.Option(help="Directory to write.")],
    text_field: TextField = "text",
    overwrite: Annotated[bool, typer.Option(help="Replace existing token files.")] = False,
    as_json: Json = False,
) -> None:
    """Write text as memory-mapped token files, which recipes can name in place of the text."""
    from dwindle.data import write_token_files
    from dwindle.sources import load_tokenizer

    files = write_token_files(
        inputs, load_tokenizer(model), out, text_field=text_field, overwrite=overwrite, option="inputs"
    )
    found = {"out": out, "tokens": files.num_tokens, "documents": files.num_documents}
    documents = f"{files.num_documents:,} document{'' if files.num_documents == 1 else 's'}"
    print_result(found if as_json else f"{out}: {files.num_tokens:,} tokens of {documents}", as_json)


def _print_run(result: Any, as_json: bool) -> None:
    """How a run ended, and the command that continues it; printed by the first of several processes."""
    if os.environ.get("RANK", "0") != "0":
        return
    if as_json:
        print(json.dumps(result.to_json()))
    elif result.status == "stopped":
        print(f"stopped after step {result.step:,}; continue with: {RunDirectory(result.run).resume_command}")
    else:
        parts = [f"{result.parameters:,} parameters", f"{result.tokens:,} tokens"]
        measured = (("loss", result.loss), ("validation", result.valid_loss))
        parts += [f"{name} {value:.4f}" for name, value in measured if value is not None]
        print(f"finished: {', '.join(parts)}\nmodel: {result.model}")
        prune = result.recipe.prune
        say_odd_sizes(result.model, "prune.round_to=32" if prune.enabled and prune.method != "adapt" else None)
    _exit(result)


def _exit(result: Any) -> None:
    """What follows in a script must not take a run that was stopped, or missed its target, for a model of that size."""
    if result.skipped_steps:
        skipped = f"{result.skipped_steps:,} of {result.step:,} steps were skipped"
        print(f"warning: {skipped}: their loss or gradient was not finite", file=sys.stderr)
    if result.status == "stopped":
        raise typer.Exit(128 + (result.signal or signal.SIGINT))
    if not result.target_reached:
        left = f"{result.parameters:,} parameters are left"
        print(f"error: the target was not reached, {left}: give it more tokens or a faster pace", file=sys.stderr)
        raise typer.Exit(1)
