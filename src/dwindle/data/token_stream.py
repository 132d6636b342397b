"""One long sequence of token ids from one or more inputs, in memory or memory-mapped."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Protocol

import numpy as np
import numpy.typing as npt

from dwindle.core.errors import UserError
from dwindle.data.tokenizing import DocumentEncoder, EncodedPiece, Tokens

_MAX_COMPARED_DOCUMENTS = 200_000
_MAX_HELD_OUT_PIECES = 32


class TokenPart(Protocol):
    """A part of a stream: token files, or text tokenized in memory."""

    @property
    def label(self) -> str:
        """Its name in messages."""

    @property
    def num_tokens(self) -> int: ...

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the token ids."""

    @property
    def document_starts(self) -> npt.NDArray[np.uint64]:
        """Position of the first token of every document."""

    def read(self, start: int, stop: int) -> Tokens:
        """Token ids [start, stop)."""

    def verify(self) -> None:
        """Raise UserError if the content does not match its checksum."""


class MemoryTokens:
    """Tokens in memory: of a text, for calibration and evaluation; of some conversations, to estimate their rows."""

    def __init__(self, label: str, ids: Tokens, document_starts: npt.NDArray[np.uint64]) -> None:
        self.label = label
        self.document_starts = document_starts
        self.fingerprint = hashlib.sha256(np.ascontiguousarray(ids).tobytes()).hexdigest()
        self._ids = ids
        self.answers: npt.NDArray[np.uint64] | None = None
        self.conversation_starts: npt.NDArray[np.uint64] | None = None
        """For conversations, as in ``TokenFiles``."""

    @classmethod
    def of_examples(cls, label: str, pieces: Sequence[EncodedPiece]) -> MemoryTokens:
        """Encoded conversations, each example one piece."""
        starts = np.cumsum([0, *(len(piece.ids) for piece in pieces)])[:-1].astype(np.uint64)
        found = cls(label, np.concatenate([piece.ids for piece in pieces]), starts)
        found.conversation_starts = starts[[piece.starts_conversation for piece in pieces]]
        answers = [p.answers + start for p, start in zip(pieces, starts, strict=True) if p.answers is not None]
        found.answers = np.concatenate(answers)
        return found

    @classmethod
    def encode(
        cls, label: str, encoder: DocumentEncoder, documents: Iterable[str], max_tokens: int | None = None
    ) -> MemoryTokens:
        """Tokenize all documents into memory."""
        pieces, starts, num_tokens = [], [], 0
        for piece in encoder.encode(documents):
            if piece.starts_document:
                starts.append(num_tokens)
            pieces.append(piece.ids)
            num_tokens += len(piece.ids)
            if max_tokens is not None and num_tokens >= max_tokens:
                break
        ids = np.concatenate(pieces)[:max_tokens]
        kept = [start for start in starts if start < len(ids)]
        return cls(label, ids, np.array(kept, dtype=np.uint64))

    @property
    def num_tokens(self) -> int:
        return len(self._ids)

    def read(self, start: int, stop: int) -> Tokens:
        return self._ids[start:stop]

    def verify(self) -> None:
        """Nothing to check in memory."""


