"""The text model inside a vision-language model (Gemma 3, Mistral 3); everything else is left out."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from dwindle.anatomy.families import FAMILIES
from dwindle.anatomy.family import CUSTOM_PREFIX
from dwindle.core.errors import UserError
from dwindle.sources.common import SourceNotice, build_model
from dwindle.sources.stored_tensors import StoredTensor, stored_tensors

_PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "lm_head.": "lm_head.",
}

_TIED = ("lm_head.weight", "model.embed_tokens.weight")


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration of the text model, if this is that of a vision-language model around a supported family."""
    inner = getattr(config, "text_config", None)
    if (
        not isinstance(inner, PreTrainedConfig)
        or config.model_type.removeprefix(CUSTOM_PREFIX) in FAMILIES
        or inner.model_type not in FAMILIES
    ):
        return config
    inner.tie_word_embeddings = config.tie_word_embeddings  # transformers ties what the outer one says
    return inner


def text_name(stored: str) -> str | None:
    """The name of a stored tensor in the text model; None if it is not part of one inside another model."""
    for prefix, ours in _PREFIXES.items():
        if stored.startswith(prefix):
            return ours + stored.removeprefix(prefix)
    return None


def read_text_tower(
    files: list[Path], config: PreTrainedConfig, dtype: torch.dtype | None, device: torch.device, where: str
) -> PreTrainedModel:
    """The text model with its tensors from safetensors files; one line says what is left out."""
    if any(file.suffix != ".safetensors" for file in files):
        raise UserError(f"source {where}: the text model is read from safetensors files only: convert the weights")
    tensors: dict[str, StoredTensor] = {}
    stored = stored_tensors(files, device)
    for full_name, tensor in stored.items():
        if (name := text_name(full_name)) is not None:
            tensors[name] = tensor
    num_left_out = len(stored) - len(tensors)
    if not tensors:
        raise UserError(f"source {where}: its weights have no tensors of a text model: fetch it again")
    both = [tensors[name].to() for name in _TIED if name in tensors] if config.tie_word_embeddings else []
    if len(both) == len(_TIED) and torch.equal(*both):
        del tensors["lm_head.weight"]
    warnings.warn(
        f"source {where}: only its text model ({config.model_type}) is loaded; {num_left_out} tensors of its other "
        "parts (vision) are left out",
        SourceNotice,
        stacklevel=2,
    )
    return build_model(config, tensors, dtype or next(iter(tensors.values())).dtype, where)
