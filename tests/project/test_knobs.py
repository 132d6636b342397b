"""Every knob of pruning is declared once: recipe keys, command options and keyword arguments are views of it."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import dwindle
from dwindle import commands
from dwindle.commands.app import app
from dwindle.commands.options import options_of
from dwindle.core.config import default_of, from_dict
from dwindle.core.errors import UserError
from dwindle.pruning.config import PostTrainingConfig, PretrainPruneConfig, PruneConfig
from dwindle.recipe.recipe import Recipe
from dwindle.recipe.reference import KeyReference, recipe_keys

SOURCE = Path(dwindle.__file__).parent
KNOBS = list(PruneConfig.model_fields)
OWNER = "pruning/config.py"

OTHER_MEANINGS = {
    ("commands/bench.py", "round_to"): "pads the widths of what is exported, prunes nothing",
    ("commands/export.py", "round_to"): "pads the widths of what is exported, prunes nothing",
    ("evaluation/latency.py", "round_to"): "pads the widths of what is exported, prunes nothing",
    ("export/exporting.py", "round_to"): "pads the widths of what is exported, prunes nothing",
    ("export/resize.py", "round_to"): "pads the widths of what is exported, prunes nothing",
    ("export/exporting.py", "min_hidden"): "the least width that a format accepts",
    ("export/resize.py", "min_hidden"): "the least width that a format accepts",
    ("anatomy/family.py", "groups"): "what models of a family can lose",
    ("evaluation/latency.py", "method"): "the function that a runtime process calls",
    ("evaluation/generation_tasks.py", "metric"): "how a task is scored",
    ("evaluation/results.py", "metric"): "how a task is scored",
    ("evaluation/tasks.py", "metric"): "how a task is scored",
    ("pruning/calibration.py", "groups"): "a result: the saliencies of all groups",
    ("run/compare.py", "metric"): "a result: the metric of a cell",
    ("run/compare.py", "second_order"): "a result: whether a cell is updated",
    ("run/family_table.py", "groups"): "a result: what models of a family can lose",
    ("run/inspection.py", "groups"): "a result: how many groups a model has",
}
"""Where another thing has the name of a knob: (file, name), and what it is there."""


def one_line(text: str | None) -> str:
    return " ".join((text or "").replace("``", "`").split())


@pytest.fixture(scope="module")
def keys() -> dict[str, KeyReference]:
    return {key.name: key for key in recipe_keys()}


@pytest.fixture(scope="module")
def options() -> dict[str, Any]:
    """The parameters of ``dwindle prune``, as its parser has them."""
    for module in pkgutil.iter_modules(commands.__path__):
        importlib.import_module(f"dwindle.commands.{module.name}")
    group: Any = typer.main.get_command(app)
    return {parameter.name: parameter for parameter in group.commands["prune"].params}


@pytest.mark.parametrize("name", KNOBS)
def test_a_knob_is_a_key_an_option_and_an_argument(
    name: str, keys: dict[str, KeyReference], options: dict[str, Any]
) -> None:
    field, default = PruneConfig.model_fields[name], default_of(PruneConfig, name)
    meaning = one_line(field.description)
    assert meaning.endswith(".")

    key = keys[f"prune.{name}"]
    assert key.meaning == meaning
    written = {type(None): "not set", str: f'"{default}"', bool: str(default).lower()}.get(type(default), str(default))
    assert key.default == written and default_of(PretrainPruneConfig, name) == default

    option = options[name]
    assert option.opts == [f"--{name.replace('_', '-')}"]
    said = one_line(option.help)
    assert said.partition(" One of ")[0] == meaning  # choices that the meaning does not name follow it
    assert all(choice in said for choice in re.findall(r'"(\w+)"', key.values))
    if isinstance(default, bool):
        assert option.default is default
    else:  # the option is parsed like an override, so the declaration's default applies where it is not given
        assert option.default is None and option.show_default == (False if default is None else str(default))

    argument = inspect.signature(dwindle.prune).parameters[name]
    assert argument.kind is inspect.Parameter.KEYWORD_ONLY
    assert argument.default == default and argument.annotation == field.annotation


def test_what_is_not_given_has_the_declared_default(options: dict[str, Any]) -> None:
    """The command passes on what its parser finds when no option is given."""
    found: list[PostTrainingConfig] = []

    @options_of(PostTrainingConfig)
    def command(config: PostTrainingConfig) -> None:
        found.append(config)

    command(**{name: options[name].default for name in PostTrainingConfig.model_fields})
    assert found == [PostTrainingConfig()]
    base: dict[str, Any] = {"source": {"model": "x"}, "training": {"tokens": 1}}
    assert from_dict(Recipe, base).prune == PretrainPruneConfig()
    shared = {name: getattr(PostTrainingConfig(), name) for name in KNOBS}
    assert shared == {name: getattr(PretrainPruneConfig(), name) for name in KNOBS} == PruneConfig().model_dump()


def test_options_are_read_like_overrides() -> None:
    found: list[PruneConfig] = []

    @options_of(PruneConfig)
    def command(config: PruneConfig) -> None:
        found.append(config)

    nothing: dict[str, Any] = dict.fromkeys(KNOBS) | {"second_order": False}
    command(**nothing | {"groups": "attn,ffn", "gram_tokens": "64k", "damping": "1e-3", "metric": "none"})
    assert found == [PruneConfig(groups=["attn", "ffn"], gram_tokens="64k", damping=1e-3)]
    with pytest.raises(UserError, match=r"^min_ffn: 0 must be at least 1$"):
        command(**nothing | {"min_ffn": "0"})


def test_each_driver_adds_its_own_timing_alone(keys: dict[str, KeyReference], options: dict[str, Any]) -> None:
    for cls in (PretrainPruneConfig, PostTrainingConfig):
        assert list(cls.model_fields)[: len(KNOBS)] == KNOBS
        assert set(KNOBS).isdisjoint(cls.__annotations__), "a driver declares a shared knob again"
    assert [name.removeprefix("prune.") for name in keys if name.startswith("prune.")] == list(
        PretrainPruneConfig.model_fields
    )
    assert set(PostTrainingConfig.model_fields) <= set(options)
    assert set(PostTrainingConfig.model_fields) <= set(inspect.signature(dwindle.prune).parameters)


def test_every_section_of_a_recipe_is_in_the_reference(keys: dict[str, KeyReference]) -> None:
    assert {name.partition(".")[0] for name in keys} == set(Recipe.model_fields)
    for section, table in Recipe.model_fields.items():
        assert one_line(table.annotation.__doc__).endswith(".")  # type: ignore[union-attr]
        own = [name.split(".")[1] for name in keys if name.startswith(f"{section}.")]
        assert list(dict.fromkeys(own)) == list(table.annotation.model_fields)  # type: ignore[union-attr]
    for key in keys.values():
        assert key.meaning and "\n" not in key.meaning and key.values and key.default, key.name


def declarations(tree: ast.AST) -> Iterator[str]:
    """Names of annotated class attributes, and of parameters that have a default."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield from (
                s.target.id for s in node.body if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)
            )
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            arguments = node.args
            positional = [*arguments.posonlyargs, *arguments.args]
            yield from (one.arg for one in positional[len(positional) - len(arguments.defaults) :])
            pairs = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
            yield from (one.arg for one, default in pairs if default is not None)


