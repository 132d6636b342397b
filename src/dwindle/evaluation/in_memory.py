"""Checks a model that is already in memory: the result of ``load``, or any causal language model and tokenizer."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

from dwindle.core.errors import UserError
from dwindle.sources.loading import Loaded

_WANTED = "give a path, the result of dwindle.load, or (model, tokenizer)"


class InMemory(NamedTuple):
    """A model, its tokenizer, and its name in tables."""

    model: nn.Module
    tokenizer: Any
    name: str


def in_memory(given: Any) -> InMemory:
    """Unpack and check a pair of causal language model and tokenizer."""
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
    return InMemory(model, tokenizer, str(source or type(model).__name__))


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module) or not hasattr(model, "config"):
        raise UserError(f"model: cannot be {type(model).__name__}: give a transformers causal language model")
    if next(model.parameters(), None) is None:
        raise UserError(f"model: {type(model).__name__} has no parameters: give a model with weights")
    if getattr(model.config, "is_encoder_decoder", False):
        raise UserError(f"model: {type(model).__name__} is an encoder-decoder: give a causal language model")
