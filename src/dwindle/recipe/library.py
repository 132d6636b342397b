"""Ready-made recipes, which come with the package and are found by name: ``dwindle pretrain demo``."""

from __future__ import annotations

import difflib
from pathlib import Path

from dwindle.core.errors import UserError
from dwindle.sources.aliases import ALIASES

_FOLDER = Path(__file__).parent / "ready"


def ready_recipes() -> dict[str, Path]:
    """Name and file of each recipe."""
    return {path.stem: path for path in sorted(_FOLDER.glob("*.toml"))}


def _is_model(path: Path) -> bool:
    """Whether the argument was meant as a model: ``dwindle pretrain MODEL`` lacks its text and size."""
    if path.exists():
        return path.suffix in (".gguf", ".bin") or (path / "config.json").is_file()
    return path.as_posix() in ALIASES or path.as_posix() in {alias.hub_id for alias in ALIASES.values()}


def find_recipe(name: str | Path) -> Path:
    """The file of a recipe: a path, or the name of a ready-made one (``recipes/NAME.toml`` is one too)."""
    path, ready = Path(name), ready_recipes()
    if _is_model(path):
        raise UserError(f"{name} is a model, not a recipe: add a text and --to: dwindle pretrain {name} TEXT --to 50%")
    stem = path.name.removesuffix(".toml")
    if not path.is_file() and stem in ready and path.parent.as_posix() in (".", "recipes"):
        return ready[stem]
    if not path.exists() and path.parent == Path() and path.suffix != ".toml":
        near = difflib.get_close_matches(stem, ready, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"ready-made ones are {', '.join(ready)}"
        raise UserError(f"{name} does not exist: give the path of a .toml file, or a ready-made recipe: {hint}")
    return path
