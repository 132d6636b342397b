"""A smaller vocabulary: which token ids stay, and the tokenizer, configuration and settings with new ids.

A BPE token is made by a merge of two others, so tokens are removed from the last merge on: a token goes only once no
kept token is made from it (``choose_ids``). Text that had a removed token then becomes the tokens that it was made of.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import Any

from tokenizers import Tokenizer, pre_tokenizers
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase

from dwindle.core.errors import UserError
from dwindle.core.limits import MAX_ITEMS

MULTIPLE = 64
"""Sizes are multiples of this: matrix products with other sizes are slower on GPUs."""
_SPACE = "▁"
_BYTES = frozenset(f"<0x{byte:02X}>" for byte in range(256))
_ID_LISTS = ("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "force_words_ids", "sequence_bias")
"""Settings that are lists of ids, or of lists of them; ``sequence_bias`` has a number for each list."""
_CHATS = (["user"], ["user", "assistant"], ["system", "user"], ["system", "user", "assistant", "user"])

State = dict[str, Any]
"""A ``tokenizer.json``."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The ids of a source that are kept, ascending; the new id of a token is its place here."""

    kept: tuple[int, ...]
    num_rows: int
    """Rows of the source's embedding."""

    def to_json(self) -> dict[str, Any]:
        """``{"rows": 49152, "kept": [[0, 319], [321, 400]]}``: runs of ids, first and last."""
        runs: list[list[int]] = []
        for token in self.kept:
            if runs and token == runs[-1][1] + 1:
                runs[-1][1] = token
            else:
                runs.append([token, token])
        return {"rows": self.num_rows, "kept": runs}

    @classmethod
    def from_json(cls, data: Any, where: str) -> Vocabulary:
        """Inverse of ``to_json``; raises UserError for anything else."""
        try:
            rows, runs = data["rows"], [(int(first), int(last)) for first, last in data["kept"]]
            is_sorted = all(a[1] < b[0] for a, b in pairwise(runs)) and all(first <= last for first, last in runs)
            if (
                type(rows) is not int
                or rows > MAX_ITEMS
                or not runs
                or not is_sorted
                or runs[0][0] < 0
                or runs[-1][1] >= rows
            ):
                raise ValueError("ids out of order")
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{where}: the kept ids of the vocabulary are damaged: restore it") from error
        return cls(tuple(token for first, last in runs for token in range(first, last + 1)), rows)

    def new_id(self) -> dict[int, int]:
        """New ids by old ones."""
        return {old: new for new, old in enumerate(self.kept)}


class Pieces:
    """The tokens of a tokenizer: what must stay, in which order others go, and what each is made of."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, where: str) -> None:
        self.state = state_of(tokenizer, where)
        model = self.state["model"]
        self.added = {int(entry["id"]): str(entry["content"]) for entry in self.state["added_tokens"]}
        listed = enumerate(token for token, _ in model["vocab"]) if model["type"] == "Unigram" else ()
        self.id_of: dict[str, int] = {token: number for number, token in listed} or dict(model["vocab"])
        self.ids = {*self.id_of.values(), *self.added}
        self.parts: dict[int, tuple[int, int]] = {}
        self.worth: dict[int, float] = {}
        """Tokens of lower worth are removed first: minus the rank of the merge, or the score."""
        if model["type"] == "Unigram":
            self.worth = {number: float(score) for number, (_, score) in enumerate(model["vocab"])}
        else:
            self._read_merges(model)

    def _read_merges(self, model: State) -> None:
        pairs, prefix = merges_of(model), model.get("continuing_subword_prefix") or ""
        made: dict[str, list[tuple[str, str]]] = {}
        for rank, (left, right) in enumerate(pairs):
            result = left + right.removeprefix(prefix)
            made.setdefault(result, []).append((left, right))
            self.worth.setdefault(self.id_of[result], -float(rank))
        ranks = {pair: rank for rank, pair in enumerate(pairs)}
        for token, ways in made.items():
            last = ways[0] if len(ways) == 1 else _last_merge(token, ranks)
            if last is not None:
                self.parts[self.id_of[token]] = (self.id_of[last[0]], self.id_of[last[1]])

    def required(self, others: Iterable[int] = ()) -> set[int]:
        """Ids that must stay: bytes, ASCII (without bytes all characters), special and ``others``, and their parts."""
        unknown = self.state["model"].get("unk_token")
        stay = {*self.added, *others, *(self.id_of[token] for token in self._alphabet())}
        stay |= {self.id_of[token] for token in (unknown, _SPACE) if token in self.id_of}
        if isinstance(unknown_id := self.state["model"].get("unk_id"), int):
            stay.add(unknown_id)
        open_ = [token for token in stay if token in self.ids]
        closed = set(open_)
        while open_:
            new = [part for part in self.parts.get(open_.pop(), ()) if part not in closed]
            closed.update(new)
            open_ += new
        return closed

    def _alphabet(self) -> set[str]:
        if self.state["model"].get("byte_fallback") and self.id_of.keys() >= _BYTES:
            return {*_BYTES, *(token for token in self.id_of if len(token) == 1 and token.isascii())}
        if '"ByteLevel"' in json.dumps([self.state["pre_tokenizer"], self.state["normalizer"]]):
            return {letter for letter in pre_tokenizers.ByteLevel.alphabet() if letter in self.id_of}
        if self.state["model"]["type"] == "Unigram":
            return {token for token in self.id_of if len(token) == 1}
        return {token for token, number in self.id_of.items() if number not in self.worth}


def state_of(tokenizer: PreTrainedTokenizerBase, where: str) -> State:
    """The content of its ``tokenizer.json``; raises UserError for kinds that cannot be cut."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise UserError(f"{where}: its tokenizer has no tokenizer.json, so it cannot be trimmed: save it as a fast one")
    state: State = json.loads(backend.to_str())
    if (kind := state["model"]["type"]) not in ("BPE", "Unigram"):
        raise UserError(f"{where}: its tokenizer is {kind}: only BPE and Unigram vocabularies can be trimmed")
    return state


