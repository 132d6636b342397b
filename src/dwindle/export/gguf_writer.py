"""Writes GGUF files: the inverse of ``sources/gguf_model.py``, from the same table of names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dwindle.anatomy.anatomy import Anatomy
from dwindle.anatomy.family import CUSTOM_PREFIX
from dwindle.anatomy.structure import Structure
from dwindle.core.errors import UserError
from dwindle.core.progress import Bar
from dwindle.export import onnx_graph
from dwindle.export.gguf_types import FILE_TYPES, Fallback, TypeChoice, quantize
from dwindle.export.gguf_vocabulary import Vocabulary
from dwindle.export.resize import Blocks
from dwindle.export.verification import check_rounded
from dwindle.sources.common import interleaved_to_halves
from dwindle.sources.gguf_file import import_gguf
from dwindle.sources.gguf_model import ARCHITECTURES, STEM_NAMES
from dwindle.sources.gguf_rope import llama3_divisors, yarn_factor

_PER_LAYER = {"llama", "mistral", "qwen2"}
"""Families that llama.cpp's ``deci`` graph computes: a Llama, with or without q/k/v biases."""

_WHOLE = {"attention.sliding_window", "shortconv.l_cache"}
"""Keys of whole numbers."""

COUPLED = {"olmo2", "olmo3", "exaone4", "phi3", "lfm2"}
"""Families for which llama.cpp assumes hidden size = heads × head size."""

_NAMES = {
    "mistral": "llama",
    "olmo3": "olmo2",
    "gemma3_text": "gemma3",
    "ministral3": "mistral3",
    "hunyuan_v1_dense": "hunyuan-dense",
}
"""Families that llama.cpp knows by another name."""


@dataclass(slots=True)
class Written:
    """What was written: architecture, tensors in a fallback type, and the weights exactly as stored."""

    architecture: str
    fallbacks: list[Fallback] = field(default_factory=list)
    """Tensors that could not be stored in the requested type."""
    stored: dict[str, torch.Tensor] = field(default_factory=dict)
    """Parameters whose values the type rounded."""


def architecture_of(model: Any) -> str:
    """The GGUF architecture: the family's own for equal layers, ``deci`` for unequal ones (each must be regular)."""
    anatomy = Anatomy.of(model)
    structure = anatomy.source
    family = str(model.config.model_type).removeprefix(CUSTOM_PREFIX)
    architecture, elsewhere = _NAMES.get(family, family), f"export to {_other_ways(model)} instead"
    if architecture not in ARCHITECTURES:
        raise UserError(f"--to gguf: {family} is not supported: {elsewhere}")
    num_heads = len(structure.with_heads.query_heads)
    coupled = len(structure.hidden) == num_heads * anatomy.head_dim
    if structure.is_uniform and family == "qwen2" and not coupled:
        return "deci"
    if structure.is_uniform and family in COUPLED and not coupled:
        raise UserError(
            f"--to gguf: llama.cpp's {family} requires hidden size = heads × head size, but {len(structure.hidden)} is "
            f"more than {num_heads} × {anatomy.head_dim}: {elsewhere}"
        )
    if not structure.is_uniform:
        if family not in _PER_LAYER:
            raise UserError(
                f"--to gguf: llama.cpp does not support {family} with unequal layers: pass --stock to pad them to "
                "equal sizes"
            )
        return "deci"
    if (why := _unsupported(model, architecture)) is not None:
        raise UserError(f"--to gguf: llama.cpp's {architecture} {why}: {elsewhere}")
    return architecture


def blocks_to_fill(structure: Structure) -> Blocks:
    """Absent blocks that llama.cpp does not skip.

    It reads the size of a head from the first layer, and of a layer without an FFN it drops the attention, too.
    """
    absent = ((number, block) for number, layer in enumerate(structure.layers) for block in layer.absent)
    return frozenset((number, block) for number, block in absent if block == "mlp" or number == 0)


def is_known(model_type: str) -> bool:
    """Whether llama.cpp computes models of this family at some sizes; a dense Granite 4 is written as a Granite 3."""
    return model_type == "granitemoehybrid" or _NAMES.get(model_type, model_type) in ARCHITECTURES


