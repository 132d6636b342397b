"""``dwindle generate``."""

from __future__ import annotations

from typing import Annotated

import typer

from dwindle.commands.app import SHIP, Device, Json, Model, app, print_result
from dwindle.core.terminal import say


@app.command(rich_help_panel=SHIP)
def generate(
    model: Model,
    prompt: Annotated[str, typer.Argument(help="The beginning of a text, or with --chat a message.")],
    tokens: Annotated[int, typer.Option(help="Tokens to generate at most.")] = 48,
    chat: Annotated[bool, typer.Option("--chat", help="Use the model's chat template.")] = False,
    threads: Annotated[int, typer.Option(help="Threads of llama.cpp and onnxruntime.")] = 1,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Continue a prompt: a .gguf file in llama.cpp, an ONNX directory in onnxruntime, others in transformers."""
    from dwindle.run.generation import generate

    text = generate(model, prompt, tokens=tokens, chat=chat, threads=threads, device=device)
    if as_json:
        print_result({"prompt": prompt, "text": text}, as_json)
    else:
        say(text if chat else prompt + text)
