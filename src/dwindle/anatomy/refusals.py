"""Which table describes a model, or one line that says why none does."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from dwindle.anatomy.families import FAMILIES, find_family
from dwindle.anatomy.family import Family
from dwindle.anatomy.family_files import DOCUMENTATION
from dwindle.core.errors import UserError

LAYER_PREFIX = "model.layers."
_EXPERT = re.compile(r"(^|\.)experts?(\.|$)")
_NUMBER = re.compile(r"\.\d+\.")
_MAX_NAMES = 6


def family_for(config: Any, names: Iterable[str]) -> Family:
    """The table of a model with these tensors; ``UserError`` if its family is unknown or a tensor has no row."""
    names = list(names)
    where = f"source {config.name_or_path}: " if config.name_or_path else ""
    if experts := [name for name in names if _EXPERT.search(name)]:
        raise UserError(
            f"{where}{config.model_type!r} is a mixture of experts ({experts[0]}), which cannot be pruned: "
            "give a dense model"
        )
    family = find_family(config.model_type)
    if family is None:
        nearest, missing = min(((n, unexplained(f, names)) for n, f in FAMILIES.items()), key=lambda pair: len(pair[1]))
        tensors = f"the nearest table ({nearest}) has no row for {_listed(missing)}"
        if not missing:
            tensors = f"the rows of {nearest} explain all its tensors"
        raise UserError(
            f"{where}model type {config.model_type!r} is not supported: {tensors}: "
            f"write a table ({DOCUMENTATION}); `dwindle families` lists those that are"
        )
    if missing := unexplained(family, names):
        raise UserError(
            f"{where}the table of {config.model_type!r} has no row for {_listed(missing)}: "
            f"such models are not supported ({DOCUMENTATION})"
        )
    return family


def unexplained(family: Family, names: Iterable[str]) -> list[str]:
    """Tensors without a row, by the name below their layer; each once."""
    found = {key: None for layer, key in map(split_name, names) if key not in (family.stem, family.layer)[layer]}
    return list(found)


def split_name(name: str) -> tuple[bool, str]:
    """(whether it belongs to a layer, its name in the table)."""
    if not name.startswith(LAYER_PREFIX):
        return False, _NUMBER.sub(".N.", name)
    return True, name.removeprefix(LAYER_PREFIX).partition(".")[2]


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(names[:_MAX_NAMES]) + more
