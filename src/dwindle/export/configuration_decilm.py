# Copyright the dwindle authors. Licensed under the Apache License, Version 2.0.
"""The configuration of a ``DeciLMForCausalLM``: a Llama whose layers differ, described by ``block_configs``.

It is saved beside models of that layout, whose modelling code is the server's own; it needs transformers only.
"""

from __future__ import annotations

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import LlamaConfig


class Block(dict[str, Any]):
    """A JSON object whose keys are also attributes."""

    def __getattr__(self, key: str) -> Any:
        if key not in self:
            raise AttributeError(key)
        return Block(self[key]) if isinstance(self[key], dict) else self[key]


@strict
class DeciLMConfig(LlamaConfig):
    model_type = "nemotron-nas"
    block_configs: list | None = None  # type: ignore[type-arg]

    def __post_init__(self, **kwargs: Any) -> None:
        self.block_configs = [Block(block) for block in self.block_configs or ()]
        super().__post_init__(**kwargs)

    def validate_architecture(self) -> None:
        """The head size is explicit, so hidden size and heads are independent."""
