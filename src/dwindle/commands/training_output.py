"""What ``dwindle pretrain`` and ``dwindle resume`` share: processes, and how the end of a run is printed."""

from __future__ import annotations

import json
import os
import signal
from typing import Annotated, Any

import typer

from dwindle.commands.app import note_odd_sizes
from dwindle.core.run_directory import RunDirectory
from dwindle.core.terminal import plain, say

Processes = Annotated[int, typer.Option(min=0, help="Processes on this machine (one per GPU); 0: this one alone.")]


def launch_resume(run: str, nproc: int, as_json: bool) -> None:
    from dwindle.distributed.launch import launch

    code = launch(nproc, ["resume", run, *(["--json"] if as_json else [])])
    if code:
        raise typer.Exit(code)


def print_run(result: Any, as_json: bool) -> None:
    """How a run ended, and the command that continues it; printed by the first of several processes."""
    if os.environ.get("RANK", "0") != "0":
        return
    if as_json:
        print(json.dumps(result.to_json()))
    elif result.status == "stopped":
        say(plain(f"stopped after step {result.step:,}; continue with: {RunDirectory(result.run).resume_command}"))
    else:
        parts = [f"{result.parameters:,} parameters", f"{result.tokens:,} tokens"]
        measured = (("loss", result.loss), ("validation", result.valid_loss))
        parts += [f"{name} {value:.4f}" for name, value in measured if value is not None]
        say(f"finished: {', '.join(parts)}\nmodel: {plain(str(result.model))}")
        prune = result.recipe.prune
        note_odd_sizes(result.model, "prune.round_to=32" if prune.enabled and not prune.keeps_hidden_size else None)
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
