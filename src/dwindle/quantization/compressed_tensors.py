"""The file format compressed-tensors, as vLLM and transformers read it: tensors and ``quantization_config``.

``int-quantized`` and ``float-quantized`` store 8-bit weights as they are, ``pack-quantized`` stores 4- or 8-bit
integers densely in int32, the first value in the lowest bits, each shifted to be positive.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dwindle.quantization.linear import QuantizedLinear, Rounding

METHOD = "compressed-tensors"


def pack(values: Tensor, bits: int, *, rows: bool = False) -> Tensor:
    """int8 values → int32, along rows of the matrix or (``rows``) along its columns."""
    if rows:
        return pack(values.T.contiguous(), bits).T.contiguous()
    per_word = 32 // bits
    shifted = values.to(torch.int64) + (1 << (bits - 1))
    shifted = F.pad(shifted, (0, -values.shape[1] % per_word)).view(values.shape[0], -1, per_word)
    words = (shifted << (bits * torch.arange(per_word, device=values.device))).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def unpack(words: Tensor, bits: int, width: int, *, rows: bool = False) -> Tensor:
    """Inverse of ``pack`` for ``width`` values along the packed axis."""
    if rows:
        return unpack(words.T.contiguous(), bits, width).T.contiguous()
    per_word = 32 // bits
    shifts = bits * torch.arange(per_word, device=words.device)
    values = (words.to(torch.int64)[..., None] >> shifts) & ((1 << bits) - 1)
    return (values.flatten(1)[:, :width] - (1 << (bits - 1))).to(torch.int8)


def tensors_of(layer: QuantizedLinear) -> dict[str, Tensor]:
    """The layer's tensors under the names of the format."""
    found = {"weight_scale": layer.scale}
    if layer.rounds is None:  # weights alone are rounded: the kernels for that read packed integers
        bits = 8 if layer.zero is None else 4
        found |= {"weight_packed": pack(layer.weight, bits), "weight_shape": torch.tensor(layer.weight.shape)}
        if layer.zero is not None:
            found["weight_zero_point"] = pack(layer.zero, bits, rows=True)
    else:
        found["weight"] = layer.weight
    return found | ({} if layer.bias is None else {"bias": layer.bias})


def layer_from(tensors: Mapping[str, Tensor], name: str, rounds: Rounding | None) -> QuantizedLinear:
    """The layer back from a file; raises KeyError for a missing tensor."""
    scale, bias = tensors[f"{name}.weight_scale"], tensors.get(f"{name}.bias")
    zero = tensors.get(f"{name}.weight_zero_point")
    if rounds is not None:
        return QuantizedLinear(tensors[f"{name}.weight"], scale, None, bias, rounds=rounds)
    height, width = tensors[f"{name}.weight_shape"].tolist()
    bits = 8 if zero is None else 4
    weight = unpack(tensors[f"{name}.weight_packed"], bits, width)
    zero = None if zero is None else unpack(zero, bits, height, rows=True)
    return QuantizedLinear(weight, scale, zero, bias, rounds=None)


def config_of(layers: Mapping[str, QuantizedLinear], group: int, ignore: Sequence[str]) -> dict[str, Any]:
    """``quantization_config``: one scheme for all linear layers, and another for those whose groups do not divide."""
    with_groups = [name for name, layer in layers.items() if layer.zero is not None]
    in_rows = {name: layer for name, layer in layers.items() if layer.zero is None}
    schemes = {}
    if with_groups:
        weights = _arguments(4, "int", "group", symmetric=False, group_size=group)
        schemes["group_0"] = _scheme(["Linear"], weights, None, "pack-quantized")
    if in_rows:
        rounds = next(iter(in_rows.values())).rounds
        kind = "float" if rounds == "fp8" else "int"
        inputs = None if rounds is None else _arguments(8, kind, "token", dynamic=True)
        form = "pack-quantized" if rounds is None else f"{kind}-quantized"
        targets = list(in_rows) if with_groups else ["Linear"]
        schemes[f"group_{len(schemes)}"] = _scheme(targets, _arguments(8, kind, "channel"), inputs, form)
    return {
        "quant_method": METHOD,
        "format": next(iter(schemes.values()))["format"],
        "quantization_status": "compressed",
        "config_groups": schemes,
        "ignore": list(ignore),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _scheme(targets: list[str], weights: Any, inputs: Any, form: str) -> dict[str, Any]:
    return {
        "targets": targets,
        "weights": weights,
        "input_activations": inputs,
        "output_activations": None,
        "format": form,
    }


def _arguments(
    bits: int, kind: str, strategy: str, *, symmetric: bool = True, dynamic: bool = False, group_size: int | None = None
) -> dict[str, Any]:
    return {
        "num_bits": bits,
        "type": kind,
        "strategy": strategy,
        "symmetric": symmetric,
        "dynamic": dynamic,
        "group_size": group_size,
    }
