"""Short names of files and folders."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from dwindle.core.run_directory import RunDirectory

_LOCAL = re.compile(r"[/\\.~]|[A-Za-z]:[/\\]")


def public_name(source: str | os.PathLike[str]) -> str:
    """The name of a model in files that are published: the last part of a local path, hub ids and aliases as they are;
    the model of a run is named after the run.

    A path reveals who made a model, and on which machine.
    """
    name = os.fspath(source)
    if not (_LOCAL.match(name) or name.count("/") > 1 or os.path.exists(name)):
        return name
    path = os.path.abspath(os.path.expanduser(name))
    run = RunDirectory.of_model(Path(path))
    return re.split(r"[/\\]", path if run is None else str(run.path))[-1] or name


def short_names(paths: Sequence[Path]) -> list[str]:
    """The last part of each path, with as many parent folders as it takes to distinguish it from the others."""
    names = []
    for path in paths:
        depth, others = 1, [other.parts for other in paths if other != path]
        while any(other[-depth:] == path.parts[-depth:] for other in others):
            depth += 1
        names.append(Path(*path.parts[-depth:]).as_posix())
    return names
