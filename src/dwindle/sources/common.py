"""Common to all sources: silencing transformers, building a model from tensors, checking weights."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as hf_logging

from dwindle.anatomy.build import is_custom
from dwindle.anatomy.modeling_dwindle import classes_for
from dwindle.core.errors import UserError, first_line
from dwindle.sources.stored_tensors import StoredTensor

_COMPUTED = re.compile(r"(^|\.)(rotary_emb\.inv_freq|masked_bias|position_ids)$")
"""Buffers that earlier versions of transformers stored and later ones compute."""


class SourceNotice(UserWarning):
    """Something about a source that a user should know."""


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence the load report and, without a terminal, the progress bar; problems are raised as errors."""
    verbosity = hf_logging.get_verbosity()
    bars = hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    if not sys.stderr.isatty():
        hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(verbosity)
        if bars:
            hf_logging.enable_progress_bar()


def config_reason(error: BaseException) -> str:
    """Why transformers rejects a configuration; the reason is in the innermost error."""
    while error.__cause__ is not None:
        error = error.__cause__
    return first_line(error)


def model_class_of(config: PreTrainedConfig) -> Any:
    """The class of a configuration's causal language model, stock or ours."""
    if is_custom(config):
        return classes_for(config.model_type)[1]
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"{config.model_type!r} is not a causal model")
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]


def build_model(
    config: PreTrainedConfig, tensors: Mapping[str, torch.Tensor | StoredTensor], dtype: torch.dtype | None, where: str
) -> PreTrainedModel:
    """The model of ``config``, stock or ours, with exactly these tensors; a missing tensor is an error.

    ``dtype`` None is that of the configuration or, if it has none, of the tensors.
    """
    config.architectures = [model_class_of(config).__name__]
    return complete_model(None, config, dtype, where, state_dict=tensors)


def complete_model(
    folder: Path | None, config: PreTrainedConfig, dtype: torch.dtype | None, where: str, **how: Any
) -> PreTrainedModel:
    """transformers' ``from_pretrained``, an error for missing, unexpected or wrongly tied tensors; it only warns."""
    with quiet_transformers():
        model, info = model_class_of(config).from_pretrained(
            folder,
            config=config,
            dtype="auto" if dtype is None else dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **how,
        )
    assert isinstance(model, PreTrainedModel)
    _check_missing(info, where)
    _check_unexpected(model, info, where)
    _check_tied(model, where)
    return model


def _check_missing(info: dict[str, Any], where: str) -> None:
    """transformers initialises missing tensors at random; such a source must not load."""
    for name, found, expected in sorted(info["mismatched_keys"], key=str):
        raise UserError(
            f"source {where}: tensor {name} has shape {tuple(found)} but the configuration says "
            f"{tuple(expected)}: the weights and the configuration do not belong together"
        )
    missing = sorted(info["missing_keys"])
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UserError(f"source {where}: tensor {missing[0]}{more} is missing from the weights: fetch the model again")
    if info.get("error_msgs"):
        first = str(info["error_msgs"][0]).strip().splitlines()[0]
        raise UserError(f"source {where}: the weights cannot be read: {first}")


def _check_unexpected(model: PreTrainedModel, info: dict[str, Any], where: str) -> None:
    """transformers ignores tensors that the configuration does not have, such as biases or further layers."""
    buffers = [f".{name}" for name, _ in model.named_buffers()]
    names = [name for name in sorted(info["unexpected_keys"]) if not _COMPUTED.search(name)]
    left = [name for name in names if not any(buffer.endswith(f".{name}") for buffer in buffers)]
    if left:
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        raise UserError(
            f"source {where}: the weights have tensor {left[0]}{more}, which the configuration does not have: correct "
            "config.json (its number of layers, its biases) or use the matching weights"
        )


def _check_tied(model: PreTrainedModel, where: str) -> None:
    """transformers loads two different tensors even if the configuration ties them; later code relies on the tie."""
    head, tied = model.get_output_embeddings(), getattr(model.config, "tie_word_embeddings", False)
    if tied and head is not None and head.weight is not model.get_input_embeddings().weight:
        raise UserError(
            f"source {where}: config.json ties lm_head.weight to the embedding, but the weights hold two different "
            "tensors: set tie_word_embeddings to false in config.json"
        )


def check_floating(model: PreTrainedModel, integers: Mapping[str, str], where: str) -> None:
    """Raise UserError for integer weights, which are meaningless without the scales of a quantisation.

    ``integers`` maps the stored integer tensors to their dtypes; buffers, such as masks, are allowed.
    """
    parameters = [f".{name}" for name, _ in model.named_parameters(remove_duplicate=False)]
    for name, dtype in sorted(integers.items()):
        if any(parameter.endswith(f".{name}") for parameter in parameters):
            raise UserError(
                f"source {where}: tensor {name} is stored as {dtype}, and config.json names no quantisation: "
                "give the model with floating-point weights (or a GGUF of it)"
            )


def check_finite(model: PreTrainedModel, where: str) -> None:
    """Raise UserError for non-finite weights: a single NaN would spoil every score and every step.

    One float32 sum per tensor is enough: it is finite unless a value is not, or unless it overflows; only then is every
    value checked.
    """
    for name, tensor in model.state_dict().items():
        if not tensor.is_floating_point() or tensor.device.type == "meta":
            continue
        if not torch.isfinite(tensor.sum(dtype=torch.float32)) and not torch.isfinite(tensor).all():
            raise UserError(
                f"source {where}: tensor {name} holds non-finite values: the file is damaged, or its values "
                f"do not fit in {str(tensor.dtype).removeprefix('torch.')}; fetch it again or load it in float32"
            )


def parse_dtype(dtype: torch.dtype | str) -> torch.dtype | None:
    """The dtype of ``"bfloat16"`` or ``torch.bfloat16``; None for ``"auto"``, the dtype stored in the source."""
    if isinstance(dtype, torch.dtype):
        found: object = dtype
    elif dtype == "auto":
        return None
    else:
        found = getattr(torch, dtype.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point or found.itemsize < 2:
        raise UserError(f"dtype: {dtype!r} is not one of float32, bfloat16, float16, float64, auto")
    return found


def limit_ids(tokenizer: Any, config: PreTrainedConfig) -> None:
    """Note on a tokenizer how many rows its model's embedding has: whoever encodes text checks the ids against it."""
    if tokenizer is not None:
        tokenizer.num_embeddings = getattr(config, "vocab_size", None)


def interleaved_to_halves(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Reorder the rows of a query or key projection for transformers' rotary embedding.

    llama2.c and llama.cpp rotate adjacent rows (2i, 2i+1) of a head together, transformers rows i and i + d/2.
    """
    pairs = rows.reshape(num_heads, rows.shape[0] // num_heads // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape).contiguous()
