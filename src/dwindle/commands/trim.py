"""``dwindle trim``."""

from __future__ import annotations

import shlex
from typing import Annotated

import typer

from dwindle.commands.app import SHRINK, Json, Model, app, print_result, resolve_model
from dwindle.commands.guidance import export_command, say_next
from dwindle.core.config import described
from dwindle.data.vocabulary_config import VocabularyConfig


@app.command(rich_help_panel=SHRINK)
def trim(
    model: Model,
    vocab: Annotated[str, typer.Option(help=described(VocabularyConfig, "size", required=True))],
    out: Annotated[str, typer.Option(help="Directory to write.")],
    text: Annotated[list[str] | None, typer.Option(help=described(VocabularyConfig, "text"))] = None,
    data: Annotated[
        list[str] | None, typer.Option(help="Text to measure on; default: parts of --text, else CPython's docs.")
    ] = None,
    measure: Annotated[bool, typer.Option(help="Measure source and result in bits per byte.")] = True,
    overwrite: Annotated[bool, typer.Option(help="Replace an existing model directory.")] = False,
    as_json: Json = False,
) -> None:
    """Remove rare tokens: a smaller embedding and head, and the matching tokenizer."""
    from dwindle.run.trim import trim

    result = trim(
        resolve_model(model),
        vocab,
        text=text or [],
        out=out,
        data=data or [],
        measure=measure,
        overwrite=overwrite,
    )
    print_result({"out": out} | result.to_json() if as_json else result.render(out), as_json)
    if not as_json:
        again = {"training mends it": f"dwindle new {shlex.join([out, *text])} --to 80%"} if text else {}
        say_next({**again, "a file for llama.cpp": export_command(out, out)})
