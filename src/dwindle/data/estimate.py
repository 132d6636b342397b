"""Estimated number of tokens of a text, from its beginning; for plans, which never read a whole text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dwindle.core.sizes import parse_count
from dwindle.data.chat import ChatEncoder
from dwindle.data.config import DataConfig, TaskConfig
from dwindle.data.conversations import conversations_in
from dwindle.data.packing import ChatStream, PackedChat
from dwindle.data.readers import HUB_PREFIX, expand_inputs, open_input
from dwindle.data.token_files import is_token_files, open_token_files
from dwindle.data.token_stream import MemoryTokens
from dwindle.data.tokenizing import DocumentEncoder, EncodedPiece
from dwindle.data.training_data import hold_out_conversations, open_chat, text_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_READ_FILES = 8
_READ_CHARS = 4_000_000
_ENCODED_CHARS = 200_000
_READ_CONVERSATIONS = 1000
_LEARNED_UNKNOWN, _PER_ROW_UNKNOWN = 0.5, 4.0
"""Share of answers, and conversations in a packed row, that are assumed of streamed conversations."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """How much there is of each source that is not streamed, and the share of each in the training samples."""

    tokens: dict[str, float]
    rows: dict[str, float]
    """Training samples; what is held out is none."""
    shares: dict[str, float]
    learned: float = 1.0
    """Share of learned tokens in the training samples: answers, and plain text between them."""
    examples_per_row: float = 1.0
    """Examples in a row of packed conversations."""

    def epochs(self, samples: int) -> dict[str, float]:
        """Passes over each source after so many samples, like ``Mixture.epochs``."""
        return {name: samples * self.shares[name] / max(rows, 1) for name, rows in self.rows.items()}


def streamed_inputs(config: DataConfig, task: TaskConfig) -> list[str]:
    """Training and validation inputs that are streamed from the hub."""
    return [name for name in [*task.chat, *config.trained_on(), *config.valid] if name.startswith(HUB_PREFIX)]


def estimate(
    config: DataConfig, task: TaskConfig, tokenizer: Callable[[], PreTrainedTokenizerBase], *, packed: bool = True
) -> Estimate:
    """How much data there is, from the beginning of each source; ``tokenizer`` is called if one is not streamed.

    ``packed`` puts several conversations into one row, as in ``open_training_data``.
    """
    tokens, weights = _texts(config, tokenizer), {n: s.weight for n, s in config.named_sources().items()}
    trained_share = 1.0 if task.kind == "chat" else 1 - config.holdout  # of chat, conversations alone are held out
    rows = {name: count * trained_share / config.seq_len for name, count in tokens.items()}
    learned, per_row = 1.0, 1.0
    if task.kind == "chat":
        learned, per_row = _LEARNED_UNKNOWN, _PER_ROW_UNKNOWN if packed else 1.0
        if not any(path.startswith(HUB_PREFIX) for path in task.chat):
            tokens["chat"], rows["chat"], chat = _conversations(config, task, ChatEncoder(tokenizer()), packed)
            learned = chat.learned_per_row / config.seq_len
            per_row = np.count_nonzero(chat.sizes) / chat.num_windows
        beside = zip(weights, text_rows(task, learned, list(weights.values())), strict=True)
        weights = {"chat": 1.0} | {name: count for name, count in beside if count}
        tokens, rows = ({name: found[name] for name in weights if name in found} for found in (tokens, rows))
    shares = {name: weight / sum(weights.values()) for name, weight in weights.items()}
    learned += (1 - learned) * (1 - shares.get("chat", 0.0))  # of text, every token
    return Estimate(tokens, rows, shares, learned, per_row)


def _conversations(
    config: DataConfig, task: TaskConfig, encoder: ChatEncoder, packed: bool
) -> tuple[float, float, PackedChat]:
    """(Tokens, rows to train on, some of them), from the first conversations of each file."""
    pieces, tokens, examples = list[EncodedPiece](), 0.0, 0.0
    for name in expand_inputs(task.chat, "task.chat"):
        found, share = _first_files(name, encoder) if is_token_files(name) else _first_rows(name, encoder)
        tokens += sum(len(piece.ids) for piece in found) / share
        examples += len(found) / share
        pieces += found
    stream = ChatStream([MemoryTokens.of_examples("task.chat", pieces)])
    trained, _ = hold_out_conversations(stream.conversation_of_N, config.holdout)
    chat = PackedChat("chat", stream, config.seq_len, 0, filler=0, packed=packed, documents=trained)
    more = tokens / len(stream) if packed else examples / len(pieces)
    return tokens, chat.num_windows * more, chat


def _first_rows(name: str, encoder: ChatEncoder) -> tuple[list[EncodedPiece], float]:
    """(The first examples of a file, their share of it)."""
    source = open_input(name, option="task.chat")
    rows = list(islice(conversations_in(source, encoder.input_joint), _READ_CONVERSATIONS + 1))
    share = source.share_read() if len(rows) > _READ_CONVERSATIONS else 1.0
    return list(encoder.encode_conversations(rows)), share


def _first_files(name: str, encoder: ChatEncoder) -> tuple[list[EncodedPiece], float]:
    """The same of token files."""
    files = open_chat([name], encoder, cache_dir=Path())
    starts, conversation_of_N = files.document_starts, files.conversation_of_N
    edges = np.append(starts, len(files))[: _READ_CONVERSATIONS + 1]
    pieces = []
    for number, (start, stop) in enumerate(pairwise(edges.tolist())):
        first, last = np.searchsorted(files.answers_K2[:, 0], [start, stop])
        answers = (files.answers_K2[first:last] - start).astype(np.uint64)
        is_first = number == 0 or bool(conversation_of_N[number] != conversation_of_N[number - 1])
        pieces.append(EncodedPiece(files.read(start, stop), True, answers, is_first))
    return pieces, len(pieces) / len(starts)


def _texts(config: DataConfig, tokenizer: Callable[[], PreTrainedTokenizerBase]) -> dict[str, float]:
    """Tokens of each text that is not streamed."""
    encoder: DocumentEncoder | None = None
    tokens: dict[str, float] = {}
    for name, source in config.named_sources().items():
        if any(path.startswith(HUB_PREFIX) for path in source.paths):
            continue
        encoder = encoder or DocumentEncoder(tokenizer())
        option = config.option_of(name)
        most = float("inf") if source.max_tokens is None else parse_count(source.max_tokens)
        paths = expand_inputs(source.paths, option)
        few = paths[:: -(-len(paths) // _READ_FILES)]  # a few of many shards, evenly spaced
        found = [min(_tokens(path, encoder, config.text_field, option), most) for path in few]
        tokens[name] = sum(found) * len(paths) / len(few)
    return tokens


def _tokens(name: str, encoder: DocumentEncoder, text_field: str, option: str) -> float:
    """Exact for token files; extrapolated from the beginning for text."""
    if is_token_files(name):
        return open_token_files(name).of_encoder(encoder, option).num_tokens
    texts, share = open_input(name, text_field=text_field, option=option).beginning(_READ_CHARS)
    sample, left = list[str](), _ENCODED_CHARS
    for text in texts:
        if left <= 0:
            break
        sample.append(text[:left])
        left -= len(text)
    num_tokens = sum(len(piece.ids) for piece in encoder.encode(sample))
    return num_tokens / sum(map(len, sample)) * sum(map(len, texts)) / share