def test_no_knob_is_declared_again() -> None:
    """Neither as a field nor with a default of its own; the exceptions are other things of the same name."""
    found = set()
    for path in SOURCE.rglob("*.py"):
        where = path.relative_to(SOURCE).as_posix()
        if where != OWNER:
            found |= {(where, name) for name in declarations(ast.parse(path.read_text())) if name in KNOBS}
    assert sorted(found - set(OTHER_MEANINGS)) == [], "declare a knob in PruneConfig alone, and pass the config"
    assert sorted(set(OTHER_MEANINGS) - found) == [], "these exceptions are not needed any more"
    assert set(KNOBS) <= set(declarations(ast.parse((SOURCE / OWNER).read_text())))  # the scan finds what there is


def test_defaults_are_not_constants_beside_their_knob() -> None:
    """``DEFAULT_DAMPING = 0.01`` somewhere would be a second declaration."""
    pattern = re.compile(rf"^DEFAULT_(?:{'|'.join(KNOBS).upper()})\b", re.MULTILINE)
    for path in SOURCE.rglob("*.py"):
        found = set(pattern.findall(path.read_text())) - ({"DEFAULT_GRAM_TOKENS"} if path == SOURCE / OWNER else set())
        assert not found, path  # gram_tokens: not set means another number for each driver
