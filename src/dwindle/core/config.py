"""Typed dataclasses ⇄ TOML, with dotted overrides from the command line.

A configuration is a dataclass whose fields are scalars, lists, string-keyed dicts, ``Literal`` choices,
unions of those, or other such dataclasses. Everything that can be wrong with a file or an override becomes a
``UserError`` of one line that names the dotted key and says what is accepted, because the person reading it
has a text editor open, not this code.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import dataclasses
import datetime
import difflib
import functools
import inspect
import itertools
import json
import math
import os
import re
import textwrap
import tomllib
import types
import typing
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from dwindle.core.errors import UserError

T = TypeVar("T")
Key = tuple[str, ...]

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_KIND_WORDS: dict[Any, str] = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    list: "a list",
    dict: "a table",
}


# Reading ---------------------------------------------------------------------------------------------------


def from_dict(cls: type[T], data: dict[str, Any], where: str = "") -> T:
    """Build ``cls`` from parsed TOML, refusing unknown keys and wrong types.

    ``where`` (a file name, say) starts every message. An int is taken where a float is wanted, since people
    write ``lr = 1``; nothing else is converted, so that a quoted number or a ``1`` for ``true`` is reported.
    """
    try:
        result: T = _convert(cls, data, (), _Schema(cls))
    except _Mismatch as error:
        raise UserError(f"{where}: {error}" if where else str(error)) from None
    return result


def from_toml(cls: type[T], text: str, where: str = "") -> T:
    """The inverse of ``to_toml``."""
    return from_dict(cls, parse_toml(text, where), where)


def parse_toml(text: str, where: str = "") -> dict[str, Any]:
    """``tomllib.loads`` with an error that names the file and the line."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        prefix = f"{where}: " if where else ""
        raise UserError(f"{prefix}not valid TOML: {' '.join(str(error).split())}") from None


def read_toml(path: str | Path) -> dict[str, Any]:
    """The tables of a TOML file; a missing file, a directory or unreadable text is the user's to fix."""
    path = Path(path)
    if path.is_dir():
        raise UserError(f"{path} is a directory: give the .toml file itself")
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: give the path of a .toml file") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8 text: save it as UTF-8") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    return parse_toml(text, str(path))


# Overrides -------------------------------------------------------------------------------------------------


def apply_overrides(data: dict[str, Any], overrides: Iterable[str], cls: type[Any]) -> dict[str, Any]:
    """A copy of ``data`` with ``key.path=value`` assignments applied, checked against ``cls`` one by one.

    The value is read as the field wants it: a TOML value if that fits (``3e-4``, ``true``, ``["a"]``), else
    plain text (``70M``, ``1:9``), else, for a list, items between commas. ``none`` unsets a key that may be empty.
    """
    result = copy.deepcopy(data)
    schema = _Schema(cls)
    for override in overrides:
        name, equals, text = override.partition("=")
        if not equals or not name.strip():
            raise UserError(f"override {override}: write section.key=value")
        try:
            key = _parse_key(name.strip())
            wanted = schema.type_at(key)
            value = _value_from_text(wanted, text.strip(), key, schema)
            _assign(result, key, value)
        except _Mismatch as error:
            raise UserError(f"override {override}: {error}") from None
    return result


def _parse_key(text: str) -> Key:
    node: Any = {}
    with contextlib.suppress(tomllib.TOMLDecodeError):
        node = tomllib.loads(f"{text} = 0")
    key: list[str] = []
    while isinstance(node, dict) and node:
        name, node = next(iter(node.items()))
        key.append(name)
    if not key:
        raise _Mismatch((), f"{text} is not a dotted key such as section.name")
    return tuple(key)


def _value_from_text(wanted: Any, text: str, key: Key, schema: _Schema) -> Any:
    if text.lower() == "none" and schema.may_be_empty(key):
        return None
    values: list[Any] = [text]
    with contextlib.suppress(tomllib.TOMLDecodeError):
        values = [*tomllib.loads(f"value = {text}").values(), text] if "\n" not in text else [text]
    errors: list[_Mismatch] = []
    for value in values:
        try:
            _convert(wanted, value, key, schema, partial=True)
            return value
        except _Mismatch as error:
            errors.append(error)
    for member in _members(wanted):
        if typing.get_origin(member) is list:
            inside = text[1:-1] if text.startswith("[") and text.endswith("]") else text
            parts = [part.strip() for part in inside.split(",") if part.strip()]
            return [_value_from_text(typing.get_args(member)[0], part, key, schema) for part in parts]
    raise errors[0]


