"""Rows of whole conversations: how they are packed, and which of their tokens are learned.

A row has three planes of L + 1 cells: token ids; 1 where the token is learned, else 0; and its position in its own
example. Positions restart where an example begins, from which transformers builds attention that does not reach across
examples. Cells that no example fills hold end-of-text, as an example of their own that is not learned.

Legend: L = seq_len; N documents (examples); K answers; B rows.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dwindle.core.errors import UserError
from dwindle.data.mixture import PackedDataset, Windows
from dwindle.data.permutation import Permutation
from dwindle.data.token_files import TokenFiles
from dwindle.data.token_stream import MemoryTokens, TokenStream

_IDS, _LEARNED, _POSITIONS = range(3)
Ints = npt.NDArray[np.int64]


class Planes(NamedTuple):
    """A batch as a model takes it; text has token ids only."""

    tokens_BT: Tensor
    learned_BT: Tensor | None
    positions_BT: Tensor | None


def planes_of(batch: Tensor) -> Planes:
    """int64 [B, T] is text; [B, 3, T] are packed conversations."""
    if batch.ndim == 2:
        return Planes(batch, None, None)
    return Planes(batch[:, _IDS], batch[:, _LEARNED].bool(), batch[:, _POSITIONS])


def num_predictions(batch: Tensor) -> int:
    """Tokens that are learned: of text, all but the first of each row."""
    tokens, learned, _ = planes_of(batch)
    return tokens[:, 1:].numel() if learned is None else int(learned[:, 1:].sum())


def first_prompt(row: Tensor, most: int) -> list[int]:
    """The first ``most`` tokens of text; the last (shortest) example of packed conversations, up to its answer."""
    if row.ndim == 1:
        return [int(token) for token in row[:most]]
    last = int(row[_LEARNED].nonzero()[-1])
    start = int((row[_POSITIONS, :last] == 0).nonzero()[-1])
    end = start + int(row[_LEARNED, start:].argmax())
    return [int(token) for token in row[_IDS, start:end]]


class ChatStream(TokenStream):
    """Conversations as one sequence of tokens, with their answers."""

    def __init__(self, parts: Sequence[TokenFiles | MemoryTokens]) -> None:
        super().__init__(parts)
        spans, starts, at = [], [], 0
        for part in parts:
            assert part.answers is not None and part.conversation_starts is not None
            spans.append(part.answers.astype(np.int64) + at)
            starts.append(part.conversation_starts.astype(np.int64) + at)
            at += part.num_tokens
        self.answers_K2: Ints = np.concatenate(spans)
        self.conversation_of_N: Ints = np.searchsorted(np.concatenate(starts), self.document_starts, side="right") - 1
        """Number of the conversation that each example is of."""
        flat = self.answers_K2.reshape(-1)
        if (np.diff(flat) < 0).any() or flat[0] < 0 or flat[-1] > len(self):
            raise UserError(f"{parts[0].label} is damaged (its answers are not in order): render it again")

    def last_of_answers(self) -> Iterator[int]:
        """The last token of each of the first 256 answers."""
        for stop in map(int, self.answers_K2[:256, 1]):
            yield int(self.read(stop - 1, stop)[0])


class PackedChat(Windows):
    """Conversations packed into rows by best fit, longest first; the rows are reshuffled every epoch.

    An example longer than a row loses whole turns from its end, so that it ends with an answer; one whose first answer
    does not fit is left out. Both are counted.
    """

    def __init__(
        self,
        name: str,
        stream: ChatStream,
        seq_len: int,
        seed: int,
        *,
        filler: int,
        packed: bool = True,
        documents: Ints | None = None,
        option: str = "task.chat",
    ) -> None:
        starts = stream.document_starts
        chosen = np.arange(len(starts)) if documents is None else documents
        ends = np.append(starts[1:], len(stream))
        self._starts, sizes = starts[chosen], (ends - starts)[chosen]
        self._answers = stream.answers_K2
        self.sizes = self._fitting(sizes, seq_len + 1)
        self.num_shortened = int(((self.sizes < sizes) & (self.sizes > 0)).sum())
        """Examples that lost turns."""
        self.num_left_out = int((self.sizes == 0).sum())
        kept = np.flatnonzero(self.sizes)
        if not len(kept):
            raise UserError(f"{option}: no conversation fits into data.seq_len = {seq_len} tokens: raise it")
        self.rows = best_fit(self.sizes, kept, seq_len + 1, f"{seed}/{name}/ties", packed=packed)
        learned = self._learned_in_each()
        self._learned = np.array([learned[row].sum() for row in self.rows], dtype=np.int64)
        self._filler = filler
        super().__init__(name, stream, seq_len, seed, len(self.rows))

    @property
    def sample_shape(self) -> tuple[int, ...]:
        return 3, self.seq_len + 1

    @property
    def learned_per_row(self) -> float:
        """Mean number of answer tokens."""
        return float(self._learned.mean())

    def _fitting(self, sizes: Ints, room: int) -> Ints:
        """The size of each example cut behind the last answer that fits; 0 if none does."""
        first = self._answers[np.minimum(np.searchsorted(self._answers[:, 0], self._starts), len(self._answers) - 1), 0]
        sizes = np.where((first >= self._starts) & (first < self._starts + sizes), sizes, 0)
        last = np.searchsorted(self._answers[:, 1], self._starts + room, side="right") - 1
        cut = np.maximum(self._answers[np.maximum(last, 0), 1] - self._starts, 0) * (last >= 0)
        fitting: Ints = np.where(sizes <= room, sizes, cut)
        return fitting

    def _spans(self, document: int) -> Ints:
        """Answers of an example, by place in it."""
        start = self._starts[document]
        first, last = np.searchsorted(self._answers[:, 0], [start, start + self.sizes[document]])
        spans: Ints = self._answers[first:last] - start
        return spans

    def _learned_in_each(self) -> Ints:
        """Answer tokens of each example."""
        before = np.concatenate([[0], np.cumsum(self._answers[:, 1] - self._answers[:, 0])])
        first, last = (np.searchsorted(self._answers[:, 0], at) for at in (self._starts, self._starts + self.sizes))
        found: Ints = before[last] - before[first]
        return found

    def num_predictions(self, sample: int) -> int:
        return int(self._learned[self.window_index(sample)])

    def window(self, index: int) -> Ints:
        row = np.zeros(self.sample_shape, dtype=np.int64)
        at = 0
        for document in self.rows[index]:
            start, size = int(self._starts[document]), int(self.sizes[document])
            row[_IDS, at : at + size] = self.stream.read(start, start + size)
            for first, stop in self._spans(document):
                row[_LEARNED, at + first : at + stop] = 1
            row[_POSITIONS, at : at + size] = np.arange(size)
            at += size
        row[_IDS, at:] = self._filler
        row[_POSITIONS, at:] = np.arange(row.shape[1] - at)
        return row

    def spread(self, max_tokens: int) -> Tensor:
        """int64 [B, 3, L + 1]: all rows, or evenly spaced ones with at most ``max_tokens`` in total; never shuffled."""
        count = max(min(self.num_windows, max_tokens // self.seq_len), 1)
        return torch.from_numpy(np.stack([self.window(n * self.num_windows // count) for n in range(count)]))


class TextRows(PackedDataset):
    """Plain text between conversations: every token is learned, and a row is one example."""

    @property
    def sample_shape(self) -> tuple[int, ...]:
        return 3, self.seq_len + 1

    def window(self, index: int) -> Ints:
        ids = super().window(index)
        return np.stack([ids, np.ones_like(ids), np.arange(len(ids))])


def best_fit(sizes: Ints, documents: Ints, room: int, seed: str, *, packed: bool = True) -> list[list[int]]:
    """Documents in rows of ``room`` tokens: the longest first, each into the fullest row that still has room.

    Documents of equal size are taken in random order, because neighbours in a file are often alike.
    """
    if not packed:
        return [[int(document)] for document in documents]
    order = Permutation(len(documents), seed)
    ties = np.array([order(n) for n in range(len(documents))])
    rows: list[list[int]] = []
    rows_with: dict[int, list[int]] = {}
    rooms: list[int] = []
    for document in documents[np.lexsort([ties, -sizes[documents]])].tolist():
        size = int(sizes[document])
        place = bisect_left(rooms, size)
        if place < len(rooms):
            left = rooms[place]
            number = rows_with[left].pop()
            if not rows_with[left]:
                del rooms[place]
        else:
            left, number = room, len(rows)
            rows.append([])
        rows[number].append(document)
        left -= size
        if left:
            if not rows_with.setdefault(left, []):
                insort(rooms, left)
            rows_with[left].append(number)
    return rows
