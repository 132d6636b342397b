"""``quantize`` writes a directory in the format compressed-tensors, ``load`` reads it back for evaluation."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from math import exp
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from rich.console import Group
from rich.table import Table
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dwindle.anatomy.build import build_on_meta, is_custom, restore_buffers
from dwindle.anatomy.positions import warn_beyond_positions
from dwindle.core.config import takes
from dwindle.core.errors import UserError, first_line
from dwindle.core.files import atomic_directory, refuse_existing
from dwindle.core.notebook import Shown
from dwindle.core.progress import status, track
from dwindle.core.reading import read_json
from dwindle.core.run_directory import QUANTIZATION
from dwindle.core.sizes import format_bytes
from dwindle.core.terminal import right, titled
from dwindle.data.pydoc_text import DEFAULT_TEXT
from dwindle.data.text_windows import calibration_windows, validation_windows
from dwindle.export.huggingface import write_beside
from dwindle.export.quantised_card import quantised_card
from dwindle.export.verification import Mismatch, check_same_weights
from dwindle.quantization.clipping import group_clips
from dwindle.quantization.compressed_tensors import config_of, layer_from, tensors_of
from dwindle.quantization.config import QuantizeConfig
from dwindle.quantization.linear import (
    QuantizedLinear,
    Rounding,
    dequantize,
    quantize_groups,
    quantize_rows,
    quantize_rows_fp8,
)
from dwindle.quantization.smoothing import InputStats, Smoothing, observe, smooth
from dwindle.sources import huggingface
from dwindle.sources.common import check_finite
from dwindle.sources.loading import Loaded, needed_tokenizer
from dwindle.sources.loading import load as load_source
from dwindle.training.loss import evaluate_loss

FORMAT = 2
MOST_ERROR = 0.5
"""Largest change of a layer's weights, relative to their norm: 4 bits change them by a tenth."""
MOST_NATS = 700.0
"""Beyond it, e to the loss is no number any more; of a vocabulary of 128,000 tokens a guess has 12 nats."""
WEIGHTS = "model.safetensors"
_HEAD = "lm_head"


@dataclass(frozen=True, slots=True)
class Scheme:
    """Bits of the weights and, if they are rounded too, how activations are."""

    weight_bits: int
    rounds: Rounding | None
    note: str


SCHEMES: dict[str, Scheme] = {
    "w8a8": Scheme(8, "int8", "8-bit weights per row, 8-bit activations per token"),
    "w8": Scheme(8, None, "8-bit weights per row"),
    "w4": Scheme(4, None, "4-bit weights in groups"),
    "fp8": Scheme(8, "fp8", "8-bit floats: weights per row, activations per token"),
}
"""Applied to all linear layers but the head; embedding, head, norms and biases have 16 bits."""


@dataclass(slots=True)
class Quantized(Shown):
    """The quantized model, how it was made and, if validation text was given, its perplexity."""

    model: Any = field(repr=False)
    tokenizer: Any = field(repr=False)
    source: str
    scheme: str
    group: int
    bytes_before: int
    bytes_after: int
    smoothing: Smoothing | None = field(repr=False)
    in_rows: int = 0
    """Linear layers of a w4 model that groups do not divide: they have 8-bit rows."""
    perplexity: dict[str, float] = field(default_factory=dict)
    """``source``, ``plain`` (rounded without smoothing or clipping) and ``quantized``."""

    def __iter__(self) -> Iterator[Any]:
        return iter((self.model, self.tokenizer))

    def to_json(self) -> dict[str, Any]:
        return {
            "source": self.source,
            "scheme": self.scheme,
            "group": self.group if self.scheme == "w4" else None,
            "bytes": {"before": self.bytes_before, "after": self.bytes_after},
            "perplexity": self.perplexity,
            "smoothed_places": _num_smoothed(self.smoothing),
            "layers_in_8_bit_rows": self.in_rows,
        }

    def render(self) -> Group:
        title = f"{self.source}, {self.scheme}: {SCHEMES[self.scheme].note}"
        if self.in_rows:
            title += f"\n{self.in_rows} linear layers have widths that groups of {self.group} do not divide: "
            title += "8-bit rows there"
        table = Table(*right("", "weights", *(("perplexity", "against the source") if self.perplexity else ())))
        names = {"source": "source", "plain": "rounded only", "quantized": _recipe(self.smoothing)}
        for key, name in names.items():
            if key == "plain" and key not in self.perplexity:
                continue
            size = self.bytes_before if key == "source" else self.bytes_after
            measured: tuple[str, ...] = ()
            if self.perplexity:
                value = self.perplexity[key]
                change = "" if key == "source" else f"{value / self.perplexity['source'] - 1:+.2%}"
                measured = (f"{value:.3f}", change)
            table.add_row(name, format_bytes(size), *measured)
        return titled(title, table)


