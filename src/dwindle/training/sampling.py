"""Greedy samples of a model: what a reader sees of a loss."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from dwindle.data.packing import first_prompt

PROMPTS = ("Once upon a time", "The most important thing about")
"""Where there is no held-out text to begin with."""
PROMPT_TOKENS, NEW_TOKENS = 16, 32


def prompt_tokens(windows_NT: Tensor | None, tokenizer: Any) -> list[list[int]]:
    """Beginnings of the first and the middle held-out window (of chat: whole questions); else fixed prompts."""
    if windows_NT is None or not len(windows_NT):
        return [[int(token) for token in tokenizer(text).input_ids] for text in PROMPTS]
    places = sorted({0, len(windows_NT) // 2})
    return [first_prompt(windows_NT[place], PROMPT_TOKENS) for place in places]


def greedy_samples(model: Any, tokenizer: Any, prompts: Sequence[Sequence[int]]) -> list[str]:
    """The likeliest continuation of each prompt, as text; draws no random numbers and restores the model's mode."""
    return [
        continuation_text(tokenizer, prompt, greedy_tokens(model, prompt, NEW_TOKENS, tokenizer)) for prompt in prompts
    ]


def greedy_tokens(model: Any, prompt: Sequence[int], count: int, tokenizer: Any) -> list[int]:
    """At most ``count`` token ids, without the one that ends a text."""
    device, cache, fresh, found = next(model.parameters()).device, None, list(prompt), list[int]()
    with evaluating(model):
        while len(found) < count:
            answer = model(input_ids=torch.tensor([fresh], device=device), past_key_values=cache, use_cache=True)
            cache, fresh = answer.past_key_values, [int(answer.logits[0, -1].argmax())]
            if fresh[0] == tokenizer.eos_token_id:
                break
            found += fresh
    return found


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Eval mode without gradients and compilation; the model's mode is restored."""
    was_training = model.training
    model.eval()
    try:
        may_be_compiled = "torch._dynamo" in sys.modules  # its import takes seconds
        with torch.no_grad(), torch.compiler.set_stance("force_eager") if may_be_compiled else nullcontext():
            yield
    finally:
        model.train(was_training)


def continuation_text(tokenizer: Any, prompt: Sequence[int], found: Sequence[int]) -> str:
    """Decoded together with the prompt: alone, some tokenizers drop the space before the first word."""
    before, whole = as_text(tokenizer, prompt), as_text(tokenizer, [*prompt, *found])
    return whole[len(before) :] if whole.startswith(before) else as_text(tokenizer, found)


def as_text(tokenizer: Any, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=True))