def _assign(data: dict[str, Any], key: Key, value: Any) -> None:
    node: Any = data
    for depth, name in enumerate(key[:-1]):
        node = node.setdefault(name, {})
        if not isinstance(node, dict):
            raise _Mismatch(key[: depth + 1], f"expected a table, got {_show(node)}")
    if value is None:
        node.pop(key[-1], None)
    else:
        node[key[-1]] = value


# Checking a value against a type ---------------------------------------------------------------------------


class _Mismatch(Exception):
    """A value that does not fit, with the dotted key it was found at."""

    def __init__(self, key: Key, problem: str) -> None:
        super().__init__(f"{_dotted(key)}: {problem}" if key else problem)


class _Schema:
    """The root dataclass of a configuration, for questions about keys anywhere in it."""

    def __init__(self, root: Any) -> None:
        self.root = root

    def type_at(self, key: Key) -> Any:
        """The declared type of a dotted key; unknown keys are refused with the nearest name."""
        wanted = self.root
        for depth, name in enumerate(key):
            child = _child_type(wanted, name)
            if child is None:
                owner = _dataclass_in(wanted)
                if owner is None:
                    raise _Mismatch(key[:depth], f"expected {_words(wanted)}, it has no keys of its own")
                raise self.unknown(key[: depth + 1], owner)
            wanted = child
        return wanted

    def may_be_empty(self, key: Key) -> bool:
        """Whether a key means nothing when it is not given: it is optional, or empty by default."""
        if _is_optional(self.type_at(key)):
            return True
        owner = _dataclass_in(self.type_at(key[:-1]))
        field = {field.name: field for field in dataclasses.fields(owner)}[key[-1]] if owner else None
        return field is not None and (field.default == "" or field.default_factory in (list, dict))

    def unknown(self, key: Key, owner: Any) -> _Mismatch:
        *path, name = key
        siblings = list(_hints(owner))
        near = difflib.get_close_matches(name, siblings, n=1) or [
            sibling for sibling in siblings if _initials(name) == sibling or _initials(sibling) == name
        ]
        elsewhere = [_dotted(other) for other in self.keys() if other[-1] == name]
        if near or (elsewhere and not path):
            better = _dotted((*path, near[0])) if near else elsewhere[0]
            return _Mismatch((), f"unknown key {_dotted(key)}: did you mean {better}?")
        place = f"[{_dotted(tuple(path))}]" if path else "this file"
        other = f"; or did you mean {elsewhere[0]}?" if elsewhere else ""
        return _Mismatch((), f"unknown key {_dotted(key)}: {place} takes {', '.join(siblings)}{other}")

    def keys(self, root: Any = None, path: Key = ()) -> list[Key]:
        found: list[Key] = []
        for name, wanted in _hints(root or self.root).items():
            found.append((*path, name))
            owner = _dataclass_in(wanted)
            if owner is not None:
                found += self.keys(owner, (*path, name))
        return found


def _convert(wanted: Any, value: Any, key: Key, schema: _Schema, partial: bool = False) -> Any:
    """``value`` as ``wanted``; ``partial`` lets a table lack required keys, as an override sets only some."""
    members = _members(wanted)
    if len(members) > 1:
        return _convert(_pick(members, value, key, wanted), value, key, schema, partial)
    wanted = members[0]
    origin = typing.get_origin(wanted)
    if dataclasses.is_dataclass(wanted):
        return _convert_table(wanted, value, key, schema, partial)
    if origin is Literal:
        return _convert_choice(typing.get_args(wanted), value, key)
    if origin is list:
        _require(isinstance(value, list), wanted, value, key)
        item_type = typing.get_args(wanted)[0]
        return [_convert(item_type, item, (*key, str(i)), schema, partial) for i, item in enumerate(value)]
    if origin is dict:
        _require(isinstance(value, dict), wanted, value, key)
        item_type = typing.get_args(wanted)[1]
        return {name: _convert(item_type, item, (*key, name), schema, partial) for name, item in value.items()}
    if wanted is float:
        _require(isinstance(value, int | float) and not isinstance(value, bool), wanted, value, key)
        return _finite(value, key)
    assert wanted in (str, int, bool), f"{_dotted(key)}: configuration cannot hold {wanted}"
    _require(isinstance(value, wanted) and (wanted is bool or not isinstance(value, bool)), wanted, value, key)
    return value


