"""Shared by the training studies: rows as recipe overrides, a JSON file that grows row by row, a time budget.

A study can be called repeatedly with the same ``--out``: it runs what is missing until the budget is used up, and
resumes a run that an earlier call stopped. WikiText-2 and the tasks are only reported: recipes are chosen on the
validation books.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import itertools
import json
import math
import os
import re
import shlex
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import training_tables as tables
from jobs import STOPPED, Outcome, Place, jobs_around, locked, run_jobs
from measures import Clock, Peak, Record, commit, facts, keep_logs, open_masks, shape_of

import dwindle
from dwindle.anatomy.anatomy import Anatomy
from dwindle.commands.main import run_command
from dwindle.core.config import apply_overrides, from_dict
from dwindle.core.errors import UserError
from dwindle.core.files import write_text_atomic
from dwindle.core.sizes import parse_count
from dwindle.data.config import DataConfig
from dwindle.data.text_windows import validation_windows
from dwindle.distributed.precision import Precision
from dwindle.evaluation.evaluate import evaluate_model, load_data
from dwindle.pruning.config import PruneConfig
from dwindle.pruning.methods import METHODS_OF
from dwindle.recipe.recipe import Recipe, resolve_recipe
from dwindle.run.plan import plan_pruning
from dwindle.run.pretrain import pretrain, resume
from dwindle.run.result import RunResult
from dwindle.sources.loading import load_config
from dwindle.training.flops import forward_flops_per_token
from dwindle.training.loss import evaluate_loss

KEY = ("row", "model", "data", "valid", "size", "seed", "tokens", "settings", "sequences", "valid_tokens")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHARED_MICRO_TOKENS = 16384
MOST_GRAPHED = 4
"""Rows at once that are started as CUDA graphs."""
FIRST_TRAINING: Record = {"optimizer": "adamw", "lr": 1e-3, "tokens_per_step": 65536}
FIRST_PRUNING: Record = {"selection": "coupled", "metric": "taylor", "horizon": 0.05, "smoothing": 0.0}
"""Settings of rows that do not set them: the defaults of the first studies. Today's defaults follow the results."""
REFUSALS = ("--to", "target", "method", "attention", "groups", "round_to", "rounds")
"""Beginnings of errors that concern one row, whose method does not reach the size. Other errors concern all rows."""
RESERVE_S = 25.0
"""Kept back from the budget to save a run that does not end in time."""


@dataclass(frozen=True)
class Row:
    """One way to make a model: recipe overrides on top of the settings that all rows share."""

    title: str
    overrides: tuple[str, ...] = ()
    from_one_shot: bool = False
    """Start from the source pruned after calibration, without pruning in the run."""
    rounds: int = 1
    """How many times that pruning scores the groups."""
    trained: bool = True
    sized: bool = True
    """False for the source itself, which has no target."""


