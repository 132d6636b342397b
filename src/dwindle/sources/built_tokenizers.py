"""Tokenizers built from a vocabulary, for sources without ``tokenizer.json`` (GGUF, llama2.c).

The GGUF conversion of transformers is not used, because it changes between releases (5.17 swaps the bos and eos tokens
of llama vocabularies) and parses the file a second time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import PreTokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from dwindle.core.errors import UserError, first_line

_SPACE = "▁"
UNKNOWN, CONTROL, USER_DEFINED, BYTE = 2, 3, 4, 6
"""Types of tokens in a GGUF file."""

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class Split:
    """How ``tokenizer.ggml.pre`` splits text into words before merging."""

    pattern: str | None = None
    """None: the pattern of GPT-2."""
    add_bos: bool = False
    """llama.cpp's default if the file has no ``add_bos_token``."""
    whole_words: bool = False
    """A word in the vocabulary becomes one token, even if the merges do not produce it."""


_LLAMA3 = Split(_LLAMA3_SPLIT, add_bos=True, whole_words=True)
_SPLITS: dict[str, Split] = {
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral"), _LLAMA3),
    **dict.fromkeys(("smaug-bpe", "dbrx"), Split(_LLAMA3_SPLIT)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez"), Split(_QWEN2_SPLIT)),
    "tekken": Split(_TEKKEN_SPLIT, add_bos=True, whole_words=True),
}

DIGITS_FIRST = frozenset({"smollm", "starcoder", "refact", "codeshell", "command-r", "exaone", "minerva-7b"})
"""Vocabularies whose tokenizer splits off every digit before GPT-2's pattern, as llama.cpp does. The GGUF conversion of
transformers does not, which only matters for two or more whitespace characters before a digit (``"\\n\\n1."``)."""


def gguf_tokenizer(metadata: dict[str, Any], architecture: str, path: Path) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a GGUF header; None if it has no vocabulary."""
    try:
        return _gguf_tokenizer(metadata, architecture, path)
    except UserError:
        raise
    except Exception as error:  # tokens, types, scores and merges of any type come from the file
        reason = first_line(error)
        raise UserError(f"source {path}: its vocabulary cannot be used ({reason}): fetch it again") from error


def _gguf_tokenizer(metadata: dict[str, Any], architecture: str, path: Path) -> PreTrainedTokenizerBase | None:
    tokens = metadata.get("tokenizer.ggml.tokens")
    kind = metadata.get("tokenizer.ggml.model", "no_vocab")
    if kind in ("no_vocab", "none") or not tokens:
        return None
    types = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(types) != len(tokens):
        raise UserError(f"source {path}: {len(tokens)} tokens but {len(types)} token types: fetch the file again")
    if kind == "gpt2":
        backend, add_bos = _byte_level(metadata, tokens, types, path)
    elif kind == "llama":
        backend, add_bos = _gguf_sentencepiece(metadata, tokens, types, path), True
    else:
        raise UserError(
            f"source {path}: tokenizer type {kind!r} is not supported (gpt2 and llama are): "
            "give the Hugging Face directory of the model instead"
        )
    _add_tokens(backend, tokens, types)
    special: dict[str, Any] = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(token_id, int) and 0 <= token_id < len(tokens):
            special[f"{name}_token"] = tokens[token_id]
    context = metadata.get(f"{architecture}.context_length")
    return finish(
        backend,
        special,
        add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", add_bos)),
        add_eos=bool(metadata.get("tokenizer.ggml.add_eos_token", False)),
        chat_template=metadata.get("tokenizer.chat_template"),
        max_length=context if isinstance(context, int) else None,
    )


def finish(
    backend: Tokenizer,
    special: dict[str, Any],
    *,
    add_bos: bool,
    add_eos: bool = False,
    chat_template: str | None = None,
    max_length: int | None = None,
) -> PreTrainedTokenizerBase:
    """The transformers tokenizer around a ``tokenizers`` backend; it is saved as a ``tokenizer.json``."""
    options: dict[str, Any] = dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"))
    options |= special
    if chat_template:
        options["chat_template"] = chat_template
    if max_length:
        options["model_max_length"] = max_length
    _set_template(backend, special, add_bos, add_eos)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, clean_up_tokenization_spaces=False, padding_side="right", **options
    )


def _set_template(backend: Tokenizer, special: dict[str, Any], add_bos: bool, add_eos: bool) -> None:
    from tokenizers.processors import TemplateProcessing

    first = special.get("bos_token") if add_bos else None
    last = special.get("eos_token") if add_eos else None

    def around(piece: str, kind: int) -> list[str]:
        return [f"{token}:{kind}" for token in (first, piece, last) if token]

    used = sorted({token for token in (first, last) if token})
    backend.post_processor = TemplateProcessing(
        single=around("$A", 0),
        pair=around("$A", 0) + around("$B", 1),
        special_tokens=[(token, backend.token_to_id(token)) for token in used],
    )


def _byte_level(
    metadata: dict[str, Any], tokens: Sequence[str], types: Sequence[int], path: Path
) -> tuple[Tokenizer, bool]:
    merges = metadata.get("tokenizer.ggml.merges")
    if not merges:
        raise UserError(f"source {path}: the vocabulary has no merges: fetch the file again")
    pre = str(metadata.get("tokenizer.ggml.pre", "default"))
    split = split_named(pre)
    spelling = bytes_to_unicode()
    alphabet = set(spelling.values())
    vocab: dict[str, int] = {}
    for index, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind not in (CONTROL, USER_DEFINED) and not set(token) <= alphabet:
            token = "".join(spelling[byte] for byte in token.encode("utf-8"))
        vocab.setdefault(token, index)
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    try:
        backend = Tokenizer(BPE(vocab=vocab, merges=pairs, ignore_merges=split.whole_words))
    except Exception as error:
        raise UserError(f"source {path}: its merges do not fit its vocabulary ({error}): fetch it again") from error
    backend.pre_tokenizer = pre_tokenizer_named(pre)
    backend.decoder = decoders.ByteLevel()
    return backend, split.add_bos


def split_named(pre: str) -> Split:
    """The rule of llama.cpp for this name; GPT-2's if it has none."""
    return _SPLITS.get(pre, Split())


def pre_tokenizer_named(pre: str) -> PreTokenizer:
    """The same rule as a pre-tokenizer."""
    split = split_named(pre)
    if split.pattern is not None:
        words = pre_tokenizers.Split(Regex(split.pattern), behavior="isolated")
        return pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre in DIGITS_FIRST:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    return gpt2


def _gguf_sentencepiece(metadata: dict[str, Any], tokens: Sequence[str], types: Sequence[int], path: Path) -> Tokenizer:
    scores = metadata.get("tokenizer.ggml.scores")
    if not scores or len(scores) != len(tokens):
        raise UserError(f"source {path}: the vocabulary has no score for every token: fetch the file again")
    unmergeable = {token for token, kind in zip(tokens, types, strict=True) if kind in (UNKNOWN, CONTROL, BYTE)}
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    return sentencepiece(
        tokens,
        scores,
        unmergeable,
        unknown=tokens[unknown] if isinstance(unknown, int) and 0 <= unknown < len(tokens) else None,
        prefix_space=bool(metadata.get("tokenizer.ggml.add_space_prefix", True)),
    )


def sentencepiece(
    pieces: Sequence[str],
    scores: Sequence[float],
    unmergeable: Collection[str],
    *,
    unknown: str | None,
    prefix_space: bool = True,
) -> Tokenizer:
    """SentencePiece BPE with byte fallback: of all adjacent pairs that form a piece, the best score is merged first."""
    vocab: dict[str, int] = {}
    for index, piece in enumerate(pieces):
        vocab.setdefault(piece, index)
    merges = _merges_from_scores(vocab, scores, unmergeable)
    backend = Tokenizer(BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = [normalizers.Prepend(_SPACE)] if prefix_space else []
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if prefix_space else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend


def _merges_from_scores(
    vocab: dict[str, int], scores: Sequence[float], unmergeable: Collection[str]
) -> list[tuple[str, str]]:
    """Every split of a piece into two pieces, best score first (ties: longer left part first)."""
    found: list[tuple[float, int, int, str, str]] = []
    for piece, index in vocab.items():
        if piece in unmergeable:
            continue
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocab and right in vocab and left not in unmergeable and right not in unmergeable:
                found.append((-scores[index], -cut, index, left, right))
    found.sort(key=lambda item: item[:3])
    return [(left, right) for *_, left, right in found]


def _add_tokens(backend: Tokenizer, tokens: Iterable[str], types: Iterable[int]) -> None:
    """Control and user-defined tokens are matched whole in the text, as llama.cpp does."""
    control, plain = [], []
    for token, kind in zip(tokens, types, strict=True):
        if kind == CONTROL:
            control.append(AddedToken(token, normalized=False, special=True))
        elif kind == USER_DEFINED:
            plain.append(AddedToken(token, normalized=False, special=False))
    backend.add_special_tokens(control)
    backend.add_tokens(plain)
