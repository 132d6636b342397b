"""Results in notebooks: what a command prints on a terminal, as HTML."""

from __future__ import annotations

from io import StringIO
from typing import Any

_WIDTH = 110
_PAGE = '<pre style="white-space:pre;overflow-x:auto;line-height:1.2;font-family:monospace">{code}</pre>'


class Shown:
    """A result with ``render``; a notebook shows it as the last expression of a cell."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        from rich.console import Console
        from rich.text import Text

        shown: Any = self.render()  # type: ignore[attr-defined]
        console = Console(record=True, file=StringIO(), width=_WIDTH)
        console.print(Text(shown) if isinstance(shown, str) else shown)
        return console.export_html(code_format=_PAGE, inline_styles=True)
