"""SmoothQuant: moves activation outliers into the weights, exactly, before rounding.

Channel j of an input is divided by s_j, and column j of the weights that read it is multiplied by s_j, with
``s_j = |x_j|^α / |w_j|^(1-α)`` where |·| is the peak (as in SmoothQuant) or the root mean square. The division costs
nothing at run time: it goes into the gain of the preceding norm, or into the rows of the preceding projection (v for o,
up for down), whose row scales absorb it. α and |·| are chosen per place on a grid by the 8-bit rounding error on a
calibration sample. "No migration" is a candidate, so smoothing never increases that error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dwindle.anatomy.anatomy import Anatomy
from dwindle.anatomy.structure import Layer
from dwindle.core.errors import UserError
from dwindle.core.progress import track
from dwindle.quantization.linear import dequantize, quantize_rows, quantize_tokens

ALPHAS = tuple(step / 10 for step in range(1, 10))
_SAMPLE_ROWS = 256
_TINY = 1e-5


@dataclass(slots=True)
class InputStats:
    """Statistics of a linear layer's input: peak and mean square per channel, and a sample of tokens."""

    peak: Tensor
    mean_square: Tensor
    sample: Tensor
    num_windows: int = 0


@dataclass(frozen=True, slots=True)
class Place:
    """Projections that read the same input, and the parameter that can absorb the division."""

    layer: int
    readers: tuple[str, ...]
    """Modules that read the input; their weights are multiplied."""
    writer: str
    """Parameter that is divided."""
    kind: str
    """``norm`` (a gain), ``value`` (rows of v, shared by the queries of a key/value head) or ``up`` (rows of up)."""


@dataclass(slots=True)
class Smoothing:
    """For each place the chosen α (None: unchanged) and the rounding error before and after."""

    chosen: dict[str, float | None] = field(default_factory=dict)
    error_before: dict[str, float] = field(default_factory=dict)
    error_after: dict[str, float] = field(default_factory=dict)


