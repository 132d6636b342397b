"""``quantize`` writes a directory of integer weights, ``load`` reads it back for evaluation."""

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
from rich.table import Table
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dwindle.anatomy.build import build_on_meta, restore_buffers
from dwindle.anatomy.families import outside_family, register_beside
from dwindle.anatomy.family_files import write_family
from dwindle.anatomy.positions import warn_beyond_positions
from dwindle.core.config import takes
from dwindle.core.errors import UserError
from dwindle.core.files import atomic_directory, refuse_existing
from dwindle.core.limits import check_sizes
from dwindle.core.notebook import Shown
from dwindle.core.progress import track
from dwindle.core.reading import read_json
from dwindle.core.sizes import format_bytes
from dwindle.data.pydoc_text import DEFAULT_TEXT
from dwindle.data.text_windows import calibration_windows, validation_windows
from dwindle.export.quantised_card import quantised_card
from dwindle.quantization.clipping import group_clips
from dwindle.quantization.config import QuantizeConfig
from dwindle.quantization.linear import Embedding8, Linear4, Linear8, pack_nibbles, quantize_groups, quantize_rows
from dwindle.quantization.smoothing import InputStats, Smoothing, observe, smooth
from dwindle.sources import huggingface
from dwindle.sources.loading import Loaded, needed_tokenizer
from dwindle.sources.loading import load as load_source