def _convert_table(cls: Any, value: Any, key: Key, schema: _Schema, partial: bool) -> Any:
    _require(isinstance(value, dict), cls, value, key)
    hints = _hints(cls)
    for name in value:
        if name not in hints:
            raise schema.unknown((*key, name), cls)
    arguments: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        path = (*key, field.name)
        if field.name in value:
            arguments[field.name] = _convert(hints[field.name], value[field.name], path, schema, partial)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            if dataclasses.is_dataclass(hints[field.name]):
                arguments[field.name] = _convert(hints[field.name], {}, path, schema, partial)
            elif not partial:
                place = f"under [{_dotted(key)}]" if key else "at the top"
                raise _Mismatch(path, f"missing: add {field.name} = … ({_words(hints[field.name])}) {place}")
    return None if partial else cls(**arguments)


def _convert_choice(choices: tuple[Any, ...], value: Any, key: Key) -> Any:
    if any(value == choice and type(value) is type(choice) for choice in choices):
        return value
    listed = ", ".join(_show(choice) for choice in choices)
    near = difflib.get_close_matches(str(value), [str(choice) for choice in choices], n=1)
    hint = f" (did you mean {_show(near[0])}?)" if near else ""
    raise _Mismatch(key, f"expected one of {listed}, got {_show(value)}{hint}")


def _pick(members: tuple[Any, ...], value: Any, key: Key, wanted: Any) -> Any:
    """The member of a union that ``value`` was meant for, by its kind, so that errors inside it are kept."""
    for member in members:
        origin = typing.get_origin(member)
        is_list = isinstance(value, list) and origin is list
        is_table = isinstance(value, dict) and (origin is dict or dataclasses.is_dataclass(member))
        is_choice = origin is Literal and any(value == choice for choice in typing.get_args(member))
        if member is type(value) or is_list or is_table or is_choice:
            return member
    if float in members and type(value) is int:
        return float
    raise _Mismatch(key, f"expected {_words(wanted)}, got {_show(value)}")


def _require(fits: bool, wanted: Any, value: Any, key: Key) -> None:
    if not fits:
        quotes = f' (write "{value}")' if wanted is str and isinstance(value, int | float) else ""
        raise _Mismatch(key, f"expected {_words(wanted)}, got {_show(value)}{quotes}")


def _finite(value: int | float, key: Key) -> float:
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise _Mismatch(key, f"expected a finite number, got {_show(value)}")
    return number


# Looking at types ------------------------------------------------------------------------------------------


@functools.cache
def _hints(cls: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _members(wanted: Any) -> tuple[Any, ...]:
    """The members of a union without ``None`` (TOML has no null: an optional key is simply absent)."""
    if typing.get_origin(wanted) in (typing.Union, types.UnionType):
        members = tuple(member for member in typing.get_args(wanted) if member is not types.NoneType)
        return members if len(members) > 1 else _members(members[0])
    return (wanted,)


def _is_optional(wanted: Any) -> bool:
    return types.NoneType in typing.get_args(wanted)


def _dataclass_in(wanted: Any) -> Any:
    return next((member for member in _members(wanted) if dataclasses.is_dataclass(member)), None)


def _child_type(wanted: Any, name: str) -> Any:
    owner = _dataclass_in(wanted)
    if owner is not None and name in _hints(owner):
        return _hints(owner)[name]
    for member in _members(wanted):
        if typing.get_origin(member) is dict:
            return typing.get_args(member)[1]
    return None


def _words(wanted: Any) -> str:
    """The accepted values in plain words: ``a whole number or text``."""
    words: list[str] = []
    for member in _members(wanted):
        if typing.get_origin(member) is Literal:
            words += [_show(choice) for choice in typing.get_args(member)]
        elif typing.get_origin(member) is list:
            item = {str: "texts", int: "whole numbers", float: "numbers"}.get(typing.get_args(member)[0])
            words.append(f"a list of {item}" if item else "a list")
        else:
            words.append(_KIND_WORDS.get(typing.get_origin(member) or member, "a table"))
    return " or ".join(dict.fromkeys(words))


def _show(value: Any) -> str:
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, datetime.date | datetime.time):
        return f"the date or time {value}"
    text = json.dumps(value, ensure_ascii=False) if isinstance(value, str | bool) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def _initials(name: str) -> str:
    """``learning_rate`` becomes ``lr``: catches the abbreviations that spelling distance misses."""
    return "".join(word[:1] for word in name.split("_"))


