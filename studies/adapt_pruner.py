"""Adapt-Pruner compared with uniform layers, without training, as in Tables 1 and 8 of its paper.

    python studies/adapt_pruner.py --data textbooks.train.jsonl.xz --wikitext wikitext-2-raw.test.txt \\
        --sizes 80%nonemb,60%nonemb --seeds 0,1,2 --rows uniform,adapt --out docs/results/adapt-pruner.json

``amplitude-0.01`` is ``adapt`` with that amplitude; ``-ratio`` after a name removes equal shares of a layer's heads and
channels (as LLM-Pruner does) instead of its least salient groups; ``global`` removes the least salient group anywhere.
The JSON grows row by row; call it again to continue.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from pathlib import Path
from typing import Any

import tables
from common import DEVICE
from measures import commit

import dwindle
from dwindle.commands.main import run_command
from dwindle.core.files import write_text_atomic
from dwindle.data.text_windows import validation_windows
from dwindle.training.loss import evaluate_loss


def options_of(row: str, args: argparse.Namespace) -> dict[str, Any]:
    name = row.removesuffix("-ratio")
    balance = {} if name == row else {"balance": "ratio"}
    if name == "uniform":
        return {"method": "uniform", **balance}
    if name == "global":
        return {"selection": "global", "metric": "taylor1", "groups": ["attn", "ffn"], "rounds": args.iterations}
    amplitude = 0.02 if name == "adapt" else float(name.removeprefix("amplitude-"))
    return {"method": "adapt", "rounds": args.iterations, "amplitude": amplitude, **balance}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--data", required=True, help="calibration text")
    parser.add_argument("--wikitext", required=True)
    parser.add_argument("--rows", default="uniform,adapt")
    parser.add_argument("--sizes", default="80%nonemb,60%nonemb")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--iterations", type=int, default=50)
    parser.add_argument("--sequences", type=int, default=512, help="of 64 tokens")
    parser.add_argument("--valid-tokens", type=int, default=10**12)
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds after which no further row begins")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    started, loaded = time.monotonic(), dwindle.load(args.model, device=DEVICE)
    content: dict[str, Any] = {"format": "dwindle-study-1", "study": "adapt_pruner", "rows": []}
    if args.out.is_file():
        content = json.loads(args.out.read_text(encoding="utf-8"))
    windows = validation_windows([args.wikitext], loaded.tokenizer, 1024, args.valid_tokens)
    common = {"sequences": args.sequences, "iterations": args.iterations}
    for seed, size, row in itertools.product(
        map(int, args.seeds.split(",")), args.sizes.split(","), args.rows.split(",")
    ):
        key = {"row": row, "size": size, "seed": seed, **common}
        if any(all(r[k] == v for k, v in key.items()) for r in content["rows"]):
            continue
        if time.monotonic() - started > args.budget:
            print("the budget is used up: call again to continue")
            break
        begun = time.monotonic()
        result = dwindle.prune(
            loaded,
            size,
            data=[args.data],
            sequences=args.sequences,
            seq_len=64,
            seed=seed,
            device=DEVICE,
            measure=False,
            **options_of(row, args),
        )
        seconds = round(time.monotonic() - begun, 1)
        loss = evaluate_loss(result.model, windows, batch=16, chunk_tokens=8192)
        layers = [[len(la.kv_heads), len(la.ffn)] for la in result.structure.layers]
        record = key | {"parameters": result.after.total, "wikitext2": loss, "seconds": seconds, "layers": layers}
        record |= {"machine": DEVICE, "commit": commit()}
        content["rows"].append(record)
        write_text_atomic(args.out, json.dumps(content, indent=1) + "\n", option="--out")
        print(json.dumps({k: v for k, v in record.items() if k != "layers"}), flush=True)
    print(tables.layer_adaptive(content))


if __name__ == "__main__":
    run_command(main)
