"""The generation settings of a source: stop tokens and sampling, without what transformers refuses to save."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedConfig

from dwindle.core.errors import UserError
from dwindle.core.reading import read_json
from dwindle.sources.common import SourceNotice, quiet_transformers

_FILE = "generation_config.json"
_FIRST = ("do_sample", "num_beams", "use_cache", "return_dict_in_generate")
"""Settings that decide whether others have a meaning."""


def read_generation(folder: Path, raw: Mapping[str, Any], where: str) -> GenerationConfig:
    """The settings of a directory: those of their own file, else those in its configuration (``raw``)."""
    known = GenerationConfig().to_dict()
    given: Mapping[str, Any] = {key: value for key, value in raw.items() if key in known} | {"_from_model_config": True}
    if (folder / _FILE).is_file():
        try:
            found = read_json(folder / _FILE)
            if not isinstance(found, dict):
                raise UserError(f"{folder / _FILE} is not a table of settings")
            given = found
        except UserError as error:
            _warn(where, f"its generation settings are ignored: {error}")
    return repaired(given, where)


def implied_generation(config: PreTrainedConfig, where: str) -> GenerationConfig:
    """The settings that a configuration implies: its special tokens."""
    return repaired(GenerationConfig.from_model_config(config).to_diff_dict(), where)


def stopping_at(generation: GenerationConfig, token: int | None) -> GenerationConfig:
    """The same settings with one more token that ends an answer."""
    known = generation.eos_token_id
    stops = [] if known is None else list(known) if isinstance(known, list) else [known]
    if token is not None and token not in stops:
        generation.eos_token_id = [token, *stops] if stops else token
    return generation


def repaired(given: Mapping[str, Any], where: str) -> GenerationConfig:
    """The settings without those that transformers refuses to save, which a warning names."""
    with quiet_transformers():
        kept, dropped = accepted(given)
    if dropped:
        _warn(where, f"generation settings that transformers refuses to save were dropped: {', '.join(dropped)}")
    return kept


def accepted(given: Mapping[str, Any]) -> tuple[GenerationConfig, list[str]]:
    """The settings that can be saved together, and the rest as ``name = value``.

    A sampling temperature without ``do_sample``, or early stopping with one beam, has no effect: to drop it changes
    nothing that ``generate`` returns.
    """
    kept: dict[str, Any] = {}
    dropped = []
    for name in sorted(given, key=lambda name: (name not in _FIRST, name)):
        try:
            candidate = GenerationConfig(**kept, **{name: given[name]})
            candidate.validate(strict=True)
            candidate.to_json_string()
        except Exception:  # transformers raises whatever a wrong type leads to
            dropped.append(f"{name} = {given[name]!r:.40}")
            continue
        kept[name] = given[name]
    return GenerationConfig(**kept), dropped


def _warn(where: str, problem: str) -> None:
    warnings.warn(f"source {where}: {problem}", SourceNotice, stacklevel=2)
