"""The rotary embedding of a GGUF file as transformers' ``rope_parameters``."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from dwindle.core.limits import MAX_WIDTH
from dwindle.sources.gguf_file import GgufFile, damaged, unsupported


def rope_parameters(file: GgufFile, head_dim: int) -> dict[str, Any]:
    """``rope_parameters`` of the file; an error if transformers has no exact counterpart."""
    rope: dict[str, Any] = {"rope_theta": file.number("rope.freq_base", 10000.0)}
    if rope["rope_theta"] <= 0:
        raise damaged(file.path, f"{file.architecture}.rope.freq_base is {rope['rope_theta']}")
    rotary_dim = int(file.number("rope.dimension_count", head_dim)) or head_dim
    if rotary_dim != head_dim:
        if file.architecture not in ("phi3", "glm4"):
            raise unsupported(file, f"rotates {rotary_dim} of {head_dim} channels, which is not supported")
        rope["partial_rotary_factor"] = rotary_dim / head_dim
    if "rope_factors_long.weight" in file.tensors or "rope_factors_short.weight" in file.tensors:
        return rope | _longrope(file)
    if "rope_freqs.weight" in file.tensors:
        return rope | _llama3_rope(file, rope["rope_theta"], head_dim)
    return rope | _rope_scaling(file)


def _rope_scaling(file: GgufFile) -> dict[str, Any]:
    kind = file.get("rope.scaling.type", "none")
    if kind == "none" and (linear := file.number("rope.scale_linear", 1.0)) != 1.0:
        return {"rope_type": "linear", "factor": linear}
    factor = file.number("rope.scaling.factor", 1.0)
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return {"rope_type": "default"}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise unsupported(file, f"scales its positions by {kind!r}, which is not supported")
    for key in ("yarn_attn_factor", "yarn_ext_factor"):
        if file.get(f"rope.scaling.{key}", 1.0) != 1.0:
            raise unsupported(file, f"sets {file.architecture}.rope.scaling.{key}, which is not supported")
    rope = {"rope_type": "yarn", "factor": factor, **_yarn_attention(file, factor)}
    original = int(file.number("rope.scaling.original_context_length", 0))
    if original:
        rope["original_max_position_embeddings"] = int(original)
    for key, name in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
        if file.get(f"rope.scaling.{key}") is not None:
            rope[name] = file.number(f"rope.scaling.{key}", 0.0)
    return rope


def _yarn_attention(file: GgufFile, factor: float) -> dict[str, Any]:
    """What multiplies the rotations of YaRN, if it is not the usual factor; Ministral's scale of late queries."""
    found: dict[str, Any] = {}
    multiplier, mscale_all_dim = file.get("rope.scaling.attn_factor"), file.get("rope.scaling.yarn_log_multiplier")
    if mscale_all_dim is not None and file.architecture != "mistral3" and mscale_all_dim != 1.0:
        raise unsupported(file, f"sets {file.architecture}.rope.scaling.yarn_log_multiplier, which is not supported")
    if mscale_all_dim is not None and file.architecture == "mistral3":
        found |= {"mscale": 1.0, "mscale_all_dim": file.number("rope.scaling.yarn_log_multiplier", 1.0)}
    if multiplier is not None and multiplier != 1.0:
        found["attention_factor"] = file.number("rope.scaling.attn_factor", 1.0) * yarn_factor(
            {"factor": factor, **found}
        )
    if beta := file.number("attention.temperature_scale", 0.0):
        found["llama_4_scaling_beta"] = beta
    return found


def yarn_factor(rope: dict[str, Any]) -> float:
    """The factor by which transformers multiplies the rotations of YaRN."""
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    growth = 0.1 * math.log(max(float(rope["factor"]), 1.0))
    mscale, mscale_all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return (growth * float(mscale) + 1.0) / (growth * float(mscale_all_dim) + 1.0)
    return growth + 1.0


def _longrope(file: GgufFile) -> dict[str, Any]:
    """phi3's two tables of frequency divisors, and the context length at which one replaces the other."""
    original = int(file.number("rope.scaling.original_context_length", 0))
    tables = ("rope_factors_long.weight", "rope_factors_short.weight")
    if file.architecture != "phi3" or not original or any(name not in file.tensors for name in tables):
        raise unsupported(file, "has rope factor tables that are not supported")
    if any(len(file.tensors[name].shape) != 1 or file.tensors[name].shape[0] > MAX_WIDTH for name in tables):
        raise unsupported(file, "has rope factor tables of a wrong shape")
    file.check_complete()
    long_factor, short_factor = (file.read(name).reshape(-1).tolist() for name in tables)
    rope = {
        "rope_type": "longrope",
        "original_max_position_embeddings": original,
        "factor": file.whole("context_length") / original,
        "long_factor": long_factor,
        "short_factor": short_factor,
    }
    if file.get("rope.scaling.attn_factor") is not None:
        rope["attention_factor"] = file.number("rope.scaling.attn_factor", 1.0)
    return rope


def _llama3_rope(file: GgufFile, theta: float, head_dim: int) -> dict[str, Any]:
    """The parameters of Llama 3's scaling, of which llama.cpp stores only the resulting divisors.

    Its converter always uses 8192 as the original context, and every published model uses 1 and 4 as the two frequency
    factors, so the largest divisor is the scale. Other divisors are an error.
    """
    if math.prod(file.tensors["rope_freqs.weight"].shape) > MAX_WIDTH:
        raise unsupported(file, "has a rope_freqs table that is not Llama 3's")
    file.check_complete()
    stored = file.read("rope_freqs.weight").reshape(-1)
    if (stored == 1.0).all():
        return {"rope_type": "default"}
    factor = float(stored.max())
    rope = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    expected = llama3_divisors(rope | {"rope_theta": theta}, head_dim) if 1 < factor < math.inf else []
    if stored.shape != (len(expected),) or not np.allclose(stored, expected, rtol=1e-3, atol=0):
        raise unsupported(file, "has a rope_freqs table that is not Llama 3's")
    return rope


def llama3_divisors(rope: dict[str, Any], head_dim: int) -> list[float]:
    """What Llama 3's scaling divides each frequency by: nothing of the fast ones, ``factor`` of the slow ones."""
    low, high, original = (
        float(rope[key]) for key in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )
    found = []
    for place in range(0, head_dim, 2):
        wavelength = 2 * math.pi * float(rope["rope_theta"]) ** (place / head_dim)
        smooth = min(1.0, max(0.0, (original / wavelength - low) / (high - low)))
        found.append(1 / ((1 - smooth) / float(rope["factor"]) + smooth))
    return found
