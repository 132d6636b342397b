"""``dwindle compare``."""

from __future__ import annotations

from typing import Annotated

import typer

from dwindle.commands.app import JUDGE, Device, Json, Model, app, show
from dwindle.commands.options import options_of
from dwindle.run.config import NOT_COMPARED, CompareConfig


@app.command(rich_help_panel=JUDGE)
@options_of(CompareConfig, but=NOT_COMPARED)
def compare(
    model: Model,
    out: Annotated[str, typer.Option(help="Directory for compare.json and the figure.")],
    config: CompareConfig,
    metrics: Annotated[
        str, typer.Option(help="Metrics, separated by commas: taylor, taylor1, obd, wanda, obc, magnitude, random.")
    ] = "taylor,obd,wanda,obc,magnitude,random",
    to: Annotated[
        str, typer.Option(help="What to remove, as in the paper's table: 10%, or 10%nonemb; or sizes such as 100M.")
    ] = "10%,36%,51%,74%",
    data: Annotated[list[str] | None, typer.Option(help="Text to calibrate and train on; default: pydoc.")] = None,
    valid: Annotated[
        list[str] | None, typer.Option(help="Text to measure on; default: windows held out of --data.")
    ] = None,
    tasks: Annotated[str, typer.Option(help="Also measure these tasks, such as commonsense or arc_easy,piqa.")] = "",
    task_data: Annotated[list[str] | None, typer.Option(help="Where the task data is, as for dwindle eval.")] = None,
    task_limit: Annotated[int | None, typer.Option(help="The first N items of each task only.")] = None,
    device: Device = "auto",
    overwrite: Annotated[bool, typer.Option(help="Replace an earlier comparison in --out.")] = False,
    as_json: Json = False,
) -> None:
    """Every metric at every size: held-out loss without training, and with the same training tokens."""
    from dwindle.run.compare import compare

    result = compare(
        model,
        config=config,
        metrics=_parts(metrics),
        to=_parts(to),
        data=data or [],
        valid=valid or [],
        tasks=_parts(tasks),
        task_data=task_data or [],
        task_limit=task_limit,
        out=out,
        overwrite=overwrite,
        device=device,
    )
    show(result, as_json)


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
