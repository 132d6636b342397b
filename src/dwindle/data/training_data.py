"""Opens the ``[data]`` table of a recipe: token files are memory-mapped, text is tokenized once and cached."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from dwindle.core.errors import UserError
from dwindle.core.sizes import parse_count
from dwindle.data.chat import ChatEncoder
from dwindle.data.config import DataConfig, TaskConfig
from dwindle.data.mixture import Mixture, PackedDataset, Windows
from dwindle.data.packing import ChatStream, PackedChat, TextRows
from dwindle.data.readers import INDEX_NAME, TextInput, expand_inputs, open_input
from dwindle.data.token_files import (
    FORMAT,
    TokenFiles,
    is_token_files,
    open_token_files,
    write_inputs,
)
from dwindle.data.token_stream import MemoryTokens, TokenPart, TokenStream, hold_out, shared_token_count
from dwindle.data.tokenizing import DocumentEncoder
from dwindle.data.windows import spread_windows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MAX_SHARED = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingData:
    """Training and validation data of one run."""

    mixture: Mixture
    """The training samples."""
    valid_windows: Tensor | None
    """int64 [windows, seq_len + 1] in text order, or rows of conversations; None without validation data."""
    end_of_turn: int | None = None
    """The token that ends an answer, if it has one."""
    warning: str = ""
    """What is not used as it is, if anything."""


def open_training_data(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int,
    cache_dir: Path,
    task: TaskConfig | None = None,
    packed: bool = True,
) -> TrainingData:
    """Open, tokenize if needed, verify checksums, and check that validation text is not trained on.

    ``seed`` and ``cache_dir`` are used if the config does not set them. With several ranks, call this on one rank
    first: it fills the cache, and the others only map it. ``packed`` puts several conversations into one row.
    """
    config.check(task)
    cache = Path(config.cache_dir).expanduser() if config.cache_dir is not None else cache_dir
    opener = _Opener(config, DocumentEncoder(tokenizer), seed if config.seed is None else config.seed, cache)
    if task is not None and task.kind == "chat":
        return opener.chat(task, ChatEncoder(tokenizer), packed)
    return opener.text()


@dataclass(frozen=True, slots=True)
class _Opener:
    config: DataConfig
    encoder: DocumentEncoder
    seed: int
    cache: Path

    def text(self) -> TrainingData:
        config = self.config
        held_out = list[TokenPart]()
        sources = self._sources(PackedDataset, held_out)
        valid_windows = None
        if held_out:
            valid_windows = spread_windows(
                TokenStream(held_out), config.seq_len, parse_count(config.valid_tokens), "data.holdout"
            )
        elif config.valid:
            valid = self._stream(config.valid, "data.valid")
            for dataset, _ in sources:
                refuse_shared_text(dataset.stream, valid, config.option_of(dataset.name))
            valid_windows = spread_windows(valid, config.seq_len, parse_count(config.valid_tokens), "data.valid")
        return TrainingData(mixture=_mixture(sources), valid_windows=valid_windows)

    def chat(self, task: TaskConfig, encoder: ChatEncoder, packed: bool) -> TrainingData:
        """Conversations, and text in the proportion that gives it its share of the tokens that are learned."""
        config = self.config
        stream = self._conversations(task.chat, encoder, "task.chat")
        train, held = hold_out_conversations(stream.conversation_of_N, config.holdout)
        chat = self._packed("chat", stream, packed, train)
        valid = self._packed("held out", stream, packed, held) if len(held) else None
        judged_by = "data.valid" if config.valid else "data.holdout"
        if config.valid:
            other = self._conversations(config.valid, encoder, "data.valid")
            refuse_shared_text(stream, other, "task.chat")
            valid = self._packed("valid", other, packed, None, "data.valid")
        datasets: list[tuple[Windows, float]] = [(chat, 1.0)]
        if task.text_share:
            text = self._sources(TextRows, None)
            rows = text_rows(task, chat.learned_per_row / config.seq_len, [weight for _, weight in text])
            datasets += [(source, count) for (source, _), count in zip(text, rows, strict=True)]
        windows = None if valid is None else valid.spread(parse_count(config.valid_tokens))
        return TrainingData(
            mixture=_mixture(datasets),
            valid_windows=windows,
            end_of_turn=encoder.end_of_turn(stream.last_of_answers()),
            warning="; ".join(filter(None, [_cuts(chat, "task.chat"), _cuts(valid, judged_by)])),
        )

    def _sources(self, kind: type[PackedDataset], held_out: list[TokenPart] | None) -> list[tuple[Windows, float]]:
        """The texts and their weights; held-out parts are added to ``held_out``."""
        config, found = self.config, list[tuple[Windows, float]]()
        for name, source in config.named_sources().items():
            option = config.option_of(name)
            limit = None if source.max_tokens is None else parse_count(source.max_tokens)
            stream = self._stream(source.paths, option, limit)
            if config.holdout and held_out is not None:
                stream, held = hold_out(stream, config.holdout, config.seq_len + 1)
                held_out += held.parts
            found.append((kind(name, stream, config.seq_len, self.seed, option), source.weight))
        return found

    def _stream(self, paths: Sequence[str], option: str, max_tokens: int | None = None) -> TokenStream:
        stream = open_stream(
            paths,
            self.encoder,
            cache_dir=self.cache,
            text_field=self.config.text_field,
            max_tokens=max_tokens,
            option=option,
        )
        stream.verify()
        return stream

    def _conversations(self, paths: Sequence[str], encoder: ChatEncoder, option: str) -> ChatStream:
        stream = open_chat(paths, encoder, cache_dir=self.cache, option=option)
        stream.verify()
        return stream

    def _packed(
        self, name: str, stream: ChatStream, packed: bool, documents: Any, option: str = "task.chat"
    ) -> PackedChat:
        length, filler = self.config.seq_len, self.encoder.end_of_text
        return PackedChat(
            name, stream, length, self.seed, filler=filler, packed=packed, documents=documents, option=option
        )


def _mixture(weighted: Sequence[tuple[Windows, float]]) -> Mixture:
    return Mixture([source for source, _ in weighted], [weight for _, weight in weighted])


def text_rows(task: TaskConfig, learned: float, weights: Sequence[float]) -> list[float]:
    """Rows of each text per row of conversations; ``learned`` is the share of answers in the latter."""
    rows = task.text_share / (1 - task.text_share) * learned
    return [float(f"{rows * weight / sum(weights):.3g}") for weight in weights]


def hold_out_conversations(
    conversation_of_N: npt.NDArray[np.int64], share: float
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(To train on, held out): the examples of evenly spread conversations, at least one if a share is held out."""
    count = int(conversation_of_N[-1]) + 1
    numbers = np.arange(count)
    held = np.floor((numbers + 1) * share) > np.floor(numbers * share)
    if share and not held.any():
        held[-1:] = True
    if held.all():
        raise UserError(f"data.holdout: too few conversations ({count}) to hold any out: give more, or set it to 0")
    is_held = held[conversation_of_N]
    return np.flatnonzero(~is_held), np.flatnonzero(is_held)


