"""Tables of the training studies (``common.py``): rows with losses, tasks and settings, several seeds each."""

from __future__ import annotations

import collections
import json
import math
import re
import statistics
from collections.abc import Sequence
from typing import Any

ALIKE = ("row", "model", "size", "tokens", "settings", "sequences", "valid_tokens")
LOSS_COLUMNS = (
    "size", "method", "tokens", "seeds", "parameters", "textbooks", "WikiText-2", "seven tasks, %", "tokens/s"
)  # fmt: skip
SHORT_TOKENS = 17_000_000
TASKS = ("arc_challenge", "arc_easy", "boolq", "hellaswag", "openbookqa", "piqa", "winogrande")
TEXT_COLUMNS = ("marketing", "mixed.valid", "mixed.test")
"""Texts that a study reports beside its validation text and WikiText-2."""

BY_HAND = ("one-shot, AdamW", "one-shot, Muon")
HEADLINE = {
    ("one-shot+kd@2e-3", ""): BY_HAND[0],
    ("one-shot-muon+kd@2.5e-3", ""): BY_HAND[1],
    ("global-group-muon+kd@1.5e-3", ""): "ours: the defaults",
    ("global-group-muon+kd@1.5e-3", "SmolLM2-135M-adapted-1M"): "**ours, after teacher correction**",
}
"""(row, model it starts from, if not the source) → name, of the table in the README."""
HEADLINE_SIZES = ("50%nonemb", "30%nonemb")
LEVERS = {
    ("one-shot+kd@2e-3", ""): BY_HAND[0],
    ("one-shot-muon+kd@2.5e-3", ""): "optimizer: Muon",
    ("global-muon+kd@2.5e-3", ""): "selection: any layer's group, while training",
    ("global-group-muon+kd@2.5e-3", ""): "metric and schedule: group saliency, after the warm-up",
    ("global-group-muon+kd@1.5e-3", ""): "rate: 1.5e-3",
    ("global-group-muon+kd@1.5e-3", "SmolLM2-135M-adapted-1M"): "teacher: adapted to the text first",
}
"""(row, model it starts from) → what it adds to the row before."""


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [list(head), ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def spread(values: Sequence[float], digits: int = 3) -> str:
    """The value, or mean ± standard deviation over runs."""
    if len(values) < 2:
        return f"{values[0]:.{digits}f}" if values else ""
    return f"{statistics.mean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f}"


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
    """A row's name, the model it starts from if not ``source``, and its unusual settings."""
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


def after_16m(data: Any, names: dict[tuple[str, str], str]) -> dict[str, dict[str, list[Any]]]:
    """For each size, the named rows of about 16M tokens without unusual settings, in the order of the names."""
    common = shared_settings(data)
    source = next(row["model"] for row in data["rows"] if row["row"] == "source")
    found: dict[str, dict[str, list[Any]]] = {}
    for seeds in grouped(data):
        first = seeds[0]
        name = names.get((first["row"], "" if first["model"] == source else first["model"]))
        if name is not None and 14e6 < first["tokens"] < 17e6 and set(first.get("set", ())) <= common:
            found.setdefault(first["size"], {})[name] = seeds
    return {size: {name: rows[name] for name in names.values() if name in rows} for size, rows in found.items()}


def levers(data: Any) -> str:
    """One lever more in each row: what it gains, and its share of all that is gained at the size."""
    rows = []
    for size, steps in after_16m(data, LEVERS).items():
        if len(steps) < 2:
            continue
        first, *_, last = steps.values()
        waiting: list[str] = []
        before: list[Any] = []
        for name in LEVERS.values():
            waiting.append(name)
            if name not in steps:  # was not run at this size: the next row has both
                continue
            seeds = steps[name]
            cells = [size, ("+ " if before else "") + "; ".join(waiting), str(len(seeds))]
            for text in ("marketing", "mixed.test", "wikitext2"):
                own, usual = [row[text] for row in seeds], [row[text] for row in before]
                whole = statistics.mean(row[text] for row in first) - statistics.mean(row[text] for row in last)
                share = (statistics.mean(usual) - statistics.mean(own)) / whole if before else 0.0
                cells += [spread(own), f"{difference(usual, own)} ({100 * share:.0f} %)" if before else ""]
            rows.append(cells)
            waiting, before = [], seeds
    texts = (column for text in ("marketing", "mixed.test", "WikiText-2") for column in (text, "gain (share)"))
    return markdown(["size", "what is added", "runs", *texts], rows)


def headline(data: Any) -> str:
    """What a user would do by hand and ours after about 16M tokens of the mixture, and how much better ours is."""
    rows = []
    for size, methods in after_16m(data, HEADLINE).items():
        if size not in HEADLINE_SIZES or not set(BY_HAND) <= set(methods):
            continue
        for name, seeds in methods.items():
            cells = [size, name, str(len(seeds))]
            for text in ("marketing", "mixed.test"):
                own = [row[text] for row in seeds]
                controls = [[row[text] for row in methods[control]] for control in BY_HAND]
                better = "" if name in BY_HAND else " / ".join(difference(control, own) for control in controls)
                cells += [spread(own), better]
            rows.append([*cells, spread([row["wikitext2"] for row in seeds])])
    head = ["size", "method", "runs", "marketing", "better by", "mixed.test", "better by", "WikiText-2"]
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
        work = [row["flops"] / 1e15 for row in seeds if "flops" in row]
        cells = [f"{statistics.mean(work):.1f}" if work else ""]
        cells += [spread([row[text] for row in seeds if text in row]) for text in columns]
        measured = [without_boolq(row) for row in seeds if "tasks" in row]
        cells.append(percent(measured) if measured else "")
        rows.append([first["size"] or "100%", title(first, common, source), tokens, seed_numbers(seeds), count, *cells])
    names = ["size", "method", "tokens", "seeds", "parameters", "PFLOP", *heads, "six tasks, %"]
    return markdown(*filled(names, rows))


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
    return markdown(["size", "method", "tokens", "runs and control runs", "textbooks", "WikiText-2"], rows)


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
    """The reference with its rows; then every other row that several rows differ from by one setting, with those."""
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
            mmlu = [row["tasks"]["mmlu"] for row in measured if "mmlu" in row["tasks"]]
            cells.append(percent(mmlu) if mmlu else "")
            rows.append([seeds[0]["size"] or "100%", title(seeds[0], common), f"{seeds[0]['tokens']:,}", *cells])
    names = ["ARC-c", "ARC-e", "BoolQ", "HellaSwag", "OBQA", "PIQA", "WinoGrande", "average", "without BoolQ", "MMLU"]
    return markdown(*filled(["size", "method", "tokens", *names], rows)) if rows else ""


def without_boolq(row: Any) -> dict[str, float]:
    """The average of the other tasks: models of this size give nearly the same answer to every BoolQ question."""
    return mean_of(row, [name for name in TASKS if name != "boolq"])


def mean_of(row: Any, names: Sequence[str]) -> dict[str, float]:
    """The average of some tasks and its standard error over items."""
    chosen = [row["tasks"][name] for name in names]
    value = statistics.mean(one["value"] for one in chosen)
    return {"value": value, "stderr": math.hypot(*(one["stderr"] for one in chosen)) / len(chosen)}


def percent(found: Sequence[Any]) -> str:
    mean = statistics.mean(one["value"] for one in found)
    error = statistics.mean(one["stderr"] for one in found)  # all runs share the items: more runs do not lower it
    return f"{100 * mean:.2f} ±{100 * error:.2f}"


def commands(data: Any) -> str:
    """The commands of each row with their commits; one for all seeds that were run alike."""
    rows = []
    for seeds in grouped(data):
        alike: dict[str, list[Any]] = {}
        for row in seeds:
            alike.setdefault(re.sub(r"--seeds \S+", "--seeds SEEDS", row["command"]), []).append(row)
        for command, runs in alike.items():
            numbers = ",".join(dict.fromkeys(str(row["seed"]) for row in runs))
            commits = ", ".join(dict.fromkeys(row["commit"] for row in runs))
            name = f"{runs[0]['row']} {runs[0]['size']}".strip()
            rows.append([name, seed_numbers(runs), commits, f"`{command.replace('SEEDS', numbers)}`"])
    return markdown(["row", "seeds", "commit", "command"], rows)