def has_unequal_layers(model_type: str) -> bool:
    """Whether llama.cpp computes models of this family whose layers have different sizes."""
    return model_type in _PER_LAYER


def padding_for(model: Any, *, stock: bool = False) -> dict[str, Any]:
    """How ``resize`` makes a model fit for GGUF; unequal layers stay unless ``stock``."""
    anatomy = Anatomy.of(model)
    own_scale = getattr(model.config, "embed_scale", None)  # Gemma's, which only stock weights absorb
    coupled = str(model.config.model_type).removeprefix(CUSTOM_PREFIX) in COUPLED
    return {
        "uniform": stock or (own_scale is not None and anatomy.source.is_uniform),
        "min_hidden": len(anatomy.source.with_heads.query_heads) * anatomy.head_dim if coupled else 1,
        "fills": blocks_to_fill(anatomy.source),
    }


def _other_ways(model: Any) -> str:
    return "hf or onnx" if onnx_graph.unsupported(model) is None else "hf"


def _unsupported(model: Any, architecture: str) -> str | None:
    """What llama.cpp would not compute of this model; None if it computes all."""
    config, known = model.config, ARCHITECTURES[architecture]
    for name, _ in model.named_parameters():
        part = name.removeprefix("model.layers.").partition(".")[2].removesuffix(".bias")
        if known.biases is not None and name.endswith(".bias") and part not in known.biases:
            return f"ignores the bias of {part.rpartition('.')[2]}"
    kinds = getattr(config, "layer_types", None) or []
    every_fourth = [int((n + 1) % 4 > 0) for n in range(config.num_hidden_layers)]
    if config.model_type == "smollm3" and list(config.no_rope_layers)[: len(every_fourth)] != every_fourth:
        return "rotates all but every fourth layer"
    if config.model_type == "exaone4" and "sliding_attention" in kinds:
        return "knows sliding-window layers only in the 32B model"
    if config.model_type == "gemma3_text" and config.query_pre_attn_scalar != config.head_dim:
        return f"scales attention by the head size ({config.head_dim}), the model by {config.query_pre_attn_scalar}"
    if known.window_period is not None and "sliding_attention" in kinds and window_period(kinds) is None:
        return "knows full attention only in every n-th layer"
    return None


def window_period(kinds: Sequence[str]) -> int | None:
    """n if every n-th layer has full attention and the others slide; None for another order."""
    slides = [kind == "sliding_attention" for kind in kinds]
    period = slides.index(False) + 1 if False in slides else len(slides) + 1
    return period if slides == [(number + 1) % period != 0 for number in range(len(slides))] else None


def write_gguf(
    path: Path,
    model: Any,
    vocabulary: Vocabulary,
    *,
    type_: str,
    name: str,
    description: str = "",
    licence: str = "",
    threads: int = 1,
) -> Written:
    """Write all tensors and the metadata; rows that are not a whole number of blocks are stored with more bits."""
    gguf = import_gguf("writing GGUF")
    architecture = architecture_of(model)
    writer = gguf.GGUFWriter(path, architecture)
    try:
        add_about(writer, model, type_, {"name": name, "description": description, "licence": licence})
        vocabulary.write(writer)
        written = Written(architecture)
        for key, table in rope_tables(model.config, Anatomy.of(model).head_dim).items():
            writer.add_tensor(key, table)
        _add_tensors(gguf, writer, model, type_, written, threads)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()
    return written