def _cuts(chat: PackedChat | None, option: str) -> str:
    """A warning about what rows have no room for; empty if they hold everything."""
    if chat is None:
        return ""
    counts = {"lose turns from their end": chat.num_shortened, "are left out": chat.num_left_out}
    cut = ", ".join(f"{count:,} {what}" for what, count in counts.items() if count)
    of = f"of {len(chat.sizes):,} conversations"
    return f"{option}: {of} {cut}: they are longer than data.seq_len = {chat.seq_len}" if cut else ""


def open_stream(
    paths: Sequence[str],
    encoder: DocumentEncoder,
    *,
    cache_dir: Path | None = None,
    text_field: str = "text",
    max_tokens: int | None = None,
    option: str = "data",
) -> TokenStream:
    """All paths as one token stream; without ``cache_dir`` text is tokenized in memory. ``max_tokens`` is per path."""
    parts: list[TokenPart] = []
    for name in expand_inputs(list(paths), option):
        if is_token_files(name):
            parts.append(open_token_files(name).of_encoder(encoder, option))
            continue
        source = open_input(name, text_field=text_field, option=option)
        if cache_dir is None:
            parts.append(MemoryTokens.encode(name, encoder, source.documents(), max_tokens))
        else:
            parts.append(cached_token_files(source, encoder, cache_dir, text_field, max_tokens))
    return TokenStream(parts)


def open_chat(paths: Sequence[str], encoder: ChatEncoder, *, cache_dir: Path, option: str = "task.chat") -> ChatStream:
    """All paths as one stream of conversations, rendered with the model's chat template on first use."""
    stream = open_stream(paths, encoder, cache_dir=cache_dir, text_field="", option=option)
    return ChatStream([part for part in stream.parts if isinstance(part, TokenFiles)])


def cached_token_files(
    source: TextInput,
    encoder: DocumentEncoder,
    cache_dir: Path,
    text_field: str,
    max_tokens: int | None,
) -> TokenFiles:
    """The token files of one text, written on first use.

    The directory's name contains a hash of tokenizer and content, so a changed text or another tokenizer gets its own
    directory, and a resumed run maps the same bytes as before.
    """
    what = [FORMAT, encoder.identity, source.cache_key, text_field, max_tokens]
    key = hashlib.sha256(repr(what).encode()).hexdigest()[:16]
    stem = re.sub(r"[^A-Za-z0-9]+", "-", Path(source.name).name).strip("-")[:40]
    directory = cache_dir / f"{stem}-{key}"
    if (directory / INDEX_NAME).is_file():
        files = open_token_files(directory)
        files.check_ids(encoder.num_embeddings, "data.cache_dir")
        return files
    return write_inputs(
        [source], encoder, directory, max_tokens=max_tokens, keep_existing=True, out_option="data.cache_dir"
    )


def refuse_shared_text(train: TokenStream, valid: TokenStream, option: str) -> None:
    """Raise UserError if validation text is trained on: the same input, or shared documents of over 1 % of its tokens.

    The margin allows boilerplate that any two collections share, such as a licence page.
    """
    train_parts = {part.fingerprint: part.label for part in train.parts}
    for part in valid.parts:
        if part.fingerprint in train_parts:
            raise UserError(
                f"data.valid: {part.label} has the same content as {train_parts[part.fingerprint]} in {option}: "
                "validate on text that is not trained on"
            )
    shared = shared_token_count(train, valid) / len(valid)
    if shared > _MAX_SHARED:
        raise UserError(
            f"data.valid: {shared:.0%} of its tokens are documents that {option} also contains: "
            "validate on text that is not trained on"
        )
