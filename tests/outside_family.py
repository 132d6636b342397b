"""A family that the package does not have: its table, as a user would write it, and tiny models of it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM

PAGE = Path(__file__).resolve().parents[1] / "docs" / "families.md"
STARCODER2 = next(
    block for block in re.findall(r"```toml\n(.*?)```", PAGE.read_text("utf-8"), re.S) if "[stem]" in block
)
"""The table of the documentation's example."""


def tables(text: str) -> dict[str, Any]:
    return tomllib.loads(text)


def starcoder2(**options: Any) -> Any:
    sizes = {"vocab_size": 257, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "bos_token_id": 1, "eos_token_id": 2}
    config = AutoConfig.for_model("starcoder2", **{**sizes, **heads, "residual_dropout": 0.0, **options})
    return AutoModelForCausalLM.from_config(config).eval()
