"""``dwindle report``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from dwindle.commands.app import JUDGE, Json, app, print_result
from dwindle.commands.guidance import export_command, say_next
from dwindle.core.errors import UserError
from dwindle.core.run_directory import REPORT
from dwindle.core.terminal import plain, say

if TYPE_CHECKING:
    from dwindle.report.loopback import LoopbackServer

RunArgument = Annotated[
    list[str],
    typer.Argument(metavar="RUN", help="A run of dwindle pretrain, or a model directory of dwindle prune."),
]


@app.command(rich_help_panel=JUDGE)
def report(
    runs: RunArgument,
    out: Annotated[str | None, typer.Option(help=f"HTML file to write; default: {REPORT} in the run.")] = None,
    open_page: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Serve it on 127.0.0.1, always up to date.")] = False,
    port: Annotated[int, typer.Option(help="Port for --watch; 0: any free port.")] = 0,
    published: Annotated[bool, typer.Option(help="Add the run's cost beside the published one.")] = False,
    overwrite: Annotated[bool, typer.Option(help="Overwrite a file that is not a report.")] = False,
    as_json: Json = False,
) -> None:
    """Write a report of a run: one self-contained HTML page."""
    from dwindle.report.page import render_page, write_page
    from dwindle.report.run import open_run
    from dwindle.report.summary import summarise

    if len(runs) > 1:
        raise UserError(
            f"{runs[1]}: a report shows one run: `dwindle plot {' '.join(runs)} --out DIR` draws several in a figure, "
            "`dwindle runs DIR` lists them in a table"
        )
    run = runs[0]
    if watch and out is not None:
        raise UserError("--out: cannot be combined with --watch: omit one of them")
    found = open_run(run)
    if watch:
        from dwindle.report.server import ReportServer

        with ReportServer(found, port, published=published) as server:
            serve(server, open_page, as_json)
        return
    summary = summarise(found, published=published)
    path = write_page(render_page(summary), out or found.directory.report, overwrite=overwrite)
    if open_page:
        _open_in_browser(path.resolve().as_uri())
    if as_json:
        figures = [figure["id"] for figure in summary["figures"]]
        print_result({"report": str(path), "figures": figures, "missing": summary["missing"]}, as_json)
        return
    for line in summary["missing"]:
        say(plain(f"note: {line}"), error=True)
    say(plain(str(path)))
    if found.directory.is_finished:
        say_next({"a file for llama.cpp": export_command(run, run.rstrip("/"))})


def serve(server: LoopbackServer, open_page: bool, as_json: bool) -> None:
    """Serve a page until Ctrl-C."""
    print(json.dumps({"url": server.url}) if as_json else f"{server.url} (Ctrl-C to stop)", flush=True)
    if open_page:
        _open_in_browser(server.url)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        say("stopped", error=True)


def _open_in_browser(url: str) -> None:
    import webbrowser

    if not webbrowser.open(url):
        say(f"no browser found: open {url}", error=True)
