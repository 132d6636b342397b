"""Estimated number of tokens of a text, from its beginning; used by plans, which read nothing whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dwindle.core.sizes import parse_count
from dwindle.data.chat import ChatEncoder
from dwindle.data.config import DataConfig, TaskConfig
from dwindle.data.conversations import open_conversations
from dwindle.data.readers import HUB_PREFIX, expand_inputs, open_input
from dwindle.data.token_files import is_token_files, open_token_files
from dwindle.data.tokenizing import DocumentEncoder
from dwindle.data.training_data import open_chat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_READ_FILES = 8
_READ_CHARS = 4_000_000
_ENCODED_CHARS = 200_000
_READ_CONVERSATIONS = 1000
_LEARNED_UNKNOWN = 0.5
"""Share of answers that is assumed of streamed conversations."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Tokens of each source, and its share of the training samples; streamed ones, whose size is unknown, have none."""

    tokens: dict[str, float]
    shares: dict[str, float]
    holdout: float = 0.0
    seq_len: int = 1

    def epochs(self, samples: int) -> dict[str, float]:
        """Passes over each source after so many samples, like ``Mixture.epochs``."""
        seen = {name: samples * self.seq_len * self.shares[name] for name in self.tokens}
        return {name: seen[name] / max(self.tokens[name] * (1 - self.holdout), 1) for name in self.tokens}


def streamed_inputs(config: DataConfig, task: TaskConfig) -> list[str]:
    """Training and validation inputs that are streamed from the hub."""
    return [name for name in [*task.chat, *config.trained_on(), *config.valid] if name.startswith(HUB_PREFIX)]


def estimate(config: DataConfig, task: TaskConfig, tokenizer: Callable[[], PreTrainedTokenizerBase]) -> Estimate:
    """How much data there is, from the beginning of each source; ``tokenizer`` is called if one is not streamed."""
    tokens, weights = _texts(config, tokenizer), {n: s.weight for n, s in config.named_sources().items()}
    if task.kind == "chat":
        learned = _LEARNED_UNKNOWN
        if not any(path.startswith(HUB_PREFIX) for path in task.chat):
            tokens["chat"], learned = _conversations(task.chat, ChatEncoder(tokenizer()))
        rows, total = task.text_share / (1 - task.text_share) * learned, sum(weights.values())
        weights = {"chat": 1.0} | {name: rows * weight / total for name, weight in weights.items() if rows}
        tokens = {name: count for name, count in tokens.items() if name in weights}
    total = sum(weights.values())
    shares = {name: weight / total for name, weight in weights.items()}
    return Estimate(tokens, shares, config.holdout, config.seq_len)


def _conversations(paths: list[str], encoder: ChatEncoder) -> tuple[float, float]:
    """(Tokens, share of those that are learned), from the first conversations of each file."""
    tokens, learned = 0.0, 0.0
    for name in expand_inputs(paths, "task.chat"):
        if is_token_files(name):
            files = open_chat([name], encoder, cache_dir=Path())
            tokens, learned = tokens + len(files), learned + float(np.diff(files.answers_K2).sum())
            continue
        source = open_conversations(name, option="task.chat", input_joint=encoder.input_joint)
        rows = list(islice(source.documents(), _READ_CONVERSATIONS + 1))
        share = min(max(source.position, 1) / max(source.total, 1), 1.0) if len(rows) > _READ_CONVERSATIONS else 1.0
        for piece in encoder.encode(rows):
            assert piece.answers is not None
            tokens += len(piece.ids) / share
            learned += int(np.diff(piece.answers).sum()) / share
    return tokens, learned / tokens


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
        files = open_token_files(name)
        files.check_tokenizer(encoder.fingerprint, option)
        files.check_ids(encoder.num_embeddings, option)
        return files.num_tokens
    texts, share = open_input(name, text_field=text_field, option=option).beginning(_READ_CHARS)
    sample, left = list[str](), _ENCODED_CHARS
    for text in texts:
        if left <= 0:
            break
        sample.append(text[:left])
        left -= len(text)
    num_tokens = sum(len(piece.ids) for piece in encoder.encode(sample))
    return num_tokens / sum(map(len, sample)) * sum(map(len, texts)) / share
