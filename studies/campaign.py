"""Runs many rows of several studies on one GPU: the tables of the mixture, the peers and the tuning.

    python studies/campaign.py thirty peers --inputs inputs --work work --out new --list     # only print the commands
    python studies/campaign.py thirty peers --inputs inputs --work work --out new --budget 1400

``inputs`` is what ``campaign_inputs.py`` writes: models, tokens, sets of the tasks, prompts. From zero to a table:
docs/reproduce.md.

- Which jobs: rows that docs/results has are skipped, unless another job needs their model.
- In which order: campaigns as they are named; of the peers half size with seed 0 first, the rest after all others. A
  job starts when the jobs that it needs have ended; those of the second model wait for its input.
- At the same time: at most ``--train`` jobs that train and ``--ask`` that answer, because a small model leaves the GPU
  idle while it is compiled, pruned and measured.
- ``--budget``: no job starts that would not end in time, judged by similar jobs that ended. When the time is up, or on
  SIGTERM, running jobs save themselves.
- Called again, it continues: finished jobs are not repeated, stopped runs resume.
- A job that fails is printed, and the jobs that need it are skipped. Exit code 1: a job failed; 143: some are left.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from common import Study, arguments
from jobs import STOPPED, environment
from ladder import ROWS as LADDER_ROWS
from measures import commit
from peers import METHOD_ROWS, OURS_AT_ONCE
from peers import ROWS as PEER_ROWS

from dwindle.commands.main import run_command
from dwindle.core.errors import UserError
from dwindle.core.files import write_text_atomic

TEXTS = ("wikipedia", "textbooks", "elife", "standardebooks", "mdn")
OURS, BY_HAND, MUON = "global-group-muon+kd@1.5e-3", "one-shot+kd@2e-3", "one-shot-muon+kd@2.5e-3"
SEEDS = (0, 1, 2)
PEER_SIZES = ("50%nonemb", "80%nonemb", "60%nonemb")
VICUNA = "vicuna_bench.question"
Kind = Literal["train", "ask"]
PYTHON = (
    f"trap 'kill $child; wait $child; exit {STOPPED}' TERM; "
    f'python() {{ {shlex.quote(sys.executable)} "$@" & child=$!; wait $child; }}; '
)
"""For the shell: this interpreter, whatever it is called, is asked to stop when the shell is."""
RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"
START_S = 40.0
"""Of every job, however little it trains: loading, compiling, measuring."""
RESERVE_S = 25.0
"""Kept back from the budget for running jobs to save themselves."""


@dataclass(frozen=True)
class Job:
    name: str
    command: str
    """For a shell, from the root of the checkout."""
    after: tuple[str, ...] = ()
    kind: Kind = "train"
    needs: Path | None = None
    """An input that may arrive later than others."""
    amount: float = 1.0
    """How much there is to do, in the unit of jobs like it: millions of tokens, rounds."""
    rank: int = 0
    """Jobs of a lower rank begin first, whatever their campaign."""

    @property
    def like(self) -> tuple[str, ...]:
        return (self.kind, *self.command.split()[1:3])


@dataclass(frozen=True)
class Places:
    inputs: Path
    work: Path
    out: Path

    @property
    def source(self) -> Path:
        return self.inputs / "SmolLM2-135M-Instruct.Q4_1.gguf"

    @property
    def second(self) -> Path:
        return self.inputs / "Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf"

    @property
    def tokens(self) -> Path:
        return self.inputs / "tokens"

    @property
    def second_tokens(self) -> Path:
        return self.inputs / "second-tokens"

    def adapted(self, seed: int) -> Path:
        """The source after a million tokens of the text, under one name for all seeds."""
        return self.work / f"adapted-{seed}" / "SmolLM2-135M-adapted-1M"


def ladder_row(
    at: Places,
    name: str,
    row: str,
    tokens: str,
    seed: int,
    *,
    size: str = "50%nonemb",
    tasks: bool = False,
    adapted: bool = False,
) -> Job:
    """A row of ``ladder.py``; ours starts from the adapted source, and others if asked."""
    adapted |= row == OURS
    model = at.adapted(seed) if adapted else at.source
    words = [*study(at, name, row, tokens, seed, model, at.tokens), "--sizes", size]
    words += ["--tasks-data", str(at.inputs / "eval")] if tasks else []
    return Job(name, shlex.join(words), (f"adapt-{seed}",) if adapted else (), amount=float(tokens.removesuffix("M")))


def study(
    at: Places,
    name: str,
    row: str,
    tokens: str,
    seed: int,
    model: Path,
    texts: Path,
    *,
    file: str = "ladder",
    settings: tuple[str, ...] = (),
) -> list[str]:
    """The command of a study for one row with a JSON file of its own; rows pruned at once share the pruned model."""
    words = ["python", f"studies/{file}.py", "--rows", row, "--seeds", str(seed), "--tokens", tokens]
    words += ["--set", *settings, "training.tokens_per_step=16384", "--kd", "distill.weight=0.75"]
    words += ["--data", *(str(texts / text) for text in TEXTS), "--model", str(model), "--valid"]
    words += [str(texts / "psychology"), "--wikitext", str(texts / "wikitext2"), "--texts"]
    words += [f"{text}={texts / text}" for text in ("marketing", "mixed.test")]
    shares = (file == "peers" or "one-shot" in row) and not name.startswith("start-")  # those are looked for by name
    work = at.work / ("at-once" if shares else name)
    return [*words, "--work", str(work), "--out", str(at.out / f"{name}.json")]


def adaptations(at: Places) -> list[Job]:
    """The source adapted to the text with each seed."""
    jobs = []
    for seed in SEEDS:
        job = ladder_row(at, f"adapt-{seed}", "adapted@3e-4", "1M", seed)
        jobs.append(linked(job, at.work / job.name / "adapted*" / "model", at.adapted(seed)))
    return jobs


def linked(job: Job, model: Path, name: Path) -> Job:
    """The job, followed by a link ``name`` to its model (a pattern)."""
    link = f'mkdir -p {name.parent} && ln -sfnr "$(realpath {model})" {name}'
    return replace(job, command=f"{job.command} && {link}")


def ladder(at: Places) -> list[Job]:
    """Rows of the mixture: seeds of ours and of both controls, one lever at a time, other sizes."""
    jobs = adaptations(at)
    for size, seeds in (("50", SEEDS), ("30", SEEDS)):
        for seed in seeds:
            for name, row, tokens in (("ours", OURS, "15M"), ("shot", BY_HAND, "16M"), ("muon", MUON, "16M")):
                where = f"{name}-{size}-{seed}"
                jobs.append(ladder_row(at, where, row, tokens, seed, size=f"{size}%nonemb", tasks=seed == 0))
    jobs.append(ladder_row(at, "muon-adapted-8M", MUON, "7M", 0, adapted=True))
    jobs.append(ladder_row(at, "muon-8M", MUON, "8M", 0))
    for row in ("global", "global-group", "rounds", "aware-b", "adapt"):
        jobs.append(ladder_row(at, f"{row}-8M", f"{row}+kd@2e-3", "8M", 0))
    jobs.append(ladder_row(at, "untaught-8M", "one-shot@2e-3", "8M", 0))
    for name, row, tokens in (("ours", OURS, "15M"), ("shot", BY_HAND, "16M"), ("muon", MUON, "16M")):
        jobs.append(ladder_row(at, f"{name}-80-0", row, tokens, 0, size="80%nonemb"))
    return jobs


def thirty(at: Places) -> list[Job]:
    """Settings of ours at 30 %, where those of 50 % are in use; on half of the tokens."""
    jobs = adaptations(at)[:1]
    choices: dict[str, tuple[str, tuple[str, ...]]] = {
        "as-at-50": (OURS, ()),
        "faster": (OURS.replace("@1.5e-3", "@2.5e-3"), ()),
        "longer": (OURS.replace("+", "-8+"), ()),
        "second-order": (OURS, ("prune.second_order=true",)),
        "to-zero": (OURS, ("training.min_lr_ratio=0",)),
        "hidden-kept": (OURS, ("prune.groups=attn,ffn",)),
    }
    for name, (row, settings) in choices.items():
        words = study(at, f"thirty-{name}", row, "7M", 0, at.adapted(0), at.tokens, settings=settings)
        jobs.append(Job(f"thirty-{name}", shlex.join([*words, "--sizes", "30%nonemb"]), ("adapt-0",), amount=7.0))
    return jobs


def tuning(at: Places, recovery: tuple[str, str] = ("11M", "12M"), tokens: str = "6M") -> list[Job]:
    """Recovered halves, tuned on the source's answers and asked; ``recovery``: tokens of ours and of one-shot."""
    prompts, answers, chat = at.work / "prompts.jsonl", at.work / "answers.jsonl", at.work / "chat"
    instructions = at.inputs / "prompts" / "natural_instructions.permissive.jsonl.xz"
    asked = f"python studies/tune.py ask {at.source} --count 10000 --out {prompts}"
    taught = (
        f"python studies/tune.py teach {at.source} --prompts {prompts} --tokens 512 --out {answers}"
        f" && python studies/tune.py render {at.source} --chat answers={answers} --out {chat}"
        f" && python studies/tune.py render {at.source} --chat ni={instructions} --most 3000 --out {chat}"
    )
    jobs = [*adaptations(at), Job("ask", asked, kind="ask"), Job("teach", taught, ("ask",), "ask")]
    jobs.append(answers_of(at, "source", str(at.source), ()))
    pairs = []
    for seed in SEEDS:
        for name, row, amount in (("ours", OURS, recovery[0]), ("shot", BY_HAND, recovery[1])):
            start = ladder_row(at, f"start-{name}-{seed}", row, amount, seed)
            model = f"$(ls -d {at.work / start.name}/{row.partition('@')[0]}*/model)"
            texts = " ".join(str(at.tokens / text) for text in TEXTS)
            command = (
                f"python studies/tune.py run {name}={model} --seed {seed} --teacher {at.source} --chat {chat}/answers"
                f" {chat}/ni --text {texts} --tune {tokens} --set distill.weight=0.75 training.lr=1e-3"
                f" training.bf16_residual=true --work {at.work}/tuned --out {at.out}/tune.json"
            )
            tuned = Job(f"tune-{name}-{seed}", command, (start.name, "teach"))
            half = f"{at.work}/tuned/{name}-{seed}"
            agreed = (
                f"python studies/tune.py agree {half} --source {at.source} --out {at.out}/agree-{name}-{seed}.json"
                f" --answers {at.out}/answers/source/{VICUNA}.jsonl"
            )
            jobs += [start, tuned, answers_of(at, f"{name}-{seed}", half, (tuned.name,))]
            jobs.append(Job(f"agree-{name}-{seed}", agreed, (tuned.name, "answers-source"), "ask"))
            pairs += [f"{at.out}/answers/{name}-{seed}:{at.out}/answers/source"]
            if seed == 0:
                jobs.append(answers_of(at, f"recovered-{name}-0", model, (start.name,), (VICUNA,)))
        pairs.append(f"{at.out}/answers/ours-{seed}:{at.out}/answers/shot-{seed}")
    judged = (
        f"python studies/tune.py judge {' '.join(pairs)} --judge {at.second} --source {at.out}/answers/source"
        f" --work {at.work}/verdicts --out {at.out}/tune-winrates.json"
    )
    asked_all = tuple(job.name for job in jobs if job.name.startswith("answers-") and "recovered" not in job.name)
    return [*jobs, Job("judge", judged, asked_all, "ask", at.second)]


