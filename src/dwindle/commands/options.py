"""Command options as a view of a configuration: one option per field, with the field's default and meaning."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any

import typer

from dwindle.core.config import Config, default_of, describe_type, from_dict, value_from_text
from dwindle.pruning.config import PruneConfig


def options_of(cls: type[Config], *, but: tuple[str, ...] = ()) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator: the command takes the fields of a config as options and receives the ``config``.

    Values are parsed like ``section.key=value`` overrides of recipes: ``64k``, ``attn,ffn``, ``none``.
    """
    names = [name for name in cls.model_fields if name not in but]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def call(**given: Any) -> None:
            typed = {name: given.pop(name) for name in names}
            knobs = {
                name: value if isinstance(value, bool) else value_from_text(cls, (name,), value)
                for name, value in typed.items()
                if value is not None
            }
            command(config=from_dict(cls, {k: v for k, v in knobs.items() if v is not None}), **given)

        own = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for parameter in inspect.signature(command, eval_str=True).parameters.values()
            if parameter.name != "config"
        ]
        parameters = [*own, *(_option(cls, name) for name in names)]
        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return call

    return decorate


def _option(cls: type[Config], name: str) -> inspect.Parameter:
    field, default = cls.model_fields[name], default_of(cls, name)
    flag = f"--{name.replace('_', '-')}"
    is_bool = isinstance(default, bool)
    meaning, values = " ".join((field.description or "").split()), describe_type(field.annotation)
    choices = re.findall(r'"([^"]+)"', values)
    if not all(re.search(rf"\b{choice}\b", meaning) for choice in choices):
        meaning += f" One of {', '.join(choices)}."
    info = typer.Option(
        flag,
        help=meaning,
        show_default=False if default is None or is_bool else str(default),
        metavar={"whole number": "<int>", "number": "<float>"}.get(values),
        rich_help_panel="Pruning" if name in PruneConfig.model_fields else "Settings",
    )
    kind: Any = bool if is_bool else str | None
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default if is_bool else None, annotation=Annotated[kind, info]
    )
