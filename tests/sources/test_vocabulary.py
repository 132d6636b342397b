"""Trimmed vocabularies: what stays, the tokens that text becomes, and that every text is still written exactly."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, GenerationConfig, PreTrainedConfig, PreTrainedTokenizerFast

from dwindle.core.errors import UserError
from dwindle.data.pydoc_text import pydoc_documents
from dwindle.data.tokenizing import token_bytes
from dwindle.sources.built_tokenizers import sentencepiece
from dwindle.sources.vocabulary import (
    Pieces,
    Vocabulary,
    choose_ids,
    trimmed_generation,
    trimmed_size,
    trimmed_tokenizer,
    used_elsewhere,
)
from tiny import tiny_tokenizer

SPECIAL = ["<|end|>", "<|user|>"]
TEMPLATE = "{% for m in messages %}<|user|>{{ m.role + ' says ' + m.content }}<|end|>{% endfor %}"


def texts() -> list[str]:
    return [text[:3000] for text in pydoc_documents("valid")][:40]


def random_text(seed: int, length: int = 200) -> str:
    """Any Unicode but surrogates, which no file holds, mixed with spaces and letters."""
    rng = random.Random(seed)
    whole = [chr(rng.randrange(0x110000)) for _ in range(length)]
    return "".join(rng.choice([c if not 0xD800 <= ord(c) < 0xE000 else "x", "a", " ", "\n"]) for c in whole)


@pytest.fixture(scope="module")
def byte_bpe() -> Any:
    """A trained byte-level BPE of 900 tokens, with a template that adds a token, and special tokens at the end."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=898, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(texts(), trainer)
    backend.add_special_tokens(SPECIAL)
    backend.post_processor = processors.TemplateProcessing(
        single="$A <|end|>", special_tokens=[("<|end|>", backend.token_to_id("<|end|>"))]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>", chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def unigram() -> Any:
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=600, unk_token="<unk>", special_tokens=["<unk>", "</s>"])
    trainer.show_progress = False
    backend.train_from_iterator(texts()[:10], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")


@pytest.fixture(scope="module")
def pieces_bpe(byte_bpe: Any) -> Any:
    """SentencePiece BPE with byte fallback: the words of the other tokenizer, and every way to merge them."""
    words = [byte_bpe.convert_ids_to_tokens(n).replace("Ġ", "▁") for n in range(256, 800)]
    letters = "▁abcdefghijklmnopqrstuvwxyz.,()_=ABCDEFG"
    words = list(dict.fromkeys([*letters, *(word for word in words if {*word} <= {*letters})]))
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *bytes_, *words]
    scores = [0.0] * 259 + [-float(n) for n in range(len(words))]
    backend = sentencepiece(tokens, scores, set(tokens[:259]), unknown="<unk>")
    backend.add_special_tokens(["<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def trim(tokenizer: Any, size: int, counts: dict[int, int] | None = None, required: tuple[int, ...] = ()) -> Any:
    pieces = Pieces(tokenizer, "it")
    vocabulary = choose_ids(pieces, size, required, len(tokenizer), counts)
    assert len(vocabulary.kept) == size
    return trimmed_tokenizer(tokenizer, vocabulary, "it"), vocabulary, pieces


def test_by_rank_every_token_becomes_the_tokens_it_was_made_of(byte_bpe: Any) -> None:
    """Independently of merging: each id of the source is split by its merge until all parts are kept."""
    smaller, vocabulary, _ = trim(byte_bpe, 512)
    state = json.loads(byte_bpe.backend_tokenizer.to_str())["model"]
    made_of = {"".join(pair): pair for pair in reversed(state["merges"])}

    def split(token: str) -> list[str]:
        return [token] if token in kept else [part for half in made_of[token] for part in split(half)]

    kept = set(byte_bpe.convert_ids_to_tokens(list(vocabulary.kept)))
    first = [byte_bpe.convert_ids_to_tokens(n) for n in range(510)]
    assert kept == {*first, *SPECIAL}, "the first merges and the special tokens"
    for text in [*texts()[:8], random_text(1)]:
        before, after = (t(text, add_special_tokens=False).input_ids for t in (byte_bpe, smaller))
        assert smaller.convert_ids_to_tokens(after) == [
            part for token in byte_bpe.convert_ids_to_tokens(before) for part in split(token)
        ]


@pytest.mark.parametrize("by_text", [False, True])
def test_every_text_is_written_exactly(byte_bpe: Any, by_text: bool, tmp_path: Path) -> None:
    counts = None
    if by_text:
        counts = {}
        for token in byte_bpe(texts()[0]).input_ids:
            counts[token] = counts.get(token, 0) + 1
    smaller, vocabulary, _ = trim(byte_bpe, 448, counts)
    smaller.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    for text in [*texts(), *map(random_text, range(20))]:
        ids = smaller(text, add_special_tokens=False).input_ids
        assert smaller.decode(ids) == text and max(ids) < 448
        assert loaded(text).input_ids == smaller(text).input_ids
    assert smaller("a").input_ids[-1] == smaller.eos_token_id == vocabulary.kept.index(byte_bpe.eos_token_id)


def test_counted_tokens_stay_with_what_they_are_made_of(byte_bpe: Any) -> None:
    """A closed set; and on its own text fewer tokens are needed than after a cut by rank of the same size."""
    text = texts()[1]
    counts: dict[int, int] = {}
    for token in byte_bpe(text, add_special_tokens=False).input_ids:
        counts[token] = counts.get(token, 0) + 1
    chosen, vocabulary, pieces = trim(byte_bpe, 448, counts)
    kept = set(vocabulary.kept)
    for token in kept:
        assert {*pieces.parts.get(token, ())} <= kept
    by_rank, _, _ = trim(byte_bpe, 448)
    assert len(chosen(text).input_ids) < len(by_rank(text).input_ids)
    whole = [chosen.convert_tokens_to_ids(byte_bpe.convert_ids_to_tokens(token)) for token in kept]
    for token, new in zip(kept, whole, strict=True):  # each kept token is still the encoding of its own text
        own = byte_bpe.decode([token])
        if token in pieces.parts and byte_bpe(own, add_special_tokens=False).input_ids == [token]:
            assert chosen(own, add_special_tokens=False).input_ids == [new]


def test_occurrences_of_a_removed_token_count_for_its_parts(byte_bpe: Any) -> None:
    """The kept ids are those of a plain loop, in which a token that is gone was written as what it is made of."""
    pieces, count = Pieces(byte_bpe, "it"), dict.fromkeys(range(898), 0)
    rng = random.Random(0)
    count |= {token: rng.randrange(20) for token in range(256, 898)}
    needed, kept = pieces.required(), set(pieces.ids)
    _, vocabulary, _ = trim(byte_bpe, 512, {token: n for token, n in count.items() if n})
    while len(kept) > 512:
        used = {part for token in kept for part in pieces.parts.get(token, ())}
        least = min(kept - used - needed, key=lambda token: (count[token], pieces.worth[token], -token))
        kept.remove(least)
        for part in pieces.parts[least]:
            count[part] += count[least]
    assert set(vocabulary.kept) == kept


def test_unigrams_go_by_score(unigram: Any) -> None:
    smaller, vocabulary, _ = trim(unigram, 320)
    state = json.loads(unigram.backend_tokenizer.to_str())["model"]
    single = {n for n, (token, _) in enumerate(state["vocab"]) if len(token) == 1 or n < 2}
    rest = sorted((n for n in range(len(state["vocab"])) if n not in single), key=lambda n: -state["vocab"][n][1])
    assert set(vocabulary.kept) == single | set(rest[: 320 - len(single)])
    for text in texts()[:10]:
        expected = unigram.decode(unigram(text, add_special_tokens=False).input_ids)
        assert smaller.decode(smaller(text, add_special_tokens=False).input_ids) == expected


def test_sentencepiece_falls_back_to_bytes(pieces_bpe: Any) -> None:
    smaller, vocabulary, _ = trim(pieces_bpe, 320)
    for text in [*texts()[:10], *map(random_text, range(10))]:
        ids = smaller(text, add_special_tokens=False).input_ids
        assert smaller.decode(ids) == pieces_bpe.decode(pieces_bpe(text, add_special_tokens=False).input_ids) == text
    assert set(range(259)) <= set(vocabulary.kept)
    ascii_letters = "abcdefghijklmnopqrstuvwxyz.,()_=ABCDEFG"
    assert {*ascii_letters} <= {*smaller.get_vocab()}, "words of ASCII are not written as bytes"
    names = smaller.convert_ids_to_tokens(list(range(320)))
    made = {left + right for left in names for right in names}
    for token in names[259:]:
        assert len(token) == 1 or token in made, "closed"


def test_what_must_stay(byte_bpe: Any) -> None:
    pieces = Pieces(byte_bpe, "it")
    rare = byte_bpe.convert_tokens_to_ids(byte_bpe.convert_ids_to_tokens(890))
    needed = pieces.required([rare])
    assert {*range(256), 898, 899, rare} <= needed
    assert trimmed_size(pieces, 511, [rare], "--vocab") == 448
    for wanted, problem in ((900, "has 900 tokens: choose fewer"), (200, "must stay .* choose at least 320")):
        with pytest.raises(UserError, match=problem):
            trimmed_size(pieces, wanted // 64 * 64 if wanted < 900 else 960, [rare], "--vocab")
    with pytest.raises(UserError, match="the source's 257 are too few to remove any: leave them"):
        trimmed_size(Pieces(tiny_tokenizer(), "it"), 200, [], "--vocab")
    _, vocabulary, _ = trim(byte_bpe, 320, required=(rare,))
    assert rare in vocabulary.kept


def test_ids_in_nested_settings_are_kept_and_renumbered(byte_bpe: Any) -> None:
    """Each setting names the same tokens before and after; sequences whose tokens are gone are gone as a whole."""
    bias = [[[880, 881], -10], [[5], 2.5]]
    settings = GenerationConfig(
        bad_words_ids=[[890], [7, 891]],
        force_words_ids=[[[892, 8]], [[893]]],
        sequence_bias=bias,
        suppress_tokens=[894],
    )
    named = used_elsewhere(byte_bpe, PreTrainedConfig(), settings)
    assert {890, 7, 891, 892, 8, 893, 880, 881, 5, 894} <= named and -10 not in named
    _, vocabulary, _ = trim(byte_bpe, 448, required=tuple(named))
    kept, found = vocabulary.kept, trimmed_generation(settings, vocabulary)

    def old(ids: Any) -> Any:
        return [old(one) for one in ids] if isinstance(ids, list) else kept[ids]

    assert old(found.bad_words_ids) == settings.bad_words_ids and old(found.suppress_tokens) == [894]
    assert old(found.force_words_ids) == settings.force_words_ids
    assert [[old(ids), value] for ids, value in found.sequence_bias] == bias
    without = Vocabulary(tuple(n for n in kept if n != 891), 900)
    assert len(trimmed_generation(settings, without).bad_words_ids) == 1


def test_pieces_with_a_prefix_and_ids_around_a_text() -> None:
    """As in BERT: inner pieces begin with ##, and the file names the ids of three special tokens in other places."""
    backend = Tokenizer(models.BPE(unk_token="[UNK]", continuing_subword_prefix="##"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(vocab_size=500, continuing_subword_prefix="##", special_tokens=["[UNK]"])
    trainer.show_progress = False
    backend.train_from_iterator(texts()[:10], trainer)
    backend.add_special_tokens(["[CLS]", "[SEP]", "[PAD]"])
    cls, sep, pad = (backend.token_to_id(token) for token in ("[CLS]", "[SEP]", "[PAD]"))
    backend.post_processor = processors.BertProcessing(("[SEP]", sep), ("[CLS]", cls))
    backend.enable_padding(pad_id=pad, pad_token="[PAD]")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="[PAD]")
    smaller, vocabulary, pieces = trim(tokenizer, 384)
    state = json.loads(smaller.backend_tokenizer.to_str())  # transformers drops its padding with the first text
    assert vocabulary.kept[state["padding"]["pad_id"]] == pad

    def split(token: int) -> list[int]:
        return [token] if token in vocabulary.kept else [one for part in pieces.parts[token] for one in split(part)]

    for text in texts()[:10]:
        before, after = (one(text).input_ids for one in (tokenizer, smaller))
        assert [vocabulary.kept[new] for new in after] == [one for token in before for one in split(token)]
    assert len(smaller("the model of a class").input_ids) < 12


def test_an_unknown_unigram_keeps_its_place() -> None:
    words = [(letter, -9.0) for letter in "abcd"] + [("ab", -1.0), ("cd", -2.0), ("abcd", -8.0), ("<unk>", -99.0)]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.Unigram(words, unk_id=7)))
    smaller, _, _ = trim(tokenizer, 6)
    assert smaller.convert_ids_to_tokens(smaller("abcdxcd").input_ids) == ["ab", "c", "d", "<unk>", "c", "d"]


def test_tokens_of_an_empty_chat_stay(byte_bpe: Any) -> None:
    named = used_elsewhere(byte_bpe, PreTrainedConfig(), None)
    assert {*byte_bpe("<|user|>user says a", add_special_tokens=False).input_ids} <= named


def test_kinds_that_cannot_be_cut() -> None:
    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, "[UNK]")))
    with pytest.raises(UserError, match="its tokenizer is WordLevel: only BPE and Unigram"):
        Pieces(words, "source x")


