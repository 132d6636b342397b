"""An estimate of training memory per device, made before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from dwindle.anatomy.anatomy import Anatomy
from dwindle.core.sizes import parse_count
from dwindle.distributed.precision import Precision, is_bf16
from dwindle.training.config import TrainingConfig
from dwindle.training.moments import MOST_ELEMENTS

_LOGITS_BYTES, _FUSED_LOGITS_BYTES, _TAUGHT_LOGITS_BYTES = 3 * 4, 2 * 2, 2
"""Per logit of a chunk: in fp32 the logit, its probability and its gradient; of a fused loss the logit and its gradient
in bf16, and a teacher's logit."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes on one device, as a function of the tokens in a micro-batch."""

    fixed: float
    """Weights, moments, narrow copies of weights, and the teacher's weights."""
    gradients: float
    """In the first micro-batch they appear as activations are freed, so the two do not add up."""
    per_token: float
    """Activations saved for the backward pass, and the teacher's final hidden states."""
    per_chunk_token: float
    """Logits of student and teacher."""
    chunk_tokens: int
    update: float
    """Temporary tensors of the optimizer, after the passes."""
    step_tokens: int

    def total(self, tokens: int) -> int:
        """Bytes for micro-batches of ``tokens``; with several in a step, gradients exist during the passes."""
        passes = self.per_token * tokens + self.per_chunk_token * min(tokens, self.chunk_tokens)
        passes += self.gradients if tokens < self.step_tokens else 0
        return int(self.fixed + max(passes, self.gradients + self.update))


def footprint(
    config: Any,
    training: TrainingConfig,
    precision: Precision,
    *,
    shards: int = 1,
    teacher: tuple[Any, torch.dtype] | None = None,
) -> Footprint:
    """Memory to train a model beside its ``teacher`` (config, dtype), with weights sharded over ``shards`` devices."""
    anatomy = Anatomy.of_config(config)
    count, layers = anatomy.count(anatomy.source).total, anatomy.layer_counts(anatomy.source)
    width = {"fp32": 4, "fp64": 8, "bf16": 4, "fp8": 4}[precision]
    fixed, gradients = count * width / shards, 0.0
    if not training.lora_rank:  # gradients and moments of the adapters are small
        moment = 2 if training.moments == "bf16" else width
        num_moments = 2 * count - (sum(layers) if training.optimizer == "muon" else 0)
        fixed, gradients = fixed + num_moments * moment / shards, count * width / shards
    if is_bf16(precision):  # copies of all weights until the backward pass, or of the layer that is recomputed
        own = 1 if precision == "fp8" else 2
        whole = (own * sum(layers) + 2 * (count - sum(layers))) / shards
        fixed += own * max(layers) if training.activation_checkpointing else whole
    saved = _saved_per_token(anatomy, training, precision)
    is_fused = training.compile and is_bf16(precision)
    logits = config.vocab_size * (_FUSED_LOGITS_BYTES if is_fused else _LOGITS_BYTES)
    if teacher is not None:
        teacher_config, dtype = teacher
        theirs = Anatomy.of_config(teacher_config)
        fixed += theirs.count(theirs.source).total * dtype.itemsize / shards
        saved += teacher_config.hidden_size * dtype.itemsize
        logits += teacher_config.vocab_size * (_TAUGHT_LOGITS_BYTES if is_fused else _LOGITS_BYTES)
    update = 0 if training.lora_rank else _update_bytes(sum(layers), count, training, width)
    step = parse_count(training.tokens_per_step, "training.tokens_per_step")
    return Footprint(fixed, gradients, saved, logits, training.ce_chunk_tokens, update, step)


def _update_bytes(in_layers: int, count: int, training: TrainingConfig, width: int) -> float:
    """Bytes of the optimizer's batches: Muon's averages and their orthogonalised and bf16 copies; wide bf16 moments."""
    if training.optimizer == "muon":
        return min(in_layers, MOST_ELEMENTS) * (2 * width + 2)
    return 2 * width * min(count, MOST_ELEMENTS) if training.moments == "bf16" else 0


def _saved_per_token(anatomy: Anatomy, training: TrainingConfig, precision: Precision) -> float:
    """Bytes of saved activations per token, and of the gradients of a layer in the backward pass.

    With activation checkpointing: those of the largest layer, and the residual stream between all layers.
    """
    structure = anatomy.source
    hidden = len(structure.hidden)
    residual = 2 if is_bf16(precision) and training.bf16_residual else 8 if precision == "fp64" else 4
    layers = []
    for layer in structure.layers:
        query, key = (anatomy.head_dim * len(heads) for heads in (layer.query_heads, layer.kv_heads))
        layers.append(_saved_by_layer(hidden, query, key, len(layer.ffn), residual, training.compile, precision))
    between = residual * hidden * len(layers) if training.activation_checkpointing else sum(layers)
    return max(layers) + between


def _saved_by_layer(
    hidden: int, query: int, key: int, ffn: int, residual: int, compiled: bool, precision: Precision
) -> float:
    """Eager autocast saves the residual stream in fp32 and every matmul's input in bf16 (counted from saved tensors).

    Compiled layers save the residual stream twice, the outputs of both norms, the attention's inputs and output, and
    three widths of the FFN. In float8 the inputs of matmuls are computed again, so norms and one width are not saved.
    docs/benchmarks.md compares with an H200.
    """
    if is_bf16(precision) and not compiled:
        return 26 * hidden + 10 * (query + key) + 8 * ffn
    width = {"fp32": 4, "fp64": 8, "bf16": 2, "fp8": 2}[precision]
    if compiled:
        norms, widths = (0, 2) if precision == "fp8" else (2, 3)
        return 2 * residual * hidden + width * (norms * hidden + 2 * (query + key) + widths * ffn)
    return 1.25 * width * (8 * hidden + 2 * query + 4 * ffn)
