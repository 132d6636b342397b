"""Log-likelihoods of continuations; the prefix that the choices of a question share is computed once.

A plain scorer reads the context of a HellaSwag question four times. Here a question is one row: the shared prefix, then
every choice at the positions right after it, with an attention mask under which a choice attends to the prefix and to
itself, not to other choices. This computes the same as reusing a key/value cache, in one pass and without copying the
cache. The head runs only on scored positions. Rows are batched by length.

Shapes: B rows, T tokens each, N scored tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dwindle.anatomy.anatomy import Anatomy
from dwindle.anatomy.families import FAMILIES
from dwindle.anatomy.family import CUSTOM_PREFIX
from dwindle.anatomy.positions import switch_of
from dwindle.core.errors import UserError
from dwindle.core.garbage import no_garbage_collection
from dwindle.distributed.async_copy import sent
from dwindle.distributed.precision import Precision, autocast_for, is_bf16
from dwindle.evaluation.encoding import Pair, Tokens
from dwindle.training.sampling import evaluating

SHARED = 0
"""Branch number of the shared prefix."""
_NO_KERNEL = "could not create a primitive"
"""oneDNN's error if the CPU has no kernel for a dtype."""


@dataclass(frozen=True, slots=True)
class PackedRow:
    """One row of the batch: a tree of choices, or a single text."""

    tokens: Tokens
    positions: list[int]
    branches: list[int]
    places: list[list[int]]
    """For each request the positions whose predictions are scored …"""
    targets: list[Tokens]
    """… and the tokens they should predict."""


def tree_row(pairs: Sequence[Pair], max_length: int) -> PackedRow:
    """All requests of a question in one row; too long ones are truncated on the left, as in the harness."""
    inputs = [(context + continuation)[-(max_length + 1) :][:-1] for context, continuation in pairs]
    shared = _common_length(inputs)
    tokens, positions, branches = list(inputs[0][:shared]), list(range(shared)), [SHARED] * shared
    starts: dict[tuple[int, ...], int] = {}
    places = []
    for branch, (row, (_, continuation)) in enumerate(zip(inputs, pairs, strict=True), 1):
        own = tuple(row[shared:])
        if own not in starts:  # identical choices are computed once, so that they tie exactly
            starts[own] = len(tokens)
            tokens += own
            positions += range(shared, len(row))
            branches += [branch] * len(own)
        start = starts[own]
        scored = range(len(row) - len(continuation), len(row))
        places.append([place if place < shared else start + place - shared for place in scored])
    return PackedRow(tokens, positions, branches, places, [continuation for _, continuation in pairs])


def _common_length(rows: Sequence[Tokens]) -> int:
    length = min(map(len, rows))
    for row in rows[1:]:
        if row[:length] != rows[0][:length]:
            length = next(place for place in range(length) if row[place] != rows[0][place])
    return length


