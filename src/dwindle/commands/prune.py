"""``dwindle prune``."""

from __future__ import annotations

from typing import Annotated

import typer

from dwindle.commands.app import SHRINK, Device, Json, Model, TextField, To, app, note_odd_sizes, print_result
from dwindle.commands.guidance import export_command, pretrain_command, say_next
from dwindle.commands.options import options_of
from dwindle.core.errors import UserError
from dwindle.pruning.config import PostTrainingConfig


@app.command(rich_help_panel=SHRINK)
@options_of(PostTrainingConfig)
def prune(
    model: Model,
    to: To,
    out: Annotated[str, typer.Option(help="Directory to write.")],
    config: PostTrainingConfig,
    data: Annotated[
        list[str] | None, typer.Option(help="Calibration text; default: CPython's own documentation (pydoc).")
    ] = None,
    more_data: Annotated[
        list[str] | None, typer.Argument(metavar="TEXT", help="More text after --data, as from --data *.txt.")
    ] = None,
    text_field: TextField = "text",
    device: Device = "auto",
    measure: Annotated[bool, typer.Option(help="Measure source and result on held-out calibration text.")] = True,
    overwrite: Annotated[bool, typer.Option(help="Replace an existing model directory.")] = False,
    as_json: Json = False,
) -> None:
    """Prune without training: in one step, or in rounds with new saliencies; all layers alike, or each on its own."""
    from dwindle.data.pydoc_text import DEFAULT_TEXT
    from dwindle.run.prune import prune

    if more_data and not data:
        raise UserError(f"unexpected argument {more_data[0]!r}: calibration files follow --data")
    texts = [*(data or [DEFAULT_TEXT]), *(more_data or [])]
    result = prune(
        model,
        to,
        config=config,
        out=out,
        data=texts,
        text_field=text_field,
        device=device,
        measure=measure,
        overwrite=overwrite,
    )
    print_result({"out": out} | result.to_json() if as_json else result.render(out), as_json)
    note_odd_sizes(out, config, to, "--round-to 32")
    if as_json:
        return
    training = {}
    if result.quality is not None and result.quality.needs_training:
        training["prune while training instead: better at the same size"] = pretrain_command(model, texts, to)
    say_next(training | {"a file for llama.cpp": export_command(out, out)})