def add_about(writer: Any, model: Any, type_: str, about: Mapping[str, str]) -> None:
    """The metadata except for the vocabulary."""
    writer.add_name(about["name"])
    if about["description"]:
        writer.add_description(about["description"])
    if about["licence"]:
        writer.add_license(about["licence"])
    writer.add_file_type(FILE_TYPES[type_])
    if type_ not in ("f32", "f16", "bf16"):
        writer.add_quantization_version(import_gguf("writing GGUF").GGML_QUANT_VERSION)
    for key, value in _hyperparameters(model, writer.arch).items():
        _add(writer, f"{writer.arch}.{key}", value)


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

    def shape(self, parameter: str, values: torch.Tensor) -> tuple[int, ...]:
        """The shape that is written."""
        return tuple(values.squeeze(1).shape if parameter.endswith(".conv.conv.weight") else values.shape)

    def reorder(self, parameter: str, values: torch.Tensor, *, inverse: bool = False) -> torch.Tensor:
        """Rows of query and key projections in GGUF's rotary order, if the architecture uses it; whole gains.

        ``inverse`` gives the model's own values.
        """
        for part, unit in (("q_proj", "query"), ("k_proj", "kv")):
            if self.family.permuted and f".self_attn.{part}." in parameter:
                heads = len(self.anatomy.source.unit(unit, self.anatomy[parameter].layer))
                return (interleaved_to_halves if inverse else interleaved_from)(values, heads)
        if parameter.endswith(".conv.conv.weight"):
            return values.unsqueeze(1) if inverse else values.squeeze(1)
        if parameter.endswith("norm.weight"):
            offset = self.anatomy.family.gain_offset
            return values - offset if inverse else values + offset
        return values


