"""Short names of files and folders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def told_apart(paths: Sequence[Path]) -> list[str]:
    """Of each path its last part, with as many folders as it takes to tell it from others that end alike."""
    names = []
    for path in paths:
        depth, others = 1, [other.parts for other in paths if other != path]
        while any(other[-depth:] == path.parts[-depth:] for other in others):
            depth += 1
        names.append(Path(*path.parts[-depth:]).as_posix())
    return names
