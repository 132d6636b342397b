"""The tuning study: a half recovered from text and one made by one-shot pruning, each tuned on the same conversations.

    python studies/tune.py render smollm2-135m --chat ni=natural_instructions.permissive.jsonl.xz \\
        answers=answers.jsonl --text mixture/*.jsonl --out tokens
    python studies/tune.py run smollm2-135m --tokens tokens --seeds 0,1,2 --recover 16M --tune 8M --work work \\
        --out docs/results/tune.json --minutes 9

``render`` needs the conversations and the texts, and writes token files; of rows with a field ``split`` those of
``train`` alone. ``run`` needs these files and the model: torch, transformers, safetensors and numpy, no other package
of the tuning world. It runs what is missing until the time is over, and resumes what it stopped. Seeds can run side by
side (``--seeds 0 --work work &``); each record names the model that it made, to be scored afterwards.

The stages of a seed, at equal tokens and with the same teacher, the untouched source:

    half        pruned while it trains on the mixture (the recipe smollm2-135m-to-80m-mixed)
    one-shot    pruned at once after calibration, then trained like the half
    <stage>-<set>   each of both, tuned on a set of conversations with text of the mixture between them
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from common import alarm
from jobs import locked
from measures import commit, keep_logs

import dwindle
from dwindle.core.files import write_text_atomic
from dwindle.data.readers import open_input
from dwindle.data.token_files import write_token_files
from dwindle.pruning.config import PruneConfig
from dwindle.recipe.recipe import Recipe, load_recipe
from dwindle.run.pretrain import pretrain, resume
from dwindle.run.result import RunResult
from dwindle.run.tune import tuning_recipe
from dwindle.sources.loading import load_tokenizer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RECOVERY = "smollm2-135m-to-80m-mixed"
VALID = "psychology"
STARTS = ("half", "one-shot")
RESERVE_S = 25.0
"""Kept back to save a run that does not end in time."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    made = commands.add_parser("render", help="conversations and texts to token files")
    made.set_defaults(do=render)
    made.add_argument("model")
    made.add_argument("--chat", nargs="+", required=True, metavar="NAME=FILE")
    made.add_argument("--text", nargs="*", default=[], metavar="FILE")
    made.add_argument("--out", type=Path, required=True)
    ran = commands.add_parser("run", help="recover and tune")
    ran.set_defaults(do=run)
    ran.add_argument("model")
    ran.add_argument("--tokens", type=Path, required=True, help="what render wrote")
    ran.add_argument("--seeds", default="0,1,2")
    ran.add_argument("--starts", default=",".join(STARTS))
    ran.add_argument("--recover", default="16M", help="tokens of text")
    ran.add_argument("--tune", default="8M", help="tokens of conversations and text")
    ran.add_argument("--sequences", type=int, default=128, help="of the calibration of one-shot pruning")
    ran.add_argument("--recover-set", nargs="*", default=[], metavar="KEY=VALUE")
    ran.add_argument("--tune-set", nargs="*", default=["distill.weight=0.5"], metavar="KEY=VALUE")
    ran.add_argument("--work", type=Path, required=True, help="runs and models")
    ran.add_argument("--out", type=Path, required=True, help="JSON file that grows record by record")
    ran.add_argument("--minutes", type=float, default=float("inf"))
    args = parser.parse_args()
    args.do(args)


def render(args: argparse.Namespace) -> None:
    """``chat/NAME`` and ``text/NAME`` below ``--out``, which ``run`` reads."""
    tokenizer = load_tokenizer(args.model)
    args.out.mkdir(parents=True, exist_ok=True)
    for name, path in (text.split("=", 1) for text in args.chat):
        rows = (row for _, row in open_input(path, option="--chat").records() if row.get("split", "train") == "train")
        chosen = args.out / f"{name}.jsonl"
        chosen.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        files = write_token_files([str(chosen)], tokenizer, args.out / "chat" / name, chat=True, overwrite=True)
        chosen.unlink()
        assert files.answers is not None
        learned = int((files.answers[:, 1] - files.answers[:, 0]).sum())
        print(f"{name}: {files.num_documents:,} examples, {files.num_tokens:,} tokens, {learned:,} of them answers")
    for path in args.text:
        name = Path(path).name.partition(".")[0]
        files = write_token_files([path], tokenizer, args.out / "text" / name, overwrite=True)
        print(f"{name}: {files.num_tokens:,} tokens")