def tensors_of(gguf: Any, model: Any, type_: str) -> tuple[_Layout, dict[str, torch.Tensor], TypeChoice]:
    """What is written, under which names and in which types."""
    layout = _Layout(model)
    parameters = dict(model.named_parameters())
    if layout.architecture == "olmo2" and "lm_head.weight" not in parameters:  # llama.cpp does not tie it
        parameters["lm_head.weight"] = parameters["model.embed_tokens.weight"]
    names = [layout.name(name) for name in parameters]
    heads = layout.anatomy.source.with_heads
    return layout, parameters, TypeChoice(gguf, type_, names, len(heads.query_heads) // max(len(heads.kv_heads), 1))


def _add_tensors(gguf: Any, writer: Any, model: Any, type_: str, written: Written, threads: int) -> None:
    layout, parameters, kind_of = tensors_of(gguf, model, type_)
    with Bar("writing tensors", len(parameters)) as bar:
        for name, parameter in parameters.items():
            target = layout.name(name)
            values = layout.reorder(name, parameter.detach().float().cpu()).contiguous().numpy()
            kind = kind_of(target, values.shape)
            packed = quantize(gguf, values, kind, threads)
            writer.add_tensor(target, packed, raw_dtype=kind)
            stored = torch.from_numpy(gguf.quants.dequantize(packed, kind))
            stored = layout.reorder(name, stored, inverse=True)
            check_rounded(name, stored, parameter.detach().float().cpu(), kind.name)
            if kind.name != "F32":
                written.stored[name] = stored
            bar.advance()
    written.fallbacks = kind_of.fallbacks


def interleaved_from(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows i and i + d/2 of a head, which transformers rotates together, become adjacent."""
    pairs = rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape).contiguous()


def _hyperparameters(model: Any, architecture: str) -> dict[str, Any]:
    config = model.config
    anatomy = Anatomy.of(model)
    structure = anatomy.source
    head_dim = anatomy.head_dim
    rope = _main_rope(config, head_dim)
    values: dict[str, Any] = {
        "context_length": _context(config, architecture),
        "embedding_length": len(structure.hidden),
        "block_count": len(structure.layers),
        **_layer_sizes(structure, architecture),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": float(getattr(config, "norm_eps", None) or config.rms_norm_eps),
        "rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1.0)),
        "rope.freq_base": float(rope["rope_theta"]),
        "vocab_size": int(config.vocab_size),
        **_rope_scaling(rope, getattr(model.model.rotary_emb, "attention_scaling", 1.0)),
        **_windows(config, architecture),
    }
    if architecture == "mistral3" and rope.get("llama_4_scaling_beta"):
        values["attention.temperature_scale"] = float(rope["llama_4_scaling_beta"])
    for key, (name, _) in ARCHITECTURES[architecture].keys.items():
        value = getattr(config, name, None)
        if value is not None:
            values[key] = int(value) if key in _WHOLE else float(value)
    return values


def _main_rope(config: Any, head_dim: int) -> dict[str, Any]:
    """The rotation of the full-attention layers; Hunyuan's fixed ``alpha`` is a larger base."""
    rope = dict(config.rope_parameters)
    rope = dict(rope.get("full_attention", rope))
    if rope.get("rope_type") == "dynamic" and rope.get("alpha"):
        rope["rope_theta"] *= rope["alpha"] ** (head_dim / (head_dim - 2))
        rope["rope_type"] = "default"
    return rope


def _windows(config: Any, architecture: str) -> dict[str, Any]:
    """Window, period and rotary base of sliding-window layers, for architectures in which llama.cpp computes them."""
    kinds = getattr(config, "layer_types", None) or []
    if ARCHITECTURES[architecture].window_period is None or "sliding_attention" not in kinds:
        return {}
    theta = config.rope_parameters["sliding_attention"]["rope_theta"]
    if architecture == "olmo2" and theta != config.rope_parameters["full_attention"]["rope_theta"]:
        raise UserError("--to gguf: llama.cpp's olmo2 has one rope_theta for all layers: export to hf or onnx instead")
    return {
        "attention.sliding_window": int(config.sliding_window),
        "attention.sliding_window_pattern": window_period(kinds),
        "rope.freq_base_swa": float(theta),
    }


def _layer_sizes(structure: Structure, architecture: str) -> dict[str, Any]:
    sizes = {
        "feed_forward_length": [len(la.ffn) for la in structure.layers],
        "attention.head_count": [len(la.query_heads) for la in structure.layers],
        "attention.head_count_kv": [len(la.kv_heads) for la in structure.layers],
    }
    if architecture == "deci":
        return sizes
    key = "attention.head_count_kv"  # of a convolution it is 0, which tells llama.cpp the kinds of layers
    first = structure.layers.index(structure.with_heads)
    own = {name: value[first] for name, value in sizes.items()}
    return own | ({key: sizes[key]} if 0 in sizes[key] else {})


def _context(config: Any, architecture: str) -> int:
    """The context length, limited to the sliding window where llama.cpp ignores the window: within it both agree."""
    window = getattr(config, "sliding_window", None)
    computed = architecture == "phi3" or ARCHITECTURES[architecture].window_period is not None
    if window and not computed and getattr(config, "use_sliding_window", True):
        return min(int(config.max_position_embeddings), int(window))
    return int(config.max_position_embeddings)


def _rope_scaling(rope: dict[str, Any], attention_scaling: float) -> dict[str, Any]:
    kind = rope.get("rope_type", "default")
    if kind in ("default", "llama3"):
        return {}
    if kind == "linear":
        return {"rope.scaling.type": "linear", "rope.scaling.factor": float(rope["factor"])}
    original = rope.get("original_max_position_embeddings")
    if kind == "longrope" and original:
        return {
            "rope.scaling.original_context_length": int(original),
            "rope.scaling.attn_factor": attention_scaling,
        }
    if kind == "yarn" and original:
        values: dict[str, Any] = {"rope.scaling.type": "yarn", "rope.scaling.factor": float(rope["factor"])}
        values["rope.scaling.original_context_length"] = int(original)
        multiplier = yarn_factor(rope) / yarn_factor({"factor": rope["factor"]})
        if abs(multiplier - 1.0) > 1e-6:
            values["rope.scaling.attn_factor"] = multiplier
        for key in ("beta_fast", "beta_slow"):
            if rope.get(key) is not None:
                values[f"rope.scaling.yarn_{key}"] = float(rope[key])
        return values
    raise UserError(f"--to gguf: rope scaling {kind!r} with these settings cannot be written: export to hf instead")


def rope_tables(config: Any, head_dim: int) -> dict[str, npt.NDArray[np.float32]]:
    """Rotary factors that GGUF stores as tensors: Llama 3's divisors and phi3's two tables."""
    rope = _main_rope(config, head_dim)
    if rope.get("rope_type") == "longrope":
        return {
            f"rope_factors_{length}.weight": np.asarray(rope[f"{length}_factor"], np.float32)
            for length in ("long", "short")
        }
    if rope.get("rope_type") != "llama3":
        return {}
    return {"rope_freqs.weight": np.asarray(llama3_divisors(rope, head_dim), np.float32)}


def _add(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_uint32(key, int(value))