def _dotted(key: Key) -> str:
    return ".".join(name if _BARE_KEY.fullmatch(name) else _quoted(name) for name in key)


# Writing ---------------------------------------------------------------------------------------------------


def to_toml(obj: Any, comments: bool = False) -> str:
    """TOML text that ``from_toml`` reads back to an equal object, keys in the order the fields are declared.

    Keys that are ``None`` are left out, as TOML has no null. ``comments`` writes each field's docstring above
    its key.
    """
    assert dataclasses.is_dataclass(obj) and not isinstance(obj, type)
    lines: list[str] = []
    _write_table(obj, (), lines, comments)
    return "\n".join(lines).strip("\n") + "\n"


def write_toml(obj: Any, path: str | Path, comments: bool = False) -> None:
    """Save ``obj`` so that a crash leaves the old file or the new one, never half of one; one writer at a time.

    What a killed writer left behind is overwritten by the next.
    """
    path = Path(path)
    text = to_toml(obj, comments)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if os.name == "posix":
        handle = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _write_table(obj: Any, key: Key, lines: list[str], comments: bool) -> None:
    """Scalars and lists first, then the tables inside: TOML gives every key to the header above it."""
    entries = _entries(obj)
    owner: Any = type(obj)
    docs = field_docs(owner) if comments and owner is not dict else {}
    for name, value in entries:
        if not _is_table(value):
            lines += [f"# {line}" for line in docs.get(name, "").splitlines()]
            lines.append(f"{_dotted((name,))} = {_literal(value, (*key, name))}")
    for name, value in entries:
        if _is_table(value):
            path = (*key, name)
            lines.append("")
            lines += [f"# {line}" for line in docs.get(name, "").splitlines()]
            lines.append(f"[{_dotted(path)}]")
            _write_table(value, path, lines, comments)


def _entries(obj: Any) -> list[tuple[str, Any]]:
    if isinstance(obj, dict):
        return list(obj.items())
    entries: list[tuple[str, Any]] = []
    for field in dataclasses.fields(obj):
        value = getattr(obj, field.name)
        default = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        if value is None:
            assert default is None, f"{field.name}: None cannot be written, so it must be the default"
        elif not (value == {} and default == {}):
            entries.append((field.name, value))
    return entries


def _is_table(value: Any) -> bool:
    return isinstance(value, dict) or dataclasses.is_dataclass(value)


def _literal(value: Any, key: Key) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise UserError(f"{_dotted(key)}: {value} cannot be saved: give a finite number")
        return repr(value)
    if isinstance(value, str):
        return _quoted(value, key)
    if isinstance(value, list):
        return "[" + ", ".join(_literal(item, (*key, str(i))) for i, item in enumerate(value)) + "]"
    assert _is_table(value), f"{_dotted(key)}: configuration cannot hold {type(value)}"
    pairs = [f"{_dotted((name,))} = {_literal(item, (*key, name))}" for name, item in _entries(value)]
    return "{" + ", ".join(pairs) + "}"


def _quoted(text: str, key: Key = ()) -> str:
    """A TOML basic string: JSON's escapes are a subset of TOML's, which adds only that of DEL."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise UserError(f"{_dotted(key)}: {text!a} is not valid Unicode: rename it") from None
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


@functools.cache
def field_docs(cls: Any) -> dict[str, str]:
    """The string literal under each field of a dataclass; empty where the source text is not available."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError, SyntaxError):
        return {}
    body: Sequence[ast.stmt] = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
    docs: dict[str, str] = {}
    for statement, following in itertools.pairwise(body):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
            and isinstance(following.value.value, str)
        ):
            docs[statement.target.id] = inspect.cleandoc(following.value.value)
    return docs
