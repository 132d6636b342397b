"""Which tokens of a source are kept: by rank or score, or by their counts on a text."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from dwindle.core.errors import UserError
from dwindle.core.progress import status
from dwindle.core.sizes import parse_count
from dwindle.data.config import check_inputs
from dwindle.data.readers import expand_inputs, open_input
from dwindle.data.token_files import is_token_files
from dwindle.data.tokenizing import DocumentEncoder, split_text
from dwindle.data.vocabulary_config import VocabularyConfig
from dwindle.sources.loading import load_config, load_generation, load_tokenizer
from dwindle.sources.vocabulary import Pieces, Vocabulary, choose_ids, trimmed_size, used_elsewhere

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MOST_CHARS = 200_000_000
"""Characters of each text that are counted: more would not change which tokens are rare."""
_PASSAGE_CHARS, _EVERY = 2_000, 8
"""Of passages that are held out: their longest, and the first of how many is one."""


class HeldOut:
    """Passages that tokens are not counted on: evenly spread over a text, about an eighth of it, at most so many
    characters."""

    def __init__(self, max_chars: int) -> None:
        self.passages: list[str] = []
        self._max_chars, self._every, self._seen = max_chars, _EVERY, 0

    def watched(self, documents: Iterable[str]) -> Iterator[str]:
        """The documents, whole."""
        for document in documents:
            for passage in split_text(document, _PASSAGE_CHARS):
                self._seen += 1
                if self._seen % self._every:
                    continue
                self.passages.append(passage)
                while sum(map(len, self.passages)) > self._max_chars:
                    self.passages, self._every = self.passages[1::2], 2 * self._every
            yield document


def vocabulary_of(
    source: str | os.PathLike[str],
    config: VocabularyConfig,
    *,
    key: str = "vocabulary.size",
    option: str = "",
    held_out: HeldOut | None = None,
) -> Vocabulary | None:
    """The ids of a source that are kept; None without a size. ``key`` and ``option`` name size and text in messages."""
    config.check_values(key)
    if config.size is None:
        return None
    option, source = option or "vocabulary.text", os.fspath(source)
    if config.text:
        check_inputs(config.text, option)
    tokenizer, model = load_tokenizer(source), load_config(source)
    pieces = Pieces(tokenizer, f"source {source}")
    if (largest := max(pieces.ids)) >= model.vocab_size:
        raise UserError(
            f"source {source}: its tokenizer has ids up to {largest:,}, its embedding only {model.vocab_size:,} rows: "
            "remove the tokens that were added, or resize the embedding first"
        )
    required = used_elsewhere(tokenizer, model, load_generation(source))
    size = trimmed_size(pieces, parse_count(config.size, key), required, key)
    counts = token_counts(config.text, tokenizer, option, held_out) if config.text else None
    return choose_ids(pieces, size, required, model.vocab_size, counts)


def token_counts(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, option: str, held_out: HeldOut | None = None
) -> dict[int, int]:
    """How often each token occurs in the texts, without the passages that are held out."""
    encoder = DocumentEncoder(tokenizer)
    counts = np.zeros(max(len(tokenizer), max(tokenizer.get_vocab().values()) + 1), np.int64)
    for name in expand_inputs(list(texts), option):
        if is_token_files(name):
            raise UserError(f"{option}: {name} is a directory of token files: give the text itself")
        with status(f"counting the tokens of {name}"):
            documents, num_chars = open_input(name, option=option).documents(), 0
            for piece in encoder.encode(documents if held_out is None else held_out.watched(documents)):
                counts += np.bincount(piece.ids.astype(np.int64), minlength=len(counts))
                num_chars += len(piece.ids) * 4  # about: a token has four characters
                if num_chars > _MOST_CHARS:
                    break
    for piece in encoder.encode(held_out.passages if held_out is not None else ()):
        counts -= np.bincount(piece.ids.astype(np.int64), minlength=len(counts))
    return {token: int(count) for token, count in enumerate(counts) if count > 0}
