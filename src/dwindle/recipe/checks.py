"""Checks of a recipe beyond its types; a message names the key and the fix."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dwindle.core.errors import UserError
from dwindle.core.sizes import parse_count, parse_size

if TYPE_CHECKING:
    from dwindle.recipe.recipe import Recipe


def check_recipe(recipe: Recipe) -> None:
    """Raise at the first value that cannot work; each table's config has already checked its own values."""
    recipe.data.check_values(recipe.task)
    recipe.vocabulary.check_values("vocabulary.size")
    _check_source_and_validation(recipe)
    _check_amounts(recipe)
    distill = recipe.distill
    has_teacher = recipe.teacher_weight > 0 or distill.model_copy(update={"weight": None}) == type(distill)()
    _require(
        has_teacher, "distill.weight", "is 0, so there is no teacher: set a weight such as 0.5, or remove [distill]"
    )
    own_start = recipe.task.kind == "chat" and not recipe.prune.enabled and recipe.teacher_weight > 0
    _require(
        bool(distill.teacher) or not own_start,
        "distill.teacher",
        "missing: a tuning that does not prune would have its own start as teacher: name the model to learn from, "
        "such as the one that was pruned, or set distill.weight = 0",
    )
    if recipe.prune.metric is not None:
        from dwindle.pruning.metrics import check_metric  # imports torch, which most mistakes need not wait for

        check_metric(recipe.prune.metric, "prune.metric: ")
    if recipe.prune.enabled:
        _check_prune(recipe)
    if recipe.training.lora_rank:
        _check_lora(recipe)


def _require(holds: bool, key: str, problem: str) -> None:
    if not holds:
        raise UserError(f"{key}: {problem}")


def _check_source_and_validation(recipe: Recipe) -> None:
    _require(bool(recipe.source.model.strip()), "source.model", "is empty: name the model to prune")
    validation = recipe.validation
    has_something = bool(recipe.data.validated_on(recipe.task) or validation.tasks) or validation.every <= 0
    _require(has_something, "validation.every", "needs data.valid, data.holdout or validation.tasks: add one, or set 0")


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
        training.micro_batch <= recipe.num_sequences_per_step,
        "training.micro_batch",
        f"must be between 0 (choose) and the {recipe.num_sequences_per_step} sequences of a step",
    )
    num_curve_steps = recipe.num_warmup_steps + training.decay_steps(recipe.num_steps)
    _require(
        recipe.num_warmup_steps < recipe.num_steps and num_curve_steps <= recipe.num_steps,
        "training.warmup",
        f"warm-up and decay take {num_curve_steps} of {recipe.num_steps} steps: shorten them or raise training.tokens",
    )


def _check_prune(recipe: Recipe) -> None:
    prune = recipe.prune
    _require(
        bool(prune.target.strip()),
        "prune.target",
        'missing: give a size such as "100M" or "60%", or set prune.enabled = false',
    )
    target = parse_size(prune.target, "prune.target")
    if prune.method != "shortgpt" and (prune.keeps_hidden_size or prune.effective_selection == "global"):
        name = f'method "{prune.method}"' if prune.keeps_hidden_size else 'selection "global"'
        has_shape = target.kind == "shape"
        _require(not has_shape, "prune.target", f"{name} gives every layer its own sizes: give a size such as 60%")
    has_moments = recipe.training.optimizer == "adamw" or prune.fisher == "step"
    _require(has_moments, "prune.fisher", '"adam" needs AdamW: Muon keeps no second moment of the layers: set "step"')
    _check_timing(recipe)
    for text in prune.milestones:
        milestone = parse_size(text, "prune.milestones")
        _require(milestone.kind != "shape", "prune.milestones", f"{text!r}: give a size such as 120M, not a shape")
        reached = milestone.kind != target.kind or milestone.value > target.value
        _require(reached, "prune.milestones", f"{text!r} is not above prune.target = {prune.target}")


def _check_lora(recipe: Recipe) -> None:
    """Adapters leave the weights as they are, so nothing can be pruned, and muon has nothing to orthogonalise."""
    key, training = "training.lora_rank", recipe.training
    _require(not recipe.prune.enabled, key, "cannot be combined with pruning: set it to 0, or prune.enabled = false")
    _require(not recipe.source.random_init, key, "cannot train a model from random weights: set it to 0")
    sharded = training.parallel in ("fsdp", "hsdp")
    _require(not sharded, key, f'cannot be combined with training.parallel = "{training.parallel}": use ddp')
    _require(training.optimizer == "adamw", key, 'cannot be combined with muon: set training.optimizer = "adamw"')


def _check_timing(recipe: Recipe) -> None:
    """Whether the steps of the run suffice for the events."""
    prune, before = recipe.prune, recipe.num_steps_before_pruning
    if prune.keeps_hidden_size:
        steps = recipe.num_steps - before
        _require(
            prune.num_stages <= steps,
            "prune.interleaves",
            f"{prune.num_stages} must be between 1 and the {max(steps, 0)} steps after prune.warmup_steps",
        )
        return
    _require(
        before < recipe.num_steps,
        "prune.warmup_steps",
        f"{before} leaves none of the {recipe.num_steps} steps for events: lower it",
    )
