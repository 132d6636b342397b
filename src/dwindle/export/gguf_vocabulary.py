"""A tokenizer as GGUF metadata, such that llama.cpp gives the same token ids (the export verifies this)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers.pre_tokenizers import PreTokenizer

from dwindle.core.errors import UserError
from dwindle.sources.built_tokenizers import BYTE, CONTROL, UNKNOWN, USER_DEFINED, pre_tokenizer_named, split_named
from dwindle.sources.loading import needed_tokenizer
from dwindle.sources.vocabulary import merges_of

_NORMAL, _UNUSED = 1, 5
_SPACE = "▁"

PROBES = (
    "The quick brown fox jumps over the lazy dog.",
    "It's 2024, and we'll pay $1,234.56 for 37 apples; they've cost 100% more!",
    "def add(a, b):\n    return a + b\n\n\n1. first\n2.  second\t\ttab",
    "  leading, trailing and   inner   spaces  ",
    "Zürich naïve façade Ελλάδα Привет 你好，世界 こんにちは 🙂👍🏽",
    "CamelCase snake_case HTTPServer2 x=y*z/3 <tag attr='v'>&amp;</tag>",
    "\n\nNew paragraph.\r\nCarriage return.\n \n x",
    "'S 'LL don'T 12345678 1.5e-10 ... !!! ??? --- a",
)
"""Texts that distinguish different tokenizers with high probability."""


def probes_of(tokenizer: Any) -> tuple[str, ...]:
    """Those texts, and one with every token that was added to the vocabulary."""
    return (*PROBES, "".join(f"{token}a" for token in tokenizer.get_added_vocab()))


def chat_template_of(tokenizer: Any) -> str | None:
    """The template of ordinary chats; a tokenizer may have others, for tools."""
    template = tokenizer.chat_template
    return template.get("default") if isinstance(template, dict) else template


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The values of ``tokenizer.ggml.*``."""

    model: str
    pre: str
    tokens: list[str]
    types: list[int]
    merges: list[str] | None
    scores: list[float] | None
    special_ids: dict[str, int]
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool
    chat_template: str | None
    warning: str | None = None
    """Shown to the user with the result of the export."""

    def write(self, writer: Any) -> None:
        """Add all keys to a ``gguf.GGUFWriter``."""
        writer.add_tokenizer_model(self.model)
        writer.add_tokenizer_pre(self.pre)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.types)
        if self.merges is not None:
            writer.add_token_merges(self.merges)
        if self.scores is not None:
            writer.add_token_scores(self.scores)
            writer.add_add_space_prefix(self.add_space_prefix)
        for name, number in self.special_ids.items():
            writer.add_uint32(f"tokenizer.ggml.{name}_token_id", number)
        writer.add_add_bos_token(self.add_bos)
        writer.add_add_eos_token(self.add_eos)
        if self.chat_template:
            writer.add_chat_template(self.chat_template)


def vocabulary_of(tokenizer: Any, num_rows: int, where: str) -> Vocabulary:
    """The metadata of a BPE tokenizer for an embedding of ``num_rows`` rows; raises for other kinds."""
    backend = getattr(needed_tokenizer(tokenizer, where), "backend_tokenizer", None)
    if backend is None:
        raise UserError(f"{where}: its tokenizer has no tokenizer.json: save it again as a fast tokenizer")
    state = json.loads(backend.to_str())
    if state["model"]["type"] != "BPE":
        raise UserError(f"{where}: its tokenizer is {state['model']['type']}: only BPE can be written as GGUF")
    tokens, types = _tokens(state, num_rows, where)
    merges = merges_of(state["model"])
    pieces = bool(state["model"].get("byte_fallback"))
    first, last = added_around(tokenizer)
    pre, warning = ("default", None) if pieces else _pre_name(backend, state, where)
    return Vocabulary(
        model="llama" if pieces else "gpt2",
        pre=pre,
        tokens=tokens,
        types=_piece_types(tokens, types, state["model"].get("unk_token")) if pieces else types,
        merges=None if pieces else [f"{left} {right}" for left, right in merges],
        scores=_scores(tokens, merges) if pieces else None,
        special_ids=_special_ids(tokenizer),
        add_bos=first,
        add_eos=last,
        add_space_prefix=_has_prefix_space(backend),
        chat_template=chat_template_of(tokenizer),
        warning=warning,
    )


