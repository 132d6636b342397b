"""What the types of a recipe allow but no run could use; a message names the key and the fix."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal, NamedTuple

from dwindle.core.errors import UserError
from dwindle.core.sizes import parse_count
from dwindle.pruning.metrics import check_metric

if TYPE_CHECKING:
    from dwindle.recipe.recipe import DistillConfig, Recipe

SHAPE_KEYS = ("hidden", "heads", "ffn")


def check_recipe(recipe: Recipe) -> None:
    """Raises at the first thing that cannot work."""
    recipe.data.check_values()
    _check_source_and_validation(recipe)
    _check_amounts(recipe)
    _check_optimizer(recipe)
    _check_distill(recipe.distill)
    if recipe.prune.metric is not None:
        check_metric(recipe.prune.metric, "prune.metric: ")
    if recipe.prune.enabled:
        _check_prune(recipe)


class Size(NamedTuple):
    """A model size as people write it: ``value`` parameters, or that share of them."""

    kind: Literal["count", "share", "nonemb share", "shape"]
    value: float


def parse_size(text: str, key: str) -> Size:
    """The grammar of ``prune.target`` and ``prune.milestones``, checked before any weights are loaded."""
    text = text.strip()
    if "=" in text:
        _check_shape(text, key)
        return Size("shape", 0.0)
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*%\s*(nonemb)?|([0-9]*\.[0-9]+)", text)
    if match is None:
        try:
            count = parse_count(text, key)
        except UserError:
            raise UserError(
                f'{key}: {text!r} is not a size such as "100M", "0.6", "60%", "50%nonemb" '
                f'or "hidden=512,heads=8,ffn=1280"'
            ) from None
        _require(count > 0, key, "must be above 0")
        return Size("count", count)
    percent, nonemb, share = match.groups()
    value = float(share) if share else float(percent) / 100
    _require(0 < value < 1, key, f"{text!r} must leave more than nothing and less than everything")
    return Size("nonemb share" if nonemb else "share", value)


def _check_shape(text: str, key: str) -> None:
    names: list[str] = []
    for part in text.split(","):
        name, _, number = (piece.strip() for piece in part.partition("="))
        if name not in SHAPE_KEYS or not number.isdecimal() or int(number) == 0:
            raise UserError(f'{key}: {part.strip()!r} is not part of a shape such as "hidden=512,heads=8,ffn=1280"')
        _require(name not in names, key, f"{name} is given twice")
        names.append(name)


def _require(holds: bool, key: str, problem: str) -> None:
    if not holds:
        raise UserError(f"{key}: {problem}")


def _check_source_and_validation(recipe: Recipe) -> None:
    _require(bool(recipe.source.model.strip()), "source.model", "is empty: name the model to make smaller")
    validation = recipe.validation
    has_something = bool(recipe.data.valid or validation.tasks) or validation.every <= 0
    _require(has_something, "validation.every", "needs text in data.valid, or validation.tasks: add one, or set 0")
    _require(validation.limit >= 1, "validation.limit", "must be at least 1")
    _require(validation.batch >= 0, "validation.batch", "must be at least 1, or 0 to choose")


def _check_amounts(recipe: Recipe) -> None:
    training = recipe.training
    num_tokens = parse_count(training.tokens, "training.tokens")
    num_tokens_per_step = parse_count(training.tokens_per_step, "training.tokens_per_step")
    _require(
        num_tokens_per_step >= recipe.data.seq_len,
        "training.tokens_per_step",
        f"{training.tokens_per_step} is below one sequence of data.seq_len = {recipe.data.seq_len}",
    )
    _require(
        num_tokens >= num_tokens_per_step,
        "training.tokens",
        f"{training.tokens} is below one step of training.tokens_per_step = {training.tokens_per_step}",
    )
    _require(
        0 <= training.micro_batch <= recipe.num_sequences_per_step,
        "training.micro_batch",
        f"must lie between 0 (choose) and the {recipe.num_sequences_per_step} sequences of a step",
    )
    at_least = {
        "training.ce_chunk_tokens": (training.ce_chunk_tokens, 1),
        "training.max_bad_steps": (training.max_bad_steps, 1),
        "training.seed": (training.seed, 0),
        "data.seed": (recipe.data.seed or 0, 0),
        "validation.every": (recipe.validation.every, 0),
        "checkpoint.every": (recipe.checkpoint.every, 0),
        "checkpoint.keep_last": (recipe.checkpoint.keep_last, 1),
    }
    for key, (value, least) in at_least.items():
        _require(value >= least, key, f"{value} is too small: use at least {least}")


def _check_optimizer(recipe: Recipe) -> None:
    training = recipe.training
    _require(training.lr > 0, "training.lr", "must be above 0")
    _require(0 <= training.min_lr_ratio <= 1, "training.min_lr_ratio", "must lie between 0 and 1")
    if isinstance(training.warmup, float):
        _require(
            0 <= training.warmup < 1,
            "training.warmup",
            f"{training.warmup} is neither a share below 1 nor a whole number of steps",
        )
    else:
        _require(training.warmup >= 0, "training.warmup", "must not be negative")
    _require(0 <= training.decay <= 1, "training.decay", "must lie between 0 and 1")
    curve = recipe.num_warmup_steps + recipe.num_decay_steps
    _require(
        recipe.num_warmup_steps < recipe.num_steps and curve <= recipe.num_steps,
        "training.warmup",
        f"warm-up and decay take {curve} steps of {recipe.num_steps}: shorten them or raise training.tokens",
    )
    in_range = len(training.betas) == 2 and all(0 <= beta < 1 for beta in training.betas)
    _require(in_range, "training.betas", "must be two numbers from 0 to below 1, such as [0.9, 0.95]")
    _require(training.eps > 0, "training.eps", "must be above 0")
    for name in ("weight_decay", "clip", "z_loss"):
        _require(getattr(training, name) >= 0, f"training.{name}", "must not be negative")


def _check_distill(distill: DistillConfig) -> None:
    _require(0 <= distill.weight <= 1, "distill.weight", f"{distill.weight} must lie between 0 (no teacher) and 1")
    in_range = 0 < distill.temperature < float("inf")
    _require(in_range, "distill.temperature", f"{distill.temperature} must be above 0: 1 changes nothing")
    _require(distill.top_k >= 0, "distill.top_k", f"{distill.top_k} must be at least 1, or 0 for the whole vocabulary")
    taught = distill.weight > 0 or distill == type(distill)()
    _require(taught, "distill.weight", "is 0, so there is no teacher: set a weight such as 0.5, or remove [distill]")


def _check_prune(recipe: Recipe) -> None:
    prune = recipe.prune
    _require(
        bool(prune.target.strip()),
        "prune.target",
        'missing: give a size such as "100M" or "60%", or set prune.enabled = false',
    )
    target = parse_size(prune.target, "prune.target")
    _check_timing(recipe)
    kinds = "attn, ffn" if prune.method == "adapt" else "attn, ffn, stem"
    _require(bool(prune.effective_groups), "prune.groups", f"leaves nothing to prune: name at least one of {kinds}")
    _check_method(recipe, target)
    _require(0 <= prune.smoothing < 1, "prune.smoothing", "must lie from 0 (off) to below 1")
    _require(0 <= prune.damping < float("inf"), "prune.damping", "must be a number from 0 on, such as 0.01")
    _require(parse_count(prune.gram_tokens, "prune.gram_tokens") >= 1, "prune.gram_tokens", "must be at least 1")
    _require(0 < prune.compact_threshold <= 1, "prune.compact_threshold", "must be above 0 and at most 1")
    _require(prune.compact_wait >= 0, "prune.compact_wait", "must be 0 or more steps")
    for name in ("min_heads", "min_ffn", "min_hidden", "round_to", "compact_multiple"):
        _require(getattr(prune, name) >= 1, f"prune.{name}", "must be at least 1")
    for text in prune.milestones:
        milestone = parse_size(text, "prune.milestones")
        _require(milestone.kind != "shape", "prune.milestones", f"{text!r}: give a size such as 120M, not a shape")
        reached = milestone.kind != target.kind or milestone.value > target.value
        _require(reached, "prune.milestones", f"{text!r} is not above prune.target = {prune.target}")


def _check_method(recipe: Recipe, target: Size) -> None:
    """Layers of different sizes cannot end in one shape, and those of adapt not on round widths."""
    prune = recipe.prune
    adapt = prune.method == "adapt"
    for name in () if adapt else ("interleaves", "amplitude", "distance", "balance"):
        unused = getattr(prune, name) == getattr(type(prune)(), name)
        _require(unused, f"prune.{name}", 'belongs to prune.method = "adapt": remove it, or set the method')
    _require(not adapt or prune.compare == "mean", "prune.compare", 'method "adapt" always compares means: remove it')
    _require(0 <= prune.amplitude <= 1, "prune.amplitude", f"{prune.amplitude} must lie from 0 to 1, such as 0.02")
    _require(not adapt or prune.selection == "coupled", "prune.selection", "belongs to method efficientllm: remove it")
    if adapt or prune.selection == "global":
        name = 'method "adapt"' if adapt else 'selection "global"'
        shaped = target.kind == "shape"
        _require(not shaped, "prune.target", f"{name} gives every layer its own sizes: give a size such as 60%")
    _require(not adapt or prune.round_to == 1, "prune.round_to", 'method "adapt" cannot round its sizes: set 1')


def _check_stages(recipe: Recipe) -> None:
    prune = recipe.prune
    for name in ("horizon", "ratio"):
        given = getattr(prune, name) is not None
        _require(not given, f"prune.{name}", 'method "adapt" prunes in prune.interleaves stages: remove it')
    steps = recipe.num_steps - prune.warmup_steps
    _require(
        1 <= prune.interleaves <= steps,
        "prune.interleaves",
        f"{prune.interleaves} must lie between 1 and the {max(steps, 0)} steps after prune.warmup_steps",
    )


def _check_timing(recipe: Recipe) -> None:
    prune = recipe.prune
    _require(prune.warmup_steps >= 0, "prune.warmup_steps", f"{prune.warmup_steps} must not be negative")
    if prune.method == "adapt":
        _check_stages(recipe)
        return
    both = prune.horizon is not None and prune.ratio is not None
    _require(not both, "prune.horizon", "give either prune.horizon or prune.ratio, not both (…=none unsets one)")
    horizon = prune.effective_horizon
    ratio = prune.steps_ratio
    assert (horizon is None) != (ratio is None)
    if horizon is not None:
        _require(0 < horizon <= 1, "prune.horizon", f"{horizon} must be above 0 and at most 1")
    last_event_step = recipe.num_steps if horizon is None else horizon * recipe.num_steps
    _require(
        0 <= prune.warmup_steps < last_event_step,
        "prune.warmup_steps",
        f"{prune.warmup_steps} leaves no step for events: they end at step {int(last_event_step)}",
    )
