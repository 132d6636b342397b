"""Renders the tables in the docs from the JSON files of the studies; a test checks that they match.

    python studies/tables.py            # rewrites the text between the markers
    python studies/tables.py --check    # reports whether it would

A table stands between ``<!-- table: NAME from results/FILE.json -->`` and ``<!-- end -->``. NAME is one of ``TABLES``;
the path is relative to the page; several files with commas give the rows of all. Tables of the training studies are in
``training_tables.py``, the others here.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import training_tables as training
from training_tables import markdown, spread

from dwindle.commands.main import run_command

ROOT = Path(__file__).resolve().parents[1]
MARKED = re.compile(r"(<!-- table: (\S+) from (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
PAGES = [
    page
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    if MARKED.search(page.read_text(encoding="utf-8"))
]
"""Every page with a marked table."""


def first_comparison(rows: Any) -> str:
    """The first comparison, whose file is one list of rows without tasks."""
    best = min(row["valid"] for row in rows)
    cells = [
        [
            row["method"],
            f"{row['parameters']:,}",
            f"{row['tokens']:,}",
            str(row["seed"]),
            f"**{row['valid']:.3f}**" if row["valid"] == best else f"{row['valid']:.3f}",
            f"{row['also']:.3f}",
            f"{row['tokens_per_s'] / 1000:.0f}k",
        ]
        for row in rows
    ]
    head = ["method", "parameters", "tokens", "seed", "textbooks", "WikiText-2", "median tokens/s"]
    return markdown(head, cells)


def metrics_without_training(data: Any) -> str:
    """Loss after pruning by each metric, without and with the second-order update."""
    ratios = list(dict.fromkeys(cell["ratio"] for cell in data["cells"]))
    names = list(dict.fromkeys(cell["metric"] for cell in data["cells"]))
    found = {(c["metric"], c["ratio"], c["second_order"]): c["loss"] for c in data["cells"]}
    rows = [["none removed", *[f"{data['loss']:.3f}"] * len(ratios)]]
    rows += [
        [name, *(" / ".join(f"{found[name, ratio, order]:.3f}" for order in (False, True)) for ratio in ratios)]
        for name in names
    ]
    return markdown(["metric", *(ratio.replace("nonemb", "") for ratio in ratios)], rows)


def layer_adaptive(data: Any) -> str:
    """Files of studies/adapt_pruner.py: WikiText-2 loss and token perplexity of every row, over seeds."""
    groups: dict[tuple[Any, ...], list[Any]] = {}
    for row in data["rows"]:
        groups.setdefault((row["size"], row["row"], row["sequences"], row["iterations"]), []).append(row)
    sizes = list(dict.fromkeys(size for size, *_ in groups))
    rows = [
        [
            size,
            name,
            f"{sequences} × 64",
            "–".join(f"{n:,}" for n in dict.fromkeys((min(counts), max(counts)))),
            ", ".join(str(r["seed"]) for r in seeds),
            spread([r["wikitext2"] for r in seeds]),
            spread([math.exp(r["wikitext2"]) for r in seeds], 1),
            f"{statistics.median(r['seconds'] for r in seeds):.0f}",
        ]
        for (size, name, sequences, _), seeds in sorted(groups.items(), key=lambda item: sizes.index(item[0][0]))
        for counts in [[r["parameters"] for r in seeds]]
    ]
    head = ["kept", "method", "calibration", "parameters", "seeds", "WikiText-2", "perplexity of a token", "seconds"]
    return markdown(head, rows)


MASKS_MISS = 0.02
PEER_NOTES = """
"non-emb." excludes embedding and head: a smaller hidden size shrinks them, and SliceGPT unties them. All trained rows
have one optimizer and rate; no method was tuned on its own (the ladder says what was tried). "pruning, s" was measured
on the H200 beside two to six other processes, so only its order of magnitude can be compared. Ours, LLM-Pruner and
Minitron score eight times, Adapt-Pruner fifty times.
"""


def unmet_masks(row: Any) -> str:
    """For learned masks: the kinds whose expected open share at the cut missed the shape's."""
    names = {"attn": "heads", "ffn": "FFN", "stem": "hidden"}
    missed = [
        f"{names[kind]} {one['expected']:.2f} (shape {one['shape']:.2f})"
        for kind, one in row.get("open_masks", {}).items()
        if abs(one["expected"] - one["shape"]) > MASKS_MISS
    ]
    return f"; masks open at the cut: {', '.join(missed)}" if missed else ""