def _recipe(smoothing: Smoothing | None) -> str:
    return "quantized" if smoothing is None else f"smoothed ({_num_smoothed(smoothing)} places)"


def _num_smoothed(smoothing: Smoothing | None) -> int:
    return 0 if smoothing is None else sum(alpha is not None for alpha in smoothing.chosen.values())


@takes(QuantizeConfig)
def quantize(
    source: str | PathLike[str] | Loaded,
    *,
    config: QuantizeConfig,
    out: str | PathLike[str] | None = None,
    data: Sequence[str] = (DEFAULT_TEXT,),
    valid: Sequence[str] = (),
    text_field: str = "text",
    device: str = "auto",
    overwrite: bool = False,
) -> Quantized:
    """Quantize a model's weights (and for ``w8a8`` its activations), calibrated on text; write it to ``out`` if given.

    With ``valid`` the perplexity of the source, of plain rounding and of the result is measured on the same windows.
    ``device`` applies to a source that is loaded here; a model in memory stays on its device.
    """
    chosen, group = SCHEMES[config.scheme], config.group
    if out is not None:
        place = source.source if isinstance(source, Loaded) else source
        refuse_existing(Path(out), marker=QUANTIZATION, overwrite=overwrite, sources=[place, *data, *valid])
    loaded = source if isinstance(source, Loaded) else load_source(source, device=device)
    check_finite(loaded.model, loaded.source)
    warn_beyond_positions(config.seq_len, loaded.model.config)
    tokenizer = needed_tokenizer(loaded.tokenizer, loaded.source)
    windows, _ = calibration_windows(
        data,
        tokenizer,
        num_sequences=config.sequences,
        seq_len=config.seq_len,
        seed=config.seed,
        text_field=text_field,
    )
    perplexity: dict[str, float] = {}
    if valid:
        held_out = validation_windows(
            list(valid),
            tokenizer,
            config.valid_seq_len,
            config.valid_tokens,
            text_field=text_field,
            option="--valid",
        )
        perplexity = _perplexity_before(loaded.model, chosen, group, held_out)
    model = deepcopy(loaded.model)
    inputs = observe(model, windows)
    found = smooth(model, inputs) if config.smoothing and chosen.rounds == "int8" else None
    model = quantized_copy(model, chosen, group, inputs)
    if valid:
        perplexity["quantized"] = measure_perplexity(model, held_out, "quantized")
    sizes = num_bytes(dict(loaded.model.named_parameters())), num_bytes(stored_tensors(model))
    layers = quantized_layers(model).values()
    in_rows = sum(layer.zero is None for layer in layers) if chosen.weight_bits == 4 else 0
    result = Quantized(model, tokenizer, loaded.source, config.scheme, group, *sizes, found, in_rows, perplexity)
    if out is not None:
        _save(result, Path(out), overwrite=overwrite)
    return result


def _perplexity_before(model: Any, scheme: Scheme, group: int, windows: Tensor) -> dict[str, float]:
    """Perplexity of the source and, if the scheme does more than round, of plain rounding."""
    found = {"source": measure_perplexity(model, windows, "source")}
    if scheme.rounds == "int8" or scheme.weight_bits < 8:
        found["plain"] = measure_perplexity(quantized_copy(model, scheme, group, {}), windows, "rounded only")
    return found