def run(args: argparse.Namespace) -> None:
    args.work.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * args.minutes
    for name, seed, make in stages(args):
        left = end - time.monotonic() - RESERVE_S
        if left <= 0:
            return
        folder = args.work / f"{name}-{seed}"
        if (folder / "done.json").is_file():
            continue
        started = time.monotonic()
        with alarm(left):
            result = resume(folder) if (folder / "checkpoints").is_dir() else pretrain(make(), folder, overwrite=True)
        if result.model is None:
            print(f"{name}, seed {seed}: stopped at step {result.step:,}, call again")
            return
        save(args, record(name, seed, result, time.monotonic() - started))
        write_text_atomic(folder / "done.json", "{}\n")
        shutil.rmtree(folder / "checkpoints")


def stages(args: argparse.Namespace) -> Iterator[tuple[str, int, Any]]:
    """(Name, seed, maker of the recipe): a tuning follows the start that it tunes."""
    for seed in map(int, args.seeds.split(",")):
        for start in args.starts.split(","):
            yield start, seed, lambda s=start, n=seed: recovery(args, s, n)
            for chat in sorted((args.tokens / "chat").iterdir()):
                yield f"{start}-{chat.name}", seed, lambda s=start, n=seed, c=chat: tuning(args, s, n, c)


def texts(args: argparse.Namespace) -> list[Path]:
    """Of the mixture: what recovery trains on, and tuning mixes in."""
    names = load_recipe(RECOVERY).data.sources
    return [args.tokens / "text" / name for name in names]


def recovery(args: argparse.Namespace, start: str, seed: int) -> Recipe:
    overrides = [
        f"source.device={DEVICE}",
        f"data.valid={args.tokens / 'text' / VALID}",
        f"training.tokens={args.recover}",
        f"training.seed={seed}",
        f"training.compile={str(DEVICE == 'cuda').lower()}",
        "validation.every=0",
        "checkpoint.every=0",
        *(f"data.sources.{path.name}.paths={path}" for path in texts(args)),
        f"distill.teacher={args.model}",
        *args.recover_set,
    ]
    if start == "half":
        return load_recipe(RECOVERY, [f"source.model={args.model}", *overrides])
    model = one_shot(args, seed)
    return load_recipe(RECOVERY, [f"source.model={model}", *overrides, "prune.enabled=false"])


def one_shot(args: argparse.Namespace, seed: int) -> Path:
    """The source pruned to the same size after calibration on the same text, with the recipe's way of choosing."""
    folder: Path = args.work / f"one-shot-{seed}.model"
    if not folder.is_dir():
        prune = load_recipe(RECOVERY).prune
        chosen = prune.model_dump(include=set(PruneConfig.model_fields), exclude_defaults=True)
        chosen |= {"selection": prune.effective_selection, "metric": prune.effective_metric}
        dwindle.prune(
            args.model,
            prune.target,
            out=folder,
            data=[str(path) for path in texts(args)],
            **{"round_to": prune.round_to} | chosen,
            sequences=args.sequences,
            seed=seed,
            device=DEVICE,
            measure=False,
        )
    return folder


def tuning(args: argparse.Namespace, start: str, seed: int, chat: Path) -> Recipe:
    return tuning_recipe(
        args.work / f"{start}-{seed}",
        [str(chat)],
        texts=[str(path) for path in texts(args)],
        tokens=args.tune,
        overrides=[
            f"source.device={DEVICE}",
            f"training.seed={seed}",
            f"training.compile={str(DEVICE == 'cuda').lower()}",
            f"distill.teacher={args.model}",
            "validation.every=0",
            "checkpoint.every=0",
            *args.tune_set,
        ],
    )


def record(name: str, seed: int, result: RunResult, seconds: float) -> dict[str, Any]:
    quality = result.quality
    return {
        "row": name,
        "seed": seed,
        "model": str(result.model),
        "parameters": result.parameters,
        "tokens": result.tokens,
        "loss": result.loss,
        "valid_before": None if quality is None else quality.source_loss,
        "valid": result.valid_loss,
        "validated_on": [] if quality is None else quality.text,
        "seconds": round(seconds, 1),
        "device": torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU",
        "commit": commit(),
    }


def save(args: argparse.Namespace, found: dict[str, Any]) -> None:
    """Add a record, and the small logs of its run; several processes may write."""
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with locked(args.work / "json.lock"):
        records = json.loads(args.out.read_text()) if args.out.is_file() else []
        kept = [one for one in records if (one["row"], one["seed"]) != (found["row"], found["seed"])]
        write_text_atomic(args.out, json.dumps([*kept, found], indent=1) + "\n")
    folder = Path(found["model"]).parent
    keep_logs(folder, args.out.with_name(f"{args.out.stem}-runs") / folder.name)
    print(f"{found['row']}, seed {found['seed']}: validation {found['valid_before']} → {found['valid']}")


if __name__ == "__main__":
    main()
