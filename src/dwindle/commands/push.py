"""``dwindle push``."""

from __future__ import annotations

from typing import Annotated

import typer

from dwindle.commands.app import SHIP, Json, app, show
from dwindle.core.terminal import plain, say


@app.command(rich_help_panel=SHIP)
def push(
    model: Annotated[str, typer.Argument(help="A model directory that dwindle wrote, or a run.")],
    repo: Annotated[str, typer.Argument(help="user/name on the Hugging Face Hub.")],
    gguf: Annotated[
        list[str] | None, typer.Option(help="A GGUF file to put beside it; those in the directory are found.")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="Only you can see it; refused if it is public.")] = False,
    with_samples: Annotated[
        bool, typer.Option("--with-samples", help="Also the samples, which quote the held-out text.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List files, sizes and deletions; send nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Publish a model on the Hugging Face Hub: weights, card, ledger, structure and GGUF files, in one commit."""
    from dwindle.export.publishing import push

    found = push(model, repo, gguf=gguf or [], private=private, with_samples=with_samples, dry_run=dry_run)
    show(found, as_json)
    if as_json:
        return
    if found.deleted is None:
        say("the repository is new or cannot be read: what would be deleted there is not known", error=True)
    for name in found.left_out:
        say(plain(f"stays here: {name}"), error=True)
    say("nothing was sent" if found.url is None else f"published: {found.url}", error=True)
