"""The typer application and what its commands share; results go to standard output, messages to standard error."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from dwindle.core.errors import UserError

API_NAMES = {"num_sequences": "sequences", "target": "to"}
"""Arguments of the Python API whose option has another name."""


def in_options(message: str, options: Mapping[str, str]) -> str:
    """The Python API names its arguments, a person typed options: ``round_to 0: …`` becomes ``--round-to 0: …``."""
    head = re.match(r"[a-z_]+(?:, [a-z_]+)*(?=[ :])", message)
    if head is None or head[0] in sys.argv:  # a file or a word that was typed
        return message
    names = [API_NAMES.get(name, name) for name in head[0].split(", ")]
    if not all(name in options for name in names):
        return message
    return ", ".join(options[name] for name in names) + message[head.end() :]


class Commands(TyperGroup):
    """The commands; what they refuse is named as it was typed, and an interrupted one says how to go on."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except UserError as error:
            command = self.get_command(ctx, ctx.invoked_subcommand or "")
            parameters = command.params if command is not None else []
            options = {str(p.name): p.opts[0] for p in parameters if p.param_type_name == "option"}
            error.args = (in_options(str(error), options),)
            raise
        except KeyboardInterrupt as stop:  # of which typer would say nothing
            print(f"interrupted: {stop}" if stop.args else "interrupted", file=sys.stderr)
            raise typer.Exit(130) from None


app = typer.Typer(
    name="dwindle",
    cls=Commands,
    help="Make a pretrained language model smaller while it keeps training.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Model = Annotated[
    str, typer.Argument(help="A Hugging Face directory or id, a .gguf file, a llama2.c .bin, or smollm2-135m.")
]
Device = Annotated[str, typer.Option(help="auto (a GPU if there is one), cpu or cuda.")]
TextField = Annotated[str, typer.Option(help="Field of JSON lines or column that holds the text.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        from dwindle import __version__

        print(__version__)
        raise typer.Exit


def chosen_device(name: str) -> str:
    """``auto`` as recipes mean it."""
    if name != "auto":
        return name
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def print_result(what: Any, as_json: bool) -> None:
    """One JSON object, or anything that rich can render."""
    if as_json:
        print(json.dumps(what))
        return
    from rich.console import Console

    Console().print(what)
