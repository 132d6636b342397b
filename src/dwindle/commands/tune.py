"""``dwindle tune``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dwindle.commands.app import SHRINK, Json, app, resolve_model
from dwindle.commands.plan_output import Measure, Price, split_overrides
from dwindle.commands.training_output import DryRun, Out, Overwrite, Processes, Training, train

_CHAT = "Conversations (.jsonl, .parquet, hf:org/name), and keys of the recipe: training.lr=3e-4."


@app.command(rich_help_panel=SHRINK)
def tune(
    model: Annotated[str, typer.Argument(help="A run, a Hugging Face directory or id, or a .gguf file.")],
    arguments: Annotated[list[str], typer.Argument(metavar="CHAT... [KEY=VALUE]...", help=_CHAT)],
    text: Annotated[list[str] | None, typer.Option(help="Plain text to mix in (30 %); may be repeated.")] = None,
    valid: Annotated[list[str] | None, typer.Option(help="Conversations to validate on; default: a part.")] = None,
    tokens: Annotated[str | None, typer.Option(help="Training tokens; default: the conversations 3 times.")] = None,
    out: Out = None,
    dry_run: DryRun = False,
    measure: Measure = True,
    price: Price = None,
    overwrite: Overwrite = False,
    nproc: Processes = 0,
    as_json: Json = False,
) -> None:
    """Tune a model on the answers of conversations, with its own chat template; plain text keeps what it knows."""
    from dwindle.run.tune import tuning_recipe

    chats, overrides = split_overrides(arguments)
    source = resolve_model(model)
    recipe = tuning_recipe(source, chats, texts=text or [], valid=valid or [], tokens=tokens, overrides=overrides)
    name = f"{Path(model).name.removesuffix('.gguf')}-tuned"
    train(recipe, name, Training(out, dry_run, measure, price, overwrite, nproc, as_json))
