"""Results in notebooks: what a command prints on a terminal, as HTML."""

from __future__ import annotations

from io import StringIO

_WIDTH = 110
_PAGE = '<pre style="white-space:pre;overflow-x:auto;line-height:1.2;font-family:monospace">{code}</pre>'


class Shown:
    """A result with ``render``; a notebook shows it as the last expression of a cell."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        from dwindle.core.terminal import PlainConsole

        console = PlainConsole(record=True, file=StringIO(), width=_WIDTH)
        console.print(self.render())  # type: ignore[attr-defined]
        return console.export_html(code_format=_PAGE, inline_styles=True)