def answers_of(
    at: Places, name: str, model: str, after: tuple[str, ...], files: tuple[str, ...] = ("ifeval.prompts", VICUNA)
) -> Job:
    prompts = " ".join(f"{at.inputs}/prompts/{file}.jsonl" for file in files)
    command = f"python studies/tune.py answer {model} --to {prompts} --out {at.out}/answers/{name}"
    return Job(f"answers-{name}", command, after, "ask")


def second_model(at: Places) -> list[Job]:
    """Another model at half size: untouched, pruned once by both optimizers, and ours from the adapted source."""
    texts, adapted = at.second_tokens, at.work / "second-adapted" / "Qwen2.5-Coder-0.5B-adapted-1M"

    def row(name: str, row: str, tokens: str, model: Path, after: tuple[str, ...] = ()) -> Job:
        words = [*study(at, name, row, tokens, 0, model, texts), "--sizes", "50%nonemb"]
        amount = 3 * float(tokens.removesuffix("M"))  # a token costs three times the FLOPs
        return Job(name, shlex.join(words), after, needs=at.second, amount=amount)

    adapt = row("second-adapt", "adapted@2e-4", "1M", at.second)
    return [
        linked(adapt, at.work / adapt.name / "adapted*" / "model", adapted),
        row("second-source", "source", "8M", at.second),
        row("second-ours", "global-group-muon+kd@1e-3", "7M", adapted, (adapt.name,)),
        row("second-shot", "one-shot+kd@1e-3", "8M", at.second),
        row("second-muon", "one-shot-muon+kd@1e-3", "8M", at.second),
        row("second-shot-slow", "one-shot+kd@3e-4", "8M", at.second),
    ]


