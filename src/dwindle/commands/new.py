"""``dwindle new``."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from dwindle.commands.app import SHRINK, Json, To, app, print_result
from dwindle.commands.guidance import say_next
from dwindle.commands.plan_output import Goal, Measure, Price, Tokens, split_overrides
from dwindle.core.terminal import plain, say


@app.command(rich_help_panel=SHRINK)
def new(
    model: Annotated[
        str, typer.Argument(help="The model to make smaller: a directory, hub id, .gguf or smollm2-135m.")
    ],
    texts: Annotated[list[str], typer.Argument(metavar="TEXT", help="Text to train on; section.key=value sets a key.")],
    to: To,
    goal: Goal = "quality",
    tokens: Tokens = None,
    valid: Annotated[list[str] | None, typer.Option(help="Held-out text; default: pieces of the text.")] = None,
    out: Annotated[str | None, typer.Option(help="Recipe to write; default: MODEL-to-SIZE.toml.")] = None,
    measure: Measure = True,
    price: Price = None,
    overwrite: Annotated[bool, typer.Option(help="Replace an existing recipe.")] = False,
    as_json: Json = False,
) -> None:
    """Write a recipe with the recommended settings for a model and a text, and estimate its time and memory."""
    from dwindle.core.files import refuse_file, write_text_atomic
    from dwindle.run.new import correction, new_recipe, recipe_name
    from dwindle.run.rehearsal import planned

    file = Path(out or f"{recipe_name(model, to)}.toml")
    refuse_file(file, "--out", suffix=".toml", overwrite=overwrite)
    texts, overrides = split_overrides(texts)
    text, recipe = new_recipe(model, texts, to, goal=goal, tokens=tokens, valid=valid or [], overrides=overrides)
    plan = planned(recipe, measure=measure, price=price)
    write_text_atomic(file, text, option="--out")
    print_result({"recipe": str(file), "plan": plan.to_json()} if as_json else plan.render(), as_json)
    if as_json:
        return
    say(plain(str(file)))
    start = f"dwindle pretrain {quote(str(file))}"
    say_next({"start it; Ctrl-C stops, `dwindle resume` continues": start})
    if (two := correction(recipe)) is not None:
        adapted = f"runs/{file.stem}-source"
        first, second = (" ".join([start, *overrides]) for overrides in two)
        say("or, for a lower loss, teacher correction: adapt the source to the text, then prune that", error=True)
        say_next(
            {
                "1. the source, which is the teacher as well": f"{first} --out {quote(adapted)}",
                "2. with the rest of the tokens": f"{second} {quote(f'source.model={adapted}/model')}",
            }
        )
