"""``dwindle new``: a short recipe with the recommended settings, scaled to a model and the length of its text."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from dwindle.anatomy.anatomy import Anatomy
from dwindle.core.config import parse_toml
from dwindle.core.errors import UserError
from dwindle.core.sizes import format_count, parse_count, parse_size
from dwindle.data.config import DataConfig, TaskConfig
from dwindle.data.estimate import estimate
from dwindle.pruning.target import parse_target
from dwindle.recipe.recipe import Recipe, recipe_from
from dwindle.recipe.recommended import (
    CORRECTED_FROM,
    CORRECTION,
    GOALS,
    HIDDEN,
    LEAST_STEPS,
    MEANING,
    PASSES,
    RECOMMENDED,
    SEQ_LEN,
    TOKENS,
    TOKENS_PER_STEP,
    Goal,
    Setting,
    Settings,
    is_goal,
)
from dwindle.run.plan import plan_pruning
from dwindle.run.start import Start, file_sizes
from dwindle.sources.loading import load_config, load_tokenizer

_VALID_SHARE, _MOST_VALID_TOKENS, _MOST_HELD_OUT = 1 / 100, 256_000, 0.1
"""Validation tokens: this share of the training tokens (a dozen measurements then cost a few hundredths of the run), at
most so many, and at most this share of the text."""


def new_recipe(
    model: str,
    texts: Sequence[str],
    to: str,
    *,
    goal: str = "quality",
    tokens: str | int | None = None,
    valid: Sequence[str] = (),
    overrides: Iterable[str] = (),
) -> tuple[str, Recipe]:
    """The commented TOML text and the recipe, checked against the model; ``overrides`` are ``section.key=value``."""
    if not is_goal(goal):
        raise UserError(f"goal {goal!r}: give one of {', '.join(GOALS)}")
    if not texts:
        raise UserError("texts: none given: name the text to train on, such as books.txt")
    data = DataConfig(train=list(texts), valid=list(valid))
    data.check()
    config = load_config(model)
    parse_target(to, Anatomy.of_config(config), "to", file_sizes(Start(model), f"to {to}"))
    found = estimate(data, TaskConfig(), lambda: load_tokenizer(model)).tokens
    length = sum(found.values()) if found else math.inf
    amount = None if tokens is None else parse_count(tokens, "tokens")
    positions = getattr(config, "max_position_embeddings", None) or SEQ_LEN
    chosen = scaled(goal, length, amount, positions, config.hidden_size)
    if valid:
        chosen.pop("data.holdout")
    elif chosen["data.holdout"].value >= 0.5:
        few = f"{', '.join(texts)}: only about {format_count(length)} tokens"
        raise UserError(f"{few}, too few to hold any out: give more text")
    own_sizes = chosen["prune.selection"].value == "global"
    if own_sizes and parse_size(to, "to").kind == "shape":
        chosen["prune.selection"] = Setting("coupled", "the same group from every layer: the target is one shape")
        own_sizes = False
    fixed = {
        "source.model": Setting(model),
        "data.train": Setting(list(texts), f"about {format_count(length)} tokens" if found else ""),
        **({"data.valid": Setting(list(valid))} if valid else {}),
        "prune.target": Setting(to),
    }
    title = f"{Path(model).name} to {to}: {MEANING[goal if own_sizes or goal != 'quality' else 'stock']}."
    return _fitting(fixed | chosen, list(overrides), title, Anatomy.of_config(config))


def scaled(goal: Goal, length: float, tokens: int | None, positions: int, hidden: int = HIDDEN) -> dict[str, Setting]:
    """The recommended settings for a text of ``length`` tokens; ``tokens`` to train on, if the user chose them.

    A short text is read at most ``PASSES`` times, in at least ``LEAST_STEPS`` steps where possible: smaller ones of
    shorter sequences. The learning rate falls with the root of a step's size, and with the width of the model.
    """
    amount = tokens or int(min(TOKENS, PASSES * length * (1 - _VALID_SHARE * PASSES)))
    per_step = min(TOKENS_PER_STEP, max(power_below(amount / LEAST_STEPS), 256))
    seq_len = max(min(SEQ_LEN, positions, per_step // 8, power_below(length / 100)), 16)
    per_step = min(max(per_step, seq_len), max(amount, seq_len))
    steps = max(amount // (per_step // seq_len * seq_len), 1)
    held_out = min(max(_VALID_SHARE * amount, 8 * seq_len), _MOST_VALID_TOKENS, max(_MOST_HELD_OUT * length, seq_len))
    held_out = max(held_out // seq_len, 1) * seq_len
    share = held_out / (amount if length == math.inf else length)
    chosen: dict[str, Setting] = {
        "data.seq_len": Setting(seq_len),
        "data.holdout": Setting(two_digits(share, up=True), "share of the text for validation, never trained on"),
        "data.valid_tokens": Setting(int(held_out)),
        "training.tokens": Setting(amount, "" if length == math.inf else f"reads the text {amount / length:.1f} times"),
        "training.tokens_per_step": Setting(per_step, f"{steps:,} steps"),
        "validation.every": Setting(max(steps // 10, 1)),
        "checkpoint.every": Setting(max(steps // 10, 10)),
        **RECOMMENDED[goal],
    }
    rate = chosen["training.lr"]
    chosen["training.lr"] = Setting(scaled_rate(rate.value, hidden, per_step), rate.why)
    return chosen


def correction(recipe: Recipe) -> tuple[list[str], list[str]] | None:
    """Overrides of the two runs of teacher correction: one adapts the source to the text, the other prunes its result,
    whose path is still to be given as ``source.model``. None where this was not measured to help."""
    tokens = parse_count(recipe.training.tokens, "training.tokens")
    ours = recipe.prune.enabled and recipe.prune.effective_selection == "global" and recipe.vocabulary.size is None
    if not ours or not recipe.teacher_weight or recipe.distill.teacher or tokens < CORRECTED_FROM:
        return None
    settings = {key: setting.value for key, setting in CORRECTION.items()}
    hidden = load_config(recipe.source.model).hidden_size
    settings["training.lr"] = scaled_rate(settings["training.lr"], hidden, recipe.num_tokens_per_step)
    read = settings["training.tokens"]
    left = format_count(tokens - parse_count(read, "training.tokens"))
    return [f"{key}={value}" for key, value in settings.items()], [f"data.skip={read}", f"training.tokens={left}"]


def scaled_rate(rate: float, hidden: int, per_step: int) -> float:
    """A recommended learning rate for another width of the model and other tokens per step."""
    by_width = min(max(HIDDEN / hidden, 1 / 8), 8.0)
    return two_digits(rate * by_width * math.sqrt(per_step / TOKENS_PER_STEP))


def _fitting(settings: Settings, overrides: list[str], title: str, anatomy: Anatomy) -> tuple[str, Recipe]:
    """The recipe; a multiple of widths that this model and target cannot have is halved until they can."""
    while True:
        text = _toml(settings, title)
        recipe = recipe_from(parse_toml(text), overrides, "new recipe")
        try:
            plan_pruning(recipe, anatomy, Start(recipe.source.model))
            return _with_overrides(settings, overrides, recipe, title), recipe
        except UserError:
            multiple = settings["prune.round_to"].value if "prune.round_to" in settings else 1
            if multiple == 1:
                raise
            rounded = Setting(multiple // 2, settings["prune.round_to"].why)
            settings = {**settings, "prune.round_to": rounded}


def _with_overrides(settings: Settings, overrides: list[str], recipe: Recipe, title: str) -> str:
    """The text with the user's own values in their places; without comments if one is inside a table of a table."""
    found = dict(settings)
    for key in (text.partition("=")[0].strip() for text in overrides):
        section, _, name = key.partition(".")
        table = getattr(recipe, section)
        if name not in type(table).model_fields:
            return tomli_w.dumps(recipe.model_dump(exclude_unset=True, exclude_none=True))
        found[key] = Setting(getattr(table, name), "as given")
    return _toml({key: setting for key, setting in found.items() if setting.value is not None}, title)


