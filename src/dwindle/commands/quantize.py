"""``dwindle quantize``."""

from __future__ import annotations

from shlex import quote
from typing import Annotated

import typer

from dwindle.commands.app import SHIP, Device, Json, Model, TextField, app, resolve_model, show
from dwindle.commands.guidance import say_next, served_by_vllm
from dwindle.commands.options import options_of
from dwindle.quantization.config import QuantizeConfig


@app.command(rich_help_panel=SHIP)
@options_of(QuantizeConfig)
def quantize(
    model: Model,
    out: Annotated[str, typer.Option(help="Directory to write.")],
    config: QuantizeConfig,
    data: Annotated[list[str] | None, typer.Option(help="Text to calibrate on; default: CPython's docs.")] = None,
    valid: Annotated[list[str] | None, typer.Option(help="Text to measure perplexity on.")] = None,
    text_field: TextField = "text",
    device: Device = "auto",
    overwrite: Annotated[bool, typer.Option(help="Replace an existing quantized model.")] = False,
    as_json: Json = False,
) -> None:
    """Quantize weights (and activations) to 8 or 4 bits, calibrated on text."""
    from dwindle.data.pydoc_text import DEFAULT_TEXT
    from dwindle.quantization.quantize import quantize

    found = quantize(
        resolve_model(model),
        config=config,
        out=out,
        data=data or [DEFAULT_TEXT],
        valid=valid or [],
        text_field=text_field,
        device=device,
        overwrite=overwrite,
    )
    show(found, as_json)
    if not as_json:
        measured = {} if valid else {"its loss": f"dwindle eval {quote(out)} --text TEXT"}
        say_next(measured | {"serve it": served_by_vllm(out)})
