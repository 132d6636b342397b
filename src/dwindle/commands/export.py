"""``dwindle export``."""

from __future__ import annotations

from typing import Annotated

import typer

from dwindle.commands.app import SHIP, Json, Model, app, resolve_model, show
from dwindle.commands.guidance import say_next


@app.command(rich_help_panel=SHIP)
def export(
    model: Model,
    to: Annotated[
        str,
        typer.Option(help="hf (directory), gguf (llama.cpp file), onnx (directory) or transformers.js (directory)."),
    ],
    out: Annotated[str, typer.Option(help="Directory, or a file name that ends in .gguf or .pte.")],
    type_: Annotated[
        str | None,
        typer.Option(
            "--type",
            help="gguf: f32, f16 (default), bf16, q8_0, q4_0, q4_1, q4_k_m, q5_k_m, q6_k, iq4_nl; hf: f32, f16, bf16; "
            "executorch: f32, int8.",
        ),
    ] = None,
    stock: Annotated[
        bool,
        typer.Option("--stock", help="Pad cluster attention and unequal layers to a stock model (exact)."),
    ] = False,
    round_to: Annotated[
        int | None, typer.Option("--round", help="Pad hidden and FFN widths to a multiple of this (exact).")
    ] = None,
    layout: Annotated[
        str | None, typer.Option("--as", help="hf: deci (DeciLMForCausalLM, unequal Llama layers without custom code).")
    ] = None,
    verify: Annotated[bool, typer.Option(help="Run the export in its runtime and compare it with its source.")] = True,
    threads: Annotated[int, typer.Option(help="Threads for the verification.")] = 1,
    overwrite: Annotated[bool, typer.Option(help="Replace an existing export.")] = False,
    as_json: Json = False,
) -> None:
    """Export a model for another runtime; the export is run there and compared with its source."""
    from dwindle.export.exporting import export

    model = resolve_model(model)
    found = export(
        model,
        to,
        out,
        type=type_,
        stock=stock,
        round_to=round_to,
        layout=layout,
        verify=verify,
        threads=threads,
        overwrite=overwrite,
    )
    show(found, as_json)
    if not as_json:
        say_next({f"run it in {runtime}": command for runtime, command in found.ways_to_run().items()})