class Scorer:
    """Scores with a model; ``batch`` counts requests (choices), as in the harness."""

    def __init__(self, model: nn.Module, *, max_length: int, batch: int = 0, precision: Precision = "fp32") -> None:
        self.model = cast(Any, model)
        self.max_length = max_length
        self.device = next(model.parameters()).device
        on_gpu = self.device.type != "cpu"
        self.batch = batch or (1024 if on_gpu else 16)
        self.precision: Precision = precision
        self._max_batch_tokens = 32768 if on_gpu else 1024  # fits in CPU caches
        self._head_chunk = 8192 if on_gpu else 256
        self._width_multiple = 8 if on_gpu else 1
        config = self.model.config
        self._known = is_known_decoder(self.model)
        """Whether it is a supported decoder with a plain head; other models are called as a whole, without sharing."""
        attention = getattr(config, "_attn_implementation", None)
        self._takes_masks = self._known and attention in ("sdpa", "eager", None)
        self._additive_mask = attention == "eager"
        self._window: int | None = getattr(config, "sliding_window", None)
        self._switch = switch_of(self.model)

    def choices(self, questions: Sequence[Sequence[Pair]], progress: Any = None) -> list[list[float]]:
        """Log-likelihood of every continuation of every question."""
        rows, owners = self._packed(questions)
        found = [[0.0] * len(pairs) for pairs in questions]
        for indices, scores in self._scored(rows, progress):
            for index, values in zip(indices, scores, strict=True):
                question, first = owners[index]
                found[question][first : first + len(values)] = values
        return found

    @no_garbage_collection()
    def _packed(self, questions: Sequence[Sequence[Pair]]) -> tuple[list[PackedRow], list[tuple[int, int]]]:
        """The rows, and for each its question and the number of its first request."""
        rows: list[PackedRow] = []
        owners: list[tuple[int, int]] = []
        for question, pairs in enumerate(questions):
            if self._shareable(pairs):
                rows.append(tree_row(pairs, self.max_length))
                owners.append((question, 0))
            else:
                rows += [tree_row([pair], self.max_length) for pair in pairs]
                owners += [(question, number) for number in range(len(pairs))]
        return rows, owners

    def _shareable(self, pairs: Sequence[Pair]) -> bool:
        """Our mask replaces a model's sliding-window mask, so sequences longer than the window are not shared, nor are
        those that the frequencies' switch lies between."""
        lengths = [min(len(context) + len(continuation) - 1, self.max_length) for context, continuation in pairs]
        is_within = self._window is None or max(lengths) < self._window
        return self._takes_masks and is_within and (min(lengths) > self._switch) == (max(lengths) > self._switch)

    def _kind(self, row: PackedRow) -> tuple[bool, bool]:
        """Only rows of one kind share a batch: a mask would open the window of a row beyond it, and the longest
        sequence chooses the frequencies of all."""
        is_beyond = self._window is not None and len(row.tokens) > self._window and row.branches[-1] == SHARED
        return is_beyond, self._switch < math.inf and max(row.positions) >= self._switch

    def _scored(self, rows: Sequence[PackedRow], progress: Any) -> Iterator[tuple[list[int], list[list[float]]]]:
        _check_vocabulary(self.model, rows)
        queued: deque[tuple[list[int], Tensor]] = deque()
        with self._evaluating():
            for indices in chain(self._batches(rows), [[]]):  # a batch is read when the next one is queued on the GPU
                if indices:
                    queued.append((indices, self._queue([rows[index] for index in indices])))
                while len(queued) > bool(indices):
                    ready, scores_N = queued.popleft()
                    chosen = [rows[index] for index in ready]
                    yield ready, _sums(chosen, scores_N.tolist())
                    if progress is not None:
                        progress.advance(sum(len(row.places) for row in chosen))

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Eval mode, no gradients; no ``torch.compile`` and no cuDNN attention, which compile for every new shape."""
        try:
            with evaluating(self.model), without_cudnn_attention():
                yield
        except RuntimeError as error:
            if _NO_KERNEL not in str(error):
                raise
            dtype = "bfloat16" if is_bf16(self.precision) else str(self.model.dtype).removeprefix("torch.")
            raise UserError(f"dtype {dtype}: this CPU does not support it ({error}): use float32") from error

    def _batches(self, rows: Sequence[PackedRow]) -> Iterator[list[int]]:
        """Batches of rows of similar length, the longest first, so that running out of memory happens at once."""
        batch: list[int] = []
        size = width = 0
        kinds = [self._kind(row) for row in rows]
        for index in sorted(range(len(rows)), key=lambda index: (kinds[index], len(rows[index].tokens)), reverse=True):
            requests = len(rows[index].places)
            is_full = size + requests > self.batch or (len(batch) + 1) * width > self._max_batch_tokens
            if batch and (is_full or kinds[index] != kinds[batch[0]]):
                yield batch
                batch, size = [], 0
            if not batch:
                width = len(rows[index].tokens)
            batch.append(index)
            size += requests
        if batch:
            yield batch

    def _queue(self, rows: Sequence[PackedRow]) -> Tensor:
        """Log-probabilities of all scored tokens; on a GPU they are not computed yet."""
        width = max(len(row.tokens) for row in rows)
        width += -width % self._width_multiple  # GPU attention kernels need aligned masks
        flat_N = (at * width + place for at, row in enumerate(rows) for place in chain.from_iterable(row.places))
        targets_N = chain.from_iterable(chain.from_iterable(row.targets for row in rows))
        with autocast_for(self.precision, self.device):
            return self._log_probabilities(self._inputs(rows, width), self._tensor(flat_N), self._tensor(targets_N))

    def _inputs(self, rows: Sequence[PackedRow], width: int) -> dict[str, Tensor]:
        """Right-padded inputs; a mask only if a row branches, so that plain texts use the fast causal kernels."""
        inputs = {"input_ids": self._padded([row.tokens for row in rows], width, 0)}
        if all(branch == SHARED for row in rows for branch in row.branches) or not self._takes_masks:
            return inputs
        inputs["position_ids"] = self._padded([row.positions for row in rows], width, 0)
        branches_BT = self._padded([row.branches for row in rows], width, -1)
        seen_BTT = (branches_BT[:, :, None] == branches_BT[:, None, :]) | (branches_BT[:, None, :] == SHARED)
        mask_B1TT = (seen_BTT & torch.ones(width, width, dtype=torch.bool, device=self.device).tril())[:, None]
        if self._additive_mask:
            hidden = torch.zeros(mask_B1TT.shape, dtype=self.model.dtype, device=self.device)
            mask_B1TT = hidden.masked_fill_(~mask_B1TT, torch.finfo(self.model.dtype).min)
        inputs["attention_mask"] = mask_B1TT
        return inputs

    def _log_probabilities(self, inputs: dict[str, Tensor], flat_N: Tensor, targets_N: Tensor) -> Tensor:
        if not self._known:
            logits_BTV = getattr(self.model(**inputs, use_cache=False), "logits", None)
            if logits_BTV is None:
                raise UserError(f"model: {type(self.model).__name__} returns no logits: give a causal language model")
            return _picked(logits_BTV.flatten(0, 1)[flat_N], targets_N)
        hidden_ND = self.model.base_model(**inputs, use_cache=False).last_hidden_state.flatten(0, 1)[flat_N]
        parts = zip(torch.split(hidden_ND, self._head_chunk), torch.split(targets_N, self._head_chunk), strict=True)
        return torch.cat([_picked(self._logits(hidden), targets) for hidden, targets in parts])

    def _logits(self, hidden_ND: Tensor) -> Tensor:
        logits_NV: Tensor = self.model.get_output_embeddings()(hidden_ND)
        scaling = getattr(self.model.config, "logits_scaling", None)  # Granite
        return logits_NV if scaling in (None, 1.0) else logits_NV / scaling

    def _padded(self, rows: Sequence[list[int]], width: int, filler: int) -> Tensor:
        padding = [[filler] * (width - len(row)) for row in rows]
        return self._tensor(chain.from_iterable(chain.from_iterable(zip(rows, padding, strict=True)))).view(-1, width)

    def _tensor(self, values: Iterable[int]) -> Tensor:
        """On the device, sent without waiting for the batch before; numpy reads integers faster than torch."""
        return sent([torch.from_numpy(np.fromiter(values, np.int64))], self.device)[0]


@contextmanager
def without_cudnn_attention() -> Iterator[None]:
    """Without cuDNN's attention, which torch 2.11 prefers on Hopper and which builds a plan for every new shape.

    83 of the 99 batches of the seven tasks have a unique shape.
    """
    was_allowed = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(was_allowed)


def is_known_decoder(model: Any) -> bool:
    """Whether it is a supported family made of stock attention; other layers might ignore masks or positions."""
    family = str(getattr(model.config, "model_type", "")).removeprefix(CUSTOM_PREFIX)
    packages = {type(part).__module__.partition(".")[0] for part in model.modules()}
    is_stock = packages <= {"dwindle", "torch", "transformers"}
    if family not in FAMILIES or not is_stock or model.get_output_embeddings() is None:
        return False
    try:
        layers = Anatomy.of_config(model.config).source.layers
    except UserError:  # experts, say, which can be scored but not pruned
        return False
    return all(layer.query_heads for layer in layers)


def _check_vocabulary(model: Any, rows: Sequence[PackedRow]) -> None:
    """Raise if the tokenizer does not fit the model, instead of an index error in the embedding."""
    count = (
        getattr(model.get_input_embeddings(), "num_embeddings", None) if isinstance(model, PreTrainedModel) else None
    )
    highest = max((max(tokens) for row in rows for tokens in (row.tokens, *row.targets) if tokens), default=0)
    if count is not None and highest >= count:
        raise UserError(
            f"tokenizer: has token {highest}, but the embedding {count} rows: use the model's own tokenizer"
        )


def _sums(rows: Sequence[PackedRow], scores: Sequence[float]) -> list[list[float]]:
    """For each row the sum of every request, of the scores of all their tokens in order."""
    found: list[list[float]] = []
    at = 0
    for row in rows:
        found.append([])
        for places in row.places:
            found[-1].append(sum(scores[at : at + len(places)]))
            at += len(places)
    return found


def _picked(logits_NV: Tensor, targets_N: Tensor) -> Tensor:
    """Log-probabilities of the targets, in at least fp32: a sum over tokens in bf16 would lose two digits.

    ``logsumexp`` would be closer to fp64 (4e-5 instead of 3e-4 for an answer of SmolLM2), but the harness, with which
    we compare, uses ``log_softmax``.
    """
    logits_NV = logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()
    return logits_NV.log_softmax(dim=-1).gather(-1, targets_N[:, None])[:, 0].double()