FORMAT = 1
MARKER = "quantization.json"
WEIGHTS = "quantized.safetensors"
"""Not ``model.safetensors``, so that no other tool loads the integers as weights."""
OWN_METHOD = "dwindle-"
"""Prefix of ``quant_method`` in the configuration; the scheme follows."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """Bits of the weights and, if they are rounded too, of the activations."""

    weight_bits: int
    activation_bits: int | None
    note: str


SCHEMES: dict[str, Scheme] = {
    "w8a8": Scheme(8, 8, "8-bit weights per row, 8-bit activations per token (except the head's input)"),
    "w8": Scheme(8, None, "8-bit weights per row"),
    "w4": Scheme(4, None, "4-bit weights in groups, 8-bit embedding and head"),
}


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
        }

    def render(self) -> Table:
        title = f"{self.source}, {self.scheme}: {SCHEMES[self.scheme].note}"
        table = Table(title=title, title_justify="left")
        for column in ("", "weights", "perplexity", "against the source"):
            table.add_column(column, justify="right")
        names = {"source": "source", "plain": "rounded only", "quantized": _recipe(self.smoothing)}
        for key, name in names.items():
            if key == "plain" and key not in self.perplexity:
                continue
            size = self.bytes_before if key == "source" else self.bytes_after
            value = self.perplexity.get(key)
            change = f"{value / self.perplexity['source'] - 1:+.2%}" if value is not None and key != "source" else ""
            table.add_row(name, format_bytes(size), f"{value:.3f}" if value is not None else "-", change)
        return table


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
        refuse_existing(Path(out), marker=MARKER, overwrite=overwrite, sources=[place, *data, *valid])
    loaded = source if isinstance(source, Loaded) else load_source(source, device=device)
    warn_beyond_positions(config.seq_len, loaded.model.config)
    tokenizer = needed_tokenizer(loaded.tokenizer, loaded.source)
    windows = calibration_windows(
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
    found = smooth(model, inputs) if config.smoothing and chosen.activation_bits else None
    model = quantized_copy(model, chosen, group, inputs)
    if valid:
        perplexity["quantized"] = measure_perplexity(model, held_out, "quantized")
    sizes = num_bytes(loaded.model), num_bytes(model)
    result = Quantized(model, tokenizer, loaded.source, config.scheme, group, *sizes, found, perplexity)
    if out is not None:
        _save(result, Path(out), overwrite=overwrite)
    return result


def _perplexity_before(model: Any, scheme: Scheme, group: int, windows: Tensor) -> dict[str, float]:
    """Perplexity of the source and, if the scheme does more than round, of plain rounding."""
    found = {"source": measure_perplexity(model, windows, "source")}
    if scheme.activation_bits or scheme.weight_bits < 8:
        found["plain"] = measure_perplexity(quantized_copy(model, scheme, group, {}), windows, "rounded only")
    return found


@torch.no_grad()
def quantized_copy(model: Any, scheme: Scheme, group: int, inputs: Mapping[str, InputStats]) -> Any:
    """A copy with quantized projections, embedding and head; 4-bit weights are clipped if ``inputs`` has their layer.

    The head has 8-bit weights in every scheme and its input is not rounded: rounding it caused about a sixth of the
    whole loss increase on SmolLM2-135M.
    """
    smaller = deepcopy(model)
    head = smaller.lm_head
    tied = head.weight is smaller.model.embed_tokens.weight
    linears = [(name, module) for name, module in smaller.named_modules() if isinstance(module, nn.Linear)]
    for name, module in track(linears, "rounding", len(linears)):
        if module is not head:
            _replace(smaller, name, _rounded(module, scheme, group, inputs.get(name)))
    embedding = smaller.model.embed_tokens.weight
    dtype = embedding.dtype
    values, scale = quantize_rows(embedding.float())
    factor = getattr(smaller.model.embed_tokens, "scalar_embed_scale", 1.0)
    smaller.model.embed_tokens = Embedding8(values, scale, dtype, factor)
    if not tied:
        values, scale = quantize_rows(head.weight.float())
    bias = None if head.bias is None else head.bias.detach()
    smaller.lm_head = Linear8(values, scale, bias, round_inputs=False)
    return smaller


def _rounded(module: nn.Linear, scheme: Scheme, group: int, seen: InputStats | None) -> nn.Module:
    weight = module.weight.detach().float()
    bias = None if module.bias is None else module.bias.detach()
    importance = None if seen is None else seen.mean_square
    if scheme.weight_bits == 8:
        return Linear8(*quantize_rows(weight), bias, round_inputs=scheme.activation_bits is not None)
    clips: Tensor | float = 1.0 if seen is None else group_clips(weight, group, importance)
    values, scale, low = quantize_groups(weight, group, clips)
    packed = pack_nibbles(values)
    return Linear4(packed, scale.half(), low.half(), bias, in_features=module.in_features, group=group)


def _replace(model: Any, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def num_bytes(model: Any) -> int:
    """Size of all parameters and weight buffers; a shared tensor counts once."""
    seen = {tensor.data_ptr(): tensor.nbytes for _, tensor in _stored(model)}
    return sum(seen.values())


def _stored(model: Any) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if "rotary_emb" not in name:
            yield name, buffer


@torch.inference_mode()
def measure_perplexity(model: Any, windows: Tensor, name: str = "model") -> float:
    """exp of the mean cross-entropy over all tokens of the windows."""
    total = 0.0
    device = next(model.parameters()).device
    for window in track(windows.to(device), f"perplexity, {name}", len(windows)):
        logits = model(input_ids=window[None, :-1], use_cache=False).logits[0]
        total += float(torch.nn.functional.cross_entropy(logits.float(), window[1:], reduction="mean"))
    return exp(total / len(windows))


def _save(result: Quantized, out: Path, *, overwrite: bool) -> None:
    model = result.model
    tensors: dict[str, Tensor] = {}
    places: dict[int, str] = {}
    shared: dict[str, str] = {}
    for name, tensor in _stored(model):
        if (first := places.setdefault(tensor.data_ptr(), name)) != name:
            shared[name] = first
        else:
            tensors[name] = tensor.detach().contiguous()
    description = {"format": FORMAT, **result.to_json(), "shared": shared}
    with atomic_directory(out, marker=MARKER, overwrite=overwrite) as folder:
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        model.config.save_pretrained(folder)
        if (table := outside_family(model.config.model_type)) is not None:
            write_family(table, folder)
        _mark_config(folder / "config.json", result.scheme)
        if getattr(model, "generation_config", None) is not None:
            model.generation_config.save_pretrained(folder)
        result.tokenizer.save_pretrained(folder)
        (folder / MARKER).write_text(json.dumps(description, indent=1) + "\n", encoding="utf-8")
        (folder / "README.md").write_text(_card(result, out), encoding="utf-8")
        for file in folder.iterdir():
            file.chmod(0o644)


def _card(result: Quantized, out: Path) -> str:
    """What the directory holds, what loads it, and what rounding cost."""
    return quantised_card(
        name=out.resolve().name,
        source=result.source,
        scheme=f"{result.scheme}: {SCHEMES[result.scheme].note}",
        num_bytes=(result.bytes_before, result.bytes_after),
        perplexity=result.perplexity,
        chat=bool(getattr(result.tokenizer, "chat_template", None)),
    )


def _mark_config(path: Path, scheme: str) -> None:
    """Set ``quantization_config``, so that other loaders refuse the model instead of misreading it."""
    config = json.loads(path.read_text(encoding="utf-8"))
    config["quantization_config"] = {"quant_method": f"{OWN_METHOD}{scheme}"}
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load(source: str | PathLike[str]) -> Loaded:
    """Load a directory that ``quantize`` wrote, as a model that ``evaluate`` can run."""
    folder = Path(source)
    try:
        description = read_json(folder / MARKER)
        tensors = load_file(folder / WEIGHTS)
    except (UserError, OSError, ValueError, SafetensorError) as error:
        raise UserError(
            f"source {folder}: not a complete directory of quantized weights ({error}): quantize the model again"
        ) from error
    if description.get("format") != FORMAT or description.get("scheme") not in SCHEMES:
        raise UserError(f"source {folder}: {MARKER} was written by another version: quantize the model again")
    tensors |= {name: tensors[first] for name, first in description["shared"].items() if first in tensors}
    try:
        model = _rebuilt(folder, description, tensors)
    except KeyError as error:
        raise UserError(f"source {folder}: {WEIGHTS} has no tensor {error}: quantize the model again") from error
    missing, unexpected = model.load_state_dict(tensors, strict=False, assign=True)
    missing = [name for name in missing if "rotary_emb" not in name]
    if missing or unexpected:
        raise UserError(f"source {folder}: {(missing + unexpected)[0]} does not fit the model: quantize it again")
    restore_buffers(model, "cpu")
    return Loaded(model.eval(), huggingface.read_tokenizer(folder, str(folder)), str(folder), "huggingface")


def _rebuilt(folder: Path, description: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
    """The model with its integer modules, which follow from the scheme."""
    scheme, group = SCHEMES[description["scheme"]], description["group"]
    raw = json.loads(json.dumps(read_json(folder / "config.json")), object_hook=_with_infinities)
    check_sizes(raw, str(folder))
    register_beside(folder, raw["model_type"])
    model: Any = build_on_meta(_config(raw))
    rounds = scheme.activation_bits is not None
    for name, module in list(model.named_modules()):
        if not isinstance(module, nn.Linear):
            continue
        weight, scale, bias = tensors[f"{name}.weight"], tensors[f"{name}.scale"], tensors.get(f"{name}.bias")
        if scheme.weight_bits == 8 or module is model.lm_head:
            _replace(model, name, Linear8(weight, scale, bias, round_inputs=rounds and module is not model.lm_head))
        else:
            low, width = tensors[f"{name}.low"], module.in_features
            _replace(model, name, Linear4(weight, scale, low, bias, in_features=width, group=group))
    dtype = getattr(torch, str(raw.get("dtype") or "float32"))
    name = "model.embed_tokens"
    factor = getattr(model.model.embed_tokens, "scalar_embed_scale", 1.0)
    model.model.embed_tokens = Embedding8(tensors[f"{name}.weight"], tensors[f"{name}.scale"], dtype, factor)
    return model


def _with_infinities(data: dict[str, Any]) -> Any:
    """transformers writes an infinite number as an object, because JSON has none."""
    return float(data["__float__"]) if data.keys() == {"__float__"} else data


def _config(raw: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    from dwindle.anatomy.modeling_dwindle import PREFIX, classes_for

    values = {k: v for k, v in raw.items() if k not in ("quantization_config", "auto_map", "model_type")}
    if raw["model_type"].startswith(PREFIX):
        config: Any = classes_for(raw["model_type"])[0](**values)
    else:
        config = AutoConfig.for_model(raw["model_type"], **values)
    config._attn_implementation = config._experts_implementation = None  # no kernels from the hub
    return config
