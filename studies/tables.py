"""Renders the tables in the docs from the JSON files of the studies; a test checks that they match.

    python studies/tables.py            # rewrites the text between the markers
    python studies/tables.py --check    # reports whether it would

A table is between ``<!-- table: NAME from results/FILE.json -->`` and ``<!-- end -->``, with the path relative to the
page and the names of ``TABLES``.
"""

from __future__ import annotations

import argparse
import collections
import json
import math
import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "docs" / "results.md", ROOT / "docs" / "benchmarks.md", ROOT / "README.md")
MARKED = re.compile(r"(<!-- table: (\S+) from (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
ALIKE = ("row", "model", "size", "tokens", "settings", "sequences", "valid_tokens")
LOSS_COLUMNS = (
    "size", "method", "tokens", "seeds", "parameters", "textbooks", "WikiText-2", "seven tasks, %", "tokens/s"
)  # fmt: skip
SHORT_TOKENS = 17_000_000
TASKS = ("arc_challenge", "arc_easy", "boolq", "hellaswag", "openbookqa", "piqa", "winogrande")


TEXT_COLUMNS = ("marketing", "mixed.valid", "mixed.test")
"""Texts that a study reports beside its validation text and WikiText-2."""


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [list(head), ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def spread(values: Sequence[float], digits: int = 3) -> str:
    """The value, or mean ± standard deviation over runs."""
    if len(values) < 2:
        return f"{values[0]:.{digits}f}" if values else ""
    return f"{statistics.mean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f}"


# Training studies ---------------------------------------------------------------------------------------------


def grouped(data: Any) -> list[list[Any]]:
    """Runs grouped by row: large sizes first, few tokens first, then in the order of the study."""
    found: dict[str, list[Any]] = {}
    for row in data["rows"]:
        found.setdefault(json.dumps([row.get(name) for name in ALIKE]), []).append(row)

    def place(seeds: list[Any]) -> tuple[float, int, int, bool]:
        first, size = seeds[0], re.match(r"[0-9.]+", seeds[0]["size"])
        return -float(size[0]) if size else -math.inf, first["tokens"], first.get("order", 0), "+" in first["row"]

    return [sorted(seeds, key=lambda row: row["seed"]) for seeds in sorted(found.values(), key=place)]


def shared_settings(data: Any) -> set[str]:
    """Settings of most trained rows, which the commands show."""
    trained = [set(row.get("set", ())) for row in data["rows"] if row["tokens"]]
    return {word for words in trained for word in words if 2 * sum(word in other for other in trained) > len(trained)}


def title(row: Any, common: set[str], source: str = "") -> str:
    """A row's name, with the model it starts from if that is not ``source``, and the settings that most do not have."""
    if not row["tokens"]:
        return str(row["title"])
    own = [setting for setting in row.get("set", ()) if setting not in common]
    keys = {setting.partition("=")[0] for setting in row.get("set", ())}
    own += [f"no {setting}" for setting in sorted(common) if setting.partition("=")[0] not in keys]
    start = f", from {row['model']}" if source and row["model"] != source else ""
    return str(row["title"]) + start + (f" [{' '.join(own)}]" if own else "")


def seed_numbers(seeds: Sequence[Any]) -> str:
    """``0 ×2, 1``: seed 0 was run twice."""
    counts = collections.Counter(row["seed"] for row in seeds)
    return ", ".join(f"{seed} ×{count}" if count > 1 else str(seed) for seed, count in counts.items())


def losses(data: Any) -> str:
    """All losses of a training study, without empty columns."""
    return markdown(*filled(named(data, LOSS_COLUMNS), loss_rows(data)))


def filled(head: Sequence[str], rows: Sequence[Sequence[str]]) -> tuple[list[str], list[list[str]]]:
    places = [place for place in range(len(head)) if not rows or any(cells[place] for cells in rows)]
    return [head[place] for place in places], [[cells[place] for place in places] for cells in rows]


def named(data: Any, columns: Sequence[str]) -> list[str]:
    """The columns, with the name of the held-out text if it is not the textbooks."""
    text = data["rows"][0].get("valid", "textbooks").partition(".")[0] if data["rows"] else "textbooks"
    return [text if column == "textbooks" else column for column in columns]


def same_teacher(data: Any) -> str:
    """One-shot and the global mixture with the same teacher at every size, and by how much the second is better."""
    common, rows = shared_settings(data), []
    with_teacher = [row for row in data["rows"] if row["row"].endswith("+kd") and set(row["set"]) == common]
    groups = grouped({"rows": [row for row in with_teacher if row["tokens"] < SHORT_TOKENS]})
    control: list[Any] = []
    for seeds in (seeds for seeds in groups if seeds[0]["row"] in ("one-shot+kd", "global+kd")):
        cells = [seeds[0]["size"], f"{max(row['parameters'] for row in seeds) / 1e6:.1f}M"]
        cells.append(seeds[0]["title"].partition(", distilled")[0])
        for text in ("textbooks", "wikitext2"):
            own, usual = [row[text] for row in seeds], [row[text] for row in control]
            cells += [spread(own), difference(usual, own) if seeds[0]["row"] == "global+kd" else ""]
        rows.append([*cells, percent([without_boolq(row) for row in seeds if "tasks" in row])])
        control = seeds
    head = ["size", "parameters", "method", "textbooks", "better by", "WikiText-2", "better by", "six tasks, %"]
    return markdown(head, rows)


def loss_rows(data: Any) -> list[list[str]]:
    """Cells for ``LOSS_COLUMNS``; the best textbook loss of each size and number of tokens is bold."""
    groups, common = grouped(data), shared_settings(data)
    best: dict[tuple[str, int], float] = {}
    for seeds in groups:
        if seeds[0]["size"] and all(r.get("target_reached", True) and "textbooks" in r for r in seeds):
            place = (seeds[0]["size"], seeds[0]["tokens"])
            best[place] = min(mean_loss(seeds), best.get(place, float("inf")))
    rows = []
    for seeds in groups:
        first = seeds[0]
        numbers = seed_numbers(seeds)
        measured = [r for r in seeds if "textbooks" in r]
        cells = loss_cells(measured) if measured else ["", f"not possible: {first['refused']}", "", "", ""]
        if measured and mean_loss(measured) == best.get((first["size"], first["tokens"])):
            cells[1] = f"**{cells[1]}**"
        rows.append([first["size"] or "100%", title(first, common), f"{first['tokens']:,}", numbers, *cells])
    return rows


def texts(data: Any) -> str:
    """A training study with several reported texts: one column for each, and the tasks without BoolQ."""
    columns = ["textbooks", *TEXT_COLUMNS, "wikitext2"]
    heads = [named(data, ["textbooks"])[0], *TEXT_COLUMNS, "WikiText-2"]
    rows, common, source = [], shared_settings(data), data["rows"][0]["model"]
    for seeds in grouped(data):
        first = seeds[0]
        count = f"{max(row['parameters'] for row in seeds) / 1e6:.1f}M"
        tokens = f"{first['tokens'] / 1e6:.0f}M" if first["tokens"] else ""
        cells = [spread([row[text] for row in seeds]) for text in columns]
        measured = [without_boolq(row) for row in seeds if "tasks" in row]
        cells.append(percent(measured) if measured else "")
        rows.append([first["size"] or "100%", title(first, common, source), tokens, seed_numbers(seeds), count, *cells])
    return markdown(*filled(["size", "method", "tokens", "seeds", "parameters", *heads, "six tasks, %"], rows))


def margins(data: Any, control: str = "one-shot") -> str:
    """Loss improvements over the control at the same size, tokens and settings."""
    groups, common = grouped(data), shared_settings(data)
    controls = {comparable(seeds): seeds for seeds in groups if seeds[0]["row"] == control}
    rows = []
    for seeds in groups:
        others = controls.get(comparable(seeds))
        if others is None or others is seeds or not all("textbooks" in row for row in [*seeds, *others]):
            continue
        cells = [
            difference([row[text] for row in others if text in row], [row[text] for row in seeds if text in row])
            for text in ("textbooks", "wikitext2")
        ]
        numbers = f"{len(seeds)} and {len(others)}"
        rows.append([seeds[0]["size"], title(seeds[0], common), f"{seeds[0]['tokens']:,}", numbers, *cells])
    return markdown(["size", "method", "tokens", "runs, and of the control", "textbooks", "WikiText-2"], rows)


def margins_distilled(data: Any) -> str:
    """The same among rows with a teacher."""
    return margins({"rows": [row for row in data["rows"] if row["row"].endswith("+kd")]}, "one-shot+kd")


def comparable(seeds: Sequence[Any]) -> tuple[Any, ...]:
    first = seeds[0]
    return (first["size"], first["tokens"], first.get("model"), first.get("valid_tokens"), *first.get("set", ()))


def difference(before: Sequence[float], after: Sequence[float]) -> str:
    """Difference of means; with several runs of both, ± the root of the summed variances."""
    if not before or not after:
        return ""
    found = f"{statistics.mean(before) - statistics.mean(after):.3f}"
    if min(len(before), len(after)) < 2:
        return found
    return f"{found} ± {math.hypot(statistics.stdev(before), statistics.stdev(after)):.3f}"


def choices(data: Any) -> str:
    """Ablations: for each number of tokens the reference, and the other rows by what they change."""
    by_tokens: dict[tuple[str, int], list[list[Any]]] = {}
    for seeds in grouped(data):
        by_tokens.setdefault((seeds[0]["size"], seeds[0]["tokens"]), []).append(seeds)
    parts = []
    for (size, tokens), groups in by_tokens.items():
        for reference, others in by_reference(groups):
            base = settings_of(reference[0])
            words = " ".join(f"`{key}={value}`" for key, value in base.items())
            rows = [["reference", *choice_cells(reference, reference)]]
            for seeds in sorted(others, key=lambda seeds: (seeds[0].get("order", 0), seeds[0]["settings"])):
                rows.append([changed(base, settings_of(seeds[0])), *choice_cells(seeds, reference)])
            head = ["changed", "seeds", "held-out loss", "minus reference", "WikiText-2", "minus reference"]
            table = markdown(*filled(head, rows))  # no empty columns with only one text
            parts.append(f"{size}, {tokens:,} tokens, {words or 'all defaults'}:\n\n{table}")
    return "\n".join(parts)


def by_reference(groups: Sequence[list[Any]]) -> list[tuple[list[Any], list[list[Any]]]]:
    """The reference with its rows, then rows that are closer to several others than the reference, with those."""
    reference, found = reference_of(groups), []
    rest = [seeds for seeds in groups if seeds is not reference]
    far = [seeds for seeds in rest if steps_between(seeds, reference) > 1]
    for other in rest:
        near = [seeds for seeds in far if steps_between(seeds, other) == 1]
        if steps_between(other, reference) == 1 and len(near) > 1:
            found.append((other, near))
            far = [seeds for seeds in far if seeds not in near]
            rest = [seeds for seeds in rest if seeds not in near]
    return [(reference, rest), *found]


def steps_between(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Number of settings that differ."""
    return len(dict_difference(settings_of(one[0]), settings_of(other[0])))


def reference_of(groups: Sequence[list[Any]]) -> list[Any]:
    """The row (preferably a base) from which the others differ in the fewest settings."""
    measured = [seeds for seeds in groups if "textbooks" in seeds[0]]
    bases = [seeds for seeds in measured if seeds[0]["row"] == "base"] or measured or groups
    every = [settings_of(seeds[0]) for seeds in groups]
    return min(bases, key=lambda seeds: sum(len(dict_difference(settings_of(seeds[0]), one)) for one in every))


def settings_of(row: Any) -> dict[str, str]:
    """A row's settings, without its tokens."""
    return dict(setting.split("=", 1) for setting in row["settings"] if not setting.startswith("training.tokens="))


def dict_difference(one: dict[str, str], other: dict[str, str]) -> list[str]:
    return [key for key in {**one, **other} if one.get(key) != other.get(key)]


def changed(base: dict[str, str], settings: dict[str, str]) -> str:
    """The settings that a row changes; a ratio replaces the horizon, which is not listed then."""
    keys = [key for key in dict_difference(base, settings) if key != "prune.horizon" or "prune.ratio" not in settings]
    return ", ".join(f"`{key}={settings[key]}`" if key in settings else f"no `{key}={base[key]}`" for key in keys)


def choice_cells(seeds: Sequence[Any], reference: Sequence[Any]) -> list[str]:
    """Seeds, and both losses with their difference from the reference."""
    cells = [seed_numbers(seeds)]
    if "refused" in seeds[0]:
        return [*cells, f"not possible: {seeds[0]['refused']}", "", "", ""]
    for text in ("textbooks", "wikitext2"):
        own = [row[text] for row in seeds if text in row]
        mark = "" if all(row.get("target_reached", True) for row in seeds) else " (target not reached)"
        usual = [row[text] for row in reference if text in row]
        compared = own and usual and seeds is not reference
        above = f"{statistics.mean(own) - statistics.mean(usual):+.3f}" if compared else ""
        cells += [spread(own) + mark if own else "", above]
    return cells


def held_out(data: Any) -> str:
    """A training study on one text: its held-out loss over seeds."""
    rows = [
        [seeds[0]["title"], f"{seeds[0]['tokens']:,}", seed_numbers(seeds), *loss_cells(seeds)[:2]]
        for seeds in grouped({"rows": [row for row in data["rows"] if "textbooks" in row]})
    ]
    return markdown(["method", "tokens", "seeds", "parameters", "held-out loss"], rows)


def mean_loss(seeds: Sequence[Any]) -> float:
    return float(statistics.mean(r["textbooks"] for r in seeds))


def loss_cells(seeds: Sequence[Any]) -> list[str]:
    """Parameters, both losses, task average (for one run with its standard error over items), and speed."""
    sizes = sorted({r["parameters"] for r in seeds})
    parameters = "–".join(f"{count:,}" for count in dict.fromkeys((sizes[0], sizes[-1])))
    if not all(r.get("target_reached", True) for r in seeds):
        parameters += " (target not reached)"
    books = spread([r["textbooks"] for r in seeds])
    wiki = spread([r["wikitext2"] for r in seeds if "wikitext2" in r])
    averages = [r["average"] for r in seeds if r.get("average")]
    average = spread([100 * one["value"] for one in averages], 2)
    if len(averages) == 1:
        average += f" (±{100 * averages[0]['stderr']:.2f})"
    speeds = [r["tokens_per_s"] for r in seeds if "tokens_per_s" in r and r.get("jobs", 1) == 1]  # without shared GPUs
    return [parameters, books, wiki, average, f"{max(speeds) / 1000:.0f}k" if speeds else ""]


def tasks(data: Any) -> str:
    """Every task of a training study with its standard error over items; means over several runs."""
    rows, common = [], shared_settings(data)
    for seeds in grouped(data):
        measured = [row for row in seeds if "tasks" in row]
        if measured:
            cells = [percent([row["tasks"][name] for row in measured]) for name in TASKS]
            cells += [percent([row["average"] for row in measured]), percent([without_boolq(row) for row in measured])]
            rows.append([seeds[0]["size"] or "100%", title(seeds[0], common), f"{seeds[0]['tokens']:,}", *cells])
    names = ["ARC-c", "ARC-e", "BoolQ", "HellaSwag", "OBQA", "PIQA", "WinoGrande", "average", "without BoolQ"]
    return markdown(["size", "method", "tokens", *names], rows) if rows else ""


def without_boolq(row: Any) -> dict[str, float]:
    """The average of the other tasks: models of this size give nearly the same answer to every BoolQ question."""
    others = [row["tasks"][name] for name in TASKS if name != "boolq"]
    value = statistics.mean(one["value"] for one in others)
    return {"value": value, "stderr": math.hypot(*(one["stderr"] for one in others)) / len(others)}


def percent(found: Sequence[Any]) -> str:
    mean = statistics.mean(one["value"] for one in found)
    error = statistics.mean(one["stderr"] for one in found)  # all runs share the items: more runs do not lower it
    return f"{100 * mean:.2f} ±{100 * error:.2f}"


def commands(data: Any) -> str:
    """The command of each row, and its commit."""
    rows = [
        [f"{seeds[0]['row']} {seeds[0]['size']}".strip(), row["commit"], f"`{row['command']}`"]
        for seeds in grouped(data)
        for row in seeds
    ]
    return markdown(["row", "commit", "command"], rows)


# Other files -------------------------------------------------------------------------------------------------------


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


def seven_tasks(data: Any) -> str:
    """Files of studies/evaluate_seven.py: both accuracies of every run in the file."""
    runs = data["results"]
    rows = []
    for place, task in enumerate(next(iter(runs.values()))["tasks"]):
        found = [run["tasks"][place] for run in runs.values()]
        scores = [f"{100 * one[k]:.2f} ±{100 * one[f'{k}_stderr']:.2f}" for one in found for k in ("acc", "acc_norm")]
        rows.append([task["title"], str(task["num_items"]), *scores])
    average = [f"{100 * run['average'][k]:.2f}" for run in runs.values() for k in ("acc", "acc_norm")]
    rows.append(["average", "", *average])
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


TABLES: dict[str, Callable[[Any], str]] = {
    "losses": losses,
    "same-teacher": same_teacher,
    "texts": texts,
    "margins": margins,
    "margins-distilled": margins_distilled,
    "choices": choices,
    "held-out": held_out,
    "tasks": tasks,
    "commands": commands,
    "first-comparison": first_comparison,
    "metrics-without-training": metrics_without_training,
    "layer-adaptive": layer_adaptive,
    "seven-tasks": seven_tasks,
    "engines": engines,
    "latency": latency,
}


def render(text: str, folder: Path) -> str:
    """The page with every marked table rendered from its file."""

    def replace(match: re.Match[str]) -> str:
        begin, name, file, _, end = match.groups()
        return begin + TABLES[name](json.loads((folder / file).read_text(encoding="utf-8"))) + end

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
    main()
