"""The target size of a run and whether it was reached, from its ledger and recipe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dwindle.core.errors import UserError
from dwindle.core.sizes import parse_size
from dwindle.report.jsonlines import Record, number


def target_count(source: Record) -> int | None:
    """Parameters at the target, from the ledger's ``source`` event; None if it does not say so."""
    options = source.get("options")
    pacing = options.get("pacing") if isinstance(options, dict) else None
    written = number(pacing.get("end_count")) if isinstance(pacing, dict) else None
    return int(written) if written else None


def target_missed(recipe: Mapping[str, Any], source: Record, parameters: float | None, structure: Record) -> bool:
    """Whether a finished run is larger than its target; False if that is unknown.

    A target shape (``heads=8``) is compared with ``structure``, because its count in the ledger is an estimate.
    """
    target = _target(recipe)
    if "=" in target:
        return _other_shape(target, structure)
    if "@" in target:
        return False  # its count in the ledger is an estimate; the file's size is not known here
    goal = target_count(source) if target else None
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
