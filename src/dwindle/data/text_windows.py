"""Windows directly from text, for pruning without training and for perplexity."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from dwindle.core.sizes import at_least
from dwindle.data.readers import HUB_PREFIX, expand_inputs, open_input
from dwindle.data.token_files import is_token_files
from dwindle.data.token_stream import MemoryTokens, TokenPart, TokenStream
from dwindle.data.tokenizing import DocumentEncoder, split_text
from dwindle.data.training_data import open_stream
from dwindle.data.windows import random_windows, spread_windows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PASSAGE_CHARS = 20_000
_CHARS_PER_TOKEN = 8
_STREAMED_PASSAGES_FACTOR = 4
_OPTION = "--data"
"""How messages call the text of a calibration."""


def validation_windows(
    files: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    seq_len: int,
    max_tokens: int,
    *,
    cache_dir: Path | None = None,
    text_field: str = "text",
    option: str = "data.valid",
) -> Tensor:
    """int64 [n, seq_len + 1]: always the same windows, in text order, never shuffled.

    Above ``max_tokens`` the windows are evenly spaced over the text, so that the last file counts as much as the first;
    of a Hugging Face dataset only the beginning is read. With ``cache_dir`` the text is tokenized once.
    """
    encoder = DocumentEncoder(tokenizer)
    parts: list[TokenPart] = []
    for name in expand_inputs(list(files), option):
        limit = max_tokens + 1 if name.startswith(HUB_PREFIX) else None
        stream = open_stream(
            [name], encoder, cache_dir=cache_dir, text_field=text_field, max_tokens=limit, option=option
        )
        parts += stream.parts
    return spread_windows(TokenStream(parts), seq_len, max_tokens, option)


def calibration_windows(
    paths: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    num_sequences: int,
    seq_len: int,
    seed: int,
    num_held_out: int = 0,
    text_field: str = "text",
) -> tuple[Tensor, Tensor]:
    """int64 [num_sequences, seq_len]: random windows of the packed text, the same for the same seed; and others of it
    (at most ``num_held_out``, maybe none).

    Only a random sample of passages is tokenized, so a large text costs little more than reading it.
    """
    at_least(1, **{"calibration num_sequences": num_sequences, "calibration seq_len": seq_len})
    encoder = DocumentEncoder(tokenizer)
    names = expand_inputs(list(paths), _OPTION)
    token_dirs = [name for name in names if is_token_files(name)]
    texts = [name for name in names if name not in token_dirs]
    parts: list[TokenPart] = list(open_stream(token_dirs, encoder, option=_OPTION).parts) if token_dirs else []
    if texts:
        num_chars = num_sequences * (seq_len + 1) * _CHARS_PER_TOKEN
        passages = _sample_passages(texts, num_chars, seed, text_field)
        parts.append(MemoryTokens.encode(", ".join(texts), encoder, passages))
    return random_windows(TokenStream(parts), num_sequences, seq_len, seed, num_held_out, _OPTION)


def _sample_passages(names: Sequence[str], num_chars: int, seed: int, text_field: str) -> list[str]:
    """A random sample of passages in text order, with at least ``num_chars`` characters if the text is long enough.

    Each passage draws a number from the seed and its position; the lowest are kept. One pass, bounded memory.
    """
    kept: list[tuple[int, int, str]] = []
    kept_chars = 0
    for position, text in enumerate(_passages(names, num_chars, text_field)):
        draw = hashlib.blake2b(f"{seed}/{position}".encode(), digest_size=8).digest()
        heapq.heappush(kept, (-int.from_bytes(draw, "little"), position, text))
        kept_chars += len(text)
        while kept_chars - len(kept[0][2]) >= num_chars:
            kept_chars -= len(heapq.heappop(kept)[2])
    return [text for _, _, text in sorted(kept, key=lambda item: item[1])]


def _passages(names: Sequence[str], num_chars: int, text_field: str) -> Iterator[str]:
    """Documents, long ones split; of a Hugging Face dataset only a few times the required length."""
    for name in names:
        read_chars = 0
        for document in open_input(name, text_field=text_field, option=_OPTION).documents():
            yield from split_text(document, _PASSAGE_CHARS)
            read_chars += len(document)
            if name.startswith(HUB_PREFIX) and read_chars > _STREAMED_PASSAGES_FACTOR * num_chars:
                break
