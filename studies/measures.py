"""What a row of a study records beside its losses: times, memory, facts of a run, shapes, the commit."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

from dwindle.anatomy.anatomy import Anatomy
from dwindle.anatomy.structure import Structure
from dwindle.pruning.ledger import read_ledger

Record = dict[str, Any]
AT_TARGET_TOKENS = 262144
"""Tokens after the last event, over which the training loss counts as that of the model when it reached its size."""


class Clock:
    """Seconds per part of a row; for a resumed run those of the last call."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self.seconds = seconds

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = round(time.monotonic() - started, 1)


class Peak:
    """The largest memory since this was made, in bytes: of the GPU, else of the process (Linux); None if unknown."""

    def __init__(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        elif Path("/proc/self/clear_refs").exists():
            Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM

    def read(self) -> int | None:
        if torch.cuda.is_available():
            return torch.cuda.max_memory_allocated()
        status = Path("/proc/self/status")
        lines = status.read_text().splitlines() if status.exists() else []
        return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM")), None)


def shape_of(model: Any) -> Record:
    """All sizes of a model: enough to build one that is as fast."""
    structure = Anatomy.of(model).source
    layers = [[list(layer.queries_per_kv), len(layer.ffn)] for layer in structure.layers]
    biased = any(name.endswith("down_proj.bias") for name, _ in model.named_parameters())
    own_head = not model.config.tie_word_embeddings
    return {"hidden": len(structure.hidden), "layers": layers, "output_bias": biased, "own_head": own_head}


def facts(run: Path, target_reached: bool = True, teacher_flops: float = 0.0) -> Record:
    """From a finished run's logs: speed, FLOPs, validation loss, and tokens until the target was reached.

    ``teacher_flops`` are those of a teacher per token, to be added to the student's.
    """
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found: Record = {"tokens_per_s": round(statistics.median(line["time"]["tokens_per_s"] for line in lines))}
    found["step_seconds"] = round(sum(line["time"]["seconds"] for line in lines), 1)
    counts = [b["tokens"] - a["tokens"] for a, b in itertools.pairwise([{"tokens": 0}, *lines])]
    found["flops"] = sum(n * (line["flops_per_token"] + teacher_flops) for n, line in zip(counts, lines, strict=True))
    found |= {"valid_loss": lines[-1]["valid_loss"]} if "valid_loss" in lines[-1] else {}
    if (run / "ledger.jsonl").is_file():
        events = [event for event in read_ledger(run) if event["event"] == "prune"]
        end = events[-1]["tokens"] if events else 0
        found |= {"events": len(events), "pruning_tokens": end}
        after = [line["loss"] for line in lines if end < line["tokens"] <= end + AT_TARGET_TOKENS]
        found |= {"loss_at_target": statistics.mean(after)} if after and target_reached else {}
    return found


def open_masks(run: Path, source: Structure) -> Record:
    """Of a run with learned masks: the expected open share of each kind in their last step, and the shape's share."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = next((line for line in reversed(lines) if any(key.startswith("open_") for key in line)), {})
    if not last:
        return {}
    kept = Structure.from_json(json.loads((run / "model" / "structure.json").read_text()))
    sizes = [
        {
            "stem": len(one.hidden),
            "attn": sum(len(layer.query_heads) for layer in one.layers),
            "ffn": sum(len(layer.ffn) for layer in one.layers),
        }
        for one in (kept, source)
    ]
    return {
        "open_masks": {
            kind: {"expected": round(last[f"open_{kind}"], 4), "shape": round(sizes[0][kind] / sizes[1][kind], 4)}
            for kind in sizes[0]
            if f"open_{kind}" in last
        }
    }


def keep_logs(run: Path, folder: Path) -> None:
    """Copy the small files of a run that ``dwindle report`` and ``dwindle plot`` need."""
    for name in ("recipe.toml", "metrics.jsonl", "ledger.jsonl", "model/structure.json"):
        if (run / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(run / name, folder / name)


@cache
def commit() -> str:
    """The commit of this checkout, marked if files differ from it; without git, ``DWINDLE_STUDY_COMMIT``."""
    if told := os.environ.get("DWINDLE_STUDY_COMMIT"):
        return told
    here = str(Path(__file__).parent)

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", here, *words], capture_output=True, text=True, check=False).stdout.strip()

    found = git("rev-parse", "--short=12", "HEAD")
    return f"{found}+changes" if found and git("status", "--porcelain", "--", "../src", "../studies") else found
