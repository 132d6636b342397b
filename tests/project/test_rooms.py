"""The house: a room imports only rooms that stand before it, and its modules form no import cycle."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "dwindle"
ROOMS = (
    "core",
    "anatomy",
    "sources",
    "data",
    "distributed",
    "training",
    "pruning",
    "recipe",
    "export",
    "quantization",
    "evaluation",
    "run",
    "report",
    "commands",
)


def module_of(path: Path) -> str:
    parts = ("dwindle", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in PACKAGE.rglob("*.py")}


@cache
def imports_of(module: str, *, at_run_time: bool = False) -> list[tuple[int, str]]:
    """(line, module) of every import of ours, in functions as well; ``at_run_time``: not those for types alone."""
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    if at_run_time:
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                node.body = [ast.Pass()]
    return list(_imports(tree))


def _imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name.split(".")[0] == "dwindle")
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "dwindle":
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield node.lineno, full if full in MODULES else node.module


def room_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in ROOMS else None


def test_every_module_has_a_room() -> None:
    loose = {path.name for path in PACKAGE.glob("*.py")}
    assert loose == {"__init__.py", "__main__.py", "hf.py"}  # hf stands after all rooms, and no room may import it
    assert {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()} == set(ROOMS)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_rooms_before_it(room: str) -> None:
    allowed = set(ROOMS[: ROOMS.index(room) + 1])
    wrong = [
        f"{module}:{line} imports {imported}"
        for module in MODULES
        if room_of(module) == room
        for line, imported in imports_of(module)
        if room_of(imported) not in allowed and imported != "dwindle"
    ]
    assert not wrong, "\n".join(wrong)


def test_no_module_imports_itself_through_others() -> None:
    """Function-level imports count: a cycle that is hidden in a function is still a cycle."""
    graph = {
        module: {name for _, name in imports_of(module, at_run_time=True) if name in MODULES and name != module}
        for module in MODULES
        if room_of(module)
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"import cycle: {' -> '.join(error.args[1])}")


def test_reports_need_no_torch() -> None:
    """Pages, figures and tables come from a run's logs alone."""
    seen, queue = set[str](), [module for module in MODULES if room_of(module) == "report"]
    while queue:
        module = queue.pop()
        if module in seen or module not in MODULES:
            continue
        seen.add(module)
        tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
        for node in tree.body:  # what is imported when the module is
            if isinstance(node, ast.Import):
                assert not any(alias.name.split(".")[0] == "torch" for alias in node.names), module
            elif isinstance(node, ast.ImportFrom) and node.module:
                assert node.module.split(".")[0] != "torch", module
                queue += [name for _, name in _imports(node)]
                queue += [node.module, ".".join(node.module.split(".")[:-1])]
