"""The ``[vocabulary]`` table of a recipe: how many tokens are kept, and on which text they are counted."""

from __future__ import annotations

from pydantic import Field

from dwindle.core.config import Config
from dwindle.core.errors import UserError
from dwindle.core.sizes import parse_count


class VocabularyConfig(Config):
    """Which tokens are kept; the others are removed before anything is pruned."""

    size: str | int | None = None
    """Tokens to keep, such as "32k", rounded down to a multiple of 64; bytes, special and chat tokens always stay. Not
    set: all."""
    text: list[str] = Field(default_factory=list)
    """Text whose most frequent tokens are kept. Not set: those of the first merges, or of the highest scores."""

    def check_values(self, key: str) -> None:
        """Refuse what no tokenizer could use; ``key`` names ``size`` in messages."""
        if self.text and self.size is None:
            raise UserError(f"{key}: missing: say how many tokens to keep, such as 32k, or remove the text")
        if self.size is not None and parse_count(self.size, key) < 1:
            raise UserError(f"{key}: {self.size} must be at least 1")

    def make_paths_absolute(self) -> None:
        """See ``DataConfig``."""
        from dwindle.data.config import absolute_path  # imports torch, which takes seconds

        self.text = list(map(absolute_path, self.text))
