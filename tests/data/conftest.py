"""A tiny real tokenizer, trained in code, and a text to go with it."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "one", "small", "bird", "green", "hills", "softly"]


def make_text(num_words: int, seed: int = 0) -> str:
    rng = random.Random(seed)
    return "".join(rng.choice(WORDS) + rng.choice([" ", " ", " ", ".\n"]) for _ in range(num_words))


def make_tokenizer(vocab_size: int = 300, *, specials: tuple[str, ...] = ("<|endoftext|>",), **names: Any) -> Any:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(specials),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([make_text(2000, seed=99)], trainer)
    add_bos = names.pop("add_bos", False)
    if add_bos:
        bos = names["bos_token"]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))]
        )
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return make_tokenizer(eos_token="<|endoftext|>")


@pytest.fixture(scope="session")
def new_tokenizer() -> Callable[..., Any]:
    return make_tokenizer


@pytest.fixture(scope="session")
def new_text() -> Callable[..., str]:
    return make_text


@pytest.fixture
def text_file(tmp_path: Path) -> Callable[..., str]:
    def write(name: str = "text.txt", num_words: int = 400, seed: int = 0) -> str:
        path = tmp_path / name
        path.write_text(make_text(num_words, seed), encoding="utf-8")
        return str(path)

    return write
