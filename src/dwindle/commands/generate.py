"""``dwindle generate``."""

from __future__ import annotations

from typing import Annotated

import typer

from dwindle.commands.app import SHIP, Device, Json, Model, app, print_result, show
from dwindle.commands.options import options_of
from dwindle.core.errors import UserError
from dwindle.evaluation.config import GenerateConfig


@app.command(rich_help_panel=SHIP)
@options_of(GenerateConfig)
def generate(
    model: Model,
    config: GenerateConfig,
    prompt: Annotated[
        str | None, typer.Argument(help="The beginning of a text, or with --chat a message.", show_default=False)
    ] = None,
    prompts: Annotated[
        str | None,
        typer.Option(help="Answer every line of this .jsonl (messages, turns, prompt, …) or .txt file."),
    ] = None,
    out: Annotated[str | None, typer.Option(help="With --prompts: the .jsonl file of answers.")] = None,
    chat: Annotated[
        bool | None,
        typer.Option("--chat/--no-chat", help="Use the model's chat template. Default: only with --prompts."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="With --prompts: only the first N.")] = None,
    threads: Annotated[int, typer.Option(help="Threads of llama.cpp and onnxruntime.")] = 1,
    device: Device = "auto",
    overwrite: Annotated[bool, typer.Option(help="Replace an existing file, or one that was begun.")] = False,
    as_json: Json = False,
) -> None:
    """Continue a prompt, or answer a file of prompts: .gguf in llama.cpp, ONNX in onnxruntime, others in transformers.

    With --prompts, run the same command again after an interruption: it goes on where it was.
    """
    if (prompt is None) == (prompts is None):
        raise UserError("prompt: give either a text or --prompts FILE")
    if prompts is None:
        from dwindle.run.generation import generate

        if out is not None or limit is not None:
            raise UserError("--out, --limit: belong to --prompts: omit them")
        text = generate(model, prompt, config=config, chat=bool(chat), threads=threads, device=device)
        shown = text if chat else f"{prompt}{text}"
        print_result({"prompt": prompt, "text": text} if as_json else shown, as_json)
        return
    if out is None:
        raise UserError("--out: is missing: name the file for the answers, such as --out answers.jsonl")
    from dwindle.run.answers import generate_answers

    try:
        done = generate_answers(
            model,
            prompts,
            out,
            config=config,
            chat=chat is not False,
            limit=limit,
            threads=threads,
            device=device,
            overwrite=overwrite,
        )
    except KeyboardInterrupt:
        raise KeyboardInterrupt("run the same command again to go on") from None
    show(done, as_json)
