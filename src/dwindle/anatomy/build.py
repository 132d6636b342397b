"""Configurations and models for a structure: stock transformers classes where possible, else ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassClassValidationError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, MistralConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from dwindle.anatomy.configuration_dwindle import per_layer
from dwindle.anatomy.families import family_of
from dwindle.anatomy.family import CUSTOM_PREFIX
from dwindle.anatomy.modeling_dwindle import backbone_for, classes_for
from dwindle.anatomy.structure import Structure, head_dim_of

_DROP = {"architectures", "auto_map", "transformers_version", "_name_or_path", "model_type"}
_OURS = {"per_layer_config", "queries_per_kv", "embed_scale"}
"""Keys of our configurations, recreated for each structure."""
_ALIGNMENT = 64
"""Alignment in bytes of torch's CPU allocations."""


def config_for(config: Any, structure: Structure, changed: Mapping[str, Any] | None = None) -> Any:
    """The configuration of a model with this structure, derived from its source's configuration (and ``changed``).

    Uniform structures get a stock configuration, if there is one for these sizes. It is never derived from that of a
    compacted model: a Llama that once had sizes for which there is only a Mistral would stay one until it is resumed.
    """
    family = config.model_type.removeprefix(CUSTOM_PREFIX)
    values = _values(config, structure) | dict(changed or {})
    own_scale = float(len(structure.hidden)) ** 0.5
    if family_of(family).scales_embedding and (scale := _embed_scale(config)) != own_scale:
        return _custom_config(family, values | {"embed_scale": scale}, structure)
    stock = stock_config(family, values) if structure.is_uniform else None
    return _custom_config(family, values, structure) if stock is None else stock


def has_stock_config(config: Any, structure: Structure) -> bool:
    """Whether transformers has a configuration for a model of this family and structure."""
    return _stock_for(config, structure) is not None


def _stock_for(config: Any, structure: Structure) -> Any:
    family = config.model_type.removeprefix(CUSTOM_PREFIX)
    return stock_config(family, _values(config, structure)) if structure.is_uniform else None


def _values(config: Any, structure: Structure) -> dict[str, Any]:
    table, widest = family_of(config.model_type), max(structure.layers, key=lambda layer: len(layer.query_heads))
    values = {k: v for k, v in config.to_dict().items() if k not in _DROP | _OURS}
    values = _with_layers(values, structure)
    values |= {
        "hidden_size": len(structure.hidden),
        "head_dim": head_dim_of(config),
        table.ffn_key: max(len(la.ffn) for la in structure.layers),
        **table.written,
    }
    if widest.query_heads:
        values["num_attention_heads"] = len(widest.query_heads)
        values["num_key_value_heads"] = max(len(la.kv_heads) for la in structure.layers)
    return values


def _with_layers(values: dict[str, Any], structure: Structure) -> dict[str, Any]:
    """The values with as many layers as the structure, and lists of one entry per layer (``layer_types``) cut."""
    had = values["num_hidden_layers"]
    if len(structure.places) == had:
        return values
    kept = list(structure.places)

    def cut(key: str, value: Any) -> Any:
        is_by_layer = "layer" in key and isinstance(value, list) and len(value) == had
        return [value[place] for place in kept] if is_by_layer else value

    return {key: cut(key, value) for key, value in values.items()} | {"num_hidden_layers": len(kept)}


def stock_config(family: str, values: dict[str, Any]) -> Any:
    """The stock configuration with these values; None if transformers does not accept them.

    Llama, Arcee and Gemma reject hidden sizes that are not a multiple of the number of heads, Phi-3 its rotary tables
    if hidden size / heads is not the head size. A Llama without biases is exactly a Mistral without a sliding window,
    so that is used instead.
    """
    try:
        return CONFIG_MAPPING[family](**values)
    except StrictDataclassClassValidationError:
        if family != "llama" or values["attention_bias"] or values["mlp_bias"]:
            return None
        known = set(MistralConfig().to_dict())
        return MistralConfig(**{k: v for k, v in values.items() if k in known} | {"sliding_window": None})


def _embed_scale(config: Any) -> float:
    """Gemma's factor of the embeddings: that of the source, whatever has been pruned since."""
    kept: float | None = getattr(config, "embed_scale", None)
    return float(config.hidden_size) ** 0.5 if kept is None else kept


def stock_form(model: nn.Module, structure: Structure) -> nn.Module:
    """A model of this structure as a stock model, if only the factor of the embeddings (Gemma's) stands in the way.

    The embeddings absorb it, and the final norm its inverse if they are tied. Not while training: Adam is not
    scale-equivariant, so a model with absorbed factors trains differently.
    """
    config: Any = model.config
    scale = getattr(config, "embed_scale", None)
    if scale is None or (stock := _stock_for(config, structure)) is None:
        return model
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    factor, offset = scale / float(config.hidden_size) ** 0.5, family_of(config.model_type).gain_offset

    def absorb(name: str, change: Callable[[Tensor], Tensor]) -> None:
        tensors[name] = change(tensors[name].double()).to(tensors[name].dtype)

    absorb("model.embed_tokens.weight", lambda weight: weight * factor)
    if config.tie_word_embeddings:
        absorb("model.norm.weight", lambda gain: (offset + gain) / factor - offset)
    return build(stock, tensors, model)


