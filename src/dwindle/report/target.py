"""The target size of a run and whether it was reached, from its ledger and recipe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dwindle.core.errors import UserError
from dwindle.core.sizes import parse_size
from dwindle.report.jsonlines import Record, number


def target_count(recipe: Mapping[str, Any], source: Record) -> int | None:
    """Parameters at the target: from the ledger's ``source`` event, else from the recipe; None if neither says so."""
    options = source.get("options")
    pacing = options.get("pacing") if isinstance(options, dict) else None
    written = number(pacing.get("end_count")) if isinstance(pacing, dict) else None
    if written is not None and written > 0:
        return int(written)
    total = number(source.get("trimmed_parameters", source.get("parameters")))
    try:
        size = parse_size(_target(recipe), "prune.target")
    except UserError:
        return None
    if size.kind == "count":
        return int(size.value)
    if total is None or size.kind in ("shape", "file"):
        return None
    layers = source.get("layer_parameters")
    if size.kind == "share" or not isinstance(layers, list):
        return int(size.value * total) if size.kind == "share" else None
    inside = sum(number(count) or 0.0 for count in layers)
    return int(total - inside + size.value * inside)


def target_missed(
    recipe: Mapping[str, Any], source: Record, parameters: float | None, structure: Record | None
) -> bool:
    """Whether a finished run is larger than its target; False if that is unknown.

    A target shape (``heads=8``) is compared with ``structure``, because its count in the ledger is an estimate.
    """
    target = _target(recipe)
    if "=" in target:
        return structure is not None and _other_shape(target, structure)
    if "@" in target:
        return False  # its count in the ledger is an estimate; the file's size is not known here
    goal = target_count(recipe, source) if target else None
    return goal is not None and parameters is not None and parameters > goal


def _target(recipe: Mapping[str, Any]) -> str:
    prune = recipe.get("prune")
    if not isinstance(prune, dict) or prune.get("enabled") is False:
        return ""
    return str(prune.get("target") or "")


def _other_shape(target: str, structure: Record) -> bool:
    try:
        layers = structure["layers"]
        sizes = {
            "hidden": len(structure["hidden"]),
            "heads": min((len(layer["query_heads"]) for layer in layers if layer["query_heads"]), default=0),
            "ffn": min(len(layer["ffn"]) for layer in layers if layer["ffn"]),
            "layers": sum(len(layer.get("absent", ())) < 2 for layer in layers),
        }
        return any(sizes[name] != size for name, size in parse_size(target, "prune.target").shape.items())
    except (KeyError, TypeError, ValueError, UserError):
        return False
