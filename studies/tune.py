"""The tuning study: models recovered from text, tuned on conversations, and asked.

    python studies/tune.py ask smollm2-135m --count 12000 --out prompts.jsonl
    python studies/tune.py teach smollm2-135m --prompts prompts.jsonl --tokens 512 --out answers.jsonl
    python studies/tune.py render smollm2-135m --chat answers=answers.jsonl --out tokens
    python studies/tune.py render smollm2-135m --chat ni=natural_instructions.permissive.jsonl.xz --most 3000 \\
        --out tokens
    python studies/tune.py run half=RUN one-shot=RUN --seed 0 --teacher smollm2-135m --chat tokens/answers tokens/ni \\
        --text wikipedia textbooks elife standardebooks mdn --tune 8M --work work --out docs/results/tune.json
    python studies/tune.py answer work/half-0 --to ifeval.prompts.jsonl vicuna_bench.question.jsonl --out answers/half-0
    python studies/tune.py agree work/half-0 --source smollm2-135m --answers answers/source/vicuna_bench.question.jsonl
    python studies/tune.py judge answers/half-0:answers/source --judge JUDGE --source answers/source --work verdicts \\
        --out docs/results/tune-winrates.json
    python studies/tune.py score answers/source answers/half-0 … --prompts PROMPTS --out docs/results/tune-scores.json

The models are rows of ``ladder.py`` at equal tokens with the same teacher: pruned while training, and at once. All are
tuned on the same data: the source's answers to prompts that it wrote itself (it continues the empty turn of a user),
Super-NaturalInstructions, and text of the mixture between them. ``run``, ``teach`` and ``answer`` continue when called
again. Only ``score`` needs the packages of IFEval.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from common import alarm
from jobs import STOPPED, locked
from measures import commit, keep_logs

import dwindle
from dwindle.commands.main import run_command
from dwindle.core.files import write_text_atomic
from dwindle.data.readers import open_input
from dwindle.data.token_files import write_token_files
from dwindle.evaluation.config import SamplingConfig
from dwindle.evaluation.in_memory import load_with_tokenizer
from dwindle.evaluation.prompts import prompt_ids
from dwindle.evaluation.sampling import decode, end_tokens
from dwindle.run.pretrain import pretrain, resume
from dwindle.run.result import RunResult
from dwindle.run.tune import tuning_recipe
from dwindle.sources.loading import load_tokenizer, model_of_run
from dwindle.training.sampling import evaluating

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = "bfloat16" if DEVICE == "cuda" else "float32"
RESERVE_S = 25.0
"""Kept back to save a run that does not end in time."""
LONGEST_PROMPT = 200
"""Tokens of a prompt that a model asks itself."""
MOST_TRIES = 20
"""Prompts begun for each that is wanted: a model without a chat template never ends one."""
BATCH = 1024 if DEVICE == "cuda" else 16
HOW: dict[str, Any] = {"batch": BATCH, "dtype": DTYPE, "device": DEVICE, "runtime": "transformers"}
"""How answers are made; on a CPU too in transformers, which needs no package more for a GGUF file."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    asked = commands.add_parser("ask", help="prompts that a model writes itself")
    asked.set_defaults(do=ask)
    asked.add_argument("model")
    asked.add_argument("--count", type=int, default=8000)
    asked.add_argument("--seed", type=int, default=0)
    asked.add_argument("--out", type=Path, required=True)
    taught = commands.add_parser("teach", help="a model's answers to learn from")
    taught.set_defaults(do=teach)
    taught.add_argument("model")
    taught.add_argument("--prompts", type=Path, required=True)
    taught.add_argument("--tokens", type=int, default=400)
    taught.add_argument("--out", type=Path, required=True)
    made = commands.add_parser("render", help="conversations to token files")
    made.set_defaults(do=render)
    made.add_argument("model")
    made.add_argument("--chat", nargs="+", required=True, metavar="NAME=FILE")
    made.add_argument("--most", type=int, default=10**9, help="examples of a file, evenly spaced")
    made.add_argument("--out", type=Path, required=True)
    ran = commands.add_parser("run", help="tune")
    ran.set_defaults(do=run)
    ran.add_argument("starts", nargs="+", metavar="NAME=MODEL")
    ran.add_argument("--seed", type=int, default=0)
    ran.add_argument("--teacher", required=True)
    ran.add_argument("--chat", nargs="+", required=True, help="what render wrote")
    ran.add_argument("--text", nargs="+", required=True, help="texts or token files of the mixture")
    ran.add_argument("--tune", default="6M", help="tokens of conversations and text")
    ran.add_argument("--set", nargs="*", default=["distill.weight=0.5"], metavar="KEY=VALUE")
    ran.add_argument("--work", type=Path, required=True, help="runs and models")
    ran.add_argument("--out", type=Path, required=True, help="JSON file that grows record by record")
    ran.add_argument("--minutes", type=float, default=float("inf"))
    answered = commands.add_parser("answer", help="a model's answers to files of prompts")
    answered.set_defaults(do=answer)
    answered.add_argument("model")
    answered.add_argument("--to", nargs="+", required=True, metavar="FILE")
    answered.add_argument("--tokens", type=int, default=1280)
    answered.add_argument("--out", type=Path, required=True, help="folder of one file each")
    agreed = commands.add_parser("agree", help="how often a model continues the source's answers like the source")
    agreed.set_defaults(do=agree)
    agreed.add_argument("model")
    agreed.add_argument("--source", required=True)
    agreed.add_argument("--answers", type=Path, required=True, help="of the source")
    agreed.add_argument("--out", type=Path, help="JSON file")
    judged = commands.add_parser("judge", help="win rates, and whether the judge knows right answers")
    judged.set_defaults(do=judge)
    judged.add_argument("pairs", nargs="+", metavar="FOLDER:FOLDER")
    judged.add_argument("--judge", required=True, help="a model")
    judged.add_argument("--questions", default="vicuna_bench.question.jsonl", help="file of answers in every folder")
    judged.add_argument("--source", type=Path, required=True, help="folder of answers to calibrate on")
    judged.add_argument("--work", type=Path, required=True)
    judged.add_argument("--out", type=Path, required=True)
    scored = commands.add_parser("score", help="IFEval of folders of answers")
    scored.set_defaults(do=score)
    scored.add_argument("answers", nargs="+", type=Path)
    scored.add_argument("--prompts", required=True, help="folder with ifeval.prompts.jsonl")
    scored.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.do(args)