def peers(at: Places, tokens: str = "8M") -> list[Job]:
    """Other papers' methods without training and after the same recovery: half size first, then others, then seeds."""
    jobs = []

    def row(
        name: str, row: str, size: str, seed: int, kind: Kind, amount: float, after: tuple[str, ...] = (), rank: int = 0
    ) -> None:
        settings = ("training.optimizer=muon", "training.lr=2.5e-3")
        words = study(at, name, row, tokens, seed, at.source, at.tokens, file="peers", settings=settings)
        words += ["--sizes", size, "--tasks-data", str(at.inputs / "eval"), "--limit", "500"]
        jobs.append(Job(name, shlex.join(words), after, kind, amount=amount, rank=rank))

    rounds = {name: method[2] for name, method in METHOD_ROWS.items()}
    ours_first = sorted(rounds, key=lambda name: (not name.startswith("ours"), rounds[name]))
    at_once = [name for name in ours_first if name not in (*OURS_AT_ONCE, "ours-plain")]
    pruned_by = {name: name for name in at_once} | {"ours-rounds": "ours"}
    row("peers-source", "source", "50%nonemb", 0, "ask", 1)
    for rank, (seed, size) in enumerate(itertools.product(SEEDS, PEER_SIZES)):
        where = f"{size[:2]}-{seed}"
        for name in ours_first:
            row(f"peers-{name}-{where}", name, size, seed, "ask", rounds[name], rank=rank)
        for name in ("ours-zscore-while", "ours", "ours-kept", "ours-32", "ours-rounds", *at_once, "sheared"):
            after = (f"peers-{pruned_by[name]}-{where}",) if name in pruned_by else ()
            row(f"peers-{name}-trained-{where}", f"{name}-trained+kd", size, seed, "train", 8, after, rank)
    return jobs