@torch.no_grad()
def quantized_copy(model: Any, scheme: Scheme, group: int, inputs: Mapping[str, InputStats]) -> Any:
    """A copy with quantized projections; 4-bit weights are clipped if ``inputs`` has their layer.

    Everything else has the values that 16 bits hold. The head is not rounded: that caused about a sixth of the whole
    loss increase on SmolLM2-135M, and servers expect it so.
    """
    smaller = deepcopy(model)
    dtype = stored_dtype(model)
    linears = [(name, module) for name, module in smaller.named_modules() if isinstance(module, nn.Linear)]
    for parameter in smaller.parameters():
        if parameter.dtype != dtype and parameter.is_floating_point():
            parameter.copy_(parameter.to(dtype))
    originals = dict(model.named_modules())
    for name, module in track(linears, "rounding", len(linears)):
        if module is not smaller.lm_head:
            bias = None if module.bias is None else module.bias.detach()
            weight = originals[name].weight.detach().float()
            layer = _rounded(weight, bias, scheme, group, inputs.get(name), dtype)
            error = float((dequantize(layer.weight, layer.scale, layer.zero) - weight).norm() / weight.norm())
            if error > MOST_ERROR:
                raise Mismatch(f"quantize: the rounded weights of {name} are {error:.0%} off the source's")
            _replace(smaller, name, layer)
    return smaller


def stored_dtype(model: Any) -> torch.dtype:
    """The model's dtype if it has 16 bits, else bfloat16: what servers compute in."""
    dtype: torch.dtype = model.model.embed_tokens.weight.dtype
    return dtype if dtype in (torch.float16, torch.bfloat16) else torch.bfloat16


def _rounded(
    weight: Tensor, bias: Tensor | None, scheme: Scheme, group: int, seen: InputStats | None, dtype: torch.dtype
) -> QuantizedLinear:
    if scheme.weight_bits == 4 and weight.shape[1] % group == 0:
        clips: Tensor | float = 1.0 if seen is None else group_clips(weight, group, seen.mean_square)
        return QuantizedLinear(*quantize_groups(weight, group, clips, dtype), bias, rounds=None)
    values, scale = (quantize_rows_fp8 if scheme.rounds == "fp8" else quantize_rows)(weight, dtype)
    return QuantizedLinear(values, scale, None, bias, rounds=scheme.rounds)


def quantized_layers(model: Any) -> dict[str, QuantizedLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}


