"""Training speed of a named shape: our loop, with and without pruning and after compaction, beside plain transformers.

Weights are random and built on the device, tokens too: speed depends on neither. All rows are measured in one run, one
after the other, and pruning on and off also in turns on the same model, because clocks drift by more than 1 %.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Group
from rich.table import Table
from torch import Tensor, nn

from dwindle.anatomy import Anatomy, Structure
from dwindle.errors import UserError
from dwindle.pruning.pruner import Pruner, PrunerOptions
from dwindle.pruning.selection import SelectionOptions
from dwindle.pruning.surgery import Prunable
from dwindle.pruning.target import Target
from dwindle.sizes import format_bytes, format_count
from dwindle.training.callbacks import Callback
from dwindle.training.engine import compile_blocks
from dwindle.training.loop import Trainer, TrainerOptions
from dwindle.training.loss import Precision, autocast_for
from dwindle.training.optim import LRSchedule, build_adamw

H200_FLOPS = 989e12
"""Dense bf16, per second."""

SHAPES: dict[str, dict[str, Any]] = {
    name: {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    }
    for name, vocab, layers, hidden, heads, kv_heads, ffn in (
        ("smollm-1.7b", 49152, 24, 2048, 32, 32, 8192),
        ("smollm2-360m", 49152, 32, 960, 15, 5, 2560),
        ("smollm2-135m", 49152, 30, 576, 9, 3, 1536),
        ("tiny", 512, 3, 64, 4, 4, 192),
    )
}
"""Llama shapes by name."""
COMPACTED = {"smollm-1.7b": (1180, 19, 3030), "tiny": (40, 3, 90)}
"""(hidden, heads, FFN) to compact to; other shapes: three fifths of each."""
ROWS = ("baseline", "off", "pruning", "compacted")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainBench:
    """What to measure, and the levers."""

    shape: str = "smollm-1.7b"
    rows: Sequence[str] = ROWS
    batch: int = 16
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
    multiple: int = 64

    def __post_init__(self) -> None:
        if self.shape not in SHAPES:
            raise UserError(f"--shape: {self.shape!r} is unknown: choose {', '.join(SHAPES)}")
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
    """Model FLOPs (6 per parameter and token, and attention's 12·L·H·d·T) over 989 TFLOP/s."""
    peak_bytes: int
    compile_s: float
    """The first step, compiling included."""
    loss: float
    details: dict[str, Any] = field(default_factory=dict)


def flops_per_token(anatomy: Anatomy, structure: Structure, seq_len: int) -> float:
    """Forward and backward, with full attention counted as is usual; embeddings count once, as the head."""
    embedding = sum(row.full_shape[0] for row in anatomy.rows if row.is_embedding) * len(structure.hidden)
    head = max(row.full_shape[0] for row in anatomy.rows if row.is_embedding) * len(structure.hidden)
    weights = anatomy.count(structure).total - embedding + head
    attended = sum(len(layer.query_heads) for layer in structure.layers) * anatomy.head_dim
    return 6.0 * weights + 12.0 * attended * seq_len


class RandomTokens:
    """The same kind of batches for every row; made once, on the host, as real data is."""

    def __init__(self, bench: TrainBench, vocab: int) -> None:
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(0, vocab, (4, bench.batch, bench.seq_len + 1), generator=generator)
        self._tokens = tokens.pin_memory() if bench.device == "cuda" else tokens
        self.tokens_per_step = bench.batch * bench.seq_len
        self._step = 0

    def next_step(self) -> list[Tensor]:
        self._step += 1
        return [self._tokens[self._step % len(self._tokens)]]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to load."""


class Clock(Callback):
    """Seconds of every step, the device waited for."""

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


@dataclass(slots=True)
class InTurns:
    """Pacing of the bench: one group after every step, in every second block of steps."""

    first_step: int
    block: int = 5
    last_step: int | None = None

    def active(self, step: int) -> bool:
        return step > self.first_step and ((step - self.first_step - 1) // self.block) % 2 == 1

    def due(self, step: int, num_parameters: int, num_events: int) -> bool:
        return num_events < sum(self.active(s) for s in range(step + 1)) and self.active(step)

    def next_step(self, step: int, num_parameters: int, num_events: int) -> int | None:
        return step


def measure_training(bench: TrainBench, out: Path | None, report: Callable[[str], None] = print) -> list[TrainRow]:
    """All rows in order; each is printed, and appended to ``out/train.jsonl``, as soon as it is there."""
    rows: list[TrainRow] = []
    set_attention(bench.attention)
    if bench.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device: cuda is not available on this machine: use cpu")
    for row in _rows(bench):
        rows.append(row)
        report(json.dumps(asdict(row)))
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            with (out / "train.jsonl").open("a") as file:
                file.write(json.dumps({"bench": asdict(bench), "versions": versions(), **asdict(row)}) + "\n")
    return rows


def _rows(bench: TrainBench) -> Iterator[TrainRow]:
    if "baseline" in bench.rows:
        yield baseline(bench)
    if "off" in bench.rows:
        yield pruning_off(bench)
    if "pruning" in bench.rows or "compacted" in bench.rows:
        yield from pruning_and_compaction(bench)


def baseline(bench: TrainBench) -> TrainRow:
    """Plain transformers: the whole model compiled, its own loss, fused AdamW, gradient clipping."""
    model = build_model(bench)
    anatomy = Anatomy.of(model)
    optimizer = build_adamw(model, lr=1e-4)
    run: Any = torch.compile(model) if bench.compile else model
    batches = RandomTokens(bench, model.config.vocab_size)
    seconds, loss = [], torch.zeros(())
    reset_peak(bench.device)
    for _ in range(bench.warmup + bench.steps):
        started = time.perf_counter()
        for tokens in batches.next_step():
            tokens = tokens.to(bench.device, non_blocking=True)
            with autocast_for(bench.precision, bench.device):
                loss = run(input_ids=tokens[:, :-1], labels=tokens[:, :-1], use_cache=False).loss
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        synchronize(bench.device)
        seconds.append(time.perf_counter() - started)
    row = make_row("baseline", bench, anatomy, anatomy.source, seconds, float(loss))
    torch.compiler.reset()
    return row


def pruning_off(bench: TrainBench) -> TrainRow:
    """Our loop without a pruner: stock norms."""
    model = build_model(bench)
    anatomy = Anatomy.of(model)
    clock = Clock(bench.device)
    trainer = make_trainer(bench, model, prepare(bench, model), [clock])
    reset_peak(bench.device)
    trainer.run()
    assert trainer.last is not None
    return make_row("off", bench, anatomy, anatomy.source, clock.seconds, trainer.last.loss)


def pruning_and_compaction(bench: TrainBench) -> Iterator[TrainRow]:
    """One group after every step, in turns with none; then the same run goes on at the compacted shape."""
    model = build_model(bench)
    prunable = Prunable(model)
    anatomy = prunable.anatomy
    optimizer = prepare(bench, model)
    clock, pacing = Clock(bench.device), InTurns(bench.warmup)
    options = PrunerOptions(compact_threshold=1.0, compact_multiple=bench.multiple)
    selection = SelectionOptions()
    target = Target(anatomy.count(anatomy.source).total // 4)
    with tempfile.TemporaryDirectory() as folder:
        pruner = Pruner(
            prunable,
            target,
            pacing,
            selection=selection,
            options=options,
            ledger=Path(folder) / "ledger.jsonl",
            source=bench.shape,
            rebuild=lambda fresh: prepare(bench, fresh),
        )
        trainer = make_trainer(bench, model, optimizer, [pruner, clock], turns=2)
        del model, optimizer
        reset_peak(bench.device)
        if "pruning" in bench.rows:
            trainer.run()
            yield pruning_row(bench, trainer, prunable, clock, pacing, pruner.num_events)
        if "compacted" in bench.rows:
            yield compacted(bench, trainer, pruner, clock)


def pruning_row(
    bench: TrainBench, trainer: Trainer, prunable: Prunable, clock: Clock, pacing: InTurns, events: int
) -> TrainRow:
    steps = list(enumerate(clock.seconds, start=1))
    on = [s for step, s in steps if pacing.active(step)]
    off = [s for step, s in steps if step > bench.warmup and not pacing.active(step)]
    assert trainer.last is not None
    anatomy = prunable.anatomy
    row = make_row("pruning", bench, anatomy, anatomy.source, clock.seconds[: bench.warmup] + on, trainer.last.loss)
    row.details = {"events": events, "slower_than_off_in_turns": median(on) / median(off) - 1}
    return row


def compacted(bench: TrainBench, trainer: Trainer, pruner: Pruner, clock: Clock) -> TrainRow:
    """Straight to the end of a long run: what would have left by then is declared dead, and compacted away."""
    prunable = pruner.prunable
    prunable.restore(smaller(prunable.alive, COMPACTED.get(bench.shape)))
    keep = prunable.rounded(bench.multiple)
    synchronize(bench.device)
    started = time.perf_counter()
    pruner.compact(trainer, keep)
    synchronize(bench.device)
    rebuilt = time.perf_counter() - started
    pruner.pacing = InTurns(10**9)
    clock.seconds.clear()
    trainer.options = replace(trainer.options, num_steps=trainer.step + bench.warmup + bench.steps)
    reset_peak(bench.device)
    trainer.run()
    assert trainer.last is not None
    row = make_row("compacted", bench, prunable.anatomy, prunable.alive, clock.seconds, trainer.last.loss)
    first, usual = clock.seconds[0], median(clock.seconds[bench.warmup :])
    sizes = {"hidden": len(keep.hidden), "heads": len(keep.layers[0].query_heads), "ffn": len(keep.layers[0].ffn)}
    row.details = {"compaction_s": rebuilt, "compaction_and_recompile_s": rebuilt + first - usual, "shape": sizes}
    return row


def smaller(structure: Structure, wanted: tuple[int, int, int] | None) -> Structure:
    """The first channels and heads of each; which ones does not matter to speed."""
    first = structure.layers[0]
    sizes = wanted or tuple(n * 3 // 5 for n in (len(structure.hidden), len(first.query_heads), len(first.ffn)))
    hidden, heads, ffn = sizes
    layers = tuple(
        replace(la, query_heads=la.query_heads[:heads], kv_of_query=la.kv_of_query[:heads], ffn=la.ffn[:ffn])
        for la in structure.layers
    )
    return Structure(structure.hidden[:hidden], layers)


# Parts ------------------------------------------------------------------------------------------------------


def build_model(bench: TrainBench) -> Any:
    """Random weights in fp32, made on the device."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(**SHAPES[bench.shape])
    torch.manual_seed(0)
    with torch.device(bench.device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model.train()


def prepare(bench: TrainBench, model: nn.Module) -> torch.optim.Optimizer:
    if bench.compile:
        compile_blocks(model, mode=bench.mode)
    return build_adamw(model, lr=1e-4)


def make_trainer(
    bench: TrainBench, model: Any, optimizer: torch.optim.Optimizer, callbacks: list[Callback], turns: int = 1
) -> Trainer:
    steps = bench.warmup + turns * bench.steps
    return Trainer(
        model,
        optimizer,
        LRSchedule(kind="constant", lr=1e-4, num_steps=10**6),
        RandomTokens(bench, model.config.vocab_size),
        options=TrainerOptions(
            num_steps=steps,
            ce_chunk_tokens=bench.chunk_tokens,
            precision=bench.precision,
            fused_loss=bench.fused_loss and bench.compile,
            bf16_residual=bench.bf16_residual,
            device=bench.device,
        ),
        callbacks=callbacks,
    )


def make_row(
    name: str, bench: TrainBench, anatomy: Anatomy, structure: Structure, seconds: list[float], loss: float
) -> TrainRow:
    per_step = median(seconds[bench.warmup :])
    tokens_per_s = bench.batch * bench.seq_len / per_step
    peak = torch.cuda.max_memory_allocated() if bench.device == "cuda" else 0
    return TrainRow(
        name=name,
        parameters=anatomy.count(structure).total,
        tokens_per_s=tokens_per_s,
        step_ms=1000 * per_step,
        utilisation=tokens_per_s * flops_per_token(anatomy, structure, bench.seq_len) / H200_FLOPS,
        peak_bytes=peak,
        compile_s=seconds[0],
        loss=loss,
    )


def render(rows: Sequence[TrainRow], bench: TrainBench) -> Group:
    """The table, with ratios against the baseline and against pruning off, and a line of details per row."""
    title = f"{bench.shape}, {bench.batch} × {bench.seq_len} tokens, {bench.precision}, {device_name(bench.device)}"
    table = Table(title=title, title_justify="left")
    for column in ("", "params", "tokens/s", "MFU", "peak", "× baseline", "× off"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    by_name = {row.name: row for row in rows}
    notes = []
    for row in rows:
        ratios = [
            f"{row.tokens_per_s / by_name[other].tokens_per_s:.3f}" if other in by_name else "–"
            for other in ("baseline", "off")
        ]
        table.add_row(
            row.name,
            format_count(row.parameters),
            f"{row.tokens_per_s:,.0f}",
            f"{100 * row.utilisation:.1f} %",
            format_bytes(row.peak_bytes) if row.peak_bytes else "–",
            *ratios,
        )
        found = {"first step": f"{row.compile_s:.1f} s"} | row.details
        texts = (f"{key} {value:.4f}" if isinstance(value, float) else f"{key} {value}" for key, value in found.items())
        notes.append(f"{row.name}: {', '.join(texts)}")
    return Group(table, *notes, "MFU: model FLOPs against 989 TFLOP/s, dense bf16 of one H200")


def median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def reset_peak(device: str) -> None:
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
