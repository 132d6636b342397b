"""Configurations: pydantic models that own every knob, read from TOML, overridden by ``section.key=value``.

A component declares its knobs once, as a subclass of ``Config`` beside the code that reads them: type, bounds, default
and, as a docstring under the field, its meaning. Recipes, command options, keyword arguments and the reference page are
views of that declaration. pydantic does the parsing; this module turns its errors into one line that names the dotted
key and says what is accepted, because its reader has a text editor open, not this code.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import difflib
import functools
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import tomli_w
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from dwindle.core import reading
from dwindle.core.errors import UserError
from dwindle.core.files import write_text_atomic

T = TypeVar("T", bound="Config")
R = TypeVar("R")
Key = tuple[str, ...]

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_NOUNS: dict[Any, str] = {str: "text", int: "whole number", float: "number", bool: "true or false", dict: "table"}
_BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below", "multiple_of": "a multiple of"}


class Config(BaseModel):
    """Base of all configurations: unknown keys and wrong types are errors, field docstrings are descriptions."""

    synonyms: ClassVar[Mapping[str, str]] = {}
    """Names that other tools give to a key, for "did you mean"; the key is dotted."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True)

    def __init__(self, /, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise UserError(_explain(error, type(self))) from None

    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]  # tables inside are validated as usual


# Reading ---------------------------------------------------------------------------------------------------


def from_dict(cls: type[T], data: Mapping[str, Any], where: str = "") -> T:
    """Build ``cls`` from parsed TOML or keyword arguments; ``where`` (a file name) starts every message.

    Types are strict: an int is accepted for a float, since people write ``lr = 1``; a quoted number is not a number.
    """
    try:
        return cls.model_validate(dict(data))
    except ValidationError as error:
        message = _explain(error, cls)
        raise UserError(f"{where}: {message}" if where else message) from None


def parse_toml(text: str, where: str = "") -> dict[str, Any]:
    """The tables of TOML text; an error names the file and the line."""
    try:
        return reading.parse_toml(text)
    except ValueError as error:
        prefix = f"{where}: " if where else ""
        raise UserError(f"{prefix}not valid TOML: {' '.join(str(error).split())}") from None


def read_toml(path: str | Path) -> dict[str, Any]:
    """The tables of a TOML file; a missing file, a directory or unreadable text is a ``UserError``."""
    path = Path(path)
    if path.is_dir():
        raise UserError(f"{path} is a directory: give the .toml file itself")
    try:
        content = reading.read_limited(path, reading.MAX_TOML_BYTES)
    except UserError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise UserError(f"{path} does not exist: give the path of a .toml file") from None
        raise
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8 text: save it as UTF-8") from None
    return parse_toml(text, str(path))


def to_toml(config: Config) -> str:
    """TOML text of which ``from_dict`` makes an equal object; keys that are ``None`` are omitted."""
    text = tomli_w.dumps(config.model_dump(exclude_none=True))
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:  # a file name that is not text
        line = text[: error.end].rpartition("\n")[2] + text[error.end :].partition("\n")[0]
        raise UserError(f"{line!a} is not valid Unicode: rename it") from None
    return text


def write_toml(config: Config, path: str | Path) -> None:
    """Save a configuration atomically."""
    write_text_atomic(Path(path), to_toml(config))


# Overrides -------------------------------------------------------------------------------------------------


def apply_overrides(data: dict[str, Any], overrides: Iterable[str], cls: type[Config]) -> dict[str, Any]:
    """A copy of ``data`` with ``key.path=value`` assignments applied, each checked against ``cls``."""
    result = copy.deepcopy(data)
    for override in overrides:
        name, equals, text = override.partition("=")
        try:
            if not equals or not name.strip():
                raise UserError("write section.key=value")
            key = _parse_key(name.strip())
            _assign(result, key, value_from_text(cls, key, text.strip()))
        except UserError as error:
            raise UserError(f"override {override}: {error}") from None
    return result


