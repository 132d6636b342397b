"""What the rows of the training benchmark share: shapes, batches, the clock, trainers and pruners."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median_high
from typing import Any, Literal

import torch
from torch import Tensor, nn

from benchmarks.shapes import SHAPES
from dwindle.anatomy.anatomy import Anatomy
from dwindle.anatomy.structure import KINDS, Kind, Structure
from dwindle.core.errors import UserError
from dwindle.distributed.precision import Precision
from dwindle.pruning.config import DEFAULT_GRAM_TOKENS, PretrainPruneConfig
from dwindle.pruning.layouts import smallest
from dwindle.pruning.pacing import Pacing
from dwindle.pruning.pruner import Pruner
from dwindle.pruning.surgery import Prunable
from dwindle.pruning.target import Shape, Target
from dwindle.run.memory import footprint
from dwindle.training.callbacks import Callback
from dwindle.training.compiling import compile_blocks
from dwindle.training.config import TrainingConfig
from dwindle.training.distill import Distillation, HiddenStates, Teacher
from dwindle.training.float8 import use_float8
from dwindle.training.flops import PEAK_FLOPS, flops_per_token
from dwindle.training.loop import Trainer
from dwindle.training.moments import Moments
from dwindle.training.optim import LRSchedule, build_optimizer

UNEQUAL = ("unequal-ffn", "unequal-heads", "unequal-groups")
"""Rows whose layers differ in FFN width, in numbers of heads as well, and in irregular groups of query heads."""
ROWS = ("baseline", "off", "pruning", "compacted", *KINDS, *UNEQUAL)
"""Rows named after a type of group measure the second-order update, with one event every nine steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainBench:
    """What to measure, and with which settings."""

    shape: str = "smollm-1.7b"
    rows: Sequence[str] = ROWS
    batch: int = 16
    """Sequences per step."""
    micro_batch: int = 0
    """Of them in one forward pass; 0: all."""
    seq_len: int = 2048
    steps: int = 20
    warmup: int = 4
    device: str = "cuda"
    precision: Precision = "bf16"
    compile: bool = True
    mode: str | None = None
    """Of torch.compile, such as ``max-autotune-no-cudagraphs``."""
    chunk_tokens: int = 4096
    fused_loss: bool = True
    bf16_residual: bool = False
    attention: str = "auto"
    """``flash``, ``cudnn``, or what torch chooses."""
    multiples: Sequence[int] = (64,)
    """Row compacted: the shape is rounded up to multiples of each of these."""
    rounded: int = 0
    """Row compacted: also a target whose widths are themselves the nearest multiples of this."""
    compacted_batches: Sequence[int] = ()
    """Row compacted: sequences per step, one row for each; as many as in the other rows by default."""
    gram_tokens: int = DEFAULT_GRAM_TOKENS
    """Rows with the second-order update: tokens of a step from which inputs are watched."""

    optimizer: Literal["adamw", "muon"] = "adamw"
    moments: Moments = "fp32"
    activation_checkpointing: bool = False
    metric: str = "taylor"
    cuda_graphs: bool = False
    """Row off: the passes of a step as one CUDA graph."""
    teacher: float = 0.0
    """Row off: weight of a teacher of the same shape."""

    @property
    def training(self) -> TrainingConfig:
        return TrainingConfig(
            tokens=1,
            lr=1e-4,
            optimizer=self.optimizer,
            moments=self.moments,
            activation_checkpointing=self.activation_checkpointing,
            ce_chunk_tokens=self.chunk_tokens,
            bf16_residual=self.bf16_residual,
            compile=self.compile,
            cuda_graphs=self.cuda_graphs,
        )

    def __post_init__(self) -> None:
        if self.shape not in SHAPES:
            raise UserError(f"--shape: {self.shape!r} is unknown: choose {', '.join(SHAPES)}")
        for option, value, allowed in (
            ("--device", self.device, ("cuda", "cpu")),
            ("--precision", self.precision, ("bf16", "fp8", "fp32")),
        ):
            if value not in allowed:
                raise UserError(f"{option}: {value!r} is unknown: choose {' or '.join(allowed)}")
        for number, option in ((self.steps, "--steps"), (self.warmup, "--warmup")):
            if number < 1:
                raise UserError(f"{option}: {number} must be at least 1")
        if "pruning" in self.rows and self.steps < 3:
            raise UserError(f"--steps: {self.steps} is too few for the row pruning, which takes turns: use at least 3")
        for row in self.rows:
            if row not in ROWS:
                raise UserError(f"--rows: {row!r} is unknown: choose from {', '.join(ROWS)}")


@dataclass(slots=True)
class TrainRow:
    """One line of the table."""

    name: str
    parameters: int
    tokens_per_s: float
    step_ms: float
    utilisation: float
    """Model FLOPs (6 per parameter and token, and attention's 12·L·H·d·T) over 989 TFLOP/s, the peak of bf16, also in
    fp8."""
    peak_bytes: int
    compile_s: float
    """The first step, compiling included."""
    loss: float
    details: dict[str, Any] = field(default_factory=dict)