def _toml(settings: Settings, title: str) -> str:
    """Tables in the order of a recipe, each reason as a comment."""
    parts = [f"# {title}\n# Made by `dwindle new`; `dwindle keys` explains every key."]
    for section in Recipe.model_fields:
        lines = [_line(key, settings[key]) for key in settings if key.partition(".")[0] == section]
        if lines:
            parts.append("\n".join([f"[{section}]", *lines]))
    return "\n\n".join(parts) + "\n"


def _line(key: str, setting: Setting) -> str:
    if isinstance(setting.value, list):
        value = f"[{', '.join(_value(item) for item in setting.value)}]"
    else:
        value = _value(setting.value)
    line = f"{key.partition('.')[2]} = {value}"
    return f"{line:<28}  # {setting.why}" if setting.why else line


def _value(value: Any) -> str:
    return tomli_w.dumps({"x": value}).removeprefix("x = ").strip()


def recipe_name(model: str, to: str) -> str:
    """A file name: ``smollm2-135m-to-50pct``."""
    name = Path(model).name.removesuffix(".gguf").removesuffix(".bin")
    return re.sub(r"[^A-Za-z0-9.]+", "-", f"{name}-to-{to.replace('%', 'pct')}").strip("-")


def power_below(value: float) -> int:
    """The largest power of two that is not above; 2^30 at most."""
    return 1 << int(math.log2(min(max(value, 1), 1 << 30)))


def two_digits(value: float, *, up: bool = False) -> float:
    """Two significant digits."""
    if value <= 0:
        return 0.0
    scale = 10 ** (math.floor(math.log10(value)) - 1)
    return float(f"{(math.ceil if up else round)(value / scale) * scale:.2g}")
