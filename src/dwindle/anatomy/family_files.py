"""Families from outside the package: tables as TOML or JSON files.

A table from outside reaches every command, recipe and process in one of three ways:

- ``family.toml`` (or ``.json``) beside a model's ``config.json``; models pruned from it get a copy;
- an installed package with an entry point of the group ``dwindle.families``: its name is the model type, its value the
  package that holds ``<model type>.toml`` (or ``.json``);
- ``register_family(file)`` in Python.

Tables are data: reading one runs no code of its author, except for importing an installed package.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points
from importlib.resources import files
from os import PathLike
from pathlib import Path
from typing import Any

import tomli_w

from dwindle.anatomy.family import FamilyFile
from dwindle.core.config import from_dict, read_toml
from dwindle.core.errors import UserError
from dwindle.core.files import write_text_atomic
from dwindle.core.reading import read_json

ENTRY_POINTS = "dwindle.families"
"""Group of the entry points."""
NAMES = ("family.toml", "family.json")
"""Files beside ``config.json`` that hold the table of a model."""
DOCUMENTATION = "docs/families.md"


def read_family(path: str | PathLike[str]) -> FamilyFile:
    """The table of a ``.toml`` or ``.json`` file; errors name the file and the row."""
    path = Path(path)
    if path.suffix == ".toml":
        return from_dict(FamilyFile, read_toml(path), str(path))
    if path.suffix != ".json":
        raise UserError(f"family {path}: give a .toml or .json file ({DOCUMENTATION})")
    try:
        data = read_json(path)
    except UserError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise UserError(f"family {path} does not exist: give the path of a .toml or .json file") from None
        raise UserError(f"family {error}") from None
    if not isinstance(data, dict):
        raise UserError(f"family {path}: is not a JSON object: write model_type, stem and layer ({DOCUMENTATION})")
    return from_dict(FamilyFile, data, str(path))


def table_of(table: Mapping[str, Any] | FamilyFile) -> FamilyFile:
    """A table given as a mapping, checked."""
    return table if isinstance(table, FamilyFile) else from_dict(FamilyFile, table, "family")


def file_beside(folder: Path) -> Path | None:
    """The table in a model directory, if it has one."""
    return next((folder / name for name in NAMES if (folder / name).is_file()), None)


def write_family(table: FamilyFile, folder: Path) -> None:
    """Put the table beside a model, so that every later command finds it."""
    write_text_atomic(folder / NAMES[0], tomli_w.dumps(table.model_dump(exclude_defaults=True)))


def package_family(name: str) -> FamilyFile | None:
    """The table of a model type in an installed package; None if no package offers it."""
    offers = [point for point in entry_points(group=ENTRY_POINTS) if point.name == name]
    if not offers:
        return None
    packages = [point.dist.name if point.dist is not None else point.value for point in offers]
    where = f"family {name!r}: the package {packages[0]}"
    if len(offers) > 1:
        raise UserError(f"family {name!r} is offered by several packages ({', '.join(packages)}): remove all but one")
    try:
        folder = files(offers[0].value)
    except Exception as error:
        raise UserError(f"{where} cannot be loaded: {error!r}") from error
    for suffix in (".toml", ".json"):
        path = Path(str(folder.joinpath(name + suffix)))
        if path.is_file():
            table = read_family(path)
            if table.model_type != name:
                raise UserError(f"{path}: model_type {table.model_type!r} is not {name!r}, as its entry point says")
            return table
    raise UserError(f"{where} offers it, but {offers[0].value} holds neither {name}.toml nor {name}.json")
