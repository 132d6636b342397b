"""The ``[data]`` table of a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from dwindle.core.config import Config
from dwindle.core.errors import UserError
from dwindle.core.sizes import parse_count
from dwindle.data.readers import HUB_PREFIX, PYDOC_IDS, expand_inputs, open_input
from dwindle.data.token_files import is_token_files


class SourceConfig(Config):
    """One named source of a mixture: ``[data.sources.books] paths = ["books.jsonl.xz"] weight = 0.7``."""

    paths: list[str] = Field(default_factory=list)
    """Files, wildcards, ``hf:`` ids, ``pydoc`` or directories of token files, read in order."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Share of the training tokens, relative to the weights of the other sources."""
    max_tokens: int | str | None = None
    """Maximum tokens read from each path (``"2B"``); required for endless streamed datasets."""


class TaskConfig(Config):
    """What is learned: text, or the answers of conversations."""

    kind: Literal["text", "chat"] = "text"
    """text learns every token of [data]; chat learns the answers of ``chat``, with text of [data] between them."""
    chat: list[str] = Field(default_factory=list)
    """Conversations: .jsonl, .parquet, ``hf:`` ids or token files; rows of messages, instruction or prompt."""
    text_share: Annotated[float, Field(ge=0, lt=1)] = 0.3
    """Share of plain text, from [data], in the tokens that chat learns; without text there is none."""

    def check_values(self) -> None:
        """Refuse what cannot work whatever the files hold."""
        if self.kind == "chat" and not self.chat:
            raise UserError('task.chat: missing: name the conversations, for example chat = ["answers.jsonl"]')
        if self.kind == "text" and self.chat:
            raise UserError('task.chat: needs task.kind = "chat": set it, or remove the conversations')

    def check(self) -> None:
        """The same, and files that do not exist."""
        self.check_values()
        if self.chat:
            check_inputs(self.chat, "task.chat")

    def make_paths_absolute(self) -> None:
        """See ``DataConfig``."""
        self.chat = list(map(absolute_path, self.chat))


class DataConfig(Config):
    """What the model is trained and validated on."""

    train: list[str] = Field(default_factory=list)
    """Training text or token files, as one source; use ``sources`` instead for a weighted mixture."""
    sources: dict[str, SourceConfig] = Field(default_factory=dict)
    """Named sources with weights that are true token ratios."""
    valid: list[str] = Field(default_factory=list)
    """Validation text (of chat: conversations), refused if also trained on; empty: none, unless holdout is set."""
    holdout: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Share of each source (of chat: of the conversations) held out for validation, spread over it."""
    seq_len: Annotated[int, Field(ge=2)] = 1024
    """Tokens per training sequence."""
    text_field: Annotated[str, Field(min_length=1)] = "text"
    """Field of JSON lines, or column of Parquet, that holds the text."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] | None = None
    """Seed of the sample order; not set takes ``training.seed``."""
    skip: int | str = 0
    """Tokens at the start of the sample order that are not read, such as those of an earlier run with the same text,
    seed and ``seq_len``; rounded down to whole sequences."""
    cache_dir: str | None = None
    """Where tokenized text is cached; not set puts it into the run directory."""
    valid_tokens: int | str = "256k"
    """Maximum validation tokens, spread evenly over the validation text."""

    def named_sources(self) -> dict[str, SourceConfig]:
        """The sources, given in either way; none in a run on conversations only."""
        return self.sources or ({"train": SourceConfig(paths=self.train)} if self.train else {})

    def trained_on(self) -> list[str]:
        """The paths of all sources."""
        return [path for source in self.named_sources().values() for path in source.paths]

    def validated_on(self, task: TaskConfig) -> list[str]:
        """The paths of the validation text or conversations."""
        return self.valid or ((task.chat or self.trained_on()) if self.holdout else [])

    def check_values(self, task: TaskConfig | None = None) -> None:
        """Refuse what cannot work whatever the files hold; looks at none, so a recipe can be read anywhere."""
        task = task or TaskConfig()
        task.check_values()
        if self.train and self.sources:
            raise UserError("data.train: cannot be combined with data.sources: make it one more source")
        if not self.train and not self.sources and task.kind == "text":
            raise UserError('data.train: missing: name the training text, for example train = ["books.jsonl"]')
        if parse_count(self.valid_tokens, "data.valid_tokens") < self.seq_len:
            raise UserError(f"data.valid_tokens: must be at least data.seq_len ({self.seq_len})")
        if task.kind == "chat" and "chat" in self.sources:
            raise UserError("data.sources.chat: is the name of the conversations: give the text another name")
        for name, source in self.named_sources().items():
            if not source.paths:
                raise UserError(f"{self.option_of(name)}: is empty: list at least one file")
            if source.max_tokens is not None:
                parse_count(source.max_tokens, f"data.sources.{name}.max_tokens")
        if self.valid and self.holdout:
            raise UserError("data.holdout: cannot be combined with data.valid: remove one of them")
        parse_count(self.skip, "data.skip")
        trained = task.chat or self.trained_on()
        for path in self.valid:
            if path in trained:
                raise UserError(f"data.valid: {path} is also trained on: hold other text out")

    def check(self, task: TaskConfig | None = None) -> None:
        """The same, and files that do not exist, before anything expensive starts."""
        self.check_values(task)
        if task is not None:
            task.check()
        for name, source in self.named_sources().items():
            check_inputs(source.paths, self.option_of(name))
        if self.valid:
            check_inputs(self.valid, "data.valid")

    def option_of(self, source_name: str) -> str:
        """How messages call a source's paths."""
        return f"data.sources.{source_name}.paths" if self.sources else "data.train"

    def make_paths_absolute(self) -> None:
        """Make paths absolute, so that a saved recipe means the same files wherever it is resumed from."""
        self.train, self.valid = (list(map(absolute_path, paths)) for paths in (self.train, self.valid))
        for source in self.sources.values():
            source.paths = list(map(absolute_path, source.paths))
        if self.cache_dir is not None:
            self.cache_dir = absolute_path(self.cache_dir)


def check_inputs(paths: list[str], option: str) -> None:
    """Refuse missing files and unknown kinds without reading any."""
    for name in expand_inputs(paths, option):
        if not is_token_files(name):
            open_input(name, option=option)


def absolute_path(path: str) -> str:
    """A path that means the same file from any folder; ids stay as they are."""
    if path in PYDOC_IDS or path.startswith(HUB_PREFIX):
        return path
    return str(Path.cwd() / Path(path).expanduser())
