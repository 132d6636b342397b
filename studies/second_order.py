"""The second-order update (EfficientLLM-B) and the metrics: what they gain without training, and what they cost.

    PYTHONPATH=src python3 studies/second_order.py quality --model DIR --data textbooks.train.jsonl.xz \\
        --valid textbooks.valid.jsonl.xz --out OUT
    PYTHONPATH=src python3 studies/second_order.py cost --out OUT           # SmolLM-1.7B shape, 1:9, one GPU
    PYTHONPATH=src python3 studies/second_order.py solve --out OUT          # the linear algebra alone

Each prints its table last and writes JSON (and the figure of ``quality``) to ``--out``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from dwindle.compare import CompareOptions, compare
from dwindle.pruning.gram import Downdate, Gram, Sample, removal_update, spread
from dwindle.pruning.pacing import Ratio
from dwindle.pruning.pruner import Pruner, PrunerOptions
from dwindle.pruning.selection import SelectionOptions
from dwindle.pruning.surgery import Prunable
from dwindle.pruning.target import Target
from dwindle.training.callbacks import Callback
from dwindle.training.engine import compile_blocks
from dwindle.training.loop import Trainer, TrainerOptions
from dwindle.training.optim import LRSchedule, build_adamw

SMOLLM_1_7B = {
    "vocab_size": 49152,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "tie_word_embeddings": True,
}
TINY = {
    "vocab_size": 257,
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["quality", "cost", "solve"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--data", action="append")
    parser.add_argument("--valid", action="append")
    parser.add_argument("--metrics", default="taylor,taylor1,obd,wanda,obc,magnitude,random")
    parser.add_argument("--to", default="10%nonemb,20%nonemb,30%nonemb")
    parser.add_argument("--sequences", type=int, default=128)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--valid-tokens", type=int, default=131072)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="cost: a tiny model, to try the script on a CPU")
    parser.add_argument("--batch", type=int, default=16, help="cost: sequences in a step")
    parser.add_argument("--length", type=int, default=2048, help="cost: tokens in a sequence")
    parser.add_argument("--steps", type=int, default=45)
    parser.add_argument("--warmup", type=int, default=18, help="cost: steps that are not counted (compilation)")
    parser.add_argument("--gram-tokens", type=int, default=4096)
    parser.add_argument("--no-compile", action="store_true")
    return parser.parse_args()


def quality(args: argparse.Namespace) -> Table:
    result = compare(
        args.model,
        metrics=args.metrics.split(","),
        to=args.to.split(","),
        second_order=True,
        data=args.data or [],
        valid=args.valid or [],
        out=args.out,
        overwrite=True,
        options=CompareOptions(
            num_sequences=args.sequences,
            seq_len=args.seq_len,
            valid_tokens=args.valid_tokens,
            seed=args.seed,
            device=args.device,
        ),
    )
    return result.render()


class RandomTokens:
    """Steps of tokens that mean nothing: only time is measured."""

    def __init__(self, vocabulary: int, batch: int, length: int) -> None:
        self.vocabulary, self.shape = vocabulary, (batch, length + 1)

    def next_step(self) -> list[Tensor]:
        return [torch.randint(1, self.vocabulary, self.shape)]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Clock(Callback):
    """Wall-clock of every step with everything that belongs to it, and whether groups left after it."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.steps: list[tuple[float, int]] = []
        self._last = 0.0

    def on_start(self, trainer: Trainer) -> None:
        self._last = self._now()

    def after_step(self, trainer: Trainer) -> None:
        now = self._now()
        self.steps.append((now - self._last, int(trainer.extra_metrics.get("events", 0))))
        self._last = now

    def _now(self) -> float:
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def timed_run(args: argparse.Namespace, groups: tuple[str, ...], second_order: bool | None) -> dict[str, Any]:
    """One run; ``second_order`` None is without pruning at all."""
    torch.manual_seed(0)
    sizes = TINY if args.tiny else SMOLLM_1_7B
    config = AutoConfig.for_model("llama", max_position_embeddings=args.length + 1, **sizes)
    with torch.device(args.device):
        model = AutoModelForCausalLM.from_config(config).float()
    num_steps = args.warmup + args.steps
    clock = Clock(args.device)
    callbacks: list[Callback] = []
    if second_order is not None:
        prunable = Prunable(model)
        pruner = Pruner(
            prunable,
            Target(prunable.num_parameters * 9 // 10),
            Ratio(1, 9, 0),
            selection=SelectionOptions(groups=groups),  # type: ignore[arg-type]
            options=PrunerOptions(second_order=second_order, gram_tokens=args.gram_tokens, compact_threshold=1.0),
            ledger=args.out / "ledger.jsonl",
            source="random",
            rebuild=lambda fresh: build_adamw(fresh, lr=1e-5),
        )
        callbacks.append(pruner)
    if not args.no_compile:
        compile_blocks(model)
    trainer = Trainer(
        model,
        build_adamw(model, lr=1e-5),
        LRSchedule(kind="constant", lr=1e-5, num_steps=num_steps),
        RandomTokens(sizes["vocab_size"], args.batch, args.length),
        options=TrainerOptions(
            num_steps=num_steps, device=args.device, precision="bf16" if args.device == "cuda" else "fp32"
        ),
        callbacks=[*callbacks, clock],
    )
    if args.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    trainer.run()
    counted = clock.steps[args.warmup :]
    plain = [seconds for seconds, events in counted if not events]
    pruning = [seconds for seconds, events in counted if events]
    normal = statistics.median(plain)
    extra = statistics.mean(pruning) - normal if pruning else 0.0
    return {
        "groups": ",".join(groups) if second_order is not None else "-",
        "run": {None: "no pruning", False: "A", True: "B (second order)"}[second_order],
        "step_ms": 1000 * normal,
        "pruning_step_ms": 1000 * statistics.mean(pruning) if pruning else None,
        "mean_step_ms": 1000 * statistics.mean(seconds for seconds, _ in counted),
        "overhead_at_1_to_9": extra / (9 * normal),
        "peak_memory_gb": torch.cuda.max_memory_allocated() / 1e9 if args.device == "cuda" else None,
    }


def cost(args: argparse.Namespace) -> Table:
    args.out.mkdir(parents=True, exist_ok=True)
    table = Table("groups", "run", "step, ms", "pruning step, ms", "overhead at 1:9", "peak memory, GB")
    rows = []
    plan: list[tuple[tuple[str, ...], bool | None]] = [(("ffn",), None)]
    plan += [((kind,), order) for kind in ("ffn", "attn", "stem") for order in (False, True)]
    for groups, order in plan:
        row = timed_run(args, groups, order)
        rows.append(row)
        print(json.dumps(row), flush=True)
        (args.out / "cost.json").write_text(json.dumps({"arguments": vars(args) | {"out": ""}, "rows": rows}, indent=1))
        pruning, memory = row["pruning_step_ms"], row["peak_memory_gb"]
        table.add_row(
            row["groups"],
            row["run"],
            f"{row['step_ms']:.1f}",
            f"{pruning:.1f}" if pruning is not None else "",
            f"{row['overhead_at_1_to_9']:.2%}" if pruning is not None else "",
            f"{memory:.1f}" if memory is not None else "",
        )
        if args.device == "cuda":
            torch.cuda.empty_cache()
    return table


def milliseconds(task: Callable[[], object], device: str, repeats: int = 5) -> float:
    times = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        task()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - started))
    return statistics.median(times[1:])