def value_from_text(cls: type[Config], key: Key, text: str) -> Any:
    """What a typed value means for a field: a TOML value if that fits (``3e-4``, ``true``, ``["a"]``), else plain text
    (``70M``, ``1:9``), else, for a list, items between commas. ``none`` unsets a key that may be empty.
    """
    annotation, may_be_empty = _type_at(cls, key)
    if text.lower() == "none" and may_be_empty:
        return None
    candidates: list[Any] = [text]
    with contextlib.suppress(ValueError):
        candidates = [*reading.parse_toml(f"value = {text}").values(), text] if "\n" not in text else [text]
    if any(typing.get_origin(member) is list for member in _members(annotation)):
        inside = text[1:-1] if text.startswith("[") and text.endswith("]") else text
        candidates.append([_item(annotation, part.strip()) for part in inside.split(",") if part.strip()])
    if _config_in(annotation) is not None and isinstance(candidates[0], dict):
        return candidates[0]  # a partial table: checked with the rest of its section
    errors: list[ValidationError] = []
    for value in candidates:
        try:
            _adapter(annotation).validate_python(value)
            return value
        except ValidationError as error:
            errors.append(error)
    first = errors[-1 if isinstance(candidates[-1], list) else 0].errors()[0]
    if any(isinstance(part, int) for part in first["loc"]):  # an item of a list
        annotation = typing.get_args(_members(annotation)[0])[0]
    raise UserError(f"{_dotted(key)}: {_problem(first, annotation)}")


def _item(annotation: Any, text: str) -> Any:
    """One item of a comma-separated list: a number where the list holds numbers."""
    numeric = any(inner in (int, float) for member in _members(annotation) for inner in typing.get_args(member))
    with contextlib.suppress(ValueError):
        return reading.parse_toml(f"value = {text}")["value"] if numeric else text
    return text


@functools.cache
def _adapter(annotation: Any) -> TypeAdapter[Any]:
    return TypeAdapter(annotation, config=None if _config_in(annotation) else Config.model_config)


def _parse_key(text: str) -> Key:
    node: Any = {}
    with contextlib.suppress(ValueError):
        node = reading.parse_toml(f"{text} = 0")
    key: list[str] = []
    while isinstance(node, dict) and node:
        name, node = next(iter(node.items()))
        key.append(name)
    if not key:
        raise UserError(f"{text} is not a dotted key such as section.name")
    return tuple(key)


def _assign(data: dict[str, Any], key: Key, value: Any) -> None:
    node: Any = data
    for depth, name in enumerate(key[:-1]):
        node = node.setdefault(name, {})
        if not isinstance(node, dict):
            raise UserError(f"{_dotted(key[: depth + 1])}: expected a table, got {_show(node)}")
    if value is None:
        node.pop(key[-1], None)
    else:
        node[key[-1]] = value


# Keyword arguments -----------------------------------------------------------------------------------------


