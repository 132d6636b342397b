"""``dwindle sample``."""

from __future__ import annotations

from shlex import join
from typing import Annotated

import typer

from dwindle.commands.app import SHRINK, Device, Json, Model, app, show
from dwindle.commands.guidance import say_next
from dwindle.commands.options import options_of
from dwindle.evaluation.config import SampleConfig


@app.command(rich_help_panel=SHRINK)
@options_of(SampleConfig)
def sample(
    model: Model,
    text: Annotated[str, typer.Argument(help="Text whose paragraphs begin the documents.")],
    config: SampleConfig,
    out: Annotated[str, typer.Option(help="The .jsonl file of documents.")],
    threads: Annotated[int, typer.Option(help="Threads of llama.cpp.")] = 1,
    device: Device = "auto",
    overwrite: Annotated[bool, typer.Option(help="Replace an existing file, or one that was begun.")] = False,
    as_json: Json = False,
) -> None:
    """Let a model write more text to train on: the first words of a text's paragraphs, continued by sampling.

    Run the same command again after an interruption: it goes on where it was.
    """
    from dwindle.run.answers import sample_text

    try:
        done = sample_text(model, text, out, config=config, threads=threads, device=device, overwrite=overwrite)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("run the same command again to go on") from None
    show(done, as_json)
    if not as_json:
        say_next({"train on both": f"dwindle new {join([model, text, out])} --to 50% --valid HELD_OUT"})