def _custom_config(family: str, values: dict[str, Any], structure: Structure) -> Any:
    table = family_of(family)
    shapes = [
        {
            "intermediate_size": len(la.ffn),
            "queries_per_kv": list(la.queries_per_kv),
            "skip": [module for module, block in table.blocks.items() if block in la.absent],
        }
        for la in structure.present
    ]
    config = classes_for(CUSTOM_PREFIX + family)[0](**values, per_layer_config=per_layer(shapes, table.ffn_key))
    name_code(config)
    return config


def name_code(config: Any) -> None:
    """Name the files that hold the classes of a custom configuration; directories of earlier versions had only one."""
    config_class, model_class = classes_for(config.model_type)
    config.auto_map = {
        "AutoConfig": f"configuration_dwindle.{config_class.__name__}",
        "AutoModel": f"modeling_dwindle.{backbone_for(config.model_type).__name__}",
        "AutoModelForCausalLM": f"modeling_dwindle.{model_class.__name__}",
    }
    config.architectures = [model_class.__name__]


def with_output_bias(model: Any, structure: Structure) -> Any:
    """The same model (it shares the tensors) with a bias, zero where it had none, on every ``o`` and ``down``."""
    keys = family_of(model.config.model_type).output_bias_keys
    assert keys, "the family has no such biases"
    config = config_for(model.config, structure, changed=dict.fromkeys(keys, True))
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for name, parameter in build_on_meta(config).named_parameters():
        if name not in tensors:
            like = next(iter(tensors.values()))
            tensors[name] = torch.zeros(parameter.shape, dtype=like.dtype, device=like.device)
    return build(config, tensors, model)


def is_custom(config: Any) -> bool:
    """Whether the model needs dwindle's modelling file."""
    return bool(config.model_type.startswith(CUSTOM_PREFIX))


def build_on_meta(config: Any) -> nn.Module:
    """The model on the meta device, without storage."""
    with torch.device("meta"):
        return _made(config)


def build_random(config: Any, seed: int) -> nn.Module:
    """The model with its family's random initialization (fp32), by ``seed``; the global generators are not touched."""
    with torch.random.fork_rng(devices=[torch.cuda.current_device()] if torch.cuda.is_available() else []):
        torch.manual_seed(seed)
        return _made(config, dtype=torch.float32).eval()


def _made(config: Any, **stock_options: Any) -> nn.Module:
    if is_custom(config):
        model: nn.Module = classes_for(config.model_type)[1](config)
    else:
        model = AutoModelForCausalLM.from_config(config, **stock_options)
    return model


def restore_buffers(model: Any, device: torch.device | str) -> None:
    """Compute the buffers that no file stores: rotary frequencies and Gemma's factor of the embeddings."""
    backbone = model.model
    if getattr(backbone, "rotary_emb", None) is not None:  # a model may have none, or one for each base
        backbone.rotary_emb = type(backbone.rotary_emb)(config=backbone.rotary_emb.config).to(device)
    for number, rotary in enumerate(getattr(backbone, "rotary_embs", ())):
        backbone.rotary_embs[number] = type(rotary)(rotary.config).to(device)
    embedding = backbone.embed_tokens
    if hasattr(embedding, "scalar_embed_scale"):
        dtype = embedding.weight.dtype  # as a model that transformers loads in this dtype
        embedding.embed_scale = torch.tensor(embedding.scalar_embed_scale, dtype=dtype, device=device)


def build(config: Any, tensors: dict[str, Tensor], like: Any = None) -> nn.Module:
    """The model with the given tensors as parameters (no copy); it generates as the model ``like``."""
    model = build_on_meta(config)
    sample = next(iter(tensors.values()))
    model.load_state_dict(tensors, strict=False, assign=True)
    model.tie_weights()  # type: ignore[operator]
    restore_buffers(model, sample.device)
    missing = [name for name, t in [*model.named_parameters(), *model.named_buffers()] if t.is_meta]
    assert sample.is_meta or not missing, f"tensors without values: {missing}"
    model.config.dtype = sample.dtype
    if getattr(like, "generation_config", None) is not None:
        model.generation_config = like.generation_config
    return model.eval()


def aligned(model: nn.Module) -> nn.Module:
    """The model with its weights aligned in host memory as torch does it; those of mapped files and of numpy are not.

    On a CPU the last bits of a matrix product can depend on it, and a resumed run has its weights from another file.
    """
    for parameter in model.parameters():
        if parameter.device.type == "cpu" and parameter.data_ptr() % _ALIGNMENT:
            parameter.data = parameter.data.clone()
    return model
