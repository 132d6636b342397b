"""``dwindle eval``."""

from __future__ import annotations

import json
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from dwindle.commands.app import JUDGE, Device, Json, Model, TextField, app, show
from dwindle.commands.evaluation_options import Data, Tasks, Text
from dwindle.commands.guidance import say_next
from dwindle.commands.options import options_of
from dwindle.core.errors import UserError
from dwindle.evaluation.config import EvalConfig


@app.command("eval", rich_help_panel=JUDGE)
@options_of(EvalConfig)
def evaluate(
    model: Model,
    config: EvalConfig,
    tasks: Tasks = None,
    data: Data = None,
    text: Text = None,
    text_field: TextField = "text",
    device: Device = "auto",
    out: Annotated[str | None, typer.Option(help="Also write the result as JSON, for dwindle table.")] = None,
    items: Annotated[
        str | None, typer.Option(help="Also write one JSON line per item with every choice's log-likelihood.")
    ] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace existing files of --out and --items.")] = False,
    as_json: Json = False,
) -> None:
    """Accuracy on common tasks and perplexity on texts, with the results of lm-evaluation-harness.

    MODEL may also be a .jsonl file of dwindle generate --prompts, for tasks that are generated (ifeval).
    """
    _check_files(out, items, overwrite)
    from dwindle.core.files import write_text_atomic
    from dwindle.evaluation.evaluate import evaluate

    result = evaluate(
        model,
        tasks or ([] if text else ["commonsense"]),
        data=data or [],
        text=text or [],
        text_field=text_field,
        config=config,
        device=device,
        items=items,
    )
    if out is not None:
        write_text_atomic(Path(out), json.dumps(result.to_json()) + "\n", option="--out")
    show(result, as_json)
    if out is not None and not as_json:
        say_next({"beside others": f"dwindle table {quote(out)} OTHER.json"})


def _check_files(out: str | None, items: str | None, overwrite: bool) -> None:
    """Before any work: both files are new or may be overwritten, are writable, and do not collide."""
    from dwindle.core.files import refuse_file

    for option, file in (("--out", out), ("--items", items)):
        if file is not None:
            refuse_file(Path(file), option, overwrite=overwrite)
    if out is None or items is None:
        return
    first, second = Path(out).resolve(), Path(items).resolve()
    if first == second or first in second.parents or second in first.parents:
        raise UserError(f"--items: {items} collides with --out {out}: choose another file")
