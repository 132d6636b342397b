"""Tokenizes contexts and continuations exactly like lm-evaluation-harness, in batches.

Scorers disagree on the boundary between context and continuation: the harness tokenizes both together and splits after
as many tokens as the context alone has, so that a continuation starts as it would in running text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from dwindle.core.errors import UserError

Tokens = list[int]
Pair = tuple[Tokens, Tokens]
"""Context and continuation."""

DEFAULT_MAX_LENGTH = 2048
_NO_LIMIT = 10**29  # transformers' "unset" is 1e30
_IDS_ONLY = {"return_attention_mask": False, "return_token_type_ids": False}
"""Masks would be two more lists as long as the tokens, for every text."""


def max_length_of(config: Any, tokenizer: Any) -> int:
    """The maximum input length of a model: from its configuration, else its tokenizer, else 2048."""
    for name in ("n_positions", "max_position_embeddings", "n_ctx"):
        if (value := getattr(config, name, None)) is not None:
            return int(value)
    value = getattr(tokenizer, "model_max_length", None)
    return int(value) if value is not None and value < _NO_LIMIT else DEFAULT_MAX_LENGTH


class Encoder:
    """A tokenizer with the harness's rules; every distinct text is tokenized once."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        bos = tokenizer.bos_token_id
        self.prefix_token: int | None = tokenizer.eos_token_id if bos is None else bos
        """Precedes the first token of a text: begin-of-text or, if there is none, end-of-text."""
        self._prefix_text: str | None = None
        if self.prefix_token is not None:
            self._prefix_text = str(tokenizer.decode(self.prefix_token))

    def texts(self, texts: Iterable[str], *, special: bool = True) -> dict[str, Tokens]:
        """Tokens of every distinct text, with special tokens unless the text starts with one."""
        unique = list(dict.fromkeys(texts))
        bare = [text for text in unique if not special or self._has_prefix(text)]
        plain = [text for text in unique if special and not self._has_prefix(text)]
        return self._batch(bare, False) | self._batch(plain, True)

    def pairs(self, requests: Sequence[tuple[str, str]]) -> list[Pair]:
        """(context tokens, continuation tokens) of every (context, continuation)."""
        moved = [_move_spaces(context, continuation) for context, continuation in requests]
        whole = self.texts(text for context, rest in moved if context for text in (context, context + rest))
        alone = self.texts((rest for context, rest in moved if not context), special=False)
        return [
            (whole[context], whole[context + rest][len(whole[context]) :])
            if context
            else self._without_context(alone[rest])
            for context, rest in moved
        ]

    def _without_context(self, continuation: Tokens) -> Pair:
        if continuation and continuation[0] == self.prefix_token:
            return continuation[:1], continuation[1:]
        return [self.required_prefix], continuation

    @property
    def required_prefix(self) -> int:
        if self.prefix_token is None:
            raise UserError("tokenizer: has neither a begin-of-text nor an end-of-text token: set one")
        return self.prefix_token

    def _has_prefix(self, text: str) -> bool:
        return self._prefix_text is not None and text.startswith(self._prefix_text)

    def _batch(self, texts: list[str], special: bool) -> dict[str, Tokens]:
        if not texts:
            return {}
        # like the harness, omit the argument to get the tokenizer's default
        options = _IDS_ONLY if special else _IDS_ONLY | {"add_special_tokens": False}
        encoded = self.tokenizer(texts, padding=False, truncation=False, verbose=False, **options)["input_ids"]
        return dict(zip(texts, encoded, strict=True))


def _move_spaces(context: str, continuation: str) -> tuple[str, str]:
    """Move trailing white space of the context to the continuation: tokens carry it at their start."""
    kept = context.rstrip()
    return kept, context[len(kept) :] + continuation


def rolling_windows(tokens: Tokens, prefix: int, max_length: int) -> list[Pair]:
    """Windows (context, continuation) that together score every token of a text once, with at least one context token.

    The last window has as much context as fits, and scores only the remaining tokens.
    """
    if not tokens:
        return []
    first = min(max_length, len(tokens))
    windows = [([prefix], tokens[:first])]
    done = first
    while done < len(tokens):
        end = min(done + max_length, len(tokens))
        windows.append((tokens[end - max_length - 1 : done], tokens[done:end]))
        done = end
    return windows
