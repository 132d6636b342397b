"""The report as a self-contained HTML file: style, scripts and data inside."""

from __future__ import annotations

import base64
import hashlib
import html
import os
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from dwindle.core.errors import UserError
from dwindle.core.files import write_text_atomic
from dwindle.core.run_directory import REPORT
from dwindle.report.summary import encode, fingerprint

SCRIPTS = ("charts.js", "architecture.js", "page.js")
MARKER = "<!-- dwindle report -->"
"""Only files with it near the start are overwritten without ``--overwrite``."""


def render_page(summary: dict[str, Any], *, live: bool = False) -> str:
    """The page of a summary; a live page polls its server for new data."""
    encoded = encode(summary)
    name = str(summary["name"])
    return self_contained(
        name,
        encoded,
        styles=("colours.css", "page.css"),
        scripts=SCRIPTS,
        asks=live,
        attributes=f' data-live="/data.json" data-tag="&quot;{fingerprint(encoded)}&quot;"' if live else "",
        noscript="The figures are drawn by a script inside this page: enable JavaScript.",
    )


def self_contained(
    name: str,
    encoded: bytes,
    *,
    styles: Sequence[str],
    scripts: Sequence[str],
    asks: bool,
    noscript: str,
    attributes: str = "",
) -> str:
    """A page with its styles, scripts and data (JSON, in ``#run-data``) inside; ``asks``: it may ask its own server.

    The content security policy allows only the page's own script, by its hash: text of others could not run as code
    even if it reached the markup.
    """
    style = "".join(map(_static, styles))
    script = "\n".join(map(_static, scripts))
    connect = "'self'" if asks else "'none'"
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src '{_hash(script)}'; img-src data:; "
        f"connect-src {connect}; base-uri 'none'; form-action 'none'"
    )
    title = html.escape(name)
    return f"""<!doctype html>
{MARKER}
<html lang="en"{attributes}>
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title} · dwindle</title>
<link rel="icon" href="data:,">
<style>
{style}</style>
</head>
<body>
<main><noscript><h1>{title}</h1>
<p>{noscript}</p></noscript></main>
<script type="application/json" id="run-data">{_inert(encoded)}</script>
<script>{script}</script>
</body>
</html>
"""


def write_page(text: str, out: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
    """Write the page atomically; an older report is overwritten, other files only with ``overwrite``."""
    out = Path(out)
    if out.is_dir():
        raise UserError(f"--out {out}: is a directory: name a file, such as {out / REPORT}")
    if out.exists() and not overwrite and not is_report(out):
        raise UserError(f"--out {out}: exists and is not a dwindle report: choose another name or pass --overwrite")
    write_text_atomic(out, text, option="--out")
    return out


def is_report(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return MARKER.encode() in file.read(200)
    except OSError:
        return False


def _static(name: str) -> str:
    return files("dwindle.report").joinpath("static", name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _inert(encoded: bytes) -> str:
    """JSON escaped so that it can contain neither markup nor JavaScript line terminators."""
    text = encoded.decode()
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text
