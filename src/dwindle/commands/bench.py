"""``dwindle bench latency``."""

from __future__ import annotations

from typing import Annotated

import typer

from dwindle.commands.app import SHIP, Json, app, resolve_model, show
from dwindle.core.errors import UserError

bench = typer.Typer(help="Measure speed relative to a baseline.", no_args_is_help=True)
app.add_typer(bench, name="bench", rich_help_panel=SHIP)


@bench.command()
def latency(
    models: Annotated[list[str], typer.Argument(help="Models to compare; the first one is the baseline.")],
    runtime: Annotated[
        str, typer.Option(help="torch, llamacpp, onnx, executorch, executorch-int8; commas separate several.")
    ] = "torch",
    threads: Annotated[str, typer.Option(help="Thread counts, such as 1,2,4,8.")] = "1",
    prompt: Annotated[int, typer.Option(help="Tokens in the prompt.")] = 64,
    new: Annotated[int, typer.Option(help="Tokens to generate.")] = 32,
    repeats: Annotated[int, typer.Option(help="Repetitions; models take turns within each.")] = 5,
    type_: Annotated[str, typer.Option("--type", help="GGUF type for llama.cpp.")] = "f16",
    round_to: Annotated[int | None, typer.Option("--round", help="Pad widths to a multiple of this.")] = None,
    as_json: Json = False,
) -> None:
    """Time prefill and decoding of several models, as ratios to the first."""
    from dwindle.evaluation.latency import measure_latency, named_models

    try:
        counts = [int(part) for part in threads.split(",") if part.strip()]
    except ValueError as error:
        raise UserError(f"--threads {threads!r}: give whole numbers, such as 1,2") from error
    found = measure_latency(
        {name: resolve_model(model) for name, model in named_models(models).items()},  # a run's model is named after it
        runtime=[part.strip() for part in runtime.split(",") if part.strip()],
        threads=counts or [1],
        prompt_tokens=prompt,
        new_tokens=new,
        repeats=repeats,
        type=type_,
        round_to=round_to,
    )
    show(found, as_json)
