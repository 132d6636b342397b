"""The names of a run's files and folders are known to one module alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import dwindle
from dwindle.core import run_directory

SOURCE = Path(dwindle.__file__).parent
FILES = (
    "recipe.toml",
    "metrics.jsonl",
    "quality.json",
    "ledger.jsonl",
    "structure.json",
    "state.json",
    "report.html",
    ".lock",
)
FOLDERS = (*run_directory.FOLDERS, "evaluation")
PREFIXES = ("step-", ".tmp-")


def layout_literals(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Strings outside docstrings that name a part of the layout.

    Folders are called by everyday words (``"model"`` is also a key), so those count only where they form a path.
    """
    expressions = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    in_paths = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            in_paths |= {id(node.left), id(node.right)}
        elif isinstance(node, ast.Compare) and any(
            isinstance(part, ast.Attribute) and part.attr == "name" for part in (node.left, *node.comparators)
        ):
            in_paths |= {id(part) for part in ast.walk(node)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str) or id(node) in expressions:
            continue
        text = node.value
        found = any(name in text for name in FILES) or text.startswith(PREFIXES)
        found |= any(text.startswith(f"{name}/") or (id(node) in in_paths and text == name) for name in FOLDERS)
        if found and text != "tokens/s":
            yield node.lineno, text


def test_one_module_knows_the_layout() -> None:
    owner = Path(run_directory.__file__)
    modules = sorted(SOURCE.rglob("*.py"))
    found = {path: list(layout_literals(ast.parse(path.read_text(encoding="utf-8")))) for path in modules}
    names = {text for _, text in found.pop(owner)}
    assert {"recipe.toml", "metrics.jsonl", "ledger.jsonl", "structure.json", "model", "checkpoints"} <= names
    others = [f"{path.relative_to(SOURCE)}:{line}: {text}" for path, rows in found.items() for line, text in rows]
    assert not others, "ask core.run_directory.RunDirectory instead:\n" + "\n".join(others)


@pytest.mark.parametrize(
    ("code", "is_found"),
    [
        ('folder / "model"', True),
        ('folder.name == "model"', True),
        ('run.glob("milestones/*")', True),
        ('f"{run} has no recipe.toml"', True),
        ('state["model"]', False),
        ('def f():\n    "Writes ``metrics.jsonl``."', False),
    ],
)
def test_what_counts(code: str, is_found: bool) -> None:
    assert bool(list(layout_literals(ast.parse(code)))) is is_found
