"""From documents to token ids: tokenizer fingerprint, document separators, batch encoding."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dwindle.core.errors import UserError
from dwindle.data.readers import TextInput

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tokens = npt.NDArray[np.generic]

_SEPARATOR_NAMES = ("<|endoftext|>", "<|end_of_text|>")
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_BATCH_CHARS = 2_000_000
_PIECE_CHARS = 500_000


class EncodedPiece(NamedTuple):
    """Token ids of a document, or of a part of a very long one."""

    ids: Tokens
    starts_document: bool
    answers: npt.NDArray[np.uint64] | None = None
    """For conversations: spans [start, stop) of the learned tokens, one per row."""
    starts_conversation: bool = True
    """False for a further example of the same conversation."""


class DocumentEncoder:
    """Encodes documents as they are packed for training.

    Every document is followed by the end-of-text token: the token named ``<|endoftext|>`` or ``<|end_of_text|>`` if the
    vocabulary has one (chat models use another token as ``eos``, but were pretrained with that separator), else
    ``eos``, else ``bos``. A document starts with ``bos`` only if the tokenizer itself adds one (Llama-2, Llama-3,
    llama2.c), and not if ``bos`` is the end-of-text token, which already precedes the document. No other special token
    is added; special tokens in the text are recognised, as usual.

    Documents above half a million characters are encoded in pieces split at line ends, so that memory stays bounded;
    only the tokens at a split can differ from encoding the whole document.
    """

    template_fingerprint: str | None = None
    """Fingerprint of the chat template of conversations; None for text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.fingerprint = tokenizer_fingerprint(tokenizer)
        self.end_of_text = end_of_text_id(tokenizer)
        self.beginning_of_text = beginning_of_text_id(tokenizer, self.end_of_text)
        self.dtype = np.dtype("<u2" if _largest_id(tokenizer) < 2**16 else "<u4")
        self.num_embeddings: int | None = getattr(tokenizer, "num_embeddings", None)
        """Rows of the model's embedding, if the tokenizer was loaded with its model."""
        self._tokenizer = tokenizer
        self.backend = _private_backend(tokenizer)
        """The fast tokenizer; None for a slow one."""

    @property
    def identity(self) -> str:
        """Everything that determines the ids of a text."""
        return f"{self.fingerprint}/{self.end_of_text}/{self.beginning_of_text}/{self.dtype.str}"

    def encode_input(self, source: TextInput) -> Iterator[EncodedPiece]:
        """All documents of an input."""
        return self.encode(source.documents())

    def encode(self, documents: Iterable[str]) -> Iterator[EncodedPiece]:
        """All documents in order, in batches, so that the tokenizer uses all cores."""
        texts: list[str] = []
        edges: list[tuple[bool, bool]] = []
        num_chars = 0
        for document in documents:
            pieces = list(split_text(document, _PIECE_CHARS))
            for number, piece in enumerate(pieces):
                texts.append(piece)
                edges.append((number == 0, number == len(pieces) - 1))
                num_chars += len(piece)
                if num_chars >= _BATCH_CHARS:
                    yield from self._encode_batch(texts, edges)
                    texts, edges, num_chars = [], [], 0
        yield from self._encode_batch(texts, edges)

    def _encode_batch(self, texts: list[str], edges: list[tuple[bool, bool]]) -> Iterator[EncodedPiece]:
        for ids, (is_first, is_last) in zip(self._ids(texts), edges, strict=True):
            if is_first and self.beginning_of_text is not None:
                ids.insert(0, self.beginning_of_text)
            if is_last:
                ids.append(self.end_of_text)
            check_ids(max(ids, default=0), self.num_embeddings, "tokenizer: gives")
            yield EncodedPiece(np.array(ids, dtype=self.dtype), is_first)

    def _ids(self, texts: list[str]) -> Iterator[list[int]]:
        if self.backend is not None:
            for encoding in self.backend.encode_batch_fast(texts, add_special_tokens=False):
                yield encoding.ids
        else:
            for text in texts:
                yield list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def check_ids(largest: int, num_embeddings: int | None, what: str) -> None:
    """Raise UserError for a token id that the embedding does not have: an index error, or silently wrong, later."""
    if num_embeddings is not None and largest >= num_embeddings:
        raise UserError(
            f"{what} token {largest:,}, and the model's embedding has {num_embeddings:,} rows: use the tokenizer that "
            "belongs to the model"
        )


def token_bytes(tokenizer: PreTrainedTokenizerBase) -> npt.NDArray[np.int64]:
    """Bytes of text that each token stands for, by id; special tokens stand for none."""
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    added = set(tokenizer.added_tokens_decoder)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    byte_level = backend is not None and "ByteLevel" in json.dumps(json.loads(backend.to_str())["decoder"])
    sizes = np.zeros(_largest_id(tokenizer) + 1, np.int64)
    for token, number in tokenizer.get_vocab().items():
        if number in special:
            continue
        if byte_level and number not in added:
            sizes[number] = len(token)  # one character for each byte
        else:
            sizes[number] = 1 if _BYTE.fullmatch(token) else len(token.replace("▁", " ").encode())
    return sizes


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of everything that determines ids: vocabulary, merges, normalizer, pre-tokenizer, added tokens.

    Padding and truncation, which a call can change, and settings for prompts and decoding are left out, so that the
    fingerprint does not change by saving, loading or use.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        content: dict[str, Any] = {"class": type(tokenizer).__name__, "vocab": tokenizer.get_vocab()}
    else:
        everything = json.loads(backend.to_str())
        content = {key: everything[key] for key in ("added_tokens", "normalizer", "pre_tokenizer", "model")}
    canonical = json.dumps(content, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def end_of_text_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token after each document (see DocumentEncoder)."""
    vocabulary = tokenizer.get_vocab()
    for name in _SEPARATOR_NAMES:
        if name in vocabulary:
            return int(vocabulary[name])
    for candidate in (tokenizer.eos_token_id, tokenizer.bos_token_id):
        if candidate is not None:
            return int(candidate)
    raise UserError(
        "tokenizer: it has no end-of-text, eos or bos token to separate documents: set eos_token in its files"
    )


def beginning_of_text_id(tokenizer: PreTrainedTokenizerBase, end_of_text: int) -> int | None:
    """``bos`` if the tokenizer itself starts a text with it, else None (see DocumentEncoder)."""
    bos = tokenizer.bos_token_id
    if bos is None or bos == end_of_text:
        return None
    ids = list(tokenizer("a")["input_ids"])
    return int(bos) if ids and ids[0] == bos else None


def split_text(text: str, max_chars: int) -> Iterator[str]:
    """``text`` in pieces of at most ``max_chars``, split after a line end, else after a space, else anywhere."""
    start = 0
    while len(text) - start > max_chars:
        stop = start + max_chars
        cut = text.rfind("\n", start, stop)
        if cut < 0:
            cut = text.rfind(" ", start, stop)
        end = stop if cut < 0 else cut + 1
        yield text[start:end]
        start = end
    yield text[start:]


def _largest_id(tokenizer: PreTrainedTokenizerBase) -> int:
    return max(max(tokenizer.get_vocab().values(), default=0), len(tokenizer) - 1)


def _private_backend(tokenizer: PreTrainedTokenizerBase) -> Any:
    """A copy of the fast tokenizer without truncation and padding, which earlier calls may have enabled."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    copy = type(backend).from_str(backend.to_str())
    copy.no_truncation()
    copy.no_padding()
    return copy