def _replace(model: Any, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def stored_tensors(model: Any) -> dict[str, Tensor]:
    """Everything that a file holds; a head that is the embedding is left out."""
    dtype = stored_dtype(model)
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        found[name] = parameter.detach().to(dtype)
    for name, layer in quantized_layers(model).items():
        own = {f"{name}.{part}": tensor for part, tensor in tensors_of(layer).items()}
        found |= {part: tensor.to(dtype) if part.endswith(".bias") else tensor for part, tensor in own.items()}
    return found


def num_bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def measure_perplexity(model: Any, windows: Tensor, name: str) -> float:
    """exp of the mean cross-entropy over all tokens of the windows."""
    with status(f"perplexity, {name}"):
        loss = evaluate_loss(model, windows, batch=1)
    if not loss < MOST_NATS:
        raise UserError(f"--valid: {name}: a loss of {loss:.3g} nats per token has no perplexity: check the model")
    return exp(loss)


def _save(result: Quantized, out: Path, *, overwrite: bool) -> None:
    model = result.model
    tensors = {name: tensor.contiguous().cpu() for name, tensor in stored_tensors(model).items()}
    with atomic_directory(out, marker=QUANTIZATION, overwrite=overwrite) as folder:
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        model.config.save_pretrained(folder)
        write_beside(model, result.tokenizer, folder, custom_code=is_custom(model.config))
        _mark_config(folder / "config.json", result)
        if getattr(model, "generation_config", None) is not None:
            model.generation_config.save_pretrained(folder)
        description = {"format": FORMAT, **result.to_json()}
        (folder / QUANTIZATION).write_text(json.dumps(description, indent=1) + "\n", encoding="utf-8")
        (folder / "README.md").write_text(_card(result, out), encoding="utf-8")
        for file in folder.iterdir():
            if file.is_file():
                file.chmod(0o644)
        check_same_weights(load(folder).model.state_dict(), model)


def _card(result: Quantized, out: Path) -> str:
    """What the directory holds, what loads it, and what rounding cost."""
    return quantised_card(
        name=out.resolve().name,
        source=result.source,
        scheme=f"{result.scheme}: {SCHEMES[result.scheme].note}",
        num_bytes=(result.bytes_before, result.bytes_after),
        perplexity=result.perplexity,
        chat=bool(getattr(result.tokenizer, "chat_template", None)),
        custom_code=is_custom(result.model.config),
    )


def _mark_config(path: Path, result: Quantized) -> None:
    """Set ``quantization_config``, and the dtype of what is not quantized."""
    config = json.loads(path.read_text(encoding="utf-8"))
    config["quantization_config"] = config_of(quantized_layers(result.model), result.group, [_HEAD])
    config["dtype"] = str(stored_dtype(result.model)).removeprefix("torch.")
    config["architectures"] = config.get("architectures") or [type(result.model).__name__]
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load(source: str | PathLike[str]) -> Loaded:
    """Load a directory that ``quantize`` wrote, in float32, as a model that ``evaluate`` can run."""
    folder = Path(source)
    try:
        description = read_json(folder / QUANTIZATION)
        tensors = load_file(folder / WEIGHTS) if description.get("format") == FORMAT else {}
    except (UserError, OSError, ValueError, SafetensorError) as error:
        raise UserError(
            f"source {folder}: not a complete directory of quantized weights ({error}): quantize the model again"
        ) from error
    if description.get("format") != FORMAT or description.get("scheme") not in SCHEMES:
        raise UserError(f"source {folder}: {QUANTIZATION} was written by another version: quantize the model again")
    try:
        model = _rebuilt(folder, SCHEMES[description["scheme"]], tensors)
        floats = {name: tensor.float() for name, tensor in tensors.items() if not _is_quantized(name, model)}
        missing, unexpected = model.load_state_dict(floats, strict=False, assign=True)
    except (AttributeError, KeyError, RuntimeError, ValueError) as error:
        why = first_line(error)
        raise UserError(f"source {folder}: {WEIGHTS} does not fit ({why}): quantize the model again") from error
    model.tie_weights()
    quantized = {f"{name}." for name in quantized_layers(model)}
    missing = [n for n in missing if "rotary_emb" not in n and not any(map(n.startswith, quantized))]
    missing = [n for n in missing if not (model.config.tie_word_embeddings and n == f"{_HEAD}.weight")]
    if missing or unexpected:
        raise UserError(f"source {folder}: {(missing + unexpected)[0]} does not fit the model: quantize it again")
    restore_buffers(model, "cpu")
    return Loaded(model.eval(), huggingface.read_tokenizer(folder, str(folder)), str(folder), "huggingface")


def _is_quantized(name: str, model: Any) -> bool:
    return isinstance(model.get_submodule(name.rpartition(".")[0]), QuantizedLinear)


def _rebuilt(folder: Path, scheme: Scheme, tensors: dict[str, Tensor]) -> Any:
    """The model with its rounded layers."""
    config = huggingface.read_config(folder, str(folder))
    del config.quantization_config  # whose layers are ours here, not those of a library
    model: Any = build_on_meta(config)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and module is not model.lm_head:
            layer = layer_from(tensors, name, scheme.rounds)
            if layer.weight.shape != module.weight.shape:
                raise ValueError(f"{name} has {tuple(layer.weight.shape)} weights")
            if layer.bias is not None:
                layer.bias = layer.bias.float()
            _replace(model, name, layer)
    return model