def peers(data: Any) -> str:
    """Files of studies/peers.py: losses, tasks, decode speed relative to the source, and what the pruning took."""
    texts = {training.named(data, ["textbooks"])[0]: "textbooks", "mixed.test": "mixed.test", "WikiText-2": "wikitext2"}
    rows = []
    for seeds in training.grouped(data):
        first = seeds[0]
        seeds = [row for row in seeds if "refused" not in row] or seeds
        found = [first["size"] or "100%", first["title"].partition(", distilled")[0] + unmet_masks(seeds[0])]
        found += [f"{first['tokens'] / 1e6:.0f}M" if first["tokens"] else "", training.seed_numbers(seeds)]
        if "refused" in seeds[0]:
            rows.append([*found, f"not possible: {first['refused']}", *[""] * (len(texts) + 5)])
            continue
        found.append(f"{max(row['parameters'] for row in seeds) / 1e6:.1f}M")
        inner = [row["non_embedding"] for row in seeds if "non_embedding" in row]
        found.append(f"{max(inner) / 1e6:.1f}M" if inner else "")
        found += [spread([row[text] for row in seeds if text in row]) for text in texts.values()]
        tasks = [training.without_boolq(row) for row in seeds if "tasks" in row]
        found.append(training.percent(tasks) if tasks else "")
        found.append(spread([row["decode_speedup"] for row in seeds if "decode_speedup" in row], 2))
        costs = [row["pruning"] for row in seeds if "pruning" in row]
        found.append(f"{statistics.median(cost['seconds'] for cost in costs):.1f}" if costs else "")
        peaks = [cost["peak_bytes"] for cost in costs if cost["peak_bytes"]]
        found.append(f"{max(peaks) / 2**30:.2f}" if peaks else "")
        rows.append(found)
    head = ["size", "method", "tokens", "seeds", "parameters", "non-emb.", *texts, "six tasks, %", "decode ×"]
    return markdown(*training.filled([*head, "pruning, s", "pruning memory, GiB"], rows)) + PEER_NOTES


def recovery(data: Any) -> str:
    """Files of studies/peers.py on one held-out text in two halves: before and after the same training, best first."""
    found: dict[str, dict[bool, list[Any]]] = {}
    for seeds in training.grouped(data):
        first = seeds[0]
        pruning = [setting for setting in first["settings"] if not setting.startswith("distill.")]
        found.setdefault(json.dumps([first["size"], pruning, first["sequences"]]), {})[first["tokens"] > 0] = seeds

    def loss(rows: list[Any], text: str) -> str:
        return spread([row[text] for row in rows])

    def place(kinds: dict[bool, list[Any]]) -> tuple[bool, str, float]:
        last = kinds.get(True) or kinds[False]
        return True not in kinds, last[0]["size"], statistics.mean(row["stories.report"] for row in last)

    rows = []
    for kinds in sorted(found.values(), key=place):
        before, after = kinds.get(False, []), kinds.get(True, [])
        first = (before or after)[0]
        title = first["title"].partition(", then training")[0].partition(", distilled")[0]
        cells = [first["size"] or "100%", title, training.seed_numbers(after or before), loss(before, "stories.report")]
        rows.append([*cells, loss(after, "textbooks"), loss(after, "stories.report")])
    return markdown(["size", "method", "seeds", "pruned", "trained, first half", "trained"], rows)


def seven_tasks(data: Any) -> str:
    """Files of studies/evaluate_seven.py: both accuracies of every run in the file."""
    runs = data["results"]
    rows = []
    for place, task in enumerate(next(iter(runs.values()))["tasks"]):
        found = [run["tasks"][place] for run in runs.values()]
        scores = [f"{100 * one[k]:.2f} ±{100 * one[f'{k}_stderr']:.2f}" for one in found for k in ("acc", "acc_norm")]
        rows.append([task["title"], str(task["num_items"]), *scores])
    averages = [run["average"][k] for run in runs.values() for k in ("acc", "acc_norm")]
    if None not in averages:  # all seven tasks were scored
        rows.append(["average", "", *(f"{100 * average:.2f}" for average in averages)])
    rows.append(["seconds", "", *(cell for run in runs.values() for cell in (f"{run['seconds']:.1f}", ""))])
    names = [run.removeprefix("dwindle ") for run in runs]
    return markdown(["task", "items", *(f"{kind}, {name}" for name in names for kind in ("acc", "acc_norm"))], rows)


