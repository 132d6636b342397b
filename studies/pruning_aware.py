"""Pruning-aware pretraining against one-shot pruning with the same tokens; one table and one JSON file.

    python studies/pruning_aware.py --model smollm2-135m --train textbooks.train.jsonl.xz \\
        --valid textbooks.valid.jsonl.xz --also wikitext-2-raw.test.txt --tokens 16M --out studies/out
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import dwindle
from dwindle.pretrain import pretrain
from dwindle.recipe import CheckpointConfig, ModelConfig, PruneConfig, Recipe, TrainingConfig
from dwindle.training.data import DataConfig, validation_windows
from dwindle.training.loss import evaluate_loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("--model", "--train", "--valid", "--also", "--out"):
        parser.add_argument(name, required=name != "--also")
    parser.add_argument("--tokens", default="16M")
    parser.add_argument("--target", default="50%nonemb")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--horizons", type=float, nargs="*", default=[0.1])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--tokens-per-step", type=int, default=65536)
    parser.add_argument("--calibration", type=int, default=128)
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()
    out = Path(args.out)

    def recipe(model: str, prune: PruneConfig) -> Recipe:
        training = TrainingConfig(
            tokens=args.tokens, tokens_per_step=args.tokens_per_step, lr=args.lr, seed=args.seed, compile=args.compile
        )
        data = DataConfig(train=[args.train], valid=[args.valid], seq_len=args.seq_len, cache_dir=str(out / "cache"))
        checkpoint = CheckpointConfig(every=0)
        return Recipe(source=ModelConfig(model=model), data=data, training=training, prune=prune, checkpoint=checkpoint)

    rows: list[dict[str, Any]] = []

    def record(name: str, run: Path) -> None:
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        steady = sorted(line["time"]["tokens_per_s"] for line in lines)[len(lines) // 2]
        model, tokenizer = dwindle.load(run / "model", device=device)
        row = {"method": name, "parameters": sum(p.numel() for p in model.parameters()), "tokens": lines[-1]["tokens"]}
        row |= {"valid": lines[-1]["valid_loss"], "tokens_per_s": steady, "seed": args.seed, "lr": args.lr}
        if args.also:
            windows = validation_windows([args.also], tokenizer, args.seq_len, 10**9)
            row["also"] = evaluate_loss(model, windows, batch=8)
        rows.append(row)
        print(json.dumps(row), flush=True)
        (out / "pruning_aware.json").write_text(json.dumps(rows, indent=1) + "\n")

    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    out.mkdir(parents=True, exist_ok=True)
    for horizon in args.horizons:
        run = out / f"aware-{horizon}-{args.seed}"
        pretrain(recipe(args.model, PruneConfig(target=args.target, horizon=horizon)), run, overwrite=True)
        record(f"pruning-aware, horizon {horizon}", run)
    pruned = out / f"one-shot-{args.seed}"
    dwindle.prune(
        args.model,
        args.target,
        out=pruned,
        data=[args.train],
        num_sequences=args.calibration,
        seq_len=args.seq_len,
        seed=args.seed,
        device=device,
        overwrite=True,
    )
    pretrain(recipe(str(pruned), PruneConfig(enabled=False)), out / f"recovered-{args.seed}", overwrite=True)
    record("one-shot, then training", out / f"recovered-{args.seed}")


if __name__ == "__main__":
    main()
