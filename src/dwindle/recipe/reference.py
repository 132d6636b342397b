"""All keys of a recipe, from the dataclasses that define them: what they may be, their default, what they mean."""

from __future__ import annotations

import dataclasses
import types
import typing
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union

from dwindle.core.config import field_docs
from dwindle.recipe.recipe import Recipe

_WORDS = {str: "text", int: "whole number", float: "number", bool: "true or false"}


@dataclass(frozen=True, slots=True)
class Key:
    """One line of the reference."""

    name: str
    values: str
    default: str
    meaning: str


def recipe_keys(containing: str = "") -> list[Key]:
    """Keys in the order of a recipe, those whose name contains the word."""
    return [key for key in _keys_of(Recipe, "") if containing in key.name]


def markdown() -> str:
    """The reference as tables of a page, one for each section."""
    parts = []
    for section, meaning in field_docs(Recipe).items():
        rows = [key for key in recipe_keys() if key.name.startswith(f"{section}.")]
        lines = [[f"`{key.name.partition('.')[2]}`", key.values, key.default, key.meaning] for key in rows]
        cells = [["key", "values", "default", "meaning"], ["---"] * 4, *lines]
        table = "\n".join(f"| {' | '.join(row)} |" for row in cells)
        parts.append(f"### [{section}]\n\n{meaning}\n\n{table}\n")
    return "\n".join(parts)


def _keys_of(owner: Any, prefix: str) -> list[Key]:
    hints, docs, found = typing.get_type_hints(owner, include_extras=True), field_docs(owner), list[Key]()
    for field in dataclasses.fields(owner):
        name, hint = prefix + field.name, hints[field.name]
        named = typing.get_args(hint)[1] if typing.get_origin(hint) is dict else None
        if dataclasses.is_dataclass(hint):
            found += _keys_of(hint, f"{name}.")
        elif dataclasses.is_dataclass(named):
            found += _keys_of(named, f"{name}.NAME.")
        else:
            meaning = " ".join(docs.get(field.name, "").replace("``", "`").split())
            found.append(Key(name, _values(hint), _default(field), meaning))
    return found


def _values(hint: Any) -> str:
    """A type in words: ``Literal["a", "b"]`` is ``"a", "b"``; ``Annotated`` brings its own."""
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return str(hint.__metadata__[0])
    if origin is Literal:
        return ", ".join(f'"{value}"' if isinstance(value, str) else str(value) for value in inside)
    if origin in (Union, types.UnionType):
        return " or ".join(_values(one) for one in inside if one is not type(None))
    if origin is list:
        return f"list of {_values(inside[0])}"
    return _WORDS[hint]


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    elif field.default is dataclasses.MISSING:
        return "must be given"
    else:
        value = field.default
    if value is None or value in ("", [], {}):
        return "not set"
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value).replace("'", '"')