def arguments(description: str, rows: dict[str, Row], words: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of all training studies, from ``words`` or else from this process's command line."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    titles = "; ".join(f"{name}: {row.title}" for name, row in rows.items())
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--data", required=True, nargs="+", help="training text or token files, as one source")
    parser.add_argument("--valid", required=True, help="held-out text; recipes are chosen on it")
    parser.add_argument("--wikitext", help="WikiText-2 raw test split; only reported")
    parser.add_argument("--texts", nargs="*", default=[], help="NAME=PATH of more texts; only reported")
    parser.add_argument("--tasks-data", help="folder with the sets of the seven tasks; only reported")
    parser.add_argument("--limit", type=int, help="items of each task; default all")
    parser.add_argument("--rows", default=",".join(rows), help=titles.replace("%", "%%"))
    parser.add_argument("--sizes", default="50%nonemb")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--tokens", default="16M")
    parser.add_argument("--valid-tokens", default="1G", help="tokens of each held-out text; default all")
    parser.add_argument("--sequences", type=int, default=128, help="sequences that one-shot pruning is calibrated on")
    parser.add_argument("--set", nargs="*", default=[], help="section.key=value for all rows")
    parser.add_argument("--kd", nargs="*", default=["distill.weight=0.5"], help="what +kd after a row's name sets")
    parser.add_argument("--out", type=Path, required=True, help="JSON file, read first if it is there")
    parser.add_argument("--work", type=Path, help="runs, models and tokens; default beside --out")
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds for this call")
    parser.add_argument("--jobs", type=int, default=1, help="rows to make at the same time")
    args = parser.parse_args(words)
    args.work = args.work or args.out.with_suffix("")
    return args


def run_study(name: str, description: str | None, rows: dict[str, Row], groups: dict[str, list[str]]) -> None:
    """Make all missing rows that fit the budget, then print the tables. ``groups`` name several rows at once."""
    args = arguments(description or "", rows)
    run_command(lambda: make_rows(Study(name, args, rows), args, groups))


def make_rows(study: Study, args: argparse.Namespace, groups: dict[str, list[str]]) -> None:
    """Check all requested rows, then make them."""
    check_texts(args)
    words = [word.strip() for word in args.rows.split(",") if word.strip()]
    wanted = [row for word in words for row in groups.get(word, [word])]
    for row in wanted:
        study.row(row)  # raises for unknown names
    order = list(itertools.product(map(int, args.seeds.split(",")), args.sizes.split(","), wanted))
    if args.jobs > 1:
        outcome = run_jobs(study.missing(order), args.jobs, lambda: study.left, args.work / "logs")
        study.read()
    else:
        outcome = Outcome(not all(study.advance(row, size, seed) for seed, size, row in order))
    if outcome.out_of_time:
        print("the budget is used up: call again to continue", flush=True)
    print(tables.losses(study.content))
    print(tables.tasks(study.content))
    if outcome.failed:
        raise SystemExit(f"{outcome.failed} rows failed: see above, and the logs in {args.work / 'logs'}")
    if outcome.out_of_time:
        raise SystemExit(STOPPED)


class Study:
    """One JSON file and its runs."""

    def __init__(self, name: str, args: argparse.Namespace, rows: dict[str, Row]) -> None:
        self.name, self.args, self.rows = name, args, rows
        self.started = time.monotonic()
        self.content: Record = {"format": "dwindle-study-1", "study": name, "rows": []}
        self.read()
        self.data = load_data(["commonsense", "mmlu"], [args.tasks_data], limit=args.limit) if args.tasks_data else None
        self.texts = {"textbooks": args.valid} | ({"wikitext2": args.wikitext} if args.wikitext else {})
        self.texts |= dict(text.split("=", 1) for text in args.texts)

    def read(self) -> None:
        """Read the file again: other processes add to it."""
        if self.args.out.is_file():
            self.content = json.loads(self.args.out.read_text(encoding="utf-8"))

    def row(self, name: str) -> Row:
        whole, _, rate = name.partition("@")
        plain, plus, kd = whole.partition("+")
        if plain not in self.rows or (plus and kd != "kd"):
            raise UserError(f"--rows: {name!r} is not one of {', '.join(self.rows)}, or one of them with +kd and @RATE")
        row = self.rows[plain]
        if rate:
            row = replace(row, title=f"{row.title}, rate {rate}", overrides=(*row.overrides, f"training.lr={rate}"))
        if not plus:
            return row
        overrides = (*row.overrides, f"distill.teacher={self.args.model}", *self.args.kd)
        how = ", ".join(setting.removeprefix("distill.") for setting in self.args.kd)
        return replace(row, title=f"{row.title}, distilled ({how})", overrides=overrides)

    def advance(self, name: str, size: str, seed: int) -> bool:
        """Make one row if it is missing; False if the time is up."""
        row = self.row(name)
        key = self._key(name, row, size, seed)
        found = self._found(key)
        if self._is_complete(found):
            return True
        if self.left < self._estimate(key["tokens"], tasks_only=found is not None):
            return False
        if found is not None:
            record, model = found, self._model_of(row, key)
        else:
            record = key | self._about(name, row, size, seed)
            model = self._make(row, key, record)
            if model is None and "refused" not in record:
                return False
        if model is not None:
            record |= self._losses(model, record)
        self._save(record)
        shutil.rmtree(self._run_folder(key) / "checkpoints", ignore_errors=True)  # only after the row is saved
        if model is not None and not self._has_tasks(record):
            self._tasks(model, record)
            self._save(record)
        print(json.dumps({k: v for k, v in record.items() if k not in ("command", "settings", "tasks")}), flush=True)
        return True

    def missing(self, places: list[Place]) -> list[Place]:
        """Places of missing rows; equal rows are listed once."""
        keys = [self._key(row, self.row(row), size, seed) for seed, size, row in places]
        found = {json.dumps(k): place for k, place in zip(keys, places, strict=True)}
        return [place for key, place in found.items() if not self._is_complete(self._found(json.loads(key)))]

    def _found(self, key: Record) -> Record | None:
        """The row; if it was run several times, preferably a complete one."""
        runs = [r for r in self.content["rows"] if all(r.get(k) == v for k, v in key.items())]
        return next((r for r in runs if self._is_complete(r)), runs[0] if runs else None)

    def _is_complete(self, found: Record | None) -> bool:
        if found is None or "refused" in found:
            return found is not None
        return self._has_tasks(found) and all(text in found for text in self.texts)

    def _has_tasks(self, record: Record) -> bool:
        return self.data is None or ("tasks" in record and record.get("limit") == self.args.limit)

    @property
    def left(self) -> float:
        return float(self.args.budget - (time.monotonic() - self.started))

    def _estimate(self, tokens: int, *, tasks_only: bool) -> float:
        """Estimated seconds: the slowest row so far, with training scaled by tokens; 0 without any."""
        rows = [r for r in self.content["rows"] if r["seconds"]]
        tasks = max((r["seconds"].get("tasks", 0.0) for r in rows), default=0.0) if self.data is not None else 0.0
        if tasks_only:
            return tasks
        pace = max((r["step_seconds"] / r["tokens"] for r in rows if r.get("step_seconds")), default=0.0)
        return pace * tokens + tasks + (RESERVE_S if tokens else 0.0)

    def _key(self, name: str, row: Row, size: str, seed: int) -> Record:
        """The settings that identify a row (``KEY``), without paths."""
        overrides = [*self.args.set, *(o for o in row.overrides if not o.startswith("distill.teacher="))]
        recipe = self._recipe(row, size, seed, self.args.model)
        resolved = resolve_recipe(recipe).prune
        given = {text.partition("=")[0] for text in overrides}
        for key in ("horizon", "warmup_steps") if recipe.prune.enabled else ():  # defaults may change, rows must not
            if (value := getattr(resolved, key)) is not None and f"prune.{key}" not in given:
                overrides.append(f"prune.{key}={value}")
        tokens = recipe.num_tokens if row.trained else 0
        return {
            "row": name,
            "model": Path(self.args.model).name,
            "data": "+".join(Path(text).name for text in self.args.data),
            "valid": Path(self.args.valid).name,
            "size": size if row.sized else "",
            "seed": seed if row.trained or row.from_one_shot else 0,  # calibration depends on it, too
            "tokens": tokens,
            "settings": overrides,
            "sequences": self.args.sequences if row.from_one_shot else 0,
            "valid_tokens": self.args.valid_tokens,
        }

    def _about(self, name: str, row: Row, size: str, seed: int) -> Record:
        words = ["python", f"studies/{self.name}.py", "--rows", name, "--sizes", size, "--seeds", str(seed)]
        words += ["--tokens", self.args.tokens, *(["--set", *self.args.set] if self.args.set else [])]
        for option, usual in (("valid_tokens", "1G"), ("sequences", 128)):
            if (value := getattr(self.args, option)) != usual:
                words += [f"--{option.replace('_', '-')}", str(value)]
        words += ["--kd", *self.args.kd] if "+" in name else []
        words += ["--data", *(Path(text).name for text in self.args.data)]
        for option in ("model", "valid", "wikitext", "tasks_data"):
            if value := getattr(self.args, option):
                words += [f"--{option.replace('_', '-')}", Path(value).name]
        named = (text.split("=", 1) for text in self.args.texts)
        words += ["--texts", *(f"{name}={Path(path).name}" for name, path in named)] if self.args.texts else []
        device = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU"
        versions = {package: importlib.metadata.version(package) for package in ("torch", "transformers")}
        return {
            "title": row.title,
            "set": self.args.set,
            "command": shlex.join(words),
            "commit": commit(),
            "machine": {"device": device, **versions},
            "jobs": jobs_around(),
            "order": list(self.rows).index(re.split(r"[+@]", name)[0]),
            "seconds": {},
        }

    def _recipe(self, row: Row, size: str, seed: int, model: str) -> Recipe:
        """The recipe of a row.

        Rows that share a GPU get small micro-batches, because each would use all of its memory. More than
        ``MOST_GRAPHED`` of them get no CUDA graphs: graphs of several processes take turns, kernels run side by side.
        """
        args = self.args
        base: Record = {
            "source": {"model": model, "device": DEVICE},
            "data": {"train": args.data, "valid": [args.valid], "cache_dir": str(args.work / "tokens")},
            "training": {"tokens": args.tokens, "seed": seed, "compile": DEVICE == "cuda", **FIRST_TRAINING},
            "prune": {"target": size, "enabled": row.sized and not row.from_one_shot},
            "distill": {"weight": 0.0},
            "checkpoint": {"every": 0},
        }
        overrides = [*args.set, *row.overrides]
        if not any(text.startswith("prune.method=") for text in overrides):
            base["prune"] |= FIRST_PRUNING
        if any(text.startswith("prune.ratio=") for text in overrides):
            del base["prune"]["horizon"]
        recipe = from_dict(Recipe, apply_overrides(base, overrides, Recipe))
        if DEVICE == "cuda" and jobs_around() > 1:
            recipe.training.cuda_graphs = jobs_around() <= MOST_GRAPHED
            if not recipe.training.micro_batch:
                fitting = max(1, SHARED_MICRO_TOKENS // recipe.data.seq_len)
                recipe.training.micro_batch = min(fitting, recipe.num_sequences_per_step)
        return recipe

    def _run_folder(self, key: Record) -> Path:
        words = (key["row"], key["size"], key["seed"], key["tokens"], fingerprint(key))
        return Path(self.args.work / re.sub(r"[^A-Za-z0-9.+-]+", "-", "-".join(map(str, words))))

    def _model_of(self, row: Row, key: Record) -> str | None:
        """The model of a finished row, if it still exists."""
        if not row.trained and not row.from_one_shot:
            return str(self.args.model)
        made = (
            self._one_shot_folder(row, key["size"], key["seed"]) if not row.trained else self._run_folder(key) / "model"
        )
        if made.is_dir():
            return str(made)
        print(f"{key['row']}: its model is no longer in {self.args.work.name}, so its tasks are not measured")
        return None

    def _make(self, row: Row, key: Record, record: Record) -> str | None:
        """The row's model; None if the recipe is invalid (recorded as such) or the run was stopped."""
        size, seed = key["size"] or self.args.sizes.split(",")[0], key["seed"]
        model, clock = self.args.model, Clock(record["seconds"])
        recipe = self._recipe(row, size, seed, model)
        try:
            recipe.check()
            plan_pruning(recipe, Anatomy.of_config(load_config(model)))
        except UserError as error:
            if not str(error).startswith("prune."):
                raise  # a mistake in the shared settings; otherwise only this row is impossible
            record["refused"] = str(error)
            return None
        if row.from_one_shot:
            try:
                model, cost = self._one_shot(row, size, seed)
            except UserError as error:
                if not str(error).startswith(REFUSALS):
                    raise
                record["refused"] = str(error)
                return None
            record["pruning"] = cost
            clock.seconds["prune"] = cost["seconds"]
        if not row.trained:
            return str(model)
        with clock("train"):
            result = self._train(self._recipe(row, size, seed, model), self._run_folder(key))
        if result.model is None:
            return None
        source = Anatomy.of_config(load_config(self.args.model))
        teacher = forward_flops_per_token(source, recipe.data.seq_len) if recipe.distill.weight else 0.0
        record |= facts(result.run, result.target_reached, teacher) | {"target_reached": result.target_reached}
        record |= open_masks(result.run, source.source)
        keep_logs(result.run, self.args.out.with_name(f"{self.args.out.stem}-runs") / result.run.name)
        return str(result.model)

    def _one_shot_options(self, row: Row, size: str, seed: int) -> Record:
        recipe = self._recipe(row, size, seed, self.args.model)
        prune = recipe.prune
        knobs = {name: getattr(prune, name) for name in PruneConfig.model_fields}
        if prune.method == "efficientllm":
            knobs["selection"] = prune.effective_selection
        if prune.method in METHODS_OF["metric"]:
            knobs["metric"] = prune.effective_metric
        return {
            "to": size,
            "data": self.args.data,
            **knobs,
            "sequences": self.args.sequences,
            "seq_len": recipe.data.seq_len,
            "seed": seed,
            **({"rounds": row.rounds} if row.rounds > 1 else {}),
        }

    def _one_shot_folder(self, row: Row, size: str, seed: int) -> Path:
        return Path(
            self.args.work / f"one-shot-{fingerprint([self.args.model, self._one_shot_options(row, size, seed)])}"
        )

    def _one_shot(self, row: Row, size: str, seed: int) -> tuple[str, Record]:
        """The source pruned after calibration, and what that took; rows with the same settings share it."""
        folder = self._one_shot_folder(row, size, seed)
        cost = folder.with_suffix(".json")
        with locked(folder.with_suffix(".lock")):
            if not folder.is_dir() or not cost.is_file():
                loaded, peak, clock = dwindle.load(self.args.model, device=DEVICE), Peak(), Clock({})
                with clock("prune"), tf32():
                    result = dwindle.prune(
                        loaded, device=DEVICE, measure=False, **self._one_shot_options(row, size, seed)
                    )
                result.save(folder, overwrite=True)
                found = {"seconds": clock.seconds["prune"], "peak_bytes": peak.read(), "device": DEVICE}
                write_text_atomic(cost, json.dumps(found) + "\n", option="--work")
        return str(folder), json.loads(cost.read_text(encoding="utf-8"))

    def _train(self, recipe: Recipe, run: Path) -> RunResult:
        """Start a run, or resume one that an earlier call stopped."""
        with alarm(self.left - RESERVE_S):
            if (run / "checkpoints").is_dir():
                return resume(run)
            return pretrain(recipe, run, overwrite=True)

    def _losses(self, model: str, known: Record) -> Record:
        """Losses on texts that have not been measured yet."""
        texts = {name: text for name, text in self.texts.items() if name not in known}
        if not texts:
            return {}
        loaded = dwindle.load(model, device=DEVICE)
        seq_len = self._recipe(Row(""), self.args.sizes.split(",")[0], 0, self.args.model).data.seq_len
        found: Record = {"parameters": sum(p.numel() for p in loaded.model.parameters())}
        anatomy = Anatomy.of(loaded.model)
        found["non_embedding"] = anatomy.count(anatomy.source).non_embedding
        found["shape"] = shape_of(loaded.model)
        tokens, cache = parse_count(self.args.valid_tokens, "--valid-tokens"), self.args.work / "tokens"
        for name, text in texts.items():
            windows = validation_windows([text], loaded.tokenizer, seq_len, tokens, cache_dir=cache)
            with tf32():
                found[name] = evaluate_loss(loaded.model, windows, batch=16, chunk_tokens=8192)
        return found

    def _tasks(self, model: str, record: Record) -> None:
        assert self.data is not None
        loaded = dwindle.load(model, device=DEVICE)
        precision: Precision = "bf16" if DEVICE == "cuda" else "fp32"
        with Clock(record["seconds"])("tasks"):
            result = evaluate_model(
                loaded.model, loaded.tokenizer, self.data, name=record["row"], quiet=True, precision=precision
            )
        record["tasks"] = {
            task.task: {"metric": task.metric, "value": task.value, "stderr": task.stderr, "items": task.num_items}
            for task in result.tasks
        }
        record |= {"average": tables.mean_of(record, tables.TASKS), "limit": self.args.limit}

    def _save(self, record: Record) -> None:
        """Add the record, or replace an incomplete one."""
        key = {name: record.get(name) for name in (*KEY, "repeat")}
        with locked(self.args.work / "json.lock"):
            self.read()
            rows, known = self.content["rows"], self._found(key)
            if known is None:
                rows.append(record)
            else:
                rows[rows.index(known)] = record
            write_text_atomic(self.args.out, json.dumps(self.content, indent=1) + "\n", option="--out")


def check_texts(args: argparse.Namespace) -> None:
    """Raise for missing texts before the first row is trained."""
    texts = {"data": args.data, "valid": [args.valid], "wikitext": [args.wikitext] if args.wikitext else []}
    texts["texts"] = [text.partition("=")[2] for text in args.texts]
    for option, paths in texts.items():
        try:
            if paths:
                DataConfig(train=paths).check()
        except UserError as error:
            raise UserError(str(error).replace("data.train", f"--{option}")) from None


def fingerprint(what: Any) -> str:
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:8]


@contextmanager
def tf32() -> Iterator[None]:
    """Matrix products of a GPU in TF32: several times as fast as fp32, with errors far below a table's digits."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def alarm(seconds: float) -> Iterator[None]:
    """Send SIGTERM when the time is over: the run then saves a checkpoint and stops."""
    if math.isinf(seconds):
        yield
        return

    def ask(*_: object) -> None:
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # the run has not installed its handler yet
            signal.setitimer(signal.ITIMER_REAL, 0.5)
        else:
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.signal(signal.SIGALRM, ask)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.1))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
