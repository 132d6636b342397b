"""A directory for transformers.js (browsers, Node): ``onnx/model.onnx``, ``model_quantized.onnx``, ``model_q4.onnx``.

transformers.js makes the empty key/value cache from ``config.json``, where all layers have the same heads, so only
stock models of families that it knows can be run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dwindle.anatomy.build import is_custom
from dwindle.anatomy.family import CUSTOM_PREFIX
from dwindle.core.errors import UserError
from dwindle.core.reading import read_json
from dwindle.export.onnx_graph import write_onnx
from dwindle.export.onnx_verification import verify_onnx
from dwindle.export.verification import Verified, with_tensors

KNOWN = (
    *("llama", "mistral", "qwen2", "qwen3", "smollm3", "olmo2", "olmo3", "granite", "phi3", "gemma3_text", "arcee"),
    *("ministral3", "ernie4_5", "hunyuan_v1_dense"),
)
"""Families of ours that transformers.js has a class for, with one shape of cache for all layers."""
GRAPHS: dict[str, int | None] = {"model": None, "model_quantized": 8, "model_q4": 4}
"""File names of its dtypes fp32, q8 and q4, and the bits of their weights."""
MAX_FILE_BYTES = 1_900_000_000
"""protobuf's limit is 2 GB; larger weights go into a file beside the graph."""


def refuse_unknown(config: Any) -> None:
    """Refuse what transformers.js cannot run."""
    family = config.model_type.removeprefix(CUSTOM_PREFIX)
    if family not in KNOWN:
        raise UserError(f"--to transformers.js: it does not know {family}: export to onnx, for onnxruntime")
    if is_custom(config):
        raise UserError("--to transformers.js: it runs stock models with equal layers only: add --stock to pad them")


def write_graphs(model: Any, folder: Path, prompts: list[list[int]], *, threads: int | None) -> Verified | None:
    """Write the three graphs; each is run in onnxruntime and compared with the weights that it stores, in torch.

    Returns the comparison with the largest difference; None without ``threads``.
    """
    (folder / "onnx").mkdir()
    found: list[Verified] = []
    in_files: dict[str, int] = {}
    for name, bits in GRAPHS.items():
        path = folder / "onnx" / f"{name}.onnx"
        beside = f"{path.name}_data" if _num_bytes(model, bits) > MAX_FILE_BYTES else None
        stored = write_onnx(model, path, bits=bits, weights_in=beside)
        if beside is not None:
            in_files[path.name] = 1
        if threads is not None:
            reference = with_tensors(model, stored) if stored else model
            found.append(verify_onnx(path, model, reference, prompts, threads=threads))
    if in_files:
        path = folder / "config.json"
        settings = {"transformers.js_config": {"use_external_data_format": in_files}}
        path.write_text(json.dumps(read_json(path) | settings, indent=2) + "\n", encoding="utf-8")
    return max(found, key=lambda verified: verified.max_error, default=None)


def _num_bytes(model: Any, bits: int | None) -> float:
    """About the size of the weights; 8 bits are 9 with their scales."""
    count: int = sum(parameter.numel() for parameter in model.parameters())
    return count * (32 if bits is None else 9) / 8