def engines(data: Any) -> str:
    """Files of studies/evaluate_seven.py with both engines: their accuracies and largest differences."""
    ((dtype, found),) = data["comparison"].items()
    titles = {task["task"]: (task["title"], task["num_items"]) for task in data["results"][f"harness {dtype}"]["tasks"]}
    rows = [
        [
            titles[task][0],
            str(titles[task][1]),
            *(
                f"{100 * pair[metric][engine]:.2f}"
                for metric in ("acc", "acc_norm")
                for engine in ("harness", "dwindle")
            ),
            f"{found['largest_difference_by_task'][task]:.1e}",
        ]
        for task, pair in found["accuracies"].items()
    ]
    beyond = f"{found['num_beyond_tolerance']} items beyond {found['tolerance']:g}"
    seconds = (f"{found['seconds'][engine]:.1f}" for engine in ("harness", "dwindle"))
    rows.append(["seconds", str(found["num_items"]), *seconds, "", "", beyond])
    head = ["task", "items", "acc, harness", "acc, ours", "acc_norm, harness", "acc_norm, ours", "largest difference"]
    return markdown(head, rows)


def latency(data: Any) -> str:
    """Output of ``dwindle bench latency --json``: medians with quartiles, and ratios to the first model."""
    runtimes = {"llamacpp": f"llama.cpp {data['gguf_type']}"}
    order = list(dict.fromkeys(row["runtime"] for row in data["rows"]))

    def quartiles(found: Any) -> str:
        return f"{found['median']:.1f} ({found['low']:.1f}–{found['high']:.1f})"

    rows = [
        [
            runtimes.get(row["runtime"], row["runtime"]),
            str(row["threads"]),
            f"{row['model']}, {row['parameters'] / 1e6:.1f}M",
            f"{row['bytes'] / 1e6:.0f} MB",
            quartiles(row["prefill_ms_per_token"]),
            quartiles(row["decode_ms_per_token"]),
            f"{row['outside_layers_share']:.0%}" if row["outside_layers_share"] is not None else "",
            f"{row['peak_memory_bytes'] / 1e6:.0f} MB" if row["peak_memory_bytes"] else "",
            f"{row['prefill_speedup']:.2f}",
            f"{row['decode_speedup']:.2f}",
        ]
        for row in sorted(data["rows"], key=lambda row: (order.index(row["runtime"]), row["threads"]))
    ]
    head = ["runtime", "threads", "model", "file", "prefill ms/token", "decode ms/token", "outside layers"]
    return markdown([*head, "peak memory", "prefill ×", "decode ×"], rows)


def ifeval(rows: Any) -> str:
    """Files of ``studies/tune.py score``: the four numbers of IFEval over seeds, and the share of the source's."""
    names = {"source": "source, untouched", "ours": "ours, tuned", "shot": "one-shot, tuned"}
    kinds = ("inst_loose", "inst_strict", "prompt_loose", "prompt_strict")
    groups: dict[str, list[Any]] = {}
    for row in rows:
        groups.setdefault(row["model"].partition("-")[0], []).append(row)
    source = statistics.mean(row["inst_loose"] for row in groups["source"])
    cells = []
    for name, seeds in groups.items():
        share = statistics.mean(row["inst_loose"] for row in seeds) / source
        found = [spread([100 * row[kind] for row in seeds], 2) for kind in kinds]
        cut = spread([row["cut"] for row in seeds], 0)
        cells.append([names[name], str(len(seeds)), *found, f"{100 * share:.1f} %", cut])
    head = [
        "model",
        "seeds",
        "instructions, loose",
        "strict",
        "prompts, loose",
        "strict",
        "of the source",
        "answers cut",
    ]
    return markdown(head, cells)


TABLES: dict[str, Callable[[Any], str]] = {
    "losses": training.losses,
    "same-teacher": training.same_teacher,
    "headline": training.headline,
    "levers": training.levers,
    "texts": training.texts,
    "margins": training.margins,
    "margins-distilled": training.margins_distilled,
    "choices": training.choices,
    "held-out": training.held_out,
    "tasks": training.tasks,
    "commands": training.commands,
    "first-comparison": first_comparison,
    "metrics-without-training": metrics_without_training,
    "layer-adaptive": layer_adaptive,
    "peers": peers,
    "recovery": recovery,
    "seven-tasks": seven_tasks,
    "engines": engines,
    "latency": latency,
    "ifeval": ifeval,
}


def render(text: str, folder: Path) -> str:
    """The page with every marked table rendered from its file."""

    def replace(match: re.Match[str]) -> str:
        begin, name, files, _, end = match.groups()
        data, *more = (json.loads((folder / file).read_text(encoding="utf-8")) for file in files.split(","))
        for other in more:
            data["rows"] += other["rows"]
        return begin + TABLES[name](data) + end

    return MARKED.sub(replace, text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("pages", type=Path, nargs="*", default=PAGES)
    args = parser.parse_args()
    for page in args.pages:
        old = page.read_text(encoding="utf-8")
        new = render(old, page.parent)
        if args.check and new != old:
            raise SystemExit(f"{page.name}: tables differ from their files")
        if not args.check:
            page.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    run_command(main)
