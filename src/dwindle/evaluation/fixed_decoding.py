"""Decoding on a GPU with keys and values in fixed places, so that a token is one CUDA graph.

Token by token, transformers waits for the host, which starts about twenty kernels a layer; its cache is copied to grow
by a token, and with padded rows every key/value head is copied once for each of its query heads. Here keys and values
are written into buffers that grow by blocks, query heads of a key/value head are the rows of one product, and the
kernels of a token are recorded and then started as one. Buffers that grow, or lose rows, are recorded again.

Shapes: B rows, H query heads, K key/value heads, T places of the buffers, D head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.cache_utils import Cache, DynamicLayer

from dwindle.anatomy.positions import follows_length

ATTENTION = "dwindle_decode"
BLOCK = 256
"""Tokens by which buffers grow."""


def grouped_attention(
    module: Any, query_BH1D: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, mask_B11T: Tensor, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attention of one new token, without a copy of the keys for every query head; softmax in at least fp32."""
    batch, heads, _, size = query_BH1D.shape
    scaling = kwargs.get("scaling") or size**-0.5
    query_BKGD = query_BH1D.reshape(batch, key_BKTD.shape[1], -1, size)
    scores_BKGT = query_BKGD @ key_BKTD.mT
    wide = torch.promote_types(scores_BKGT.dtype, torch.float32)
    shares_BKGT = (scores_BKGT.to(wide) * scaling).masked_fill(~mask_B11T, -torch.inf).softmax(dim=-1)
    return (shares_BKGT.to(value_BKTD.dtype) @ value_BKTD).reshape(batch, 1, heads, size), None


AttentionInterface.register(ATTENTION, grouped_attention)


class _FixedLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values of a layer; new ones are written to the place that ``slot`` holds."""

    def __init__(self, full: DynamicLayer, slot: Tensor) -> None:
        super().__init__()
        self.keys, self.values, self.slot, self.is_initialized = full.keys, full.values, slot, True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self.keys.index_copy_(2, self.slot, key_states), self.values.index_copy_(2, self.slot, value_states)

    def grow(self, count: int) -> None:
        self.keys, self.values = (torch.nn.functional.pad(x, (0, 0, 0, count)) for x in (self.keys, self.values))


class FixedDecoder:
    """Logits of the next token of every row, one call a token, after a prompt that ``cache`` holds."""

    def __init__(
        self, model: Any, cache: Cache, mask_BT: Tensor | None, next_position_B: Tensor, **options: Any
    ) -> None:
        """``mask_BT`` is 0 where a prompt is padded; ``next_position_B`` are the positions of the next tokens."""
        self._model, self._options = model, options
        keys = cache.layers[0].keys
        self._used = keys.shape[2]
        self._slot = torch.full((1,), self._used, device=keys.device)
        self.cache = Cache(layers=[_FixedLayer(layer, self._slot) for layer in cache.layers])
        self._mask_B11T = keys.new_ones((len(keys), 1, 1, self._used), dtype=torch.bool)
        if mask_BT is not None:
            self._mask_B11T &= mask_BT[:, None, None].bool()
        self._position_B1 = next_position_B[:, None].clone()
        self._token_B1 = torch.zeros_like(self._position_B1)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._logits_BV: Tensor | None = None

    @staticmethod
    def fits(model: Any, cache: Any) -> bool:
        """Whether every layer attends to all tokens, by transformers' sdpa, whose meaning ``grouped_attention`` has.

        Not where a step waits for the device.
        """
        layers = getattr(cache, "layers", None) or ()
        plain = bool(layers) and all(type(layer) is DynamicLayer for layer in layers)
        by_sdpa = getattr(model.config, "_attn_implementation", None) == "sdpa"
        return plain and by_sdpa and not follows_length(model)

    def logits(self, token_B1: Tensor) -> Tensor:
        """Append a token to every row; the result is valid until the next call."""
        self._token_B1.copy_(token_B1)
        if self._used == self._mask_B11T.shape[3]:
            self._grow()
        self._used += 1
        if not token_B1.is_cuda:
            return self._step()
        if self._graph is None:
            self._record()
        assert self._graph is not None and self._logits_BV is not None
        self._graph.replay()
        return self._logits_BV

    def keep(self, index: Tensor) -> None:
        """Continue with these rows only."""
        for layer in self.cache.layers:
            layer.keys, layer.values = layer.keys[index], layer.values[index]
        self._mask_B11T, self._position_B1 = self._mask_B11T[index], self._position_B1[index]
        self._token_B1, self._graph = self._token_B1[index], None

    def _grow(self) -> None:
        for layer in self.cache.layers:
            layer.grow(BLOCK)
        self._mask_B11T, self._graph = torch.nn.functional.pad(self._mask_B11T, (0, BLOCK)), None

    def _step(self) -> Tensor:
        self._mask_B11T.index_fill_(3, self._slot, True)
        with _attention(self._model):
            answer = self._model(
                input_ids=self._token_B1,
                position_ids=self._position_B1,
                attention_mask=self._mask_B11T,
                past_key_values=self.cache,
                use_cache=True,
                **self._options,
            )
        self._slot += 1
        self._position_B1 += 1
        logits_BV: Tensor = answer.logits[:, -1]
        return logits_BV

    def _record(self) -> None:
        """Libraries choose kernels and allocate memory in a first pass, whose effects are undone."""
        stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._step()
            self._slot -= 1
            self._position_B1 -= 1
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):  # others may copy tensors meanwhile
            self._logits_BV = self._step()


@contextmanager
def _attention(model: Any) -> Iterator[None]:
    before = model.config._attn_implementation
    model.config._attn_implementation = ATTENTION
    try:
        yield
    finally:
        model.config._attn_implementation = before
