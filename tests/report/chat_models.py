"""A stand-in for a model that answers, of which everything is counted."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import cycle, islice
from typing import Any

from dwindle.core.errors import UserError
from dwindle.run.chat import Facts, Piece


class Parrot:
    """Says the last message word by word; ``pause_s`` between words, ``words`` of them at most."""

    def __init__(self, name: str = "parrot", *, words: int = 5, pause_s: float = 0.0) -> None:
        self.facts = Facts(name, 134_515_008, 270_000_000, "transformers", True, "weights and cache")
        self.words, self.pause_s = words, pause_s
        self.num_started = self.num_ended = self.num_words = self.num_at_once = self.most_at_once = 0

    def stream(self, messages: Any, config: Any) -> Iterator[Piece]:
        if "forbidden" in messages[-1]["content"]:
            raise UserError("chat: the prompt has 9 tokens, the model's context 8: shorten or remove it")
        self.num_started += 1
        self.num_at_once += 1
        self.most_at_once = max(self.most_at_once, self.num_at_once)
        try:
            said = cycle(messages[-1]["content"].split() or ["…"])
            for number, word in enumerate(islice(said, self.words), 1):
                time.sleep(self.pause_s)
                self.num_words += 1
                yield Piece(f"{word} ", number, 0.05 * number, 541_000_000)
            yield Piece("", self.words, 0.05 * self.words, 541_000_000, is_last=True, is_finished=True)
        finally:
            self.num_at_once -= 1
            self.num_ended += 1
