"""``dwindle table``."""

from __future__ import annotations

from typing import Annotated

import typer

from dwindle.commands.app import JUDGE, Device, Json, TextField, app, print_result, resolve_model
from dwindle.commands.evaluation_options import Data, Tasks, Text
from dwindle.commands.options import options_of
from dwindle.evaluation.config import EvalConfig


@app.command(rich_help_panel=JUDGE)
@options_of(EvalConfig, but=("max_length",))
def table(
    config: EvalConfig,
    models: Annotated[
        list[str] | None, typer.Argument(help="Models, runs of dwindle pretrain, or results of dwindle eval --out.")
    ] = None,
    tasks: Tasks = None,
    data: Data = None,
    text: Text = None,
    text_field: TextField = "text",
    device: Device = "auto",
    published: Annotated[bool, typer.Option(help="Add results from papers as reference rows.")] = False,
    markdown: Annotated[bool, typer.Option(help="Print Markdown.")] = False,
    as_json: Json = False,
) -> None:
    """Compare several models: parameters, tokens, tasks, average."""
    from dwindle.evaluation.table import model_table
    from dwindle.report.runs import MISSED, missed_target

    for name in models or []:
        resolve_model(name)
    found = model_table(
        models or [],
        tasks=tasks,
        places=data or [],
        texts=text or [],
        text_field=text_field,
        config=config,
        device=device,
        published=published,
        notes={name: MISSED for name in models or [] if missed_target(name)},
    )
    print_result(found.to_json() if as_json else found.markdown() if markdown else found.text(), as_json)
