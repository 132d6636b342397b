"""Writes a model as an ExecuTorch program (``.pte``) for phones: XNNPACK, float32 or 8-bit dynamic quantisation.

The key/value cache is a buffer of the program, one for each layer, so layers may have any number of heads.
"""

from __future__ import annotations

from copy import deepcopy
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from dwindle.anatomy.anatomy import Anatomy
from dwindle.core.errors import UserError, first_line, install_hint

TYPES = ("f32", "int8")
MAX_CONTEXT = 1024
"""Tokens that fit into the cache; a program has fixed buffers."""


def import_executorch() -> Any:
    try:
        import_module("executorch.runtime")
        import_module("torchao")
        return import_module("executorch.exir")
    except ImportError as error:
        raise UserError(f"--to executorch needs executorch: {install_hint('executorch')}") from error


def context_of(model: Any) -> int:
    """Tokens of the program's cache."""
    return min(int(getattr(model.config, "max_position_embeddings", MAX_CONTEXT)), MAX_CONTEXT)


def write_program(model: Any, path: Path, type_: str) -> Any:
    """Write ``forward(input_ids [1, S], positions [S]) -> logits [1, S, vocabulary]``; returns its model in torch.

    The tokens at earlier positions must have been given in earlier calls.
    """
    exir = import_executorch()
    if (why := unsupported(model)) is not None:
        raise UserError(f"--to executorch: {why}: export to hf, gguf or onnx instead")
    whole = deepcopy(model).eval().requires_grad_(False)
    whole.config._attn_implementation = "eager"
    if type_ == "int8":
        _quantise(whole)
    context = context_of(model)
    decoder = StaticDecoder(whole, context)
    length = torch.export.Dim("length", min=1, max=context - 1)
    example = (torch.zeros(1, 3, dtype=torch.long), torch.arange(3))
    try:
        with torch.no_grad():
            exported = torch.export.export(decoder, example, dynamic_shapes=({1: length}, {0: length}), strict=False)
        partitioner = import_module("executorch.backends.xnnpack.partition.xnnpack_partitioner")
        parts = [partitioner.XnnpackDynamicallyQuantizedPartitioner()] if type_ == "int8" else []
        program = exir.to_edge_transform_and_lower(
            exported,
            partitioner=[*parts, partitioner.XnnpackPartitioner()],
            compile_config=exir.EdgeCompileConfig(_check_ir_validity=False),
        ).to_executorch()
    except Exception as error:
        raise UserError(
            f"--to executorch: this model cannot be lowered ({first_line(error)[:200]}): export to gguf or onnx instead"
        ) from error
    path.write_bytes(program.buffer)
    return whole


def unsupported(model: Any) -> str | None:
    """What such a program cannot compute; None if it computes all."""
    config = model.config
    if any(not layer.query_heads for layer in Anatomy.of(model).source.layers):
        return "layers without attention have no cache of keys (pass --stock if they lost it)"
    window = getattr(config, "sliding_window", None)
    if window is not None and window < context_of(model):
        return f"a sliding window of {window} tokens"
    return None


def _quantise(model: nn.Module) -> None:
    """8-bit weights by output channel, 8-bit activations by token, as XNNPACK computes."""
    quantization = import_module("torchao.quantization")
    granularity = import_module("torchao.quantization.granularity")
    config = quantization.Int8DynamicActivationIntxWeightConfig(
        weight_dtype=torch.int8, weight_granularity=granularity.PerAxis(0)
    )
    quantization.quantize_(model, config)


class StaticDecoder(nn.Module):
    """A model with a cache of fixed length in its own buffers."""

    def __init__(self, model: Any, context: int) -> None:
        super().__init__()
        self.model = model
        anatomy = Anatomy.of(model)
        for number, layer in enumerate(anatomy.source.layers):
            shape = (1, len(layer.kv_heads), context, anatomy.head_dim)
            self.register_buffer(f"key_{number}", torch.zeros(shape), persistent=False)
            self.register_buffer(f"value_{number}", torch.zeros(shape), persistent=False)
        self.register_buffer("places", torch.arange(context), persistent=False)

    def forward(self, input_ids: Tensor, positions_S: Tensor) -> Tensor:
        places: Any = self.places
        allowed_ST = places[None] <= positions_S[:, None]
        mask = torch.zeros(allowed_ST.shape).masked_fill(~allowed_ST, torch.finfo(torch.float32).min)
        found = self.model(
            input_ids=input_ids,
            position_ids=positions_S[None],
            attention_mask=mask[None, None],
            past_key_values=_Buffers(self, positions_S),
            use_cache=True,
        )
        logits: Tensor = found.logits
        return logits


class _Buffers(Cache):  # type: ignore[misc]
    """The cache that attention layers write to: buffers of the decoder, at the given positions."""

    def __init__(self, decoder: StaticDecoder, positions_S: Tensor) -> None:
        super().__init__(layers=[])
        self.decoder, self.positions = decoder, positions_S

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        keys = getattr(self.decoder, f"key_{layer_idx}")
        values = getattr(self.decoder, f"value_{layer_idx}")
        keys.index_copy_(2, self.positions, key_states)
        values.index_copy_(2, self.positions, value_states)
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0
