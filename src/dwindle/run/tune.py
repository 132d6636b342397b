"""``dwindle tune``: the recipe of an instruction tuning, from a model and its conversations; ``pretrain`` trains it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from os import PathLike
from typing import Any

from dwindle.anatomy.positions import can_be_packed
from dwindle.core.config import apply_overrides, from_dict
from dwindle.core.errors import UserError
from dwindle.core.sizes import parse_count
from dwindle.data.config import DataConfig, TaskConfig
from dwindle.data.estimate import Estimate, estimate
from dwindle.recipe.recipe import Recipe, recipe_from
from dwindle.recipe.recommended import TOKENS_PER_STEP, TUNING, TUNING_PASSES, TUNING_STEPS
from dwindle.run.new import power_below, scaled_rate, two_digits
from dwindle.sources.loading import load_config, load_tokenizer, model_in

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
    ``section.key=value``. Without ``tokens`` the conversations that are not held out are read three times.
    """
    if not chats:
        raise UserError("chats: none given: name the conversations to learn from, such as answers.jsonl")
    source = model_in(model)
    config: Any = load_config(source)
    seq_len = min(DataConfig.model_fields["seq_len"].default, getattr(config, "max_position_embeddings", None) or 1024)
    overrides = list(overrides)
    given = apply_overrides(
        {
            "task": {"kind": "chat", "chat": list(chats)},
            "data": {"train": list(texts), "valid": list(valid), "seq_len": seq_len},
            "training": {} if tokens is None else {"tokens": parse_count(tokens, "tokens")},
        },
        overrides,
        Recipe,
    )
    task, data, training = from_dict(TaskConfig, given["task"]), from_dict(DataConfig, given["data"]), given["training"]
    data.check(task)
    found = estimate(data, task, lambda: load_tokenizer(source), packed=can_be_packed(config))
    is_chosen = not data.valid and "holdout" not in given["data"]
    share = min(max(_HELD_OUT / found.tokens.get("chat", math.inf), _LEAST_HELD_OUT), _MOST_HELD_OUT)
    holdout = two_digits(share) if is_chosen else 0.0
    wanted = training["tokens"] if "tokens" in training else _amount(found, data.seq_len, 1 - holdout)
    amount = parse_count(wanted, "training.tokens")
    if not amount:
        raise UserError("tokens: 0 would train nothing: give more, or leave them out to read the conversations 3 times")
    per_step = min(TOKENS_PER_STEP, max(power_below(amount / TUNING_STEPS), data.seq_len))
    per_step = parse_count(training.get("tokens_per_step", per_step), "training.tokens_per_step")
    tables: dict[str, dict[str, Any]] = {
        "source": {"model": source},
        "task": given["task"],
        "data": {"holdout": holdout, "valid_tokens": max(4 * _HELD_OUT, data.seq_len)} | given["data"],
        "training": {
            "tokens": max(amount, per_step),
            "tokens_per_step": per_step,
            "optimizer": TUNING["training.optimizer"].value,
            "lr": scaled_rate(TUNING["training.lr"].value, config.hidden_size, per_step),
        },
        "prune": {"enabled": False},
        "validation": {"every": max(amount // per_step // 5, 1) if holdout or data.validated_on(task) else 0},
    }
    return recipe_from(tables, overrides, "tune")


def _amount(found: Estimate, seq_len: int, trained: float) -> int:
    """Tokens that read the conversations often enough, of which the share ``trained`` is not held out."""
    if "chat" not in found.rows:
        raise UserError(
            "tokens: the number of streamed conversations is unknown: give the number of tokens to train on"
        )
    return math.ceil(TUNING_PASSES * trained * found.rows["chat"] / found.shares["chat"]) * seq_len
