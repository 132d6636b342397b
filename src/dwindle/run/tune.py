"""``dwindle tune``: the recipe of an instruction tuning, from a model and its conversations; ``pretrain`` trains it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from dwindle.core.errors import UserError
from dwindle.core.sizes import parse_count
from dwindle.data.config import DataConfig, TaskConfig
from dwindle.data.estimate import estimate
from dwindle.recipe.recipe import Recipe, recipe_from
from dwindle.recipe.recommended import HIDDEN, TOKENS_PER_STEP, TUNING, TUNING_PASSES, TUNING_STEPS
from dwindle.run.new import power_below, two_digits
from dwindle.sources.loading import load_config, load_tokenizer, model_of_run

_HELD_OUT, _LEAST_HELD_OUT, _MOST_HELD_OUT = 32_000, 0.02, 0.1
"""Tokens of conversations to validate on, and the least and most share of them."""


def tuning_recipe(
    model: str | PathLike[str],
    chats: Sequence[str],
    *,
    texts: Sequence[str] = (),
    valid: Sequence[str] = (),
    tokens: str | int | None = None,
    overrides: Iterable[str] = (),
) -> Recipe:
    """The recipe that tunes a model, or the model of a run, on the answers of conversations.

    ``texts`` are mixed in, ``valid`` are conversations to validate on (else some are held out), ``overrides`` are
    ``section.key=value``. Without ``tokens`` the conversations are read three times.
    """
    if not chats:
        raise UserError("chats: none given: name the conversations to learn from, such as answers.jsonl")
    source = fspath(model)
    source = str(model_of_run(Path(source)) or source)
    task, data = TaskConfig(kind="chat", chat=list(chats)), DataConfig(train=list(texts), valid=list(valid))
    data.check(task)
    config: Any = load_config(source)
    seq_len = min(DataConfig.model_fields["seq_len"].default, getattr(config, "max_position_embeddings", None) or 1024)
    found = estimate(data, task, lambda: load_tokenizer(source))
    if tokens is None and "chat" not in found.tokens:
        raise UserError("tokens: how many conversations are streamed is unknown: say how many tokens to train on")
    length = found.tokens.get("chat", math.inf)
    amount = parse_count(tokens, "tokens") if tokens is not None else int(TUNING_PASSES * length / found.shares["chat"])
    holdout = two_digits(min(max(_HELD_OUT / length, _LEAST_HELD_OUT), _MOST_HELD_OUT))
    per_step = min(TOKENS_PER_STEP, max(power_below(amount / TUNING_STEPS), seq_len))
    rate = TUNING["training.lr"].value * min(max(HIDDEN / config.hidden_size, 1 / 8), 8.0)
    steps = max(amount // per_step, 1)
    tables: dict[str, dict[str, Any]] = {
        "source": {"model": source},
        "task": {"kind": "chat", "chat": list(chats)},
        "data": {"train": list(texts), "seq_len": seq_len, "valid_tokens": max(4 * _HELD_OUT, seq_len)}
        | ({"valid": list(valid)} if valid else {"holdout": holdout}),
        "training": {
            "tokens": max(amount, per_step),
            "tokens_per_step": per_step,
            "optimizer": TUNING["training.optimizer"].value,
            "lr": two_digits(rate * math.sqrt(per_step / TOKENS_PER_STEP)),
        },
        "prune": {"enabled": False},
        "validation": {"every": max(steps // 5, 1)},
    }
    return recipe_from(tables, overrides, "tune")
