"""What programs beside transformers 5 read in a model directory: transformers 4, mlx-lm, and older servers.

transformers 5 writes the rotary base and scaling as ``rope_parameters``, and ``TokenizersBackend`` as the class of a
tokenizer. Programs that do not know the first take a default for the base and compute another model without an error;
the second they refuse. So both are written in the older way as well, which transformers 5 reads as the same. mlx-lm
builds layers of different sizes by a file of ours, as transformers does.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from dwindle.anatomy.family import CUSTOM_PREFIX
from dwindle.core.reading import read_json

MLX_FILE = "mlx_dwindle.py"
MLX_FAMILIES = ("llama", "mistral", "qwen3", "smollm3", "glm4", "seed_oss", "ernie4_5", "hunyuan_v1_dense")
"""Families whose logits in mlx-lm 0.32 are ours, whatever the sizes of their layers."""
MLX_EQUAL_HEADS = ("qwen2", "granite", "phi3", "olmo2")
"""Families of which mlx-lm knows one number of heads, from which it takes their size."""
_TOKENIZER_CLASS = "PreTrainedTokenizerFast"
"""The class, in every transformers, of a tokenizer that ``tokenizer.json`` describes; 5 calls it TokenizersBackend."""
_LONGROPE = {"rope_type", "short_factor", "long_factor", "original_max_position_embeddings"}
"""All that Phi-3 has of this kind of scaling: transformers 4 wants the factors, and ``type``, and nothing else."""


def add_for_other_readers(folder: Path) -> None:
    """Complete ``config.json`` and ``tokenizer_config.json`` of a directory, as far as it has them."""
    if (config := folder / "config.json").is_file():
        values = read_json(config)
        values |= rotary_keys(values.get("rope_parameters"))
        values.pop("model_file", None)  # of the source
        if _needs_mlx_file(values):
            values["model_file"] = MLX_FILE
            shutil.copyfile(Path(__file__).with_name(MLX_FILE), folder / MLX_FILE)
        _write(config, values)
    if (config := folder / "tokenizer_config.json").is_file():
        _write(config, _tokenizer_keys(read_json(config)))


def _needs_mlx_file(config: dict[str, Any]) -> bool:
    """Whether mlx-lm has the family, but not with layers of these sizes."""
    model_type: str = config.get("model_type", "")
    family = model_type.removeprefix(CUSTOM_PREFIX)
    layers = config.get("per_layer_config", {}).values()
    has_equal_heads = not any("num_attention_heads" in own or "num_key_value_heads" in own for own in layers)
    is_known = family in MLX_FAMILIES or (family in MLX_EQUAL_HEADS and has_equal_heads)
    return is_known and family != model_type


def rotary_keys(rope: dict[str, Any] | None) -> dict[str, Any]:
    """``rope_theta``, ``rope_scaling``, …: of one rotation, or of one for each type of layer (Gemma 3, OLMo 3)."""
    of_types = {kind: one for kind, one in (rope or {}).items() if isinstance(one, dict) and "rope_theta" in one}
    full = of_types.get("full_attention") or next(iter(of_types.values()), rope or {})
    if "rope_theta" not in full:
        return {}
    keys = dict[str, Any]()
    scaling = {key: value for key, value in full.items() if key not in ("rope_theta", "partial_rotary_factor")}
    kind = scaling.get("rope_type", "default")
    if kind == "longrope" and set(scaling) == _LONGROPE:
        keys["original_max_position_embeddings"] = scaling.pop("original_max_position_embeddings")
        scaling["type"] = scaling.pop("rope_type")
    if kind == "dynamic" and "alpha" in scaling:  # Hunyuan's, which mlx-lm knows by this key
        scaling["type"] = kind
    keys |= {"rope_theta": full["rope_theta"], "rope_scaling": None if kind == "default" else scaling}
    if "partial_rotary_factor" in full:
        keys["partial_rotary_factor"] = full["partial_rotary_factor"]
    if "sliding_attention" in of_types:
        keys["rope_local_base_freq"] = of_types["sliding_attention"]["rope_theta"]
    return keys


def _tokenizer_keys(values: dict[str, Any]) -> dict[str, Any]:
    """The class, and a list of special tokens under a name that does not stand for a table of them."""
    if values.get("tokenizer_class") == "TokenizersBackend":
        values["tokenizer_class"] = _TOKENIZER_CLASS
    if isinstance(values.get("extra_special_tokens"), list):
        values["additional_special_tokens"] = values.pop("extra_special_tokens")
    return values


def _write(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
