"""``dwindle tokenize``."""

from __future__ import annotations

from typing import Annotated

import typer

from dwindle.commands.app import SHRINK, Json, TextField, app, print_result


@app.command(rich_help_panel=SHRINK)
def tokenize(
    inputs: Annotated[list[str], typer.Argument(help="Text files (.txt, .jsonl, .parquet, compressed), or hf: ids.")],
    model: Annotated[str, typer.Option(help="The model whose tokenizer to use.")],
    out: Annotated[str, typer.Option(help="Directory to write.")],
    text_field: TextField = "text",
    chat: Annotated[bool, typer.Option("--chat", help="The inputs are conversations, for dwindle tune.")] = False,
    overwrite: Annotated[bool, typer.Option(help="Replace existing token files.")] = False,
    as_json: Json = False,
) -> None:
    """Write text as memory-mapped token files, which recipes can name in place of the text."""
    from dwindle.core.sizes import counted
    from dwindle.data.token_files import write_token_files
    from dwindle.sources.loading import load_tokenizer

    files = write_token_files(
        inputs, load_tokenizer(model), out, text_field=text_field, overwrite=overwrite, chat=chat, option="inputs"
    )
    found = {"out": out, "tokens": files.num_tokens, "documents": files.num_documents}
    line = f"{out}: {files.num_tokens:,} tokens of {counted(files.num_documents, 'document')}"
    print_result(found if as_json else line, as_json)
