"""Run directories written by hand, of any size, without training anything."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

from dwindle.core.quality import Quality, Sample

SHAPE = {"hidden": 576, "layers": 30, "heads": 9, "kv": 3, "ffn": 1536}


def make_run(
    folder: Path,
    *,
    steps: int = 200,
    events: int = 40,
    shape: dict[str, int] | None = None,
    finished: bool = True,
    recipe: str | None = '[source]\nmodel = "org/source"\n\n[prune]\ntarget = "50%"\n',
    seed: int = 0,
    missed: bool = False,
    source_loss: float | None = None,
) -> Path:
    """Like a run of ``dwindle pretrain``: the same files and keys, made-up numbers.

    The target is what a finished run ended at; with ``missed``, one parameter less. With ``source_loss`` the source was
    measured, too.
    """
    shape = shape or {"hidden": 32, "layers": 3, "heads": 8, "kv": 4, "ffn": 40}
    folder.mkdir(parents=True, exist_ok=True)
    chance = random.Random(seed)
    alive = Alive(shape, chance)
    horizon = max(steps // 2, 1)
    before = alive.parameters
    pacing = {"start_count": before, "end_count": before // 2, "first_step": 0, "last_step": horizon}
    ledger: list[dict[str, Any]] = [
        {
            "event": "source",
            "format": 1,
            "source": "org/source",
            "parameters": before,
            "layer_parameters": [0] * shape["layers"],
            "hidden": shape["hidden"],
            "layer_kv_of_query": [alive.kv_of_query] * shape["layers"],
            "layer_ffn": [shape["ffn"]] * shape["layers"],
            "options": {"metric": "taylor", "pacing": pacing},
        }
    ]
    metrics, done, running = [], 0, 0.0
    for step in range(1, steps + 1):
        tokens = step * 512
        due = min(events, events * step // horizon)
        seconds = 0.02 * alive.parameters / before + 0.002 * chance.random()
        times: dict[str, float] = {"tokens_per_s": 512 / seconds, "seconds": seconds}
        here = due - done
        for _ in range(here):
            ledger.append(alive.event(step, tokens, done / max(events, 1)))
            done += 1
        record: dict[str, Any] = metrics_of(step, tokens, steps, chance)
        record |= {"parameters": alive.parameters, "events": here}
        if here and (done == events // 2 or done == events):
            sizes = {"hidden": len(alive.hidden), "heads": len(alive.queries[0]), "ffn": len(alive.ffn[0])}
            ledger.append({"event": "compact", "step": step, "tokens": tokens, **sizes})
            record["compacted"], times["compaction"] = sizes, 0.8
        if step % max(steps // 20, 1) == 0:
            record["valid_loss"] = record["loss"] + 0.05
        if source_loss is not None and (step == 1 or "valid_loss" in record):
            record["source_valid_loss"] = source_loss
        running += seconds
        metrics.append({**record, "time": {**times, "began": 1_700_000_000.0, "running": running}})
    if finished:
        pacing["end_count"] = alive.parameters - missed
    write_lines(folder / "ledger.jsonl", ledger)
    write_lines(folder / "metrics.jsonl", metrics)
    if source_loss is not None:
        sample = Sample("Once upon a time", "there was a fox.", "there was." if finished else None)
        result = metrics[-1]["valid_loss"] if finished else None
        Quality(["held-out.txt"], 4096, True, source_loss, result, [sample]).write(folder / "quality.json")
    if recipe is not None:
        (folder / "recipe.toml").write_text(recipe, encoding="utf-8")
    if finished:
        (folder / "model").mkdir(exist_ok=True)
        (folder / "model" / "config.json").write_text("{}", encoding="utf-8")
        (folder / "model" / "structure.json").write_text(json.dumps(alive.structure()), encoding="utf-8")
    return folder


def metrics_of(step: int, tokens: int, steps: int, chance: random.Random) -> dict[str, Any]:
    bump = 1.4 * math.exp(-(((step / steps - 0.35) / 0.25) ** 2))
    return {
        "step": step,
        "tokens": tokens,
        "loss": 2.4 + bump + 0.9 * math.exp(-6 * step / steps) + chance.gauss(0, 0.06),
        "grad_norm": math.exp(chance.gauss(-0.3, 0.3)),
        "lr": 1e-3 * (0.1 + 0.9 * (1 + math.cos(math.pi * step / steps)) / 2),
        "skipped": False,
        "flops_per_token": 1e6,
    }


class Alive:
    """What is left, as lists of the source's indices."""

    def __init__(self, shape: dict[str, int], chance: random.Random) -> None:
        self.shape, self.chance = shape, chance
        self.hidden = list(range(shape["hidden"]))
        self.queries = [list(range(shape["heads"])) for _ in range(shape["layers"])]
        self.ffn = [list(range(shape["ffn"])) for _ in range(shape["layers"])]

    @property
    def parameters(self) -> int:
        width, size = len(self.hidden), 64
        rows = 2 * len(self.queries[0]) * size + 2 * self.shape["kv"] * size + 3 * len(self.ffn[0])
        return 1000 * width + self.shape["layers"] * rows * width

    def event(self, step: int, tokens: int, done: float) -> dict[str, Any]:
        draw = self.chance.random()
        kind = "stem" if draw < 0.25 * done else "attn" if draw > 0.985 else "ffn"
        left = {"attn": len(self.queries[0]) - 1, "ffn": len(self.ffn[0]) - 1, "stem": len(self.hidden) - 1}
        if left[kind] < 1:
            kind = max(left, key=lambda name: left[name])
        kept = {"attn": self.queries, "ffn": self.ffn, "stem": [self.hidden]}[kind]
        indices = [[layer.pop(self.chance.randrange(len(layer)))] for layer in kept]
        base = 1e-7 * (1 + 4 * done)
        saliency = {name: base * math.exp(self.chance.gauss(0.2, 0.15)) for name in ("attn", "ffn", "stem")}
        saliency[kind] = base
        return {
            "event": "prune",
            "step": step,
            "tokens": tokens,
            "type": kind,
            "indices": indices,
            "saliency": saliency,
            "parameters": self.parameters,
        }

    @property
    def kv_of_query(self) -> list[int]:
        return [query // (self.shape["heads"] // self.shape["kv"]) for query in range(self.shape["heads"])]

    def structure(self) -> dict[str, Any]:
        layers = []
        for queries, ffn in zip(self.queries, self.ffn, strict=True):
            kv = [self.kv_of_query[query] for query in queries]
            layers.append({"query_heads": queries, "kv_heads": sorted(set(kv)), "kv_of_query": kv, "ffn": ffn})
        return {"format": 1, "source": "org/source", "hidden": self.hidden, "layers": layers}


def write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
