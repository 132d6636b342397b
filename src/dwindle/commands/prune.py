"""``dwindle prune``."""

from __future__ import annotations

from typing import Annotated

import typer

from dwindle.commands.app import Device, Json, Model, TextField, app, chosen_device, note_odd_sizes, print_result
from dwindle.commands.options import options_of
from dwindle.core.errors import UserError
from dwindle.pruning.config import PostTrainingConfig


@app.command()
@options_of(PostTrainingConfig)
def prune(
    model: Model,
    to: Annotated[str, typer.Option(help="100M, 0.6, 60%, 50%nonemb, or hidden=512,heads=8,ffn=1280.")],
    out: Annotated[str, typer.Option(help="Directory to write.")],
    config: PostTrainingConfig,
    data: Annotated[
        list[str] | None, typer.Option(help="Calibration text; default: CPython's own documentation (pydoc).")
    ] = None,
    more_data: Annotated[
        list[str] | None, typer.Argument(metavar="TEXT", help="More text after --data, such as of --data *.txt.")
    ] = None,
    text_field: TextField = "text",
    device: Device = "auto",
    overwrite: Annotated[bool, typer.Option(help="Replace an existing model directory.")] = False,
    as_json: Json = False,
) -> None:
    """Prune without training: in one step, or in rounds with new saliencies; all layers alike, or each on its own."""
    from dwindle.data.pydoc_text import DEFAULT_TEXT
    from dwindle.run.prune import prune

    if more_data and not data:
        raise UserError(f"unexpected argument {more_data[0]!r}: calibration files follow --data")
    result = prune(
        model,
        to,
        config=config,
        out=out,
        data=[*(data or [DEFAULT_TEXT]), *(more_data or [])],
        text_field=text_field,
        device=chosen_device(device),
        overwrite=overwrite,
    )
    print_result(result.summary(out) if as_json else result.render(out), as_json)
    note_odd_sizes(out, "--round-to 32" if config.method == "efficientllm" else None)
