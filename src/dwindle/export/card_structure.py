"""What a model card says about a structure (the content of ``structure.json``): what loads it, and how it is stored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any


def served_by(structure: Mapping[str, Any]) -> str:
    """What vLLM needs if not all layers give attention the same numbers of heads."""
    groups = [tuple(sorted(found.values())) for found in kv_groups(structure) if found]  # a convolution has none
    if len(set(groups)) < 2 and all(len(set(found)) == 1 for found in groups):
        return ""
    other = "`dwindle export --to hf --as deci` or `--stock` write a directory for earlier versions"
    return f" vLLM serves it from version 0.28 on; {other}."


def kv_groups(structure: Mapping[str, Any]) -> list[Counter[int]]:
    """For each layer, how many query heads read each of its key/value heads."""
    return [Counter(layer["kv_of_query"]) for layer in structure.get("layers") or []]


def why_not_stock(structure: Mapping[str, Any]) -> str:
    """Why transformers' own classes cannot load the model."""
    layers = structure.get("layers") or []
    uneven = any(len(set(groups.values())) > 1 for groups in kv_groups(structure))
    found = ["query groups of different sizes within a layer"] if uneven else []
    heads = {(len(la["query_heads"]), len(la["kv_heads"])) for la in layers if la["query_heads"]}
    widths = {len(la["ffn"]) for la in layers if "mlp" not in la.get("absent", ())}
    different = [*(["heads"] * (len(heads) > 1)), *(["FFN channels"] * (len(widths) > 1))]
    found += ["layers without attention or FFN"] if any(len(la.get("absent", ())) == 1 for la in layers) else []
    found += [f"layers with different numbers of {' and '.join(different)}"] if different else []
    return f"The model has {' and '.join(found)}" if found else "No stock configuration supports its sizes"


def is_gone(layer: Mapping[str, Any]) -> bool:
    """Whether a layer has neither attention nor FFN any more."""
    return len(layer.get("absent", ())) == 2


def stored_as(model_type: str, structure: Mapping[str, Any]) -> str:
    """``mistral_note`` of a structure."""
    layers = structure.get("layers") or []
    heads = max((len(layer["query_heads"]) for layer in layers), default=0)
    return mistral_note(model_type, len(structure["hidden"]), heads) if heads else ""


def mistral_note(model_type: str, hidden: int, heads: int) -> str:
    """Why a pruned Llama is stored as a Mistral; empty if it is not (no other Mistral has such sizes)."""
    if model_type != "mistral" or hidden % heads == 0:
        return ""
    return (
        f"It is stored as a Mistral, because Llama's configuration requires a hidden size (here {hidden:,}) that is a "
        f"multiple of the heads ({heads:,}); a Mistral without sliding window computes the same as a Llama without "
        "biases."
    )