def takes(cls: type[Config], *, but: Sequence[str] = ()) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Decorator: the function's keyword arguments are the fields of a config, which it receives as ``config``.

    ``help()`` and editors see every field with its default; a whole ``config=`` may be given instead. ``but`` names
    fields that are not arguments.
    """
    names = [name for name in cls.model_fields if name not in but]

    def decorate(function: Callable[..., R]) -> Callable[..., R]:
        @functools.wraps(function)
        def call(*args: Any, config: Config | None = None, **given: Any) -> R:
            knobs = {name: given.pop(name) for name in list(given) if name in names}
            if config is not None and knobs:
                raise UserError(f"{', '.join(knobs)}: cannot be combined with config: set it there")
            return function(*args, config=from_dict(cls, knobs) if config is None else config, **given)

        own = [p for p in inspect.signature(function).parameters.values() if p.name != "config"]
        fields = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=default_of(cls, name),
                annotation=cls.model_fields[name].annotation,
            )
            for name in names
        ]
        call.__signature__ = inspect.Signature([*own, *fields])  # type: ignore[attr-defined]
        return call

    return decorate


def described(cls: type[Config], name: str, *, required: bool = False) -> str:
    """The meaning of a field on one line, for an option that has another name; ``required`` ones are always set."""
    text = " ".join((cls.model_fields[name].description or "").split())
    return text.partition(" Not set:")[0] if required else text


def default_of(cls: type[Config], name: str) -> Any:
    """The default of a field; ``inspect.Parameter.empty`` where it must be given."""
    field = cls.model_fields[name]
    return inspect.Parameter.empty if field.is_required() else field.get_default(call_default_factory=True)


@contextlib.contextmanager
def in_section(section: str, cls: type[Config]) -> Iterator[None]:
    """Name fields as recipes do: ``round_to 64: …`` becomes ``prune.round_to 64: …`` in errors raised inside."""
    try:
        yield
    except UserError as error:
        if re.split(r"[ :]", str(error), maxsplit=1)[0] in cls.model_fields:
            raise UserError(f"{section}.{error}") from None
        raise


# Looking at types ------------------------------------------------------------------------------------------


def iter_fields(cls: type[Config], path: Key = ()) -> Iterator[tuple[Key, Any]]:
    """(dotted key, pydantic field) of every leaf of a configuration; ``NAME`` stands for the keys of a dict."""
    for name, field in cls.model_fields.items():
        inner = _config_in(field.annotation)
        if inner is None:
            yield (*path, name), field
        else:
            is_dict = typing.get_origin(_members(field.annotation)[0]) is dict
            yield from iter_fields(inner, (*path, name, "NAME") if is_dict else (*path, name))


def describe_type(annotation: Any, article: bool = False) -> str:
    """The accepted values in words: ``whole number or text``; with ``article`` as in a sentence."""
    words: list[str] = []
    for member in _members(annotation):
        origin, inside = typing.get_origin(member), typing.get_args(member)
        if origin is Literal:
            words += [_show(choice) for choice in inside] if article else [", ".join(map(_show, inside))]
        elif origin is list:
            item = describe_type(inside[0])
            words.append(f"a list of {item.replace('number', 'numbers').replace('text', 'texts')}" if article else item)
            words[-1] = words[-1] if article else f"list of {item}"
        else:
            noun = _NOUNS.get(origin or member, "table")
            words.append(f"a {noun}" if article and noun not in ("text", "true or false") else noun)
    return " or ".join(dict.fromkeys(words))


def _members(annotation: Any) -> tuple[Any, ...]:
    """The members of a union without ``None`` (TOML has no null: an optional key is absent) and without bounds."""
    if typing.get_origin(annotation) is typing.Annotated:
        return _members(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return tuple(
            one for member in typing.get_args(annotation) if member is not types.NoneType for one in _members(member)
        )
    return (annotation,)


def _config_in(annotation: Any) -> type[Config] | None:
    """The table that a field holds, directly or as values of a dict."""
    for member in _members(annotation):
        inside = typing.get_args(member)[1] if typing.get_origin(member) is dict else member
        if isinstance(inside, type) and issubclass(inside, Config):
            return inside
    return None


def _annotation(field: Any) -> Any:
    """The annotation with its bounds, which pydantic stores separately."""
    return typing.Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation


def _type_at(cls: type[Config], key: Key) -> tuple[Any, bool]:
    """(Type, whether it may be unset) of a dotted key; unknown keys are refused with the nearest name."""
    annotation: Any = cls
    may_be_empty = False
    for depth, name in enumerate(key):
        owner = _config_in(annotation)
        if typing.get_origin(_members(annotation)[0]) is dict:
            annotation, may_be_empty = typing.get_args(_members(annotation)[0])[1], False
        elif owner is None:
            wanted = describe_type(annotation, article=True)
            raise UserError(f"{_dotted(key[:depth])}: expected {wanted}, it has no keys of its own")
        elif name not in owner.model_fields:
            raise UserError(_unknown(key[: depth + 1], owner, cls))
        else:
            annotation = _annotation(owner.model_fields[name])
            may_be_empty = default_of(owner, name) in (None, "", [], {})
    return annotation, may_be_empty


# Messages --------------------------------------------------------------------------------------------------


def _explain(error: ValidationError, cls: type[Config]) -> str:
    """The first problem in one line; unknown keys first, because they explain missing ones."""
    found = sorted(error.errors(), key=lambda one: one["type"] != "extra_forbidden")[0]
    key: Key = ()
    annotation: Any = cls
    for part in found["loc"]:
        owner, members = _config_in(annotation), _members(annotation)
        if len(members) > 1:  # the rest of the location names members of a union
            break
        key = (*key, str(part))
        if typing.get_origin(members[0]) is dict:
            annotation = typing.get_args(members[0])[1]
        elif isinstance(part, int):
            annotation = typing.get_args(members[0])[0]
        elif owner is None or part not in owner.model_fields:
            return _unknown(key, owner or cls, cls)
        else:
            annotation = _annotation(owner.model_fields[str(part)])
    if found["type"] == "missing":
        return _missing(key, annotation)
    if found["type"] == "value_error":  # a validator of ours, whose message begins with the field
        message = str(found["ctx"]["error"])
        return ".".join((*key, message)) if _config_in(annotation) is not None and key else message
    return f"{_dotted(key)}: {_problem(found, annotation)}" if key else _problem(found, annotation)


def _problem(found: Any, annotation: Any) -> str:
    value = found["input"]
    shown = f"got {_show(value)}"
    if found["type"] == "finite_number" or (found["type"] == "float_type" and type(value) is int):
        return f"expected a finite number, {shown}"
    if found["type"] == "string_too_short":
        return "must not be empty"
    if any(name in (found.get("ctx") or {}) for name in _BOUNDS):
        return f"{_show(value)} must be {_bounds(annotation)}"
    members = _members(annotation)
    choices = [str(choice) for member in members for choice in typing.get_args(member)]
    if found["type"] == "literal_error" and len(members) == 1:
        near = difflib.get_close_matches(str(value), choices, n=1)
        return f"expected one of {describe_type(annotation)}, {shown}" + (
            f" (did you mean {_show(near[0])}?)" if near else ""
        )
    quotes = f' (write "{value}")' if members == (str,) and isinstance(value, int | float) else ""
    return f"expected {describe_type(annotation, article=True)}, {shown}{quotes}"


def _bounds(annotation: Any) -> str:
    """``at least 0 and below 1``, from the field's own declaration."""
    limits = [item for part in _metadata(annotation) for item in getattr(part, "metadata", [part])]
    words = [
        f"{word} {getattr(limit, name):g}" for limit in limits for name, word in _BOUNDS.items() if hasattr(limit, name)
    ]
    return " and ".join(dict.fromkeys(words))


