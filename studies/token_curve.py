"""Loss against training tokens: how many tokens ours needs for what one-shot reaches.

    python studies/token_curve.py docs/results/ladder-6m.json docs/results/ladder.json docs/results/correction.json \\
        --size 50%nonemb --out docs/pictures

Every point is a run of its own with its rate decayed to the end, not a moment of a longer run. Tokens of the source's
adaptation count. Means over seeds.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from pathlib import Path
from typing import Any

from dwindle.commands.main import run_command
from dwindle.core.drawing import write_figure
from dwindle.core.figure import Figure, Panel, Series

TEXTS = ("marketing", "mixed.test")
PLAIN = ["training.tokens_per_step=16384"]
"""Settings of all rows; those of rows that tried others are not drawn."""
METHODS = {
    "one-shot, AdamW, teacher": ("one-shot+kd@2e-3", False),
    "ours, after teacher correction": ("global-group-muon+kd@1.5e-3", True),
}
"""Name → row, and whether it starts from an adapted source."""


def tokens_of(row: Any) -> int:
    """Tokens of the run and of the adaptation that its source names."""
    adapted = re.search(r"-adapted-(\d+)M$", row["model"])
    return int(row["tokens"]) + 1_000_000 * int(adapted[1] if adapted else 0)


def points(rows: list[Any], name: str, text: str) -> list[tuple[float, float]]:
    """(million tokens, mean loss) of a method; the best, if the same tokens were split in several ways."""
    wanted, adapted = METHODS[name]
    found: dict[tuple[str, int], list[float]] = {}
    for row in rows:
        alike = row["row"] == wanted and row["set"] == PLAIN and "distill.weight=0.75" in row["settings"]
        if alike and text in row and ("-adapted-" in row["model"]) == adapted:
            found.setdefault((row["model"], tokens_of(row)), []).append(row[text])
    best: dict[float, float] = {}
    for (_, tokens), losses in found.items():
        place = round(tokens / 1e6)
        best[place] = min(statistics.mean(losses), best.get(place, float("inf")))
    return sorted(best.items())


def figure(rows: list[Any], size: str) -> Figure:
    panels = []
    for text in TEXTS:
        series = []
        for place, name in enumerate(METHODS):
            at = points(rows, name, text)
            series.append(Series(name, f"task{place}", [x for x, _ in at], [y for _, y in at], "line"))
        panels.append(Panel(f"{text}, nats per token", "number", series, legend=not panels))
    caption = f"SmolLM2-135M at {size}; every point is a run of its own, mean over seeds. Lower left is better."
    return Figure(
        "tokens", "Loss against training tokens", caption, "million tokens, adaptation included", "number", panels
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--size", default="50%nonemb")
    parser.add_argument("--out", type=Path, required=True, help="folder of the figure")
    args = parser.parse_args()
    read = [row for path in args.results for row in json.loads(path.read_text(encoding="utf-8"))["rows"]]
    rows = [row for row in read if row["size"] == args.size]
    for text in TEXTS:
        for name in METHODS:
            print(f"{text}, {name}:", ", ".join(f"{x}M {y:.3f}" for x, y in points(rows, name, text)))
    for path in write_figure(figure(rows, args.size), args.out):
        print(path)


if __name__ == "__main__":
    run_command(main)
