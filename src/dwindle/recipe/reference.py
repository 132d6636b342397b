"""All keys of a recipe, from the configurations that declare them: accepted values, default, meaning."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from dwindle.core.config import describe_type, iter_fields
from dwindle.recipe.recipe import Recipe


@dataclass(frozen=True, slots=True)
class KeyReference:
    """One line of the reference."""

    name: str
    values: str
    default: str
    meaning: str


def recipe_keys(containing: str = "") -> list[KeyReference]:
    """Keys in the order of a recipe, those whose name contains the word."""
    found = []
    for path, field in iter_fields(Recipe):
        name = ".".join(path)
        if containing in name:
            meaning = " ".join((field.description or "").replace("``", "`").split())
            found.append(KeyReference(name, describe_type(field.annotation), _default(field), meaning))
    return found


def markdown() -> str:
    """The reference as Markdown tables, one for each section."""
    parts = []
    for section, owner in Recipe.model_fields.items():
        rows = [key for key in recipe_keys() if key.name.startswith(f"{section}.")]
        lines = [[f"`{key.name.partition('.')[2]}`", key.values, key.default, key.meaning] for key in rows]
        cells = [["key", "values", "default", "meaning"], ["---"] * 4, *lines]
        table = "\n".join(f"| {' | '.join(row)} |" for row in cells)
        parts.append(f"### [{section}]\n\n{inspect.getdoc(owner.annotation)}\n\n{table}\n")
    return "\n".join(parts)


def _default(field: Any) -> str:
    if field.is_required():
        return "must be given"
    value = field.get_default(call_default_factory=True)
    if value is None or value in ("", [], {}):
        return "not set"
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value).replace("'", '"')
