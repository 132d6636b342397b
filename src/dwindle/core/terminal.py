"""Printing untrusted text: names of files, contents of configurations and logs, messages of libraries.

Such text may hold escape sequences that recolour or rewrite a terminal, line breaks that fake further messages, and
square brackets that rich reads as markup. Everything that commands print goes through here.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.text import Text

if TYPE_CHECKING:
    from rich.table import Column, Table


def plain(text: str, *, keep: str = "") -> str:
    """``text`` with control characters, direction overrides and lone surrogates written out: ``\\x1b``, ``\\n``.

    ``keep`` are control characters of our own, such as line breaks.
    """
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() or letter in keep else _spelled(letter) for letter in text)


def shortened(text: str) -> str:
    """A long text without its middle: names and values from files can have megabytes."""
    return text if len(text) <= 1000 else f"{text[:500]} … {text[-500:]}"


def _spelled(letter: str) -> str:
    return letter.encode("unicode_escape").decode("ascii")


def say(text: str, *, error: bool = False) -> None:
    """Print plain lines on standard output, or on standard error; line breaks are ours."""
    print(plain(text, keep="\n\t"), file=sys.stderr if error else sys.stdout)


def right(*names: str, no_wrap: bool = False) -> list[Column]:
    """Right-aligned columns, as for numbers."""
    from rich.table import Column

    return [Column(name, justify="right", no_wrap=no_wrap) for name in names]


def titled(title: str, table: Table) -> Group:
    """A table below its title. Rich would wrap the title at the width of the table, and break the paths in it."""
    return Group(Text(plain(title, keep="\n"), style="table.title"), table)


class PlainConsole(Console):
    """A rich console for which text is only text: no markup, emoji codes, colours of numbers or control characters."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """All strings pass here: cells, titles and captions of tables as well as lines."""
        return super().render_str(plain(text, keep="\n\t"), **(options | {"markup": False, "emoji": False}))
