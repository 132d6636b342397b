"""Estimated number of tokens of a text, from its beginning; used by plans, which read nothing whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from dwindle.core.sizes import parse_count
from dwindle.data.config import DataConfig
from dwindle.data.readers import HUB_PREFIX, expand_inputs, open_input
from dwindle.data.token_files import is_token_files, open_token_files
from dwindle.data.tokenizing import DocumentEncoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_READ_FILES = 8
_READ_CHARS = 4_000_000
_ENCODED_CHARS = 200_000


def streamed_inputs(config: DataConfig) -> list[str]:
    """Training and validation inputs that are streamed from the hub."""
    return [name for name in [*config.trained_on(), *config.valid] if name.startswith(HUB_PREFIX)]


def epochs_of(config: DataConfig, tokens: Mapping[str, float]) -> Callable[[int], dict[str, float]]:
    """A function from the number of samples to the epochs of each source, like ``Mixture.epochs`` but estimated."""
    sources = config.named_sources()
    total = sum(source.weight for source in sources.values())

    def epochs(samples: int) -> dict[str, float]:
        seen = {name: samples * config.seq_len * sources[name].weight / total for name in tokens}
        return {name: seen[name] / max(tokens[name] * (1 - config.holdout), 1) for name in tokens}

    return epochs


def estimated_tokens(config: DataConfig, tokenizer: Callable[[], PreTrainedTokenizerBase]) -> dict[str, float]:
    """Tokens of each source; streamed ones, whose size is unknown, are left out.

    ``tokenizer`` is called only if there are others.
    """
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