def ask(args: argparse.Namespace) -> None:
    """Different prompts: the model continues the chat template at the user's turn; those that it ends are kept."""
    model, tokenizer = load_with_tokenizer(args.model, DTYPE, DEVICE)
    mark = "\x00"
    before, _, _ = tokenizer.apply_chat_template([{"role": "user", "content": mark}], tokenize=False).partition(mark)
    row = tokenizer(before, add_special_tokens=False)["input_ids"]
    how = SamplingConfig(temperature=1.0, top_k=256, top_p=0.95, seed=args.seed)
    ends = end_tokens(model, tokenizer)
    found: dict[str, None] = {}
    number = 0
    while len(found) < args.count and number < MOST_TRIES * args.count:
        keys = [[number + place] for place in range(BATCH)]
        number += BATCH
        for one in decode(model, [row] * BATCH, how, count=LONGEST_PROMPT, ends=ends, keys=keys, droppable=True):
            if one.is_finished and (text := tokenizer.decode(one.ids).strip()):
                found[text] = None
        print(f"{len(found):,} prompts of {number:,}", flush=True)
    lines = [json.dumps({"id": place, "prompt": text}) for place, text in enumerate(list(found)[: args.count])]
    write_text_atomic(args.out, "\n".join(lines) + "\n", option="--out")


def teach(args: argparse.Namespace) -> None:
    """Greedy answers, as ``dwindle generate`` gives them; an interrupted call is continued."""
    options: dict[str, Any] = {"tokens": args.tokens, **HOW}
    print(json.dumps(dwindle.generate_answers(args.model, args.prompts, args.out, **options).to_json()))


