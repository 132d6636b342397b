"""The settings in which runs differ, and a short form of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dwindle.core.names import public_name
from dwindle.report.jsonlines import Record

Settings = dict[str, Any]
"""Values by dotted name, such as ``prune.method``."""

MAX_SHOWN = 5

_FIRST = ("prune.method", "prune.metric", "prune.selection", "prune.second_order", "distill.weight", "training.tokens")
# Settings that do not change the result.
_ASIDE = {
    "source.device",
    "training.micro_batch",
    "training.compile",
    "training.activation_checkpointing",
    "training.parallel",
    "training.ce_chunk_tokens",
    "prune.milestones",
    "prune.compact_threshold",
    "prune.compact_multiple",
    "prune.compact_wait",
}


def settings_of(recipe: Mapping[str, Any], source: Record) -> Settings:
    """Settings of the recipe; the ledger's ``source`` event adds what the recipe left open, or all without one."""
    found = {
        f"{section}.{key}": value
        for section, table in recipe.items()
        if isinstance(table, dict) and section not in ("checkpoint", "validation")
        for key, value in table.items()
    }
    options = source.get("options")
    if isinstance(options, dict):
        found |= {f"prune.{k}": v for k, v in options.items() if v is not None and not found.get(f"prune.{k}")}
    return {key: value for key, value in found.items() if key not in _ASIDE and not isinstance(value, dict)}


def different_settings(runs: Sequence[Settings]) -> list[Settings]:
    """For each run the settings that differ among the runs, the most important first."""
    keys = dict.fromkeys(key for settings in runs for key in settings)
    different = sorted((key for key in keys if len(_values(key, runs)) > 1), key=_rank)
    return [{key: run[key] for key in different if key in run} for run in runs]


def _values(key: str, runs: Sequence[Settings]) -> set[str]:
    """The values of a key; a recipe with its section but without the key counts as one (``ratio`` or ``horizon``)."""
    section = key.split(".")[0] + "."
    asked = [run for run in runs if key in run or ("source.model" in run and any(k.startswith(section) for k in run))]
    return {json.dumps(run.get(key)) for run in asked}


def _rank(key: str) -> int:
    return _FIRST.index(key) if key in _FIRST else len(_FIRST)


def short_settings(settings: Settings) -> str:
    """Such as ``adapt, no second order, distilled 0.75``."""
    shown = [_words(key, value) for key, value in settings.items()]
    more = len(shown) - MAX_SHOWN
    return ", ".join(shown[:MAX_SHOWN]) + (f" and {more} more" if more > 0 else "")


_NAMES = {"distill.weight": "distilled", "source.model": "source", "prune.enabled": "pruning"}


def _words(key: str, value: Any) -> str:
    name = _NAMES.get(key, key.split(".")[-1].replace("_", " "))
    if value is False or value in ("", []) or (key == "distill.weight" and value == 0):
        return f"no {'distillation' if name == 'distilled' else name}"
    if value is True or key == "prune.method":
        return name if value is True else str(value)
    values = value if isinstance(value, list) else [value]
    return f"{name} {' + '.join(_short(item) for item in values)}"


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else public_name(str(value))
