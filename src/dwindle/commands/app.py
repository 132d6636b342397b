"""The typer application and what its commands share; results go to standard output, messages to standard error."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from dwindle.anatomy.structure import Kind
from dwindle.core.config import described
from dwindle.core.errors import UserError
from dwindle.core.progress import without_spinners
from dwindle.core.terminal import PlainConsole, plain, say
from dwindle.pruning.config import PretrainPruneConfig, PruneConfig

_ORDER = (
    *("inspect", "families", "check-family", "demo", "keys"),
    *("new", "pretrain", "tune", "resume", "prune", "trim", "tokenize"),
    *("report", "runs", "plot", "eval", "winrate", "table", "compare"),
    *("generate", "chat", "export", "quantize", "bench", "push"),
)

API_NAMES = {"target": "to"}
"""Arguments of the Python API whose option has another name."""


def in_options(message: str, options: Mapping[str, str]) -> str:
    """Messages of the Python API name arguments; on the command line they name options: ``round_to 0: …`` →
    ``--round-to 0: …``."""
    head = re.match(r"[a-z_]+(?:, [a-z_]+)*(?=[ :])", message)
    if head is None or head[0] in sys.argv:  # a file or a word that was typed
        return message
    names = [API_NAMES.get(name, name) for name in head[0].split(", ")]
    if not all(name in options for name in names):
        return message
    return ", ".join(options[name] for name in names) + message[head.end() :]


class Commands(TyperGroup):
    """The commands; errors name options as they were typed, an interrupted command says how to continue."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Along a user's path, as in the help."""
        known = {name: place for place, name in enumerate(_ORDER)}
        return sorted(super().list_commands(ctx), key=lambda name: known.get(name, len(known)))

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except UserError as error:
            command = self.get_command(ctx, ctx.invoked_subcommand or "")
            parameters = command.params if command is not None else []
            options = {str(p.name): p.opts[0] for p in parameters if p.param_type_name == "option"}
            error.args = (in_options(str(error), options),)
            raise
        except KeyboardInterrupt as stop:  # typer would print nothing
            say(f"interrupted: {stop}" if stop.args else "interrupted", error=True)
            raise typer.Exit(130) from None


app = typer.Typer(
    name="dwindle",
    cls=Commands,
    help="Make a pretrained language model smaller while it keeps training.",
    epilog="Start with: dwindle new MODEL TEXT --to 50%. Each command prints the next.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)

LOOK, SHRINK, JUDGE, SHIP = "Look", "Make smaller", "Judge", "Run and ship"
"""Groups of commands in the help, along a user's path."""

Model = Annotated[
    str, typer.Argument(help="A Hugging Face directory or id, a .gguf file, a llama2.c .bin, or smollm2-135m.")
]
To = Annotated[str, typer.Option(help=described(PretrainPruneConfig, "target"))]
Device = Annotated[str, typer.Option(help="auto (a GPU if there is one), cpu or cuda.")]
TextField = Annotated[str, typer.Option(help="Field of JSON lines or column that holds the text.")]


def _without_spinners(context: typer.Context, as_json: bool) -> bool:
    if as_json:
        context.with_resource(without_spinners())
    return as_json


Json = Annotated[
    bool, typer.Option("--json", callback=_without_spinners, help="Print one JSON object instead of tables.")
]


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        from dwindle import __version__

        print(__version__)
        raise typer.Exit


def print_result(what: Any, as_json: bool) -> None:
    """One JSON object, plain lines, or anything that rich can render."""
    if as_json:
        print(json.dumps(what))
    elif isinstance(what, str):
        say(what)
    else:
        PlainConsole().print(what)


def show(result: Any, as_json: bool) -> None:
    """A result as one JSON object, or as it renders itself."""
    print_result(result.to_json() if as_json else result.render(), as_json)


def resolve_model(name: str) -> str:
    """Resolves a run directory to its model (logged to stderr)."""
    from dwindle.sources.loading import model_of_run

    model = model_of_run(Path(name))
    if model is None:
        return name
    say(plain(f"{name} is a run: using its model, {model}"), error=True)
    return str(model)


def note_odd_sizes(model: str | Path, prune: PruneConfig, target: str | None, remedy: str) -> None:
    """Warn that sizes are not multiples of 32, which quantized GGUF files need, or that no stock model has them.

    ``remedy`` is named where it would have rounded them; ``target`` is None where nothing was pruned.
    """
    from dwindle.anatomy.anatomy import Anatomy
    from dwindle.anatomy.build import is_custom
    from dwindle.anatomy.family import CUSTOM_PREFIX
    from dwindle.export.exporting import odd_sizes
    from dwindle.sources.loading import load_config

    config: Any = load_config(str(model))
    anatomy = Anatomy.of_config(config)
    if is_custom(config) and anatomy.source.is_uniform:
        what = f"hidden size {config.hidden_size:,} with {config.num_attention_heads} heads"
        family = config.model_type.removeprefix(CUSTOM_PREFIX)
        stored = "so the model is stored with a modelling file; `dwindle export --to hf --stock` pads it"
        say(plain(f"note: transformers accepts no {family} of {what}, {stored}"), error=True)
    sizes = odd_sizes(anatomy)
    if odd := [size for size in sizes if not size.startswith("heads")]:  # heads cannot be rounded
        what = f"{' and '.join(odd)}: not in blocks of 32, so most rows of a quantized GGUF file are stored as f16"
        padding = "padding by `dwindle export --round 32`"
        kinds: set[Kind] = {"stem" if size.startswith("hidden") else "ffn" for size in odd}
        ways = f"{remedy}, or {padding}," if target and prune.can_round(kinds, target) else padding
        say(f"note: {what}; {ways} avoids it", error=True)
