"""The paper's Fig. 5 from our rows: loss when the target is reached, and at the end of the same tokens.

    python studies/scalability.py docs/results/ablations.json --out docs/pictures

Uses the most frequent combination of size, tokens and settings in the file, and only rows that reached the target.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from dwindle.commands.main import run_command
from dwindle.core.drawing import write_figure
from dwindle.core.errors import UserError
from dwindle.core.figure import Figure, Panel, Series

LOSSES = {
    "loss_at_target": "training text, just after the target is reached",
    "textbooks": "held-out textbooks, at the end",
    "wikitext2": "WikiText-2, at the end",
}


def scalability(data: Any, choices: tuple[str, ...] = ("base", "horizon", "ratio")) -> Figure:
    """Mean loss over seeds against the tokens until the target was reached."""
    kept = [
        row
        for row in data["rows"]
        if row["row"].split("-")[0] in choices and row.get("target_reached") and "pruning_tokens" in row
    ]
    if len({row["pruning_tokens"] for row in kept}) < 2:
        raise UserError("scalability: the file has fewer than two pruning lengths: run `ablations.py --rows horizon`")
    alike = [(row["size"], row["tokens"], *row.get("set", ())) for row in kept]
    size, most, *settings = usual = max(alike, key=alike.count)  # seeds are averaged, other settings are not
    kept = [row for row, settings in zip(kept, alike, strict=True) if settings == usual]
    panels = [
        Panel(f"{name}, nats per token", "number", lines(kept, key), legend=place == 0)
        for place, (key, name) in enumerate(LOSSES.items())
        if all(key in row for row in kept)
    ]
    caption = " ".join([f"{size} of the parameters, {most:,} tokens in all.", *settings])
    return Figure("scalability", "Loss by the tokens of pruning", caption, "tokens until the target", "count", panels)


def lines(rows: list[Any], key: str) -> list[Series]:
    """One line for horizons and one for ratios, which also change the types of the removed groups."""
    found = []
    for place, (name, is_ratio) in enumerate((("horizon", False), ("ratio", True))):
        points: dict[int, list[float]] = {}
        for row in rows:
            if row["row"].startswith("ratio") == is_ratio:
                points.setdefault(row["pruning_tokens"], []).append(row[key])
        if points:
            x: list[float | int] = [*sorted(points)]
            y: list[float | int] = [statistics.mean(points[int(tokens)]) for tokens in x]
            found.append(Series(f"prune.{name}", f"task{place}", x, y, "dots"))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    for path in write_figure(scalability(json.loads(args.results.read_text(encoding="utf-8"))), args.out):
        print(path)


if __name__ == "__main__":
    run_command(main)
