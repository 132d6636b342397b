"""Verifies an ONNX export: every weight that the file holds, and logits in onnxruntime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dwindle.anatomy.anatomy import Anatomy
from dwindle.export.onnx_graph import BLOCK, import_onnx
from dwindle.export.onnx_runtime import OnnxEngine
from dwindle.export.verification import Mismatch, Verified, check_rounded, numbers_of, verify_cached

TOLERANCE = 1e-4


def verify_onnx(path: Path, written: Any, reference: Any, prompts: list[list[int]], *, threads: int) -> Verified:
    """Compare the weights with those of ``written``, and logits with ``reference``, in batches of two lengths."""
    check_weights(path, written)
    pairs = [[ids, ids[len(ids) // 3 :][::-1]] for ids in prompts]
    return verify_cached("onnxruntime", lambda: OnnxEngine(path, threads=threads), reference, pairs, TOLERANCE)


def check_weights(path: Path, model: Any) -> None:
    """``Mismatch`` unless the file holds the model's weights, but for rounding, and its window.

    Prompts neither read every row of an embedding nor fill every window.
    """
    onnx = import_onnx()
    graph = onnx.load(str(path), load_external_data=False).graph
    stored = {one.name: one for one in graph.initializer}

    def read(name: str) -> Tensor:
        return torch.from_numpy(onnx.numpy_helper.to_array(stored[name], base_dir=str(path.parent)).copy())

    window = numbers_of(model)["sliding_window"]
    if {int(read(node.input[1])) for node in graph.node if node.op_type == "Less"} != {window} - {None}:
        raise Mismatch(f"export: the graph has other windows than {window}: the output was removed")
    anatomy = Anatomy.of(model)
    rotated = 2 * len(model.model.rotary_emb.inv_freq) if anatomy.family.interleaved_rotation else 0
    for name, parameter in model.named_parameters():
        own, kind = parameter.detach().float().cpu(), "F32"
        if rotated and (".q_proj." in name or ".k_proj." in name):
            own = _with_halves(own, anatomy.head_dim, rotated)
        if name in stored:
            found = read(name).T if ".layers." in name and own.ndim == 2 else read(name)
            found = found - anatomy.family.gain_offset if name.endswith("norm.weight") else found
        elif bits := next((bits for bits in (8, 4) if f"{name}_q{bits}" in stored), None):
            found = _whole(read(f"{name}_q{bits}"), bits).flatten(1).short() - 2 ** (bits - 1)
            found = found * read(f"{name}_scales").view(len(own), -1).repeat_interleave(BLOCK, 1)
            found, kind = found[:, : own.shape[1]], f"Q{bits}_0"
        else:
            raise Mismatch(f"export: {name} was not written: the output was removed")
        check_rounded(name, found, own, kind)


def _whole(packed: Tensor, bits: int) -> Tensor:
    """One whole number per entry; of two in a byte the first has the lower bits."""
    return packed if bits == 8 else torch.stack([packed & 15, packed >> 4], -1).flatten(-2)


def _with_halves(rows: Tensor, head_dim: int, rotated: int) -> Tensor:
    """Query or key rows of interleaved rotations as the graph rotates them: channel i with channel i + r/2."""
    heads = rows.reshape(-1, head_dim, *rows.shape[1:])
    parts = heads[:, 0:rotated:2], heads[:, 1:rotated:2], heads[:, rotated:]
    return torch.cat(parts, dim=1).flatten(0, 1)
