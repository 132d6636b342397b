"""Export to other formats and runtimes; every export is run and compared with its source before it is kept.

from dwindle.export import export
export("smaller", "gguf", "smaller.gguf", type_="q8_0")
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dwindle.export.exporting import Exported, export

__all__ = ["Exported", "export"]


def __getattr__(name: str) -> Any:
    """Import on first use: the child process of ``process.py`` imports this package without torch."""
    if name in __all__:
        from dwindle.export import exporting

        return getattr(exporting, name)
    raise AttributeError(f"module 'dwindle.export' has no attribute {name!r}")