def solve(args: argparse.Namespace) -> Table:
    """One layer's update by every way there is: from the Gram, from the inputs, as a block or one after the other."""
    args.out.mkdir(parents=True, exist_ok=True)
    widths = [(256, 128), (256, 1024)] if args.tiny else [(2048, 4096), (8192, 4096), (8192, 32768)]
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    table = Table("inputs", "tokens", "columns", "gram, ms", "from gram, ms", "from inputs, ms", "downdates, ms")
    rows = []
    for width, tokens in widths:
        x = torch.randn(tokens, width, device=args.device, dtype=dtype)
        weight = torch.randn(2048 if width > 1024 else 64, width, device=args.device)
        gram = Gram()
        gram.add(x)
        for count in (1, 4, 64):
            gone, kept = torch.arange(count, device=args.device), torch.arange(count, width, device=args.device)

            def block(seen: Gram | Sample, gone: Tensor = gone, kept: Tensor = kept, w: Tensor = weight) -> None:
                removal_update(w, gone, spread(seen.regression(gone, kept, 0.01).result(), kept, w.shape[1]))

            def downdates(gram: Gram = gram, gone: Tensor = gone, w: Tensor = weight) -> None:
                downdate = Downdate(gram.matrix_NN, 0.1)
                for column in gone:
                    downdate.remove(w, column[None])

            sample = Sample([x])

            def accumulate(x: Tensor = x) -> None:
                Gram().add(x)

            row = {
                "inputs": width,
                "tokens": tokens,
                "columns": count,
                "gram": milliseconds(accumulate, args.device),
                "from gram": milliseconds(lambda g=gram, b=block: b(g), args.device),  # type: ignore[misc]
                "from inputs": milliseconds(lambda s=sample, b=block: b(s), args.device),  # type: ignore[misc]
                "downdates": milliseconds(downdates, args.device),
            }
            rows.append(row)
            table.add_row(*(f"{value:.1f}" if isinstance(value, float) else str(value) for value in row.values()))
    (args.out / "solve.json").write_text(json.dumps(rows, indent=1))
    return table


def main() -> None:
    args = arguments()
    table = {"quality": quality, "cost": cost, "solve": solve}[args.what](args)
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