def render(args: argparse.Namespace) -> None:
    """Token files by name below ``--out``; of rows with a field ``split`` only ``train``, no empty answers."""
    tokenizer = load_tokenizer(args.model)
    args.out.mkdir(parents=True, exist_ok=True)
    for name, path in (text.split("=", 1) for text in args.chat):
        rows = (row for _, row in open_input(path, option="--chat").records())
        kept = [row for row in rows if row.get("split", "train") == "train" and not is_empty(row)]
        kept = kept[:: max(1, -(-len(kept) // args.most))]
        chosen = args.out / f"{name}.jsonl"
        chosen.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
        files = write_token_files([str(chosen)], tokenizer, args.out / name, chat=True, overwrite=True)
        chosen.unlink()
        assert files.answers is not None
        learned = int((files.answers[:, 1] - files.answers[:, 0]).sum())
        print(f"{name}: {files.num_documents:,} examples, {files.num_tokens:,} tokens, {learned:,} of them answers")


def is_empty(row: dict[str, Any]) -> bool:
    """Whether a model said nothing in one of its answers."""
    return any(not turn["content"].strip() for turn in row.get("messages", []) if turn["role"] == "assistant")


def run(args: argparse.Namespace) -> None:
    args.work.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * args.minutes
    for name, model in (text.split("=", 1) for text in args.starts):
        left = end - time.monotonic() - RESERVE_S
        folder = args.work / f"{name}-{args.seed}"
        if left <= 0 or (folder / "done.json").is_file():
            continue
        started = time.monotonic()
        recipe = tuning_recipe(
            model,
            args.chat,
            texts=args.text,
            tokens=args.tune,
            overrides=[
                f"source.device={DEVICE}",
                f"training.seed={args.seed}",
                f"training.compile={str(DEVICE == 'cuda').lower()}",
                f"distill.teacher={args.teacher}",
                "validation.every=0",
                "checkpoint.every=0",
                *args.set,
            ],
        )
        with alarm(left):
            result = resume(folder) if (folder / "checkpoints").is_dir() else pretrain(recipe, folder, overwrite=True)
        if result.model is None:
            print(f"{name}, seed {args.seed}: stopped at step {result.step:,}: call again to continue")
            raise SystemExit(STOPPED)
        save(args, record(name, args.seed, result, time.monotonic() - started))
        write_text_atomic(folder / "done.json", "{}\n")
        shutil.rmtree(folder / "checkpoints")


def answer(args: argparse.Namespace) -> None:
    """Greedy answers, a file for each file of prompts, all in one pass; an interrupted call is continued."""
    args.out.mkdir(parents=True, exist_ok=True)
    asked, answered = args.out / "prompts.jsonl", args.out / "answers.jsonl"
    names, lines = dict[str, tuple[Path, Any]](), list[str]()
    for path in map(Path, args.to):
        for row in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
            name = next(row.pop(key) for key in ("id", "key", "question_id") if key in row)
            names[f"{path.name}:{name}"] = path, name
            lines.append(json.dumps({"id": f"{path.name}:{name}"} | row) + "\n")
    write_text_atomic(asked, "".join(lines))
    answered.unlink(missing_ok=True)  # whole, by a call that ended before it was split
    options: dict[str, Any] = {"tokens": args.tokens, **HOW}
    made = dwindle.generate_answers(args.model, asked, answered, **options)
    found: dict[Path, list[str]] = {path: [] for path in map(Path, args.to)}
    for row in map(json.loads, answered.read_text(encoding="utf-8").splitlines()):
        path, name = names[row["id"]]
        found[path].append(json.dumps(row | {"id": name}) + "\n")
    for path, own in found.items():
        write_text_atomic(args.out / path.name, "".join(own))
    asked.unlink(), answered.unlink()
    print(json.dumps(made.to_json()), flush=True)


def agree(args: argparse.Namespace) -> None:
    """Share of the positions in the source's first answers at which both models find the same token likeliest."""
    models = [load_with_tokenizer(resolved(name), DTYPE, DEVICE) for name in (args.source, args.model)]
    tokenizer, same, total = models[0][1], 0, 0
    for line in args.answers.read_text(encoding="utf-8").splitlines():
        messages = json.loads(line)["messages"][:2]
        prompt = prompt_ids(tokenizer, messages[:1], str(args.answers), chat=True)
        own = tokenizer(messages[1]["content"], add_special_tokens=False)["input_ids"]
        ids = torch.tensor([[*prompt, *own]], device=DEVICE)
        likeliest = []
        for model, _ in models:
            with evaluating(model):
                likeliest.append(model(input_ids=ids).logits[0, len(prompt) - 1 : -1].argmax(-1))
        same += int((likeliest[0] == likeliest[1]).sum())
        total += len(own)
    found = {"model": Path(args.model).name, "agreement": same / total, "tokens": total, "commit": commit()}
    print(json.dumps(found))
    if args.out:
        write_text_atomic(args.out, json.dumps(found) + "\n", option="--out")


def resolved(name: str) -> str:
    """A run's model, or the name of a model itself."""
    return str(model_of_run(Path(name)) or name)


def score(args: argparse.Namespace) -> None:
    """The four numbers of IFEval for each folder that ``answer`` wrote, beside how many answers were cut."""
    found = []
    for folder in args.answers:
        file = folder / "ifeval.prompts.jsonl"
        (result,) = dwindle.evaluate(str(file), ["ifeval"], data=[args.prompts]).generated
        cut = sum(not json.loads(line)["finished"] for line in file.read_text(encoding="utf-8").splitlines())
        left_out = sum(result.left_out.values())
        one = {"model": folder.name, "cut": cut, "left_out": left_out, **result.values, "commit": commit()}
        found.append(one)
        print(one, flush=True)
    write_text_atomic(args.out, json.dumps(found, indent=1) + "\n", option="--out")


def judge(args: argparse.Namespace) -> None:
    """Win rates of pairs. Calibration: does the judge prefer an answer to the one that belongs to the next question?"""
    args.work.mkdir(parents=True, exist_ok=True)
    right, wrong, verdicts = args.source / args.questions, args.work / "wrong.jsonl", args.work / "verdicts.jsonl"
    rows = [json.loads(line) for line in right.read_text(encoding="utf-8").splitlines()]
    others = [row["messages"][1] for row in [*rows[1:], rows[0]]]
    shifted = [row | {"messages": [row["messages"][0], other]} for row, other in zip(rows, others, strict=True)]
    write_text_atomic(wrong, "".join(json.dumps(row) + "\n" for row in shifted))
    write_text_atomic(verdicts, "".join(json.dumps({"id": row["id"], "verdict": "A"}) + "\n" for row in rows))

    def rate(a: Path, b: Path, **options: Any) -> dict[str, Any]:
        """As JSON, with names in place of this machine's paths."""
        result = dwindle.win_rate(a, b, judge=args.judge, dtype=DTYPE, device=DEVICE, **options)
        return result.to_json() | {"a": a.parent.name, "b": b.parent.name, "judge": Path(args.judge).name}

    found: list[dict[str, Any]] = [{"calibration": rate(right, wrong, calibrate=verdicts), "commit": commit()}]
    for a, b in (map(Path, pair.split(":")) for pair in args.pairs):
        folder = args.work / f"{a.name}-{b.name}"  # with which an interrupted call goes on
        result = rate(a / args.questions, b / args.questions, out=folder)
        found.append({"a": a.name, "b": b.name, "win_rate": result, "commit": commit()})
        print(found[-1], flush=True)
    write_text_atomic(args.out, json.dumps(found, indent=1) + "\n", option="--out")


def record(name: str, seed: int, result: RunResult, seconds: float) -> dict[str, Any]:
    quality = result.quality
    return {
        "row": name,
        "seed": seed,
        "model": f"{result.run.name}/model",
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
    folder = (args.work / found["model"]).parent
    keep_logs(folder, args.out.with_name(f"{args.out.stem}-runs") / folder.name)
    print(f"{found['row']}, seed {found['seed']}: validation {found['valid_before']} → {found['valid']}")


if __name__ == "__main__":
    run_command(main)