def _tokens(state: dict[str, Any], num_rows: int, where: str) -> tuple[list[str], list[int]]:
    by_id: dict[int, str] = {number: token for token, number in state["model"]["vocab"].items()}
    added = {entry["id"]: entry for entry in state["added_tokens"]}
    by_id |= {number: entry["content"] for number, entry in added.items()}
    if by_id and max(by_id) >= num_rows:
        raise UserError(f"{where}: its tokenizer has token {max(by_id)} but the embedding has only {num_rows} rows")
    tokens = [by_id.get(number, f"[PAD{number}]") for number in range(num_rows)]
    types = []
    for number in range(num_rows):
        if number in added:
            types.append(CONTROL if added[number]["special"] else USER_DEFINED)
        else:
            types.append(_NORMAL if number in by_id else _UNUSED)
    return tokens, types


def _piece_types(tokens: list[str], types: list[int], unknown: str | None) -> list[int]:
    bytes_ = {f"<0x{byte:02X}>" for byte in range(256)}
    marked = [BYTE if token in bytes_ else kind for token, kind in zip(tokens, types, strict=True)]
    return [UNKNOWN if token == unknown else kind for token, kind in zip(tokens, marked, strict=True)]


def _scores(tokens: list[str], merges: Sequence[tuple[str, str]]) -> list[float]:
    """Scores from the merge order: llama.cpp first merges the pair whose result has the highest score."""
    order: dict[str, int] = {}
    for merge in merges:
        order.setdefault("".join(merge), len(order))
    lowest = -float(len(order) + 1)
    return [-float(order[token]) if token in order else lowest for token in tokens]


def _special_ids(tokenizer: Any) -> dict[str, int]:
    names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    found = {key: getattr(tokenizer, f"{name}_token_id") for key, name in names.items()}
    return {key: int(number) for key, number in found.items() if number is not None}


def added_around(tokenizer: Any) -> tuple[bool, bool]:
    """Whether the tokenizer adds its begin and its end token to a text."""
    plain, full = tokenizer("a", add_special_tokens=False).input_ids, tokenizer("a").input_ids
    first = len(full) > len(plain) and full[0] == tokenizer.bos_token_id
    last = len(full) > len(plain) and full[-1] == tokenizer.eos_token_id and len(full) > len(plain) + first
    return bool(first), bool(last)


def _has_prefix_space(backend: Any) -> bool:
    encoded = backend.encode("a", add_special_tokens=False).tokens
    return bool(encoded) and encoded[0].startswith(_SPACE)


def _pre_name(backend: Any, state: dict[str, Any], where: str) -> tuple[str, str | None]:
    """llama.cpp's name of the pre-tokenizer, and a warning if it was only matched on the test texts."""
    own = backend.pre_tokenizer
    whole_words = bool(state["model"].get("ignore_merges"))
    for name, candidate, whole in _known_pre_tokenizers():
        if own is not None and _normalized(own) == _normalized(candidate) and whole == whole_words:
            return name, None
    for name, candidate, _ in _known_pre_tokenizers():
        if own is not None and all(_words(own, text) == _words(candidate, text) for text in PROBES):
            return name, f"unknown pre-tokenizer; written as {name!r}, which splits our test texts in the same way"
    raise UserError(
        f"{where}: none of llama.cpp's pre-tokenizers splits text like its own: export to hf or onnx instead"
    )


def _known_pre_tokenizers() -> list[tuple[str, PreTokenizer, bool]]:
    names = ["smollm", "gpt-2", "llama-bpe", "qwen2", "smaug-bpe", "tekken"]
    return [(name, pre_tokenizer_named(name), split_named(name).whole_words) for name in names]


def _normalized(pre: PreTokenizer) -> Any:
    """The pre-tokenizer's JSON without the options that do not change where it splits."""

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: clean(v) for k, v in value.items() if k not in ("trim_offsets", "invert")}
        return [clean(item) for item in value] if isinstance(value, list) else value

    return clean(json.loads(pre.__getstate__()))


def _words(pre: PreTokenizer, text: str) -> list[str]:
    return [word for word, _ in pre.pre_tokenize_str(text)]