def _metadata(annotation: Any) -> Iterator[Any]:
    if typing.get_origin(annotation) is typing.Annotated:
        yield from annotation.__metadata__
        yield from _metadata(typing.get_args(annotation)[0])
    elif typing.get_origin(annotation) in (typing.Union, types.UnionType):
        for member in typing.get_args(annotation):
            yield from _metadata(member)


def _missing(key: Key, annotation: Any) -> str:
    owner = _config_in(annotation)
    if owner is not None:  # a whole table: name its first key without a default
        for name, field in owner.model_fields.items():
            if field.is_required():
                return _missing((*key, name), field.annotation)
    place = f"under [{_dotted(key[:-1])}]" if key[:-1] else "at the top"
    return f"{_dotted(key)}: missing: add {key[-1]} = … ({describe_type(annotation, article=True)}) {place}"


def _unknown(key: Key, owner: type[Config], root: type[Config]) -> str:
    *path, name = key
    siblings = list(owner.model_fields)
    near = difflib.get_close_matches(name, siblings, n=1) or [
        sibling for sibling in siblings if _initials(name) == sibling or _initials(sibling) == name
    ]
    elsewhere = [_dotted(other) for other, _ in iter_fields(root) if other[-1] == name and len(other) > 1]
    known = root.synonyms.get(name)
    if known and (not path or known.startswith(f"{_dotted(tuple(path))}.")):
        return f"unknown key {_dotted(key)}: did you mean {known}?"
    if near or (elsewhere and not path):
        better = _dotted((*path, near[0])) if near else elsewhere[0]
        return f"unknown key {_dotted(key)}: did you mean {better}?"
    place = f"[{_dotted(tuple(path))}]" if path else "this file"
    other = f"; or did you mean {elsewhere[0]}?" if elsewhere else ""
    return f"unknown key {_dotted(key)}: {place} takes {', '.join(siblings)}{other}"


def _show(value: Any) -> str:
    if isinstance(value, dict | Config):
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
    return ".".join(name if _BARE_KEY.fullmatch(name) else json.dumps(name, ensure_ascii=False) for name in key)
