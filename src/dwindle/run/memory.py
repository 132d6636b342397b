"""How much memory training takes on one device: an estimate, made before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from dwindle.anatomy import Anatomy
from dwindle.distributed.precision import Precision
from dwindle.training.config import TrainingConfig

_LOGITS_BYTES = 3 * 4
"""Of one logit of a chunk: itself, its probability and its gradient."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes, by the tokens of a micro-batch."""

    fixed: float
    """Weights, gradients and moments, and a teacher's weights."""
    per_token: float
    """What is kept for the backward pass, and a teacher's final hidden states."""
    per_token_of_a_chunk: float
    """Logits."""
    chunk_tokens: int

    def total(self, tokens: int) -> int:
        return int(self.fixed + self.per_token * tokens + self.per_token_of_a_chunk * min(tokens, self.chunk_tokens))


def footprint(
    config: Any,
    training: TrainingConfig,
    precision: Precision,
    *,
    shards: int = 1,
    teacher: tuple[Any, torch.dtype] | None = None,
) -> Footprint:
    """Of a model by its config, and of its ``teacher``'s config and type; ``shards`` devices share the weights."""
    anatomy = Anatomy.of_config(config)
    width = {"fp32": 4, "fp64": 8, "bf16": 4}[precision]
    count = anatomy.count(anatomy.source)
    fixed = count.total * (4 * width + (2 if precision == "bf16" else 0)) / shards
    if training.optimizer == "muon":  # one moment instead of two
        fixed -= sum(anatomy.layer_counts(anatomy.source)) * width / shards
    kept = _kept_per_token(anatomy, training, precision)
    logits = _LOGITS_BYTES * config.vocab_size
    if teacher is not None:
        taught, dtype = teacher
        theirs = Anatomy.of_config(taught)
        fixed += theirs.count(theirs.source).total * dtype.itemsize / shards
        kept += taught.hidden_size * dtype.itemsize
        logits += _LOGITS_BYTES * taught.vocab_size
    return Footprint(fixed, kept, logits, training.ce_chunk_tokens)


def _kept_per_token(anatomy: Anatomy, training: TrainingConfig, precision: Precision) -> float:
    """Activations of all layers. Recomputed ones are kept for one layer, and the stream between the layers for all."""
    structure = anatomy.source
    hidden = len(structure.hidden)
    layers = []
    for layer in structure.layers:
        query, key = (anatomy.head_dim * len(heads) for heads in (layer.query_heads, layer.kv_heads))
        layers.append(_kept_by_layer(hidden, query, key, len(layer.ffn), training.compile, precision))
    if not training.activation_checkpointing:
        return sum(layers)
    stream = 2 if precision == "bf16" and training.bf16_residual else 8 if precision == "fp64" else 4
    return max(layers) + stream * hidden * len(layers)


def _kept_by_layer(hidden: int, query: int, key: int, ffn: int, compiled: bool, precision: Precision) -> float:
    """Eager autocast keeps fp32 streams and a bf16 copy of the input of every product (counted from saved tensors).

    Compiled layers recompute what is cheap; on an H200 the whole estimate was 1.3 times (SmolLM-1.7B) and 1.4 times
    (SmolLM2-135M) what training took.
    """
    if precision == "bf16" and not compiled:
        return 26 * hidden + 10 * (query + key) + 8 * ffn
    width = {"fp32": 4, "fp64": 8, "bf16": 2}[precision]
    return width * (8 * hidden + 2 * query + 4 * ffn) * (1.0 if compiled else 1.25)
