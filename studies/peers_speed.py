"""Decode speed of the models of ``peers.py`` in llama.cpp at q8_0, relative to their source, and the figure.

    python studies/peers_speed.py docs/results/peers.json --model smollm2-135m --out docs/pictures

Needs the JSON file alone: speed depends on sizes, not on values, so a model with random weights is built for every
shape in it. Adds ``decode_speedup`` to the rows and draws quality against latency, one curve for each method. Widths
are padded to multiples of 32, which q8_0 needs. Run it on a quiet CPU; what is measured is not measured again.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from pathlib import Path
from typing import Any

from measures import shape_of

import dwindle
from dwindle.anatomy.build import build_random, config_for
from dwindle.anatomy.families import family_of
from dwindle.anatomy.structure import Structure
from dwindle.commands.main import run_command
from dwindle.core.drawing import write_figure
from dwindle.core.errors import UserError
from dwindle.core.figure import Figure, Panel, Series
from dwindle.core.files import write_text_atomic
from dwindle.evaluation.latency import measure_latency
from dwindle.sources.loading import Loaded

QUALITY = "mixed.test"
SOURCE = "source"


def model_of(shape: Any, source: Any) -> Any:
    """A random model of these sizes, otherwise like the source."""
    layers = shape["layers"]
    structure = Structure.full(
        hidden=shape["hidden"],
        ffn=[ffn for _, ffn in layers],
        kv_of_query=[[kv for kv, queries in enumerate(per_kv) for _ in range(queries)] for per_kv, _ in layers],
    )
    keys = family_of(source.config.model_type).output_bias_keys if shape["output_bias"] else []
    changed = {"num_hidden_layers": len(layers), **dict.fromkeys(keys, True)}
    changed["tie_word_embeddings"] = not shape.get("own_head", not source.config.tie_word_embeddings)
    return build_random(config_for(source.config, structure, changed=changed), seed=0)


def measure(data: Any, args: argparse.Namespace) -> None:
    """Adds the speedup to every row; rows of the same shape share it."""
    loaded = dwindle.load(args.model)
    known = {json.dumps(row["shape"]): row["decode_speedup"] for row in data["rows"] if "decode_speedup" in row}
    known[json.dumps(shape_of(loaded.model))] = 1.0
    for row in data["rows"]:
        if "shape" not in row or "decode_speedup" in row:
            continue
        key = json.dumps(row["shape"])
        if key not in known:
            smaller = Loaded(model_of(row["shape"], loaded.model), loaded.tokenizer, row["row"], "huggingface")
            found = measure_latency(
                {SOURCE: loaded, "pruned": smaller},
                runtime="llamacpp",
                prompt_tokens=args.prompt,
                new_tokens=args.new,
                repeats=args.repeats,
                type="q8_0",
                round_to=32,
            )
            known[key] = round(found.row("pruned", "llamacpp").decode_speedup, 4)
        row["decode_speedup"] = known[key]
        write_text_atomic(args.results, json.dumps(data, indent=1) + "\n", option="RESULTS")
        print(f"{row['row']} {row['size']}: {row['decode_speedup']:.3f}", flush=True)


def method_of(row: Any) -> str:
    return re.sub(r"(-trained)?(\+kd)?(@.*)?$", "", row["row"])


def figure(data: Any) -> Figure:
    """Loss against time per token relative to the source: a panel without and one with training, a curve a method."""
    rows = [row for row in data["rows"] if row["size"] and QUALITY in row and "decode_speedup" in row]
    if not rows:
        raise UserError(f"the file has no row with both {QUALITY} and a decode speed: run peers.py with it first")
    names = list(dict.fromkeys(map(method_of, rows)))
    panels = []
    for is_trained, label in ((False, "without training"), (True, "after the same recovery")):
        series = []
        for place, name in enumerate(names):
            points: dict[str, list[Any]] = {}
            for row in rows:
                if method_of(row) == name and bool(row["tokens"]) == is_trained:
                    points.setdefault(row["size"], []).append(row)
            means = sorted(
                (statistics.mean(1 / r["decode_speedup"] for r in seeds), statistics.mean(r[QUALITY] for r in seeds))
                for seeds in points.values()
            )
            if means:
                style = "line" if place < 8 else "dashed"  # eight colours
                x, y = [time for time, _ in means], [loss for _, loss in means]
                series.append(Series(name, f"task{place}", [*x], [*y], style))  # type: ignore[arg-type]
        if series:
            shown = {one.name for panel in panels for one in panel.series}
            new = any(one.name not in shown for one in series)
            panels.append(Panel(f"{QUALITY}, {label}, nats per token", "number", series, legend=new))
    caption = f"{rows[0]['model']} at several sizes; llama.cpp, q8_0, one thread. Lower left is better."
    x_label = "time per generated token, relative to the source"
    return Figure("peers", "Quality against latency", caption, x_label, "number", panels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--model", default="smollm2-135m", help="the source")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, help="folder of the figure; without it, only speeds are measured")
    args = parser.parse_args()
    data = json.loads(args.results.read_text(encoding="utf-8"))
    measure(data, args)
    if args.out is not None:
        for path in write_figure(figure(data), args.out):
            print(path)


if __name__ == "__main__":
    run_command(main)