def merges_of(model: State) -> list[tuple[str, str]]:
    """The merges of a BPE in order; older files write each as one string."""
    pairs = (merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model["merges"])
    return [(left, right) for left, right in pairs]


def _last_merge(token: str, ranks: Mapping[tuple[str, str], int]) -> tuple[str, str] | None:
    """The last merge when the token's own text is encoded; None if its text becomes several tokens."""
    symbols, last = list(token), None
    while len(symbols) > 1:
        found = [(ranks[pair], place) for place, pair in enumerate(pairwise(symbols)) if pair in ranks]
        if not found:
            return None
        place = min(found)[1]
        last = (symbols[place], symbols[place + 1])
        symbols[place : place + 2] = ["".join(last)]
    return last


def used_elsewhere(
    tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, generation: GenerationConfig | None
) -> set[int]:
    """Ids that the configuration and the generation settings name, and those of an empty chat."""
    named = [config.to_dict(), {} if generation is None else generation.to_diff_dict()]
    found = {token for table in named for value in _ids_in(table).values() for token in _listed(value)}
    for roles in _CHATS if tokenizer.chat_template else ():
        messages = [{"role": role, "content": "a"} for role in roles]
        try:
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=roles[-1] == "user")
        except Exception:  # a template raises whatever it likes for an order of roles that it does not know
            continue
        found.update(tokenizer(str(text), add_special_tokens=False)["input_ids"])
    return found


