"""Decodes a batch of prompts with a cached KV: greedy, or sampled with a seed for every row.

B rows, T tokens so far, V vocabulary.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dwindle.evaluation.config import SamplingConfig
from dwindle.evaluation.fixed_decoding import FixedDecoder
from dwindle.training.sampling import evaluating


@dataclass(frozen=True, slots=True)
class Decoded:
    """Token ids of an answer, without the one that ended it."""

    ids: list[int]
    is_finished: bool
    """False if it was cut at the maximum number of tokens."""


def check_every(device: torch.device) -> int:
    """Steps between two checks of the tokens: each check waits for the GPU."""
    return 1 if device.type == "cpu" else 16


def uniforms(seed: int, keys: Sequence[int], count: int) -> Tensor:
    """``count`` numbers in [0, 1) of a prompt: they depend on the seed and the prompt's keys, not on its batch."""
    digest = hashlib.sha256(":".join(map(str, (seed, *keys))).encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    return torch.rand(count, generator=generator, dtype=torch.float64)


def choose(logits_BV: Tensor, config: SamplingConfig, uniform_B: Tensor | None) -> Tensor:
    """The next token of every row: temperature, ``top_k``, ``top_p``, then the inverse of the distribution function."""
    if config.temperature == 0 or uniform_B is None:
        return logits_BV.argmax(dim=-1)
    sorted_BV, order_BV = _likeliest_first(logits_BV, config.top_k)
    p_BV = (sorted_BV.double() / config.temperature).softmax(dim=-1)
    before_BV = p_BV.cumsum(dim=-1) - p_BV
    p_BV = p_BV.masked_fill(before_BV >= config.top_p, 0.0)
    p_BV[:, 0] = p_BV[:, 0].clamp_min(torch.finfo(p_BV.dtype).tiny)  # the likeliest always stays
    sums_BV = p_BV.cumsum(dim=-1)
    reached_B1 = uniform_B[:, None] * sums_BV[:, -1:]
    place_B1 = (sums_BV <= reached_B1).sum(dim=-1, keepdim=True).clamp_max(p_BV.shape[-1] - 1)
    return order_BV.gather(-1, place_B1)[:, 0]


def _likeliest_first(logits_BV: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Sorted logits and their tokens, the lowest token first among equal ones; ``top_k`` of them are found without
    sorting."""
    if not 0 < top_k < logits_BV.shape[-1]:
        sorted_BV, order_BV = logits_BV.sort(dim=-1, descending=True, stable=True)
        return sorted_BV, order_BV
    last_B1 = logits_BV.topk(top_k, dim=-1).values[:, -1:]
    above_BV, equal_BV = logits_BV > last_B1, logits_BV == last_B1
    room_B1 = top_k - above_BV.sum(dim=-1, keepdim=True)  # topk itself takes any of equal ones, on a GPU by the batch
    kept_BV = above_BV | (equal_BV & (equal_BV.cumsum(dim=-1) <= room_B1))
    from_end_V = torch.arange(logits_BV.shape[-1], 0, -1, device=logits_BV.device)
    likely_BK = (kept_BV * from_end_V).topk(top_k, dim=-1).indices
    sorted_BK, place_BK = logits_BV.gather(-1, likely_BK).sort(dim=-1, descending=True, stable=True)
    return sorted_BK, likely_BK.gather(-1, place_BK)


class BatchDecoder:
    """Left-padded rows that grow by a token per ``step``."""

    def __init__(
        self,
        model: Any,
        rows: Sequence[Sequence[int]],
        config: SamplingConfig,
        draws: Tensor | None,
        *,
        fixed: bool | None = None,
    ) -> None:
        """``draws`` (B × steps) are the random numbers, None for greedy decoding.

        ``fixed`` places of keys and values are for GPUs, where they make CUDA graphs possible; default: on a GPU.
        """
        self._model, self._config = model, config
        self._device = next(model.parameters()).device
        self._draws = None if draws is None or config.temperature == 0 else draws.to(self._device)
        width = max(map(len, rows))
        padded = [[0] * (width - len(row)) + list(row) for row in rows]
        self._fresh_BT = torch.tensor(padded, device=self._device)
        lengths_B = torch.tensor([len(row) for row in rows], device=self._device)
        is_padded = any(len(row) < width for row in rows)
        places_T = torch.arange(width, device=self._device)
        self._mask_BT = (places_T >= width - lengths_B[:, None]).long() if is_padded else None
        self._next_position_B = lengths_B
        self._cache: Any = None
        self._fixed: FixedDecoder | None = None
        self._may_be_fixed = self._device.type == "cuda" if fixed is None else fixed
        self._step = 0
        known = inspect.signature(model.forward).parameters
        self._last_logits = {"logits_to_keep": 1} if "logits_to_keep" in known else {}

    def logits(self) -> Tensor:
        """Logits of the next token of every row (B × V); caches the keys and values of the tokens so far."""
        if self._fixed is not None:
            return self._fixed.logits(self._fresh_BT)
        inputs: dict[str, Any] = {"input_ids": self._fresh_BT, "past_key_values": self._cache, "use_cache": True}
        if self._mask_BT is not None:
            inputs["attention_mask"] = self._mask_BT
            first = self._cache is None
            inputs["position_ids"] = (
                (self._mask_BT.cumsum(dim=1) - 1).clamp_min(0) if first else self._next_position_B[:, None] - 1
            )
        answer = self._model(**inputs, **self._last_logits)
        self._cache = answer.past_key_values
        if self._may_be_fixed and not torch.is_autocast_enabled(self._device.type):
            self._fix()
        logits_BV: Tensor = answer.logits[:, -1]
        return logits_BV

    def _fix(self) -> None:
        if FixedDecoder.fits(self._model, self._cache):
            position_B = self._next_position_B
            self._fixed = FixedDecoder(self._model, self._cache, self._mask_BT, position_B, **self._last_logits)
            self._cache = self._fixed.cache
        self._may_be_fixed = False

    def step(self) -> Tensor:
        """The next token of every row."""
        logits_BV = self.logits()
        draws = None if self._draws is None else self._draws[:, self._step]
        next_B = choose(logits_BV, self._config, draws)
        self._step += 1
        self._fresh_BT, self._next_position_B = next_B[:, None], self._next_position_B + 1
        if self._mask_BT is not None:
            self._mask_BT = torch.cat([self._mask_BT, torch.ones_like(self._mask_BT[:, :1])], dim=1)
        return next_B

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values; those of custom cache classes are not counted."""
        layers = getattr(self._cache, "layers", None) or ()
        found = [getattr(layer, name, None) for layer in layers for name in ("keys", "values")]
        return sum(part.nbytes for part in found if isinstance(part, Tensor))

    def keep(self, rows: Sequence[int]) -> None:
        """Continue with these rows only."""
        index = torch.tensor(rows, device=self._device)
        if self._fixed is None:
            self._cache.batch_select_indices(index)
        else:
            self._fixed.keep(index)
        self._fresh_BT, self._next_position_B = self._fresh_BT[index], self._next_position_B[index]
        self._draws = None if self._draws is None else self._draws[index]
        self._mask_BT = None if self._mask_BT is None else self._mask_BT[index]


def decode(
    model: Any,
    rows: Sequence[Sequence[int]],
    config: SamplingConfig,
    *,
    count: int,
    ends: Collection[int],
    keys: Sequence[Sequence[int]],
    droppable: bool = True,
) -> list[Decoded]:
    """Answers of at most ``count`` tokens to a batch of prompts; ``keys`` and the seed decide what a row draws.

    When half of the rows have ended, they are dropped (``droppable``: the model's cache can select rows).
    """
    draws = torch.stack([uniforms(config.seed, key, count) for key in keys]) if config.temperature else None
    found: list[list[int]] = [[] for _ in rows]
    done = [False] * len(rows)
    alive = list(range(len(rows)))
    with evaluating(model):
        decoder = BatchDecoder(model, rows, config, draws)
        every = check_every(next(model.parameters()).device)
        columns: list[Tensor] = []
        for step in range(1, count + 1):
            columns.append(decoder.step())
            if step % every and step != count:
                continue
            for row, tokens in zip(alive, torch.stack(columns, dim=1).tolist(), strict=True):
                for token in () if done[row] else tokens:
                    done[row] = token in ends
                    if done[row]:
                        break
                    found[row].append(token)
            columns = []
            left = [place for place, row in enumerate(alive) if not done[row]]
            if not left:
                break
            if droppable and 2 * len(left) <= len(alive) and step < count:
                decoder.keep(left)
                alive = [alive[place] for place in left]
    return [Decoded(ids, end) for ids, end in zip(found, done, strict=True)]


def stream(
    model: Any, ids: Sequence[int], config: SamplingConfig, *, count: int, ends: Collection[int], keys: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """(token, bytes of the cache) of one answer, one by one, until it ends; the caller may stop at any token."""
    draws = uniforms(config.seed, keys, count)[None] if config.temperature else None
    decoder = BatchDecoder(model, [ids], config, draws)
    for _ in range(count):
        with evaluating(model):  # left between two tokens, where the caller may do anything
            token = int(decoder.step())
        if token in ends:
            return
        yield token, decoder.cache_bytes


def end_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """Tokens that end an answer: the tokenizer's, and those of the model's generation settings."""
    found: list[Any] = [tokenizer.eos_token_id]
    given = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    found += given if isinstance(given, (list, tuple)) else [given]
    return frozenset(int(token) for token in found if token is not None)
