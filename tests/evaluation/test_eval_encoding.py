"""Tokens at the boundary of context and continuation, and windows over long texts."""

from __future__ import annotations

from typing import Any

import pytest

from dwindle.core.errors import UserError
from dwindle.evaluation.encoding import Encoder, max_length_of, rolling_windows
from tiny import tiny_model, tiny_tokenizer


def merging_tokenizer(bos: bool = False) -> object:
    """Letters and a few merges, so that tokens can straddle the boundary; optionally puts ``<s>`` in front."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "b"), ("Ġ", "a"), ("Ġ", "Ġ"), ("Ġa", "b"), (":", "Ġ")]
    words = ["<s>", "</s>", *letters, *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={word: n for n, word in enumerate(words)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 0)]
        )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>" if bos else None, eos_token="</s>")


REQUESTS = [
    ("Q: a", " ab"),
    ("Q: a ", " ab"),
    ("Q:  \n", "ab"),
    ("Q:", "  ab"),
    ("xa", "b"),  # the boundary falls inside a token
    ("", " ab"),
    ("", "</s> ab"),
    ("<s>Q:", " ab"),
    ("Q: a", " ab"),
]


@pytest.mark.parametrize("bos", [False, True])
def test_equals_the_harness(bos: bool) -> None:
    pytest.importorskip("lm_eval", reason="needs the eval extra")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    tokenizer = merging_tokenizer(bos)
    model = HFLM(pretrained=tiny_model("llama", vocab_size=300), tokenizer=tokenizer, backend="causal")
    seen: list[tuple[list[int], list[int]]] = []

    def collect(requests: list[tuple[object, list[int], list[int]]], **_: object) -> list[tuple[float, bool]]:
        seen.extend((context, continuation) for _, context, continuation in requests)
        return [(0.0, False)] * len(requests)

    model._loglikelihood_tokens = collect
    requests = [request for request in REQUESTS if "</s>" not in request[1] or not bos]
    model.loglikelihood([Instance("loglikelihood", {}, request, n) for n, request in enumerate(requests)])
    assert Encoder(tokenizer).pairs(requests) == seen


@pytest.mark.parametrize("bos", [False, True])
def test_a_batch_equals_one_by_one(bos: bool) -> None:
    """And both equal the plain rule; masks are not asked for, which must not change the tokens."""
    tokenizer: Any = merging_tokenizer(bos)
    requests = [
        *REQUESTS,
        ("Straße – 東京 🦊", " über ab"),
        ("ab\u00a0", " ab\u3000"),
        ("ab" * 300, "ab"),
        ("  ", "ab "),
    ]
    together = Encoder(tokenizer).pairs(requests)
    assert together == [Encoder(tokenizer).pairs([request])[0] for request in requests]
    for (context, continuation), (first, rest) in zip(requests, together, strict=True):
        if context.strip() and not context.startswith("<s>"):
            assert first == tokenizer(context.rstrip())["input_ids"]
            assert rest == tokenizer(context + continuation)["input_ids"][len(first) :]


def test_a_context_of_white_space_counts_as_none() -> None:
    encoder = Encoder(tiny_tokenizer())
    assert encoder.pairs([("  ", "x")]) == encoder.pairs([("", "  x")])


def test_a_tokenizer_without_special_tokens_is_named() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    encoder = Encoder(tokenizer)
    assert encoder.pairs([("a", "b")]) == [(tokenizer("a")["input_ids"], tokenizer("b")["input_ids"])]
    with pytest.raises(UserError, match="neither a begin-of-text"):
        encoder.pairs([("", "b")])


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9, 17])
def test_windows_score_every_token_once(length: int) -> None:
    tokens = list(range(100, 100 + length))
    windows = rolling_windows(tokens, 0, 4)
    assert [token for _, scored in windows for token in scored] == tokens
    assert all(context and len(context) + len(scored) <= 5 for context, scored in windows)
    utils = pytest.importorskip("lm_eval.utils", reason="needs the eval extra")
    stock = utils.get_rolling_token_windows(tokens, 0, 4, 1)
    assert windows == [utils.make_disjoint_window(window) for window in stock]


def test_max_length() -> None:
    class Nothing:
        model_max_length = 10**30

    assert max_length_of(tiny_model().config, tiny_tokenizer()) == 128
    assert max_length_of(object(), Nothing()) == 2048
