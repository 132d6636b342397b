"""A model with its tokenizer: loaded from a source, or checked if it is already in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from dwindle.core.errors import UserError
from dwindle.core.run_directory import QUANTIZATION
from dwindle.quantization.quantize import load as load_quantized
from dwindle.sources.loading import Loaded, load, needed_tokenizer

_WANTED = "give a path, the result of dwindle.load, or (model, tokenizer)"


def load_with_tokenizer(source: str, dtype: str, device: str) -> tuple[nn.Module, Any]:
    """Load a model, quantized by ``dwindle`` or not, with its tokenizer."""
    if (Path(source) / QUANTIZATION).is_file():
        loaded = load_quantized(source)
        loaded.model.to(torch.device(device))
    else:
        loaded = load(source, dtype=dtype, device=device)
    return loaded.model, needed_tokenizer(loaded.tokenizer, source)


def in_memory(given: Any) -> tuple[nn.Module, Any, str]:
    """Unpack and check a pair of causal language model and tokenizer; the last one is its name in tables."""
    try:
        model, tokenizer = given
    except (TypeError, ValueError):
        if isinstance(given, nn.Module):
            raise UserError(f"model: {type(given).__name__} has no tokenizer: pass (model, tokenizer)") from None
        raise UserError(f"model: cannot be {type(given).__name__}: {_WANTED}") from None
    _check_model(model)
    if tokenizer is None:
        raise UserError("tokenizer: the model has none: pass (model, tokenizer)")
    if not callable(tokenizer) or not hasattr(tokenizer, "eos_token_id"):
        raise UserError(f"tokenizer: cannot be {type(tokenizer).__name__}: give a transformers tokenizer")
    source = given.source if isinstance(given, Loaded) else getattr(model.config, "_name_or_path", "")
    return model, tokenizer, str(source or type(model).__name__)


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module) or not hasattr(model, "config"):
        raise UserError(f"model: cannot be {type(model).__name__}: give a transformers causal language model")
    if next(model.parameters(), None) is None:
        raise UserError(f"model: {type(model).__name__} has no parameters: give a model with weights")
    if getattr(model.config, "is_encoder_decoder", False):
        raise UserError(f"model: {type(model).__name__} is an encoder-decoder: give a causal language model")
