"""Greedy samples of a model: what a reader sees of a loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

PROMPTS = ("Once upon a time", "The most important thing about")
"""Where there is no held-out text to begin with."""
PROMPT_TOKENS, NEW_TOKENS = 16, 32


def prompt_tokens(windows_NT: Tensor | None, tokenizer: Any, count: int = 2) -> list[list[int]]:
    """The beginnings of ``count`` held-out windows, evenly spaced; fixed prompts without windows."""
    if windows_NT is None or not len(windows_NT):
        return [[int(token) for token in tokenizer(text).input_ids] for text in PROMPTS[:count]]
    length = min(PROMPT_TOKENS, windows_NT.shape[1])
    places = dict.fromkeys(len(windows_NT) * number // count for number in range(count))
    return [windows_NT[place, :length].tolist() for place in places]


def greedy_samples(model: Any, tokenizer: Any, prompts: Sequence[Sequence[int]]) -> list[str]:
    """The likeliest continuation of each prompt, as text; draws no random numbers and restores the model's mode."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            found = [_continuation(model, prompt, tokenizer.eos_token_id) for prompt in prompts]
    finally:
        model.train(was_training)
    return [as_text(tokenizer, ids) for ids in found]


def _continuation(model: Any, prompt: Sequence[int], end: int | None) -> list[int]:
    device = next(model.parameters()).device
    cache, fresh, found = None, list(prompt), list[int]()
    while len(found) < NEW_TOKENS:
        answer = model(input_ids=torch.tensor([fresh], device=device), past_key_values=cache, use_cache=True)
        cache, fresh = answer.past_key_values, [int(answer.logits[0, -1].argmax())]
        if fresh[0] == end:
            break
        found += fresh
    return found


def as_text(tokenizer: Any, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=True))