def test_kept_ids_are_recorded_as_runs() -> None:
    vocabulary = Vocabulary((0, 1, 2, 5, 7, 8), 9)
    assert vocabulary.to_json() == {"rows": 9, "kept": [[0, 2], [5, 5], [7, 8]]}
    assert Vocabulary.from_json(vocabulary.to_json(), "x") == vocabulary
    for damaged in (
        {},
        {"rows": 9, "kept": [[2, 1]]},
        {"rows": 4, "kept": [[0, 4]]},
        {"rows": 9, "kept": [[3, 4], [4, 5]]},
    ):
        with pytest.raises(UserError, match="damaged"):
            Vocabulary.from_json(damaged, "x")


def test_normalizers_are_kept() -> None:
    """A tokenizer that writes bytes in its normalizer, as newer ones do."""
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.ByteLevel()
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    trainer.show_progress = False
    backend.train_from_iterator(texts()[:5], trainer)
    smaller, _, _ = trim(PreTrainedTokenizerFast(tokenizer_object=backend), 320)
    for text in map(random_text, range(5)):
        assert smaller.decode(smaller(text).input_ids) == text


def test_bytes_of_tokens(byte_bpe: Any, pieces_bpe: Any) -> None:
    """Their sum is the bytes of the text; SentencePiece puts one space before it."""
    for text in [*texts()[:5], *map(random_text, range(5))]:
        for tokenizer, more in ((byte_bpe, 0), (trim(byte_bpe, 320)[0], 0), (pieces_bpe, 1)):
            ids = tokenizer(text, add_special_tokens=False).input_ids
            assert token_bytes(tokenizer)[ids].sum() == len(text.encode()) + more
    assert token_bytes(byte_bpe)[byte_bpe.eos_token_id] == 0