@torch.inference_mode()
def observe(model: Any, windows: Tensor, *, option: str = "--data") -> dict[str, InputStats]:
    """Run the calibration text and collect statistics of every linear layer's input."""
    found: dict[str, InputStats] = {}
    per_window = max(1, _SAMPLE_ROWS // len(windows))

    def watch(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            x = args[0].detach().float().flatten(0, -2)
            rows = x[torch.linspace(0, len(x) - 1, min(per_window, len(x)), device=x.device).long()]
            peak, square = x.abs().amax(0), x.square().mean(0)
            if name not in found:
                found[name] = InputStats(peak, square, rows, 1)
                return
            seen = found[name]
            seen.peak = torch.maximum(seen.peak, peak)
            seen.mean_square += (square - seen.mean_square) / (seen.num_windows + 1)
            seen.sample = torch.cat([seen.sample, rows])
            seen.num_windows += 1

        return hook

    device = next(model.parameters()).device
    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                hooks.enter_context(module.register_forward_pre_hook(watch(name)))
        for window in track(windows, "calibrating", len(windows)):
            model(input_ids=window[None].to(device), use_cache=False)
    if any(not torch.isfinite(seen.peak).all() for seen in found.values()):
        raise UserError(f"{option}: activations are not finite on the calibration text: the weights are broken")
    return found


def smooth(model: Any, inputs: Mapping[str, InputStats]) -> Smoothing:
    """Migrate scales in place where that lowers the rounding error; the unquantized function does not change.

    ``inputs`` is updated to the scaled activations.
    """
    anatomy = Anatomy.of(model)
    result = Smoothing()
    places = list(_places(model, anatomy))
    for place in track(places, "smoothing", len(places)):
        _smooth_place(model, anatomy, place, inputs, result)
    return result


@torch.no_grad()
def _smooth_place(
    model: Any, anatomy: Anatomy, place: Place, inputs: Mapping[str, InputStats], result: Smoothing
) -> None:
    seen = inputs[place.readers[0]]
    weights = torch.cat([model.get_submodule(name).weight.float() for name in place.readers])
    layer = anatomy.source.layers[place.layer]
    plain = rounding_error(seen.sample, weights)
    best: tuple[float, float | None, Tensor | None] = (plain, None, None)
    for size_x, size_w in _sizes(seen, weights):
        for alpha in ALPHAS:
            scale = _tied(size_x.pow(alpha) / size_w.pow(1 - alpha), place, layer, anatomy.head_dim)
            scale = scale / scale.log().mean().exp()
            error = rounding_error(seen.sample / scale, weights * scale)
            if error < best[0]:
                best = (error, alpha, scale)
    key = place.readers[0]
    result.chosen[key], result.error_before[key], result.error_after[key] = best[1], plain, best[0]
    if best[2] is not None:
        _migrate(model, place, layer, anatomy, best[2])
        for name in place.readers:
            there = inputs[name]
            there.peak, there.sample = there.peak / best[2], there.sample / best[2]
            there.mean_square = there.mean_square / best[2].square()


def _sizes(seen: InputStats, weights: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of channel magnitudes (inputs, weights) to derive scales from: peak and root mean square."""
    peak_x, rms_x = seen.peak, seen.mean_square.sqrt()
    peak_w, rms_w = weights.abs().amax(0), weights.square().mean(0).sqrt()
    for size_x, size_w in ((peak_x, peak_w), (peak_x, rms_w), (rms_x, rms_w)):
        yield size_x.clamp(min=_TINY), size_w.clamp(min=_TINY)


def rounding_error(x_TI: Tensor, w_OI: Tensor) -> float:
    """Mean squared error of the output with 8-bit tokens and rows, relative to its mean square."""
    exact = F.linear(x_TI, w_OI)
    weight, scale = quantize_rows(w_OI)
    rounded = F.linear(quantize_tokens(x_TI), dequantize(weight, scale))
    return float((rounded - exact).square().mean() / exact.square().mean().clamp(min=_TINY))


def _tied(scale: Tensor, place: Place, layer: Layer, head_dim: int) -> Tensor:
    """Queries of one value head share its scale: the largest of theirs."""
    if place.kind != "value":
        return scale
    by_query = scale.view(-1, head_dim)
    owners = torch.tensor([layer.kv_heads.index(kv) for kv in layer.kv_of_query], device=scale.device)
    shared = torch.stack([by_query[owners == kv].amax(0) for kv in range(len(layer.kv_heads))])
    return shared[owners].flatten()


def _migrate(model: Any, place: Place, layer: Layer, anatomy: Anatomy, scale: Tensor) -> None:
    for name in place.readers:
        weight = model.get_submodule(name).weight
        weight.mul_(scale.to(weight.dtype))
    if place.kind == "value":
        first = [layer.kv_of_query.index(kv) for kv in layer.kv_heads]
        scale = scale.view(-1, anatomy.head_dim)[first].flatten()
    parameters = dict(model.named_parameters())
    written = [parameters[place.writer]]
    bias = place.writer.removesuffix("weight") + "bias"
    if place.kind != "norm" and bias in parameters:
        written.append(parameters[bias])
    for tensor in written:
        rows = tensor[-len(scale) :]  # the last part of a fused projection: v of qkv, up of gate_up
        divisor = scale.to(tensor.dtype) if tensor.ndim == 1 else scale.to(tensor.dtype)[:, None]
        offset = anatomy.family.gain_offset if place.kind == "norm" else 0.0
        rows.add_(offset).div_(divisor).sub_(offset)


def _places(model: Any, anatomy: Anatomy) -> Iterator[Place]:
    """All places that can absorb a division; with norms after the blocks (OLMo 2) only v and up can.

    Without a gate (Arcee) the rows of up cannot: the activation behind them is not linear. Blocks of other kinds
    (convolutions, linear attention) are left as they are.
    """
    names = {name for name, _ in model.named_parameters()}
    for layer in range(anatomy.num_layers):
        prefix = f"model.layers.{layer}."

        def present(parts: tuple[str, ...], prefix: str = prefix) -> tuple[str, ...]:
            return tuple(prefix + part for part in parts if f"{prefix}{part}.weight" in names)

        attention = present(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.qkv_proj"))
        ffn = present(("mlp.gate_proj", "mlp.up_proj", "mlp.gate_up_proj"))
        for part, readers in (("self_attn", attention), ("mlp", ffn)):
            if readers and (norm := anatomy.family.norm_before.get(part)) is not None:
                yield Place(layer, readers, f"{prefix}{norm}.weight", "norm")
        values = present(("self_attn.v_proj", "self_attn.qkv_proj"))
        if present(("self_attn.o_proj",)) and anatomy.source.layers[layer].query_heads:
            yield Place(layer, (f"{prefix}self_attn.o_proj",), f"{values[0]}.weight", "value")
        if ffn and ffn != (f"{prefix}mlp.up_proj",):
            yield Place(layer, (f"{prefix}mlp.down_proj",), f"{ffn[-1]}.weight", "up")
