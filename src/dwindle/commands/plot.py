"""``dwindle plot``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dwindle.commands.app import JUDGE, Json, app, print_result
from dwindle.core.terminal import plain

RunArguments = Annotated[
    list[str],
    typer.Argument(
        metavar="[NAME=]RUN", help="A run or a model directory of dwindle prune; several are drawn together."
    ),
]


@app.command(rich_help_panel=JUDGE)
def plot(
    runs: RunArguments,
    out: Annotated[str, typer.Option(help="Directory to write: PNG and SVG of every figure.")],
    dpi: Annotated[int, typer.Option(help="Resolution of the PNG files.")] = 200,
    overwrite: Annotated[bool, typer.Option(help="Replace an existing directory of figures.")] = False,
    as_json: Json = False,
) -> None:
    """Draw the figures of a report as PNG and SVG; for several runs, loss and size in one figure."""
    from dwindle.report.plots import open_named, write_overlay, write_plots

    labels, found = zip(*map(open_named, runs), strict=True)
    if len(found) > 1:
        names = write_overlay(found, out, names=labels, dpi=dpi, overwrite=overwrite)
    else:
        names = write_plots(found[0], out, dpi=dpi, overwrite=overwrite)
    lines = "\n".join(plain(str(Path(out) / name)) for name in names)
    print_result({"out": out, "files": names} if as_json else lines, as_json)
