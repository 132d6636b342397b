"""``dwindle chat``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from dwindle.commands.app import SHIP, Device, app
from dwindle.commands.options import options_of
from dwindle.commands.report import serve
from dwindle.core.errors import UserError
from dwindle.core.terminal import plain, say
from dwindle.evaluation.config import GenerateConfig, SamplingConfig

if TYPE_CHECKING:
    from dwindle.run.chat import Conversation


@app.command(rich_help_panel=SHIP)
@options_of(GenerateConfig, but=("batch",))
def chat(
    models: Annotated[
        list[str], typer.Argument(metavar="MODEL...", help="Hugging Face directories or ids, runs, .gguf files.")
    ],
    config: GenerateConfig,
    system: Annotated[str, typer.Option(help="System prompt.")] = "",
    page: Annotated[bool, typer.Option("--page", help="Serve a page on 127.0.0.1: answers side by side.")] = False,
    port: Annotated[int, typer.Option(help="Port for --page; 0: any free port.")] = 0,
    open_page: Annotated[bool, typer.Option("--open", help="With --page: open it in the browser.")] = False,
    threads: Annotated[int, typer.Option(help="Threads of llama.cpp.")] = 1,
    device: Device = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="With --page: print its address as JSON.")] = False,
) -> None:
    """Talk to one model, or to several at once: in the terminal, or on a page (--page)."""
    from dwindle.run.chat import Conversation, open_chat_models

    if not page and (open_page or as_json):
        raise UserError("--open, --json: belong to --page: add it")
    sampling = SamplingConfig(**config.model_dump(include=set(SamplingConfig.model_fields)))
    with open_chat_models(models, config, device=device, threads=threads) as loaded:
        for model in loaded:
            if not model.facts.is_chat:
                name = plain(model.facts.name)
                say(f"note: {name} has no chat template: it continues your last message as plain text", error=True)
        if page:
            from dwindle.report.chat_server import ChatServer

            with ChatServer(loaded, port, config=sampling, system=system) as server:
                serve(server, open_page, as_json)
        else:
            _talk(Conversation(loaded, sampling, system=system))


def _talk(talk: Conversation) -> None:
    """Read lines until the end of the input."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        import readline  # noqa: F401  (line editing and history of input())

        say("/help for commands, Ctrl-D to end", error=True)
    while True:
        try:
            line = (input("> ") if is_terminal else next(sys.stdin)).strip()
        except (EOFError, StopIteration):
            return
        if line in ("/quit", "/exit"):
            return
        if not line:
            continue
        try:
            if line.startswith("/"):
                say(talk.command(line))
            else:
                talk.ask(line, _write)
        except UserError as error:
            say(f"error: {plain(str(error))}", error=True)


def _write(text: str) -> None:
    print(plain(text, keep="\n\t"), end="", flush=True)
