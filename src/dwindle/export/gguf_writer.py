"""Writes GGUF files: the inverse of ``sources/gguf_model.py``, from the same table of names."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dwindle.anatomy.anatomy import Anatomy
from dwindle.anatomy.families import CUSTOM_PREFIX
from dwindle.anatomy.structure import Structure
from dwindle.core.errors import UserError, install_hint
from dwindle.core.progress import Bar
from dwindle.export.gguf_vocabulary import Vocabulary
from dwindle.sources.gguf_model import ARCHITECTURES, STEM_NAMES

BLOCK = 32
"""Values per block in the quantized types; a row must be a whole number of blocks."""

TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1")
_FILE_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q8_0": 7, "bf16": 32}
_PER_LAYER = {"llama", "mistral", "qwen2"}
"""Families that llama.cpp's ``deci`` graph computes: a Llama, with or without q/k/v biases."""

COUPLED = {"olmo2", "phi3"}
"""Families for which llama.cpp assumes hidden size = heads × head size."""


@dataclass(slots=True)
class Written:
    """What was written: architecture, tensors in a fallback type, and the weights exactly as stored."""

    architecture: str
    fallbacks: list[str] = field(default_factory=list)
    """Tensors that could not be stored in the requested type."""
    stored: dict[str, torch.Tensor] = field(default_factory=dict)
    """Parameters whose values the type rounded."""


def import_gguf() -> Any:
    try:
        import gguf
        import gguf.quants
    except ImportError as error:
        raise UserError(f"writing GGUF needs the gguf package: {install_hint('gguf')}") from error
    return gguf


def architecture_of(model: Any) -> str:
    """The GGUF architecture: the family's own for equal layers, ``deci`` for unequal ones (each must be regular)."""
    anatomy = Anatomy.of(model)
    structure = anatomy.source
    family = model.config.model_type.removeprefix(CUSTOM_PREFIX)
    coupled = len(structure.hidden) == len(structure.layers[0].query_heads) * anatomy.head_dim
    if structure.is_uniform and family == "qwen2" and not coupled:
        return "deci"
    if structure.is_uniform and family in COUPLED and not coupled:
        raise UserError(
            f"--to gguf: llama.cpp's {family} requires hidden size = heads × head size, but {len(structure.hidden)} is "
            f"more than {len(structure.layers[0].query_heads)} × {anatomy.head_dim}: export to hf or onnx instead"
        )
    if not structure.is_uniform:
        if family not in _PER_LAYER:
            raise UserError(
                f"--to gguf: llama.cpp does not support {family} with unequal layers: pass --stock to pad them to "
                "equal sizes"
            )
        return "deci"
    architecture = "llama" if family == "mistral" else family
    if architecture not in ARCHITECTURES:
        raise UserError(f"--to gguf: {family} is not supported: export to hf or onnx instead")
    return architecture


def write_gguf(
    path: Path, model: Any, vocabulary: Vocabulary, *, type_: str, name: str, description: str = "", licence: str = ""
) -> Written:
    """Write all tensors and the metadata; rows that are not a whole number of blocks are stored as f16."""
    gguf = import_gguf()
    architecture = architecture_of(model)
    writer = gguf.GGUFWriter(path, architecture)
    try:
        writer.add_name(name)
        if description:
            writer.add_description(description)
        if licence:
            writer.add_license(licence)
        writer.add_file_type(_FILE_TYPES[type_])
        for key, value in _hyperparameters(model, architecture).items():
            _add(writer, f"{architecture}.{key}", value)
        vocabulary.write(writer)
        written = Written(architecture)
        for key, table in _rope_tables(model.config, Anatomy.of(model).head_dim).items():
            writer.add_tensor(key, table)
        _add_tensors(gguf, writer, model, type_, written)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()
    return written


class _Layout:
    """GGUF names and row order of a model's tensors."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.anatomy = Anatomy.of(model)
        self.architecture = architecture_of(model)
        self.family = ARCHITECTURES[self.architecture]
        self._layer_parts = {ours: theirs for theirs, ours in self.family.layer.items()}
        self._stem_parts = {ours: theirs for theirs, ours in STEM_NAMES.items()}

    def name(self, parameter: str) -> str:
        """``model.layers.3.self_attn.q_proj.weight`` -> ``blk.3.attn_q.weight``"""
        module, _, kind = parameter.rpartition(".")
        if not module.startswith("model.layers."):
            return f"{self._stem_parts[module]}.{kind}"
        number, _, part = module.removeprefix("model.layers.").partition(".")
        return f"blk.{number}.{self._layer_parts[part]}.{kind}"

    def reorder(self, parameter: str, values: torch.Tensor, *, inverse: bool = False) -> torch.Tensor:
        """Rows of query and key projections in GGUF's rotary order, if the architecture uses it."""
        for part, unit in (("q_proj", "query"), ("k_proj", "kv")):
            if self.family.permuted and f".self_attn.{part}." in parameter:
                heads = len(self.anatomy.source.unit(unit, self.anatomy[parameter].layer))
                return interleaved_from(values, heads, inverse=inverse)
        return values