def _ids_in(table: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that are token ids or lists of them; ``sequence_bias``, which may be a list of pairs, as a dict."""
    found = {key: value for key, value in table.items() if key.endswith("_token_id") or key in _ID_LISTS}
    if isinstance(pairs := found.get("sequence_bias"), list):
        found["sequence_bias"] = {tuple(ids): bias for ids, bias in pairs}
    return found


def _listed(value: Any) -> list[int]:
    """The ids of a setting."""
    if isinstance(value, list | tuple | dict):
        return [token for one in value for token in _listed(one)]
    return [value] if type(value) is int else []


def choose_ids(
    pieces: Pieces, size: int, required: Iterable[int], num_rows: int, counts: Mapping[int, int] | None = None
) -> Vocabulary:
    """The ``size`` ids to keep: by merge rank or score, or by their ``counts`` in a text.

    Removed is always the token of the lowest count (then of the latest merge, the lowest score) that no kept token is
    made from. Its occurrences become its parts, so their counts grow.
    """
    needed = pieces.required(required)
    kept, count = set(pieces.ids), dict(counts or {})
    users: dict[int, int] = {}
    for parts in pieces.parts.values():
        for part in parts:
            users[part] = users.get(part, 0) + 1

    def entry(token: int) -> tuple[int, float, int]:
        return count.get(token, 0), pieces.worth.get(token, -float("inf")), -token

    heap = [entry(token) for token in kept if token not in needed and not users.get(token)]
    heapify(heap)
    while len(kept) > size:
        *_, negative = heappop(heap)
        kept.discard(-negative)
        for part in pieces.parts.get(-negative, ()):
            count[part] = count.get(part, 0) + count.get(-negative, 0)
            users[part] -= 1
            if not users[part] and part not in needed:
                heappush(heap, entry(part))
    return Vocabulary(tuple(sorted(kept)), num_rows)


def trimmed_size(pieces: Pieces, wanted: int, required: Iterable[int], option: str) -> int:
    """The size in use, the largest multiple of 64 within what is wanted; refuses what the tokenizer cannot have."""
    size, needed = wanted // MULTIPLE * MULTIPLE, len(pieces.required(required))
    if size >= len(pieces.ids):
        raise UserError(f"{option} {wanted:,}: the source has {len(pieces.ids):,} tokens: choose fewer")
    least = -(-needed // MULTIPLE) * MULTIPLE
    if size < least:
        advice = f"choose at least {least:,}"
        if least >= len(pieces.ids):
            advice = f"the source's {len(pieces.ids):,} are too few to remove any: leave them"
        raise UserError(
            f"{option} {wanted:,}: {needed:,} tokens must stay (bytes or characters, special and chat tokens): {advice}"
        )
    return size


def trimmed_tokenizer(tokenizer: PreTrainedTokenizerBase, vocabulary: Vocabulary, where: str) -> Any:
    """The same tokenizer with the kept tokens alone, renumbered."""
    new, state = vocabulary.new_id(), state_of(tokenizer, where)
    model = state["model"]
    if model["type"] == "Unigram":
        model["vocab"] = [model["vocab"][old] for old in vocabulary.kept if old < len(model["vocab"])]
        if model.get("unk_id") is not None:
            model["unk_id"] = new[model["unk_id"]]
    else:
        prefix = model.get("continuing_subword_prefix") or ""
        kept = {token: new[old] for token, old in model["vocab"].items() if old in new}
        model["merges"] = [
            [left, right]
            for left, right in merges_of(model)
            if left in kept and right in kept and left + right.removeprefix(prefix) in kept
        ]
        model["vocab"] = kept
    state["added_tokens"] = [entry | {"id": new[entry["id"]]} for entry in state["added_tokens"]]
    state["post_processor"] = _renumbered(state["post_processor"], new)
    if state.get("padding"):
        state["padding"]["pad_id"] = new.get(state["padding"]["pad_id"], 0)
    smaller: Any = deepcopy(tokenizer)
    smaller._tokenizer = Tokenizer.from_str(json.dumps(state))
    smaller.num_embeddings = len(vocabulary.kept)
    _check_names(tokenizer, smaller, vocabulary, where)
    return smaller


def _check_names(tokenizer: Any, smaller: Any, vocabulary: Vocabulary, where: str) -> None:
    """Every kept id must still name its token: added tokens are numbered by the library, not by the file."""
    names = smaller.convert_ids_to_tokens(list(range(len(vocabulary.kept))))
    if names != tokenizer.convert_ids_to_tokens(list(vocabulary.kept)):
        raise UserError(
            f"{where}: its added tokens get other ids when tokens before them are removed, so it cannot be trimmed: "
            "save its tokenizer with the added tokens in the order of their ids"
        )


def _renumbered(processor: Any, new: Mapping[int, int]) -> Any:
    """A post-processor with new ids: those of a template, and ``[token, id]`` of BERT and RoBERTa."""
    if isinstance(processor, list):
        return [_renumbered(item, new) for item in processor]
    if not isinstance(processor, dict):
        return processor
    found = {key: _renumbered(value, new) for key, value in processor.items()}
    if processor.get("type") == "TemplateProcessing":
        found["special_tokens"] = {
            name: entry | {"ids": [new[old] for old in entry["ids"]]}
            for name, entry in processor["special_tokens"].items()
        }
    for key in ("sep", "cls"):
        if isinstance(pair := processor.get(key), Sequence) and len(pair) == 2 and type(pair[1]) is int:
            found[key] = [pair[0], new[pair[1]]]
    return found


def trimmed_config(config: PreTrainedConfig, vocabulary: Vocabulary) -> Any:
    """The configuration of the model with the kept rows alone."""
    smaller: Any = deepcopy(config)
    smaller.vocab_size = len(vocabulary.kept)
    for key, value in _ids_in(config.to_dict()).items():
        setattr(smaller, key, _new_value(value, vocabulary.new_id()))
    return smaller


def trimmed_generation(generation: GenerationConfig, vocabulary: Vocabulary) -> GenerationConfig:
    """The generation settings with new ids."""
    smaller = deepcopy(generation)
    for key, value in _ids_in(generation.to_diff_dict()).items():
        setattr(smaller, key, _new_value(value, vocabulary.new_id()))
    return smaller


def _new_value(value: Any, new: Mapping[int, int], *, inner: bool = False) -> Any:
    """A setting with new ids. Removed ids leave lists; a sequence inside a list goes as a whole."""
    if isinstance(value, dict):
        pairs = ((_new_value(ids, new, inner=True), bias) for ids, bias in value.items())
        return [[ids, bias] for ids, bias in pairs if ids is not None]  # a JSON file has no sequences as keys
    if isinstance(value, list | tuple):
        found = [_new_value(one, new, inner=True) for one in value]
        return None if inner and None in found else [one for one in found if one is not None]
    return new.get(value) if type(value) is int else value
