"""Results in notebooks: what a command prints on a terminal, as HTML."""

from __future__ import annotations

from dataclasses import asdict
from io import StringIO
from typing import Any

_WIDTH = 110
_PAGE = '<pre style="white-space:pre;overflow-x:auto;line-height:1.2;font-family:monospace">{code}</pre>'


class Shown:
    """Base of results, which are dataclasses with ``render``; a notebook shows one as the last expression of a cell."""

    __slots__ = ()

    def to_json(self) -> dict[str, Any]:
        """The result for ``--json``."""
        return asdict(self)  # type: ignore[call-overload, no-any-return]

    def _repr_html_(self) -> str:
        from dwindle.core.terminal import PlainConsole

        console = PlainConsole(record=True, file=StringIO(), width=_WIDTH)
        console.print(self.render())  # type: ignore[attr-defined]
        return console.export_html(code_format=_PAGE, inline_styles=True)