class RandomTokens:
    """The same kind of batches for every row; made once, on the host, as real data is."""

    def __init__(self, bench: TrainBench, vocab: int) -> None:
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(0, vocab, (4, bench.batch, bench.seq_len + 1), generator=generator)
        self._tokens = tokens.pin_memory() if bench.device == "cuda" else tokens
        self._micro_batch = bench.micro_batch or bench.batch
        self.num_tokens_per_step = self.num_predictions = bench.batch * bench.seq_len
        self._step = 0

    def next_step(self) -> list[Tensor]:
        self._step += 1
        return list(torch.split(self._tokens[self._step % len(self._tokens)], self._micro_batch))

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to load."""


class Clock(Callback):
    """Seconds of every step, with the device synchronised."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.seconds: list[float] = []
        self._last = 0.0

    def on_start(self, trainer: Trainer) -> None:
        self._last = self._now()

    def after_step(self, trainer: Trainer) -> None:
        now = self._now()
        self.seconds.append(now - self._last)
        self._last = now

    def _now(self) -> float:
        synchronize(self.device)
        return time.perf_counter()


def build_model(bench: TrainBench) -> Any:
    """Random weights in fp32, made on the device."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(**SHAPES[bench.shape])
    torch.manual_seed(0)
    with torch.device(bench.device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model.train()


def prepare(bench: TrainBench, model: nn.Module) -> torch.optim.Optimizer:
    if bench.precision == "fp8":
        use_float8(model)
    if bench.compile:
        compile_blocks(model, mode=bench.mode)
    return build_optimizer(model, bench.training)


def predicted_bytes(bench: TrainBench, config: Any) -> int:
    """The peak that the plan of such a run predicts."""
    tokens = min(bench.micro_batch or bench.batch, bench.batch) * bench.seq_len
    return footprint(config, bench.training, bench.precision).total(tokens)


def make_trainer(
    bench: TrainBench, model: Any, optimizer: torch.optim.Optimizer, callbacks: list[Callback], turns: int = 1
) -> Trainer:
    trainer = Trainer(
        model,
        optimizer,
        LRSchedule(kind="constant", lr=1e-4, num_steps=10**6),
        RandomTokens(bench, model.config.vocab_size),
        config=bench.training,
        num_steps=bench.warmup + turns * bench.steps,
        device=bench.device,
        precision=bench.precision,
        callbacks=callbacks,
        teacher=make_teacher(bench) if bench.teacher else None,
    )
    trainer.fused_loss = bench.fused_loss and bench.compile
    return trainer


def make_teacher(bench: TrainBench) -> Teacher:
    """A frozen model of the same shape in bf16, compiled like the student."""
    model = build_model(bench).to(torch.bfloat16)
    if bench.compile:
        compile_blocks(model, mode=bench.mode)
    return Teacher.of(HiddenStates(model), Distillation(bench.teacher))


def make_pruner(
    bench: TrainBench,
    prunable: Prunable,
    pacing: Pacing,
    folder: Path,
    *,
    groups: tuple[Kind, ...] = KINDS,
    second_order: bool = False,
) -> Pruner:
    """Prunes towards the smallest possible model, which no benchmark reaches; never compacts by itself."""
    anatomy = prunable.anatomy
    config = PretrainPruneConfig(
        selection="coupled",
        metric=bench.metric,
        groups=list(groups),
        compact_threshold=1.0,
        second_order=second_order,
        gram_tokens=bench.gram_tokens,
    )
    full = Shape.of(anatomy.source)
    least = Shape(
        config.min_hidden if "stem" in groups else full.hidden,
        config.min_heads if "attn" in groups else full.heads,
        config.min_ffn if "ffn" in groups else full.ffn,
        full.layers,
    )
    return Pruner(
        prunable,
        Target(anatomy.count(smallest(anatomy.source, least)).total),
        pacing,
        config=config,
        ledger=folder / "ledger.jsonl",
        source=bench.shape,
        rebuild=lambda fresh: prepare(bench, fresh),
    )


def make_row(
    name: str,
    bench: TrainBench,
    anatomy: Anatomy,
    structure: Structure,
    seconds: list[float],
    loss: float,
    batch: int | None = None,
) -> TrainRow:
    """``seconds`` are of all steps, beginning with the warm-up."""
    per_step = median_high(seconds[bench.warmup :])
    tokens_per_s = (batch or bench.batch) * bench.seq_len / per_step
    peak = torch.cuda.max_memory_allocated() if bench.device == "cuda" else 0
    return TrainRow(
        name=name,
        parameters=anatomy.count(structure).total,
        tokens_per_s=tokens_per_s,
        step_ms=1000 * per_step,
        utilisation=tokens_per_s * flops_per_token(anatomy, structure, bench.seq_len) / PEAK_FLOPS["H200"],
        peak_bytes=peak,
        compile_s=seconds[0],
        loss=loss,
    )


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def reset_peak(device: str) -> None:
    gc.collect()  # the model of the row before refers to itself through its hooks
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def set_attention(kind: str) -> None:
    """Leave torch only one fast kernel to choose from."""
    if kind == "auto":
        return
    if kind not in ("flash", "cudnn"):
        raise UserError(f"--attention: {kind!r} is unknown: choose auto, flash or cudnn")
    torch.backends.cuda.enable_flash_sdp(kind == "flash")
    torch.backends.cuda.enable_cudnn_sdp(kind == "cudnn")
    torch.backends.cuda.enable_mem_efficient_sdp(False)


def device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "CPU"


def versions() -> dict[str, str]:
    import transformers

    return {"torch": torch.__version__, "transformers": transformers.__version__}