def _add_tensors(gguf: Any, writer: Any, model: Any, type_: str, written: Written) -> None:
    layout = _Layout(model)
    parameters = dict(model.named_parameters())
    with Bar("writing tensors", len(parameters)) as bar:
        for name, parameter in parameters.items():
            target = layout.name(name)
            values = layout.reorder(name, parameter.detach().float().cpu()).contiguous().numpy()
            kind = _type_for(gguf, target, values, type_, written)
            packed = values if kind.name == "F32" else gguf.quants.quantize(values, kind)
            writer.add_tensor(target, packed, raw_dtype=kind)
            if kind.name != "F32":
                stored = torch.from_numpy(gguf.quants.dequantize(packed, kind))
                written.stored[name] = layout.reorder(name, stored, inverse=True)
            bar.advance()


def _type_for(gguf: Any, target: str, values: npt.NDArray[np.float32], type_: str, written: Written) -> Any:
    """The GGML type of a tensor: f32 for gains and biases, q8_0 for embedding and head in 4-bit files."""
    kinds = gguf.GGMLQuantizationType
    if values.ndim == 1:
        return kinds.F32
    if type_.startswith("q"):
        if values.shape[-1] % BLOCK:
            written.fallbacks.append(target)
            return kinds.F16
        if target in ("token_embd.weight", "output.weight"):
            return kinds.Q8_0
    return kinds[type_.upper()]


def interleaved_from(rows: torch.Tensor, num_heads: int, *, inverse: bool = False) -> torch.Tensor:
    """Rows i and i + d/2 of a head, which transformers rotates together, become adjacent (or the inverse)."""
    half = rows.shape[0] // num_heads // 2
    pairs = rows.reshape(num_heads, *((half, 2) if inverse else (2, half)), *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape).contiguous()


def _hyperparameters(model: Any, architecture: str) -> dict[str, Any]:
    config = model.config
    anatomy = Anatomy.of(model)
    structure = anatomy.source
    rope = config.rope_parameters
    head_dim = anatomy.head_dim
    values: dict[str, Any] = {
        "context_length": _context(config, architecture),
        "embedding_length": len(structure.hidden),
        "block_count": len(structure.layers),
        **_layer_sizes(structure, architecture),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1.0)),
        "rope.freq_base": float(rope["rope_theta"]),
        "vocab_size": int(config.vocab_size),
        **_rope_scaling(rope),
    }
    for key, (name, _) in ARCHITECTURES[architecture].keys.items():
        value = getattr(config, name, None)
        if value is not None:
            values[key] = int(value) if key == "attention.sliding_window" else float(value)
    return values


def _layer_sizes(structure: Structure, architecture: str) -> dict[str, Any]:
    sizes = {
        "feed_forward_length": [len(la.ffn) for la in structure.layers],
        "attention.head_count": [len(la.query_heads) for la in structure.layers],
        "attention.head_count_kv": [len(la.kv_heads) for la in structure.layers],
    }
    return sizes if architecture == "deci" else {key: value[0] for key, value in sizes.items()}


def _context(config: Any, architecture: str) -> int:
    """The context length, limited to the sliding window where llama.cpp ignores the window: within it both agree."""
    window = getattr(config, "sliding_window", None)
    if window and architecture != "phi3" and getattr(config, "use_sliding_window", True):
        return min(int(config.max_position_embeddings), int(window))
    return int(config.max_position_embeddings)


def _rope_scaling(rope: dict[str, Any]) -> dict[str, Any]:
    kind = rope.get("rope_type", "default")
    if kind in ("default", "llama3"):
        return {}
    if kind == "linear":
        return {"rope.scaling.type": "linear", "rope.scaling.factor": float(rope["factor"])}
    original = rope.get("original_max_position_embeddings")
    if kind == "longrope" and original:
        values: dict[str, Any] = {"rope.scaling.original_context_length": int(original)}
        if rope.get("attention_factor") is not None:
            values["rope.scaling.attn_factor"] = float(rope["attention_factor"])
        return values
    plain = not any(rope.get(key) for key in ("attention_factor", "mscale", "mscale_all_dim"))
    if kind == "yarn" and original and plain:
        values = {"rope.scaling.type": "yarn", "rope.scaling.factor": float(rope["factor"])}
        values["rope.scaling.original_context_length"] = int(original)
        for key in ("beta_fast", "beta_slow"):
            if rope.get(key) is not None:
                values[f"rope.scaling.yarn_{key}"] = float(rope[key])
        return values
    raise UserError(f"--to gguf: rope scaling {kind!r} with these settings cannot be written: export to hf instead")


def _rope_tables(config: Any, head_dim: int) -> dict[str, npt.NDArray[np.float32]]:
    """Rotary factors that GGUF stores as tensors: Llama 3's divisors and phi3's two tables."""
    rope = config.rope_parameters
    if rope.get("rope_type") == "longrope":
        return {
            f"rope_factors_{length}.weight": np.asarray(rope[f"{length}_factor"], np.float32)
            for length in ("long", "short")
        }
    if rope.get("rope_type") != "llama3":
        return {}
    original, low, high = (
        float(rope[key]) for key in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    )
    divisors = []
    for place in range(0, head_dim, 2):
        wavelength = 2 * math.pi * float(rope["rope_theta"]) ** (place / head_dim)
        smooth = min(1.0, max(0.0, (original / wavelength - low) / (high - low)))
        divisors.append(1 / ((1 - smooth) / float(rope["factor"]) + smooth))
    return {"rope_freqs.weight": np.asarray(divisors, np.float32)}


def _add(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_uint32(key, int(value))
