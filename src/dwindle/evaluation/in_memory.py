"""A model that is in memory already, with its tokenizer: what ``load`` gave, or any causal language model."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

from dwindle.core.errors import UserError
from dwindle.sources import Loaded

_WANTED = "give a path, what dwindle.load returns, or a pair (model, tokenizer)"


class InMemory(NamedTuple):
    """A model, its tokenizer, and what to call it in tables."""

    model: nn.Module
    tokenizer: Any
    name: str


def in_memory(given: Any) -> InMemory:
    """Anything that unpacks into a model and a tokenizer; refuses what could not answer questions in text."""
    try:
        model, tokenizer = given
    except (TypeError, ValueError):
        if isinstance(given, nn.Module):
            raise UserError(f"model: {type(given).__name__} is alone: pass (model, tokenizer)") from None
        raise UserError(f"model: cannot be {type(given).__name__}: {_WANTED}") from None
    _check_model(model)
    if tokenizer is None:
        raise UserError("tokenizer: the model has none: pass (model, tokenizer)")
    if not callable(tokenizer) or not hasattr(tokenizer, "eos_token_id"):
        raise UserError(f"tokenizer: cannot be {type(tokenizer).__name__}: give one of transformers")
    source = given.source if isinstance(given, Loaded) else getattr(model.config, "_name_or_path", "")
    return InMemory(model, tokenizer, str(source or type(model).__name__))


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module) or not hasattr(model, "config"):
        raise UserError(f"model: cannot be {type(model).__name__}: give a causal language model of transformers")
    if next(model.parameters(), None) is None:
        raise UserError(f"model: {type(model).__name__} has no parameters: give a model with weights")
    if getattr(model.config, "is_encoder_decoder", False):
        raise UserError(f"model: {type(model).__name__} is an encoder and a decoder: give a causal language model")
