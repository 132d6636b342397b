"""Training speed of a named shape: our loop, with and without pruning and after compaction, beside plain transformers.

Weights are random and built on the device, tokens too: speed depends on neither. All rows are measured in one run, one
after the other, and pruning on and off also in turns on the same model, because clocks drift by more than 1 %.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median_high
from typing import Any

import torch
from rich.console import Console, Group
from rich.table import Table

from benchmarks.train_parts import (
    UNEQUAL,
    Clock,
    RandomTokens,
    TrainBench,
    TrainRow,
    build_model,
    device_name,
    make_pruner,
    make_row,
    make_trainer,
    predicted_bytes,
    prepare,
    reset_peak,
    set_attention,
    synchronize,
    versions,
)
from dwindle.anatomy.anatomy import Anatomy, cut
from dwindle.anatomy.structure import KINDS, Kind, Structure
from dwindle.commands.main import run_command
from dwindle.core.errors import UserError
from dwindle.core.sizes import format_bytes, format_count
from dwindle.distributed.precision import autocast_for
from dwindle.pruning.compaction import rounded_up
from dwindle.pruning.pacing import Ratio
from dwindle.pruning.pruner import Pruner
from dwindle.pruning.surgery import Prunable
from dwindle.pruning.target import sizes_text
from dwindle.training.callbacks import Validator
from dwindle.training.compiling import forget_graphs
from dwindle.training.config import TrainingConfig
from dwindle.training.float8 import check_float8
from dwindle.training.loop import Trainer
from dwindle.training.optim import build_optimizer

COMPACTED = {"smollm-1.7b": (1180, 19, 3030), "tiny": (40, 3, 90)}
"""(hidden, heads, FFN) to compact to; other shapes: three fifths of each."""

CYCLE = 9
"""Steps for each event of the second-order rows."""


@dataclass(slots=True)
class InTurns:
    """Pacing of the bench: one group after every step, in every second block of steps.

    One is also removed in the last step of the warm-up: scoring is compiled when first used.
    """

    first_step: int
    block: int = 5
    last_step: int | None = None

    def active(self, step: int) -> bool:
        return step == self.first_step or self.measured(step)

    def measured(self, step: int) -> bool:
        return step > self.first_step and ((step - self.first_step - 1) // self.block) % 2 == 1

    def due(self, step: int, num_parameters: int, num_events: int) -> bool:
        return num_events < sum(self.active(s) for s in range(step + 1)) and self.active(step)

    def aim(self, step: int) -> int | None:
        return None

    def next_step(self, step: int, num_parameters: int, num_events: int) -> int | None:
        return step


def measure_training(bench: TrainBench, out: Path | None, report: Callable[[str], None] = print) -> list[TrainRow]:
    """All rows in order; each is printed, and appended to ``out/train.jsonl``, as soon as it is there."""
    rows: list[TrainRow] = []
    set_attention(bench.attention)
    if bench.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device: cuda is not available on this machine: use cpu")
    if bench.precision == "fp8":
        check_float8(bench.device, "--precision")
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
    if "compacted" in bench.rows and bench.rounded:
        yield from rounded(bench)
    for kind in KINDS:
        if kind in bench.rows:
            yield second_order(bench, kind)
    for name in UNEQUAL:
        if name in bench.rows:
            yield unequal(bench, name)


def baseline(bench: TrainBench) -> TrainRow:
    """Plain transformers: the whole model compiled, its own loss, fused AdamW, gradient clipping."""
    model = build_model(bench)
    anatomy = Anatomy.of(model)
    optimizer = build_optimizer(model, TrainingConfig(tokens=1, lr=1e-4))
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
    forget_graphs()
    return row


def pruning_off(bench: TrainBench) -> TrainRow:
    """Our loop without a pruner: stock norms. The peak of memory stands beside that of ``pretrain --dry-run``."""
    model = build_model(bench)
    anatomy = Anatomy.of(model)
    clock = Clock(bench.device)
    trainer = make_trainer(bench, model, prepare(bench, model), [clock])
    reset_peak(bench.device)
    trainer.run()
    assert trainer.last is not None
    row = make_row("off", bench, anatomy, anatomy.source, clock.seconds, trainer.last.loss)
    predicted = predicted_bytes(bench, model.config)
    row.details = {"predicted_peak_gb": predicted / 1e9, "peak_gb": row.peak_bytes / 1e9}
    if row.peak_bytes:
        row.details["predicted_to_measured"] = predicted / row.peak_bytes
    return row


def pruning_and_compaction(bench: TrainBench) -> Iterator[TrainRow]:
    """One group after every step, in turns with none; then the same run goes on at the compacted shapes."""
    with tempfile.TemporaryDirectory() as folder:
        trainer, pruner, clock = pruned_run(bench, Path(folder))
        prunable = pruner.prunable
        if "pruning" in bench.rows:
            trainer.run()
            yield pruning_row(bench, trainer, pruner, clock)
        if "compacted" in bench.rows:
            prunable.restore(smaller(prunable.alive, COMPACTED.get(bench.shape)))
            for multiple in sorted(bench.multiples, reverse=True):  # each shape is cut out of the one before
                yield from compacted(bench, trainer, pruner, clock, multiple)


def rounded(bench: TrainBench) -> Iterator[TrainRow]:
    """A target whose own widths are the nearest multiples (``prune.round_to``), so no padding."""
    with tempfile.TemporaryDirectory() as folder:
        trainer, pruner, clock = pruned_run(bench, Path(folder))
        exact = smaller(pruner.prunable.alive, COMPACTED.get(bench.shape))
        hidden, ffn = (
            max(1, round(n / bench.rounded)) * bench.rounded for n in (len(exact.hidden), len(exact.layers[0].ffn))
        )
        pruner.prunable.restore(smaller(pruner.prunable.alive, (hidden, len(exact.layers[0].query_heads), ffn)))
        yield from compacted(bench, trainer, pruner, clock, bench.rounded, "rounded")


def pruned_run(bench: TrainBench, folder: Path) -> tuple[Trainer, Pruner, Clock]:
    """A run that prunes in turns, not begun yet."""
    model = build_model(bench)
    prunable, clock = Prunable(model), Clock(bench.device)
    pruner = make_pruner(bench, prunable, InTurns(bench.warmup), folder)
    trainer = make_trainer(bench, model, prepare(bench, model), [pruner, clock], turns=2)
    reset_peak(bench.device)
    return trainer, pruner, clock


def pruning_row(bench: TrainBench, trainer: Trainer, pruner: Pruner, clock: Clock) -> TrainRow:
    pacing, anatomy = pruner.pacing, pruner.prunable.anatomy
    assert isinstance(pacing, InTurns)
    steps = list(enumerate(clock.seconds, start=1))
    on = [s for step, s in steps if pacing.measured(step)]
    off = [s for step, s in steps if step > bench.warmup and not pacing.measured(step)]
    assert trainer.last is not None
    row = make_row("pruning", bench, anatomy, anatomy.source, clock.seconds[: bench.warmup] + on, trainer.last.loss)
    row.details = {"events": pruner.num_events, "slower_than_off_in_turns": median_high(on) / median_high(off) - 1}
    return row


def second_order(bench: TrainBench, kind: Kind) -> TrainRow:
    """Events of one type with the second-order update, every nine steps; the eight between are the comparison."""
    model = build_model(bench)
    prunable = Prunable(model)
    anatomy = prunable.anatomy
    clock = Clock(bench.device)
    cycles = 1 + max(2, bench.steps // CYCLE)  # the first compiles
    with tempfile.TemporaryDirectory() as folder:
        pacing = Ratio(1, CYCLE, 0)
        pruner = make_pruner(bench, prunable, pacing, Path(folder), groups=(kind,), second_order=True)
        trainer = make_trainer(bench, model, prepare(bench, model), [pruner, clock])
        trainer.num_steps = cycles * CYCLE
        reset_peak(bench.device)
        trainer.run()
    assert trainer.last is not None and pruner.num_events == cycles
    seconds = clock.seconds[CYCLE:]
    events = seconds[CYCLE - 1 :: CYCLE]
    plain = [s for number, s in enumerate(seconds, 1) if number % CYCLE]
    row = make_row(kind, bench, anatomy, anatomy.source, clock.seconds[: bench.warmup] + plain, trainer.last.loss)
    extra = sum(events) / len(events) - median_high(plain)
    row.details = {"events": pruner.num_events, "extra_ms_of_an_event": 1000 * extra, "gram_tokens": bench.gram_tokens}
    row.details["slower_at_1_to_9"] = extra / (CYCLE * median_high(plain))
    return row


def compacted(
    bench: TrainBench, trainer: Trainer, pruner: Pruner, clock: Clock, multiple: int, name: str = "compacted"
) -> Iterator[TrainRow]:
    """The end of a long run: what would be pruned by then is zeroed, then compacted away.

    One row for every batch size.
    """
    prunable = pruner.prunable
    keep = rounded_up(prunable.alive, prunable.physical, multiple)
    synchronize(bench.device)
    started = time.perf_counter()
    pruner.compact(trainer, keep)
    synchronize(bench.device)
    rebuilt = time.perf_counter() - started
    pruner.pacing = InTurns(10**9)
    sizes = {"hidden": len(keep.hidden), "heads": len(keep.layers[0].query_heads), "ffn": len(keep.layers[0].ffn)}
    for number, batch in enumerate(bench.compacted_batches or [bench.batch]):
        clock.seconds.clear()
        trainer.batches = RandomTokens(replace(bench, batch=batch), trainer.model.config.vocab_size)  # type: ignore[union-attr, arg-type]
        trainer.num_steps = trainer.step + bench.warmup + bench.steps
        reset_peak(bench.device)
        trainer.run()
        assert trainer.last is not None
        row = make_row(
            f"{name}-{multiple}", bench, prunable.anatomy, prunable.alive, clock.seconds, trainer.last.loss, batch
        )
        row.details = {"shape": sizes, "batch": batch}
        if number == 0:
            first, usual = clock.seconds[0], median_high(clock.seconds[bench.warmup :])
            row.details |= {"compaction_s": rebuilt, "compaction_and_recompile_s": rebuilt + first - usual}
        yield row


def unequal(bench: TrainBench, name: str) -> TrainRow:
    """Our loop on layers of different sizes, then a validation: seconds of all compiling in a run without pruning."""
    whole = build_model(bench)
    anatomy = Anatomy.of(whole)
    keep = different(anatomy.source, name)
    model: Any = cut(whole, anatomy, keep, anatomy.source)
    del whole
    forget_graphs()
    model, clock = model.to(bench.device).train(), Clock(bench.device)
    trainer = make_trainer(bench, model, prepare(bench, model), [clock])
    reset_peak(bench.device)
    trainer.run()
    assert trainer.last is not None
    row = make_row(name, bench, anatomy, keep, clock.seconds, trainer.last.loss)
    windows = torch.randint(0, model.config.vocab_size, (10, bench.seq_len + 1))  # 8 at a time, then 2
    validator, passes = Validator(windows, 0), list[float]()
    for _ in range(2):
        started = time.perf_counter()
        validator.measure(trainer)
        passes.append(time.perf_counter() - started)
    training = sum(clock.seconds) - len(clock.seconds) * median_high(clock.seconds[bench.warmup :])
    row.details = {
        "all_compiling_s": training + passes[0] - passes[1],
        "of_training_s": training,
        "heads": " ".join(sorted({"+".join(map(str, layer.queries_per_kv)) for layer in keep.layers})),
        "ffn": f"{min(len(layer.ffn) for layer in keep.layers)}–{max(len(layer.ffn) for layer in keep.layers)}",
    }
    return row


def different(structure: Structure, name: str) -> Structure:
    """A sixth to two thirds of the FFN channels, spread over the layers; two or more key/value heads if there are."""
    layers, last = [], max(1, len(structure.layers) - 1)
    for number, layer in enumerate(structure.layers):
        width = len(layer.ffn) // 6 + len(layer.ffn) * (7 * number % (last + 1)) // (2 * last)
        layer = replace(layer, ffn=layer.ffn[: width - width % 8])
        per_kv, kv_heads = layer.queries_per_kv[0], layer.kv_heads
        if name != "unequal-ffn" and len(kv_heads) > 2:
            kv_heads = kv_heads[: len(kv_heads) - number % 2]
        kept: list[int] = []
        for place, kv in enumerate(kv_heads):
            sizes = {"unequal-ffn": per_kv, "unequal-heads": max(min(2, per_kv), per_kv - number // 2 % 2)}
            kept += layer.queries_of(kv)[: sizes.get(name, 1 + (number + place) % per_kv)]
        layers.append(layer.without(query_heads=set(layer.query_heads) - set(kept)))
    return Structure(structure.hidden, tuple(layers))


def smaller(structure: Structure, wanted: tuple[int, int, int] | None) -> Structure:
    """Keeps the first channels and heads of each layer; which ones does not matter for speed."""
    first = structure.layers[0]
    sizes = wanted or tuple(n * 3 // 5 for n in (len(structure.hidden), len(first.query_heads), len(first.ffn)))
    hidden, heads, ffn = sizes
    layers = tuple(
        replace(la, query_heads=la.query_heads[:heads], kv_of_query=la.kv_of_query[:heads], ffn=la.ffn[:ffn])
        for la in structure.layers
    )
    return Structure(structure.hidden[:hidden], layers)


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
        found = {"first_step_s": row.compile_s} | row.details
        notes.append(f"{row.name}: {', '.join(_in_words(key, value) for key, value in found.items())}")
    return Group(table, *notes, "MFU: model FLOPs against 989 TFLOP/s, dense bf16 of one H200, in every precision")


def _in_words(key: str, value: Any) -> str:
    """One detail of a row, whose keys are made for JSON: ``compaction_s`` of 0.81 is ``compaction 0.81 s``."""
    name = key.removesuffix("_s").replace("_", " ")
    if isinstance(value, dict):
        return f"{name} ({sizes_text(value)})"
    if key.startswith("slower"):
        return f"{name} {100 * value:.2f} %"
    if isinstance(value, float):
        return f"{name} {value:.2f}" + (" s" if key.endswith("_s") else "")
    return f"{name} {value}"


def parse_arguments(arguments: Sequence[str] | None = None) -> tuple[TrainBench, Path | None, bool]:
    """The benchmark, the folder for its rows, and whether to print JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.train", description=__doc__)
    add = parser.add_argument
    add("--shape", default="smollm-1.7b", help="llama-7b, smollm-1.7b, smollm2-360m, smollm2-135m or tiny")
    add("--rows", default="baseline,off,pruning,compacted", help=f"also {', '.join((*KINDS, *UNEQUAL))}")
    add("--batch", type=int, default=16, help="sequences per step")
    add("--micro-batch", type=int, default=0, help="sequences per forward pass; default: all of a step")
    add("--seq-len", type=int, default=2048, help="tokens per sequence")
    add("--steps", type=int, default=20, help="measured steps per row")
    add("--warmup", type=int, default=4, help="steps before them that are not measured, at least 1")
    add("--device", default="cuda", help="cuda or cpu")
    add("--precision", default="auto", help="bf16, fp8 (our rows; the baseline in bf16), fp32, or auto: bf16 on a GPU")
    add("--compile", action=argparse.BooleanOptionalAction, default=True, help="torch.compile, per block in our rows")
    add("--optimizer", default="adamw", choices=["adamw", "muon"], help="of our rows")
    add("--moments", default="fp32", choices=["fp32", "bf16"], help="how moments are stored, in our rows")
    add("--activation-checkpointing", action="store_true", help="recompute activations, in our rows")
    add("--metric", default="taylor", help="saliency of the pruning rows, such as group")
    add("--mode", help="of torch.compile, such as max-autotune-no-cudagraphs")
    add("--chunk-tokens", type=int, default=4096, help="tokens whose logits exist at once")
    add("--fused-loss", action=argparse.BooleanOptionalAction, default=True, help="compile the loss")
    add("--cuda-graphs", action="store_true", help="start the passes of a step as one CUDA graph")
    add("--teacher", type=float, default=0.0, help="weight of a teacher of the same shape; 0 is none")
    add("--bf16-residual", action="store_true", help="residual stream in bf16")
    add("--attention", default="auto", help="flash, cudnn or auto")
    add("--multiples", default="64", help="compact to multiples of these, such as 64,128")
    add("--rounded", type=int, default=0, help="also compact to a target of the nearest multiples of this")
    add("--compacted-batch", default="", help="sequences per step after compaction, such as 16,32; default: --batch")
    add("--gram-tokens", type=int, default=4096, help="tokens watched for a second-order update")
    add("--out", type=Path, help="folder for train.jsonl, a line per row")
    add("--json", action="store_true", help="print one JSON object instead of a table")
    given = vars(parser.parse_args(arguments))
    out, as_json = given.pop("out"), given.pop("json")
    if given["precision"] == "auto":
        given["precision"] = "bf16" if given["device"] == "cuda" else "fp32"
    given["rows"] = [row.strip() for row in given["rows"].split(",")]
    given["multiples"] = whole_numbers(given["multiples"], "--multiples")
    given["compacted_batches"] = whole_numbers(given.pop("compacted_batch"), "--compacted-batch")
    return TrainBench(**given), out, as_json


def whole_numbers(text: str, option: str) -> list[int]:
    """``64,128`` as numbers."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise UserError(f"{option} {text}: not whole numbers above 0: write them as 64,128")
    return [int(part) for part in parts]


def main() -> None:
    bench, out, as_json = parse_arguments()
    found = measure_training(bench, out, lambda line: print(line, file=sys.stderr, flush=True))
    if as_json:
        print(json.dumps({"rows": [asdict(row) for row in found]}))
    else:
        Console().print(render(found, bench))


if __name__ == "__main__":
    run_command(main)
