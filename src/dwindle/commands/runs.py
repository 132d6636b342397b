"""``dwindle runs``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from dwindle.commands.app import JUDGE, Json, app, print_result


@app.command(rich_help_panel=JUDGE)
def runs(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="Directory that contains runs.")] = "runs",
    as_json: Json = False,
) -> None:
    """List runs: status, target, size, tokens, loss, and the settings in which they differ."""
    from dwindle.report.runs import list_runs, render_runs

    rows = list_runs(Path(folder))
    shown = render_runs(rows) if rows else f"no runs in {folder}"
    print_result([asdict(row) for row in rows] if as_json else shown, as_json)
