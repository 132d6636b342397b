"""Short names of files and folders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def short_names(paths: Sequence[Path]) -> list[str]:
    """The last part of each path, with as many parent folders as it takes to distinguish it from the others."""
    names = []
    for path in paths:
        depth, others = 1, [other.parts for other in paths if other != path]
        while any(other[-depth:] == path.parts[-depth:] for other in others):
            depth += 1
        names.append(Path(*path.parts[-depth:]).as_posix())
    return names
