"""``dwindle winrate``."""

from __future__ import annotations

from typing import Annotated

import typer

from dwindle.commands.app import JUDGE, Device, Json, app, show
from dwindle.commands.options import options_of
from dwindle.evaluation.config import GenerateConfig

Side = "A model, or a .jsonl file of dwindle generate --prompts."


@app.command(rich_help_panel=JUDGE)
@options_of(GenerateConfig)
def winrate(
    a: Annotated[str, typer.Argument(help=Side)],
    b: Annotated[str, typer.Argument(help=Side)],
    config: GenerateConfig,
    judge: Annotated[
        str, typer.Option(help="A model, a .jsonl file of verdicts by people, or an OpenAI-compatible http(s) address.")
    ],
    prompts: Annotated[str | None, typer.Option(help="Prompts that models answer first.")] = None,
    out: Annotated[
        str | None, typer.Option(help="Directory for answers and verdicts: an interrupted command continues there.")
    ] = None,
    judge_model: Annotated[str | None, typer.Option(help="With an address: the model that it serves.")] = None,
    allow_network: Annotated[
        bool,
        typer.Option("--allow-network", help="Let --judge be an address: prompts and answers are sent there."),
    ] = False,
    calibrate: Annotated[
        str | None, typer.Option(help="Verdicts by people (id, verdict): report how often the judge agrees.")
    ] = None,
    tie_margin: Annotated[float, typer.Option(min=0, max=0.5, help="A preference this close to 0.5 is a tie.")] = 0.0,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first N prompts.")] = None,
    threads: Annotated[int, typer.Option(help="Threads of llama.cpp.")] = 1,
    device: Device = "auto",
    overwrite: Annotated[bool, typer.Option(help="Replace answers and verdicts in --out.")] = False,
    as_json: Json = False,
) -> None:
    """Judge the answers of two models pair by pair, each in both orders: win rate, also at equal lengths."""
    from dwindle.run.winrate import win_rate

    found = win_rate(
        a,
        b,
        judge,
        config=config,
        prompts=prompts,
        out=out,
        judge_model=judge_model,
        allow_network=allow_network,
        calibrate=calibrate,
        tie_margin=tie_margin,
        limit=limit,
        device=device,
        threads=threads,
        overwrite=overwrite,
    )
    show(found, as_json)