class TokenStream:
    """Parts concatenated into one sequence."""

    def __init__(self, parts: Sequence[TokenPart]) -> None:
        assert parts
        self.parts = list(parts)
        self._ends = list(accumulate(part.num_tokens for part in self.parts))

    def __len__(self) -> int:
        return self._ends[-1]

    @property
    def fingerprint(self) -> str:
        """The fingerprint of a single part; several are hashed together, in order."""
        if len(self.parts) == 1:
            return self.parts[0].fingerprint
        return hashlib.sha256("".join(part.fingerprint for part in self.parts).encode()).hexdigest()

    @property
    def document_starts(self) -> npt.NDArray[np.int64]:
        """Position of the first token of every document."""
        offsets = [0, *self._ends]
        found = [part.document_starts.astype(np.int64) + at for part, at in zip(self.parts, offsets, strict=False)]
        return np.concatenate(found)

    def read(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Token ids [start, stop) as int64, across parts if needed."""
        assert 0 <= start <= stop <= len(self), (start, stop, len(self))
        out = np.empty(stop - start, dtype=np.int64)
        at = start
        while at < stop:
            number = bisect_right(self._ends, at)
            offset = self._ends[number] - self.parts[number].num_tokens
            end = min(stop, self._ends[number])
            out[at - start : end - start] = self.parts[number].read(at - offset, end - offset)
            at = end
        return out

    def verify(self) -> None:
        """Raise UserError if a part does not match its checksum."""
        for part in self.parts:
            part.verify()


class TokenSlice:
    """Tokens [start, stop) of a stream, as a part of another."""

    def __init__(self, stream: TokenStream, start: int, stop: int) -> None:
        assert 0 <= start < stop <= len(stream)
        self._stream, self._start, self._stop = stream, start, stop

    @property
    def label(self) -> str:
        return ", ".join(part.label for part in self._stream.parts)

    @property
    def num_tokens(self) -> int:
        return self._stop - self._start

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(f"{self._stream.fingerprint}/{self._start}/{self._stop}".encode()).hexdigest()

    @property
    def document_starts(self) -> npt.NDArray[np.uint64]:
        """Starts of the documents inside; the rest of an earlier one counts as a document."""
        starts = self._stream.document_starts
        inside = starts[(starts > self._start) & (starts < self._stop)] - self._start
        return np.concatenate([np.zeros(1, dtype=np.int64), inside]).astype(np.uint64)

    def read(self, start: int, stop: int) -> Tokens:
        return self._stream.read(self._start + start, self._start + stop)

    def verify(self) -> None:
        self._stream.verify()


def hold_out(stream: TokenStream, share: float, least: int) -> tuple[TokenStream, TokenStream]:
    """(To train on, held out): ``share`` of the tokens in pieces spread evenly, none shorter than ``least`` tokens."""
    total = round(share * len(stream))
    count = max(1, min(_MAX_HELD_OUT_PIECES, total // (4 * least)))
    size = max(total // count, least)
    kept, held, at = list[TokenPart](), list[TokenPart](), 0
    for number in range(1, count + 1):
        end = len(stream) * number // count
        start = max(end - size, at)
        held.append(TokenSlice(stream, start, end))
        if start > at:
            kept.append(TokenSlice(stream, at, start))
        at = end
    if not kept:
        raise UserError(f"data.holdout: only {len(stream)} tokens, too few to hold any out: give more text")
    return TokenStream(kept), TokenStream(held)


def shared_token_count(train: TokenStream, valid: TokenStream) -> int:
    """Number of tokens of ``valid`` in documents that ``train`` contains verbatim.

    Only documents of equal length are compared, and at most 200,000 of those per part (evenly spaced), so that the
    check is cheap compared with training.
    """
    wanted: dict[bytes, int] = {}
    lengths: set[int] = set()
    for part in valid.parts:
        starts, sizes = _documents(part)
        for start, size in zip(starts.tolist(), sizes.tolist(), strict=True):
            key = _document_key(part, start, size)
            wanted[key] = wanted.get(key, 0) + size
            lengths.add(size)
    known = np.fromiter(lengths, dtype=np.int64)
    found: set[bytes] = set()
    for part in train.parts:
        starts, sizes = _documents(part)
        candidates = np.flatnonzero(np.isin(sizes, known))
        step = -(-len(candidates) // _MAX_COMPARED_DOCUMENTS) or 1
        for index in candidates[::step].tolist():
            key = _document_key(part, int(starts[index]), int(sizes[index]))
            if key in wanted:
                found.add(key)
    return sum(wanted[key] for key in found)


def _documents(part: TokenPart) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    starts = part.document_starts.astype(np.int64)
    return starts, np.diff(starts, append=part.num_tokens)


def _document_key(part: TokenPart, start: int, size: int) -> bytes:
    return hashlib.sha256(part.read(start, start + size).astype("<u4").tobytes()).digest()