STUDIES = {"ladder": LADDER_ROWS, "peers": PEER_ROWS}
CAMPAIGNS = {"ladder": ladder, "thirty": thirty, "tuning": tuning, "second-model": second_model, "peers": peers}


class Progress:
    """Jobs that ended (kept in a file), and those that run, failed or stopped in this call."""

    def __init__(self, work: Path) -> None:
        (work / "logs").mkdir(parents=True, exist_ok=True)
        self.file, self.logs = work / "campaign.json", work / "logs"
        found = json.loads(self.file.read_text(encoding="utf-8")) if self.file.is_file() else {}
        self.ended: dict[str, float] = found.get("ended", {})
        """Seconds of jobs that ended well."""
        self.spent: dict[str, float] = found.get("spent", {})
        """Seconds of jobs that were stopped."""
        self.running: dict[str, tuple[subprocess.Popen[bytes], float]] = {}
        self.failed, self.stopped = set[str](), set[str]()

    def waits(self, job: Job) -> bool:
        """Whether the job could be started."""
        known = job.name in {*self.ended, *self.failed, *self.stopped, *self.running}
        return not known and set(job.after) <= set(self.ended) and (job.needs is None or job.needs.is_file())

    def expected(self, job: Job, jobs: list[Job]) -> float:
        """Seconds that a job still takes, from the finished job like it with the closest amount; 0 without any."""
        alike = [one for one in jobs if one.name in self.ended and one.like == job.like]
        if not alike:
            return 0.0
        near = min(alike, key=lambda one: abs(one.amount - job.amount))
        taken = START_S + max(0.0, self.ended[near.name] - START_S) * job.amount / near.amount
        return max(START_S, taken - self.spent.get(job.name, 0.0))

    def start(self, job: Job, env: dict[str, str]) -> None:
        """Run a job in a session of its own, which Ctrl-C does not reach."""
        with (self.logs / f"{job.name}.log").open("wb") as log:
            words = ["bash", "-c", PYTHON + job.command]
            process = subprocess.Popen(words, stdout=log, stderr=log, env=env, start_new_session=True)
        self.running[job.name] = process, time.monotonic()

    def collect(self) -> None:
        """Remember and report the jobs that ended."""
        for name, (process, started) in list(self.running.items()):
            if process.poll() is not None:
                del self.running[name]
                self.note(name, process.returncode, round(time.monotonic() - started + self.spent.get(name, 0.0), 1))

    def note(self, name: str, code: int, taken: float) -> None:
        if code == STOPPED:
            self.stopped.add(name)
            self.spent[name] = taken
            print(f"{name}: stopped after {taken:.0f} s", flush=True)
        elif code:
            self.failed.add(name)
            lines = (self.logs / f"{name}.log").read_text(encoding="utf-8", errors="replace").splitlines()
            print(f"{name}: failed with {code}", *lines[-6:], sep="\n  ", flush=True)
        else:
            self.ended[name] = taken
            print(f"{name}: {taken:.0f} s", flush=True)
        write_text_atomic(self.file, json.dumps({"ended": self.ended, "spent": self.spent}, indent=1) + "\n")

    def stop(self) -> None:
        """Ask what runs to save itself, and wait for it."""
        for process, _ in self.running.values():
            process.terminate()
        for process, _ in self.running.values():
            process.wait()
        self.collect()


