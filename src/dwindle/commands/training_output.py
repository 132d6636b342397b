"""What ``dwindle pretrain`` and ``dwindle resume`` share: processes, and how the end of a run is printed."""

from __future__ import annotations

import json
import signal
from shlex import quote
from typing import Annotated, Any

import typer

from dwindle.commands.app import note_odd_sizes
from dwindle.commands.guidance import export_command, is_main_process, say_next
from dwindle.core.terminal import say

Processes = Annotated[int, typer.Option(min=0, help="Processes on this machine (one per GPU); 0: this one alone.")]


def launch_resume(run: str, nproc: int, as_json: bool) -> None:
    from dwindle.distributed.launch import launch

    code = launch(nproc, ["resume", run, *(["--json"] if as_json else [])])
    if code:
        raise typer.Exit(code)


def print_run(result: Any, as_json: bool) -> None:
    """How a run ended, how good its model is, and what to do next; printed by the first of several processes."""
    if not is_main_process():
        return
    if as_json:
        print(json.dumps(result.to_json()))
    else:
        say(result.render())
    if not as_json and result.status != "stopped":
        prune = result.recipe.prune
        note_odd_sizes(result.model, "prune.round_to=32" if prune.enabled and not prune.keeps_hidden_size else None)
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
