"""The typer application and what its commands share; results go to standard output, messages to standard error."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

app = typer.Typer(
    name="dwindle",
    help="Make a pretrained language model smaller while it keeps training.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Model = Annotated[
    str, typer.Argument(help="A Hugging Face directory or id, a .gguf file, a llama2.c .bin, or smollm2-135m.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        from dwindle import __version__

        print(__version__)
        raise typer.Exit


def print_result(what: Any, as_json: bool) -> None:
    """One JSON object, or anything that rich can render."""
    if as_json:
        print(json.dumps(what))
        return
    from rich.console import Console

    Console().print(what)