def run(jobs: list[Job], work: Path, most: dict[Kind, int], budget: float = math.inf) -> Progress:
    """Run all jobs that fit the budget; those that ended well before are not run again."""
    end = time.monotonic() + budget - RESERVE_S
    progress, env = Progress(work), environment(most["train"])
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(STOPPED))
    try:
        while (left := end - time.monotonic()) > 0:
            progress.collect()
            busy = Counter(job.kind for job in jobs if job.name in progress.running)
            for job in jobs:
                if busy[job.kind] < most[job.kind] and progress.waits(job) and progress.expected(job, jobs) < left:
                    busy[job.kind] += 1
                    progress.start(job, env)
            if not progress.running:
                break
            time.sleep(0.2)
    finally:
        progress.stop()
        signal.signal(signal.SIGTERM, before)
    return progress


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("campaigns", nargs="+", choices=list(CAMPAIGNS))
    parser.add_argument("--inputs", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="runs, logs, what has ended")
    parser.add_argument("--out", type=Path, required=True, help="JSON files and answers")
    parser.add_argument(
        "--only", default="", help="names of jobs with commas; also runs what they need; default: what docs lack"
    )
    parser.add_argument("--train", type=int, default=3, help="runs that train at the same time")
    parser.add_argument("--ask", type=int, default=2, help="models that answer at the same time")
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds for this call; then running jobs stop")
    parser.add_argument("--list", action="store_true", help="print the commands, run nothing")
    args = parser.parse_args()
    places = Places(args.inputs, args.work, args.out)
    named = {job.name: job for campaign in args.campaigns for job in CAMPAIGNS[campaign](places)}
    jobs = list(named.values())
    jobs = needed(jobs, args.only, set() if args.only else published(jobs, RESULTS))
    if args.list:
        print(*(f"{job.name}: {job.command}" for job in jobs), sep="\n")
        return
    if not commit():
        raise UserError("no commit is known here: set DWINDLE_STUDY_COMMIT, which rows are recorded with")
    args.out.mkdir(parents=True, exist_ok=True)
    progress = run(jobs, args.work, {"train": args.train, "ask": args.ask}, args.budget)
    left = [job.name for job in jobs if job.name not in {*progress.ended, *progress.failed}]
    if left:
        print(
            f"{len(left)} jobs are left; call again, or add the inputs that they lack: {', '.join(left[:8])}"
            + ", …" * (len(left) > 8)
        )
    if progress.failed:
        raise SystemExit(f"{len(progress.failed)} jobs failed: see above, and the logs in {args.work / 'logs'}")
    raise SystemExit(STOPPED if left else 0)


def published(jobs: list[Job], results: Path) -> set[str]:
    """Names of the jobs whose row is in a file of ``results``, with every text."""
    rows: dict[str, list[Any]] = {name: [] for name in STUDIES}
    for content in (json.loads(file.read_text(encoding="utf-8")) for file in sorted(results.glob("*.json"))):
        if isinstance(content, dict) and content.get("study") in rows:
            rows[content["study"]] += content["rows"]
    found = set()
    for job in jobs:
        _, script, *words = shlex.split(job.command.partition(" && ")[0])
        if (name := Path(script).stem) in STUDIES:
            study = Study(name, arguments("", STUDIES[name], [*words, "--tasks-data", ""]), STUDIES[name])
            study.content["rows"] = rows[name]
            if not study.missing([(int(study.args.seeds), study.args.sizes, study.args.rows)]):
                found.add(job.name)
    return found


def needed(jobs: list[Job], only: str, known: Set[str] = frozenset()) -> list[Job]:
    """The jobs of these names (default: all that are not known) and, before them, those they need."""
    by_name = {job.name: job for job in jobs}
    wanted = [name.strip() for name in only.split(",") if name.strip()] or [n for n in by_name if n not in known]
    if unknown := [name for name in wanted if name not in by_name]:
        raise UserError(f"--only: {', '.join(unknown)}: not among {', '.join(by_name)}")
    found = set(wanted)
    while more := {name for one in found for name in by_name[one].after} - found:
        found |= more
    return sorted((job for job in jobs if job.name in found), key=lambda job: job.rank)


if __name__ == "__main__":
    run_command(main)
