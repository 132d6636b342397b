"""Opens the ``[data]`` table of a recipe: token files are memory-mapped, text is tokenized once and cached."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from dwindle.core.errors import UserError
from dwindle.core.sizes import parse_count
from dwindle.data.config import DataConfig
from dwindle.data.mixture import Mixture, PackedDataset
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
    """int64 [windows, seq_len + 1], in text order; None without validation text."""


def open_training_data(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, *, seed: int, cache_dir: Path
) -> TrainingData:
    """Open, tokenize if needed, verify checksums, and check that validation text is not trained on.

    ``seed`` and ``cache_dir`` are used if the config does not set them. With several ranks, call this on one rank
    first: it fills the cache, and the others only map it.
    """
    config.check()
    encoder = DocumentEncoder(tokenizer)
    cache = Path(config.cache_dir).expanduser() if config.cache_dir is not None else cache_dir
    seed = seed if config.seed is None else config.seed
    datasets, weights, held_out = [], [], list[TokenPart]()
    for name, source in config.named_sources().items():
        option = config.option_of(name)
        limit = None if source.max_tokens is None else parse_count(source.max_tokens)
        stream = open_stream(
            source.paths,
            encoder,
            cache_dir=cache,
            text_field=config.text_field,
            max_tokens=limit,
            option=option,
        )
        stream.verify()
        if config.holdout:
            stream, held = hold_out(stream, config.holdout, config.seq_len + 1)
            held_out += held.parts
        datasets.append(PackedDataset(name, stream, config.seq_len, seed, option))
        weights.append(source.weight)
    valid_windows = None
    if held_out:
        valid_windows = spread_windows(
            TokenStream(held_out), config.seq_len, parse_count(config.valid_tokens), "data.holdout"
        )
    elif config.valid:
        valid = open_stream(config.valid, encoder, cache_dir=cache, text_field=config.text_field, option="data.valid")
        valid.verify()
        for dataset in datasets:
            refuse_shared_text(dataset.stream, valid, config.option_of(dataset.name))
        limit = parse_count(config.valid_tokens)
        valid_windows = spread_windows(valid, config.seq_len, limit, "data.valid")
    return TrainingData(mixture=Mixture(datasets, weights), valid_windows=valid_windows)


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
            files = open_token_files(name)
            files.check_tokenizer(encoder.fingerprint, option)
            files.check_ids(encoder.num_embeddings, option)
            parts.append(files)
            continue
        source = open_input(name, text_field=text_field, option=option)
        if cache_dir is None:
            parts.append(MemoryTokens.encode(name, encoder, source.documents(), max_tokens))
        else:
            parts.append(cached_token_files(source, encoder, cache_dir, text_field, max_tokens))
    return TokenStream(parts)


def cached_token_files(
    source: TextInput, encoder: DocumentEncoder, cache_dir: Path, text_field: str, max_tokens: int | None
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


def refuse_shared_text(train: TokenStream, valid: TokenStream, option: str = "data.train") -> None:
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
