"""``make faults``: kills, full disks, power cuts, clock jumps and slow disks over all kinds of runs; prints a table.

After each fault the run is resumed without one. Its model, milestones, ledger and metrics must equal those of a run
that was never disturbed, to the bit.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "faults"), str(TESTS / "distributed"), str(TESTS.parent / "src")]
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch  # noqa: E402
from layer import CUT, FaultyDisk, full_from, jumping_clock, power_cut_at, slow  # noqa: E402
from processes import start_ranks  # noqa: E402

from chats import chat_directory, tiny_chats, write_rows  # noqa: E402
from dwindle.core.errors import UserError  # noqa: E402
from dwindle.recipe.recipe import Recipe  # noqa: E402
from runs import COMPACT_OFTEN, go_on, kill, metrics, start, tiny_recipe, wait  # noqa: E402
from tiny import tiny_directory  # noqa: E402

STEPS, SHORT = 14, 6
"""Steps of a run that is killed, and of one that is made again for every write."""
KINDS: dict[str, dict[str, Any]] = {
    "coupled": {"prune": {"target": "60%", "horizon": 0.8, "milestones": ["80%"], **COMPACT_OFTEN}},
    "global": {"prune": {"target": "60%", "horizon": 0.8, "selection": "global", **COMPACT_OFTEN}},
    "adapt": {"prune": {"target": "70%", "method": "adapt", "interleaves": 4}},
    "distill": {"prune": {"target": "70%", "horizon": 0.8}, "distill": {"weight": 0.5}},
    "plain": {"prune": {"enabled": False}},
    "tune": {"task": {"kind": "chat"}, "data": {"holdout": 0.1}, "prune": {"target": "70%", "horizon": 0.8}},
    "two ranks": {"prune": {"target": "70%", "horizon": 0.8}},
}
REFUSED = 2
SOME = 12
"""Operations at which the disk fails in runs that write what another one writes as well."""
HANGS = 600.0
"""Seconds after which a process is killed, whatever it does."""


@dataclass
class Row:
    """One line of the table."""

    fault: str
    kind: str
    faults: int = 0
    unequal: int = 0


class Campaign:
    """A folder with a model, and an undisturbed run of every kind."""

    def __init__(self, folder: Path, steps: int = STEPS) -> None:
        self.folder, self.steps = folder, steps
        folder.mkdir(exist_ok=True)
        tiny_directory(folder / "model")
        chat_directory(folder / "chat model")
        write_rows(folder / "chat.jsonl", tiny_chats(60))
        self._seconds: dict[str, float] = {}

    def recipe(self, kind: str) -> Recipe:
        tables: dict[str, Any] = {"training": {"micro_batch": 4}, "checkpoint": {"every": 3}} | KINDS[kind]
        if kind != "tune":
            return tiny_recipe(self.folder, steps=self.steps, **tables)
        tables["task"] = KINDS[kind]["task"] | {"chat": [str(self.folder / "chat.jsonl")]}
        tables["source"] = {"model": str(self.folder / "chat model")}
        return tiny_recipe(self.folder, steps=self.steps, sequences=4, seq_len=159, **tables)

    def reference(self, kind: str) -> Path:
        run = self.folder / f"reference {kind}" / "run"
        if not run.exists():
            began = time.monotonic()
            assert self.attempt(kind, run) == 0, kind
            self._seconds[kind] = time.monotonic() - began
        return run

    def attempt(
        self, kind: str, run: Path, before: Callable[[], object] = lambda: None, kill_after: float = HANGS
    ) -> int:
        """Begin or continue a run in its own process; the exit code, or -1 if it was killed after that time."""

        def task() -> None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
                torch.set_num_threads(1)
                before()
                try:
                    go_on(self.recipe(kind), run)
                except UserError:
                    os._exit(REFUSED)

        if kind == "two ranks":
            if not (run / "recipe.toml").exists():
                self._begin(kind, run)
            return self._ranks(task, kill_after)
        child = start(task)
        status = wait(child, kill_after)
        if status is None:
            kill(child)
            return -1
        return os.waitstatus_to_exitcode(status)

    def _begin(self, kind: str, run: Path) -> None:
        """As ``--nproc`` does: the directory is made before any process is started."""
        from dwindle.core.run_directory import RunDirectory
        from dwindle.recipe.recipe import resolve_recipe
        from dwindle.run.pretrain import begin_run

        begin_run(resolve_recipe(self.recipe(kind)), RunDirectory(run), overwrite=False)

    def _ranks(self, task: Callable[[], None], kill_after: float) -> int:
        children = start_ranks(2, lambda rank: task())
        deadline, codes = time.monotonic() + kill_after, [None, None]
        while None in codes:
            for place, child in enumerate(children):
                if codes[place] is None and time.monotonic() > deadline:
                    kill(child)
                    codes[place] = -1
                elif codes[place] is None and (status := wait(child, 0.01)) is not None:
                    codes[place] = os.waitstatus_to_exitcode(status)
                    deadline = min(deadline, time.monotonic() + (20 if codes[place] else 600))
        return max(codes, key=lambda code: (code != 0, code or 0)) or 0

    def seconds(self, kind: str) -> float:
        self.reference(kind)
        return self._seconds[kind]

    def difference(self, kind: str, run: Path) -> str:
        """What a finished run has that the undisturbed one has not; empty if they are equal."""
        whole = self.reference(kind)
        for folder in ("model", "milestones"):
            ours, theirs = (_content(one / folder) for one in (run, whole))
            if ours != theirs:
                names = ours.keys() ^ theirs.keys() or {name for name in ours if ours[name] != theirs[name]}
                return f"{folder}: {sorted(names)}"
        logs = [(one / "ledger.jsonl").read_bytes() for one in (run, whole) if (one / "ledger.jsonl").exists()]
        if len(set(logs)) > 1:
            return "ledger"
        if metrics(run) != metrics(whole):
            return "metrics"
        left = [path.name for path in run.parent.rglob(".*") if path.name != ".lock"]
        return f"left over: {left}" if left else ""

    def finish(self, kind: str, run: Path, row: Row) -> None:
        """Resume without a fault, and compare."""
        row.faults += 1
        code = self.attempt(kind, run)
        problem = self.difference(kind, run) if code == 0 else f"exit code {code}"
        if problem:
            row.unequal += 1
            print(f"{row.fault}, {kind}: {problem} ({run})", file=sys.stderr)
        else:
            shutil.rmtree(run.parent)

    def place(self, name: str) -> Path:
        folder = self.folder / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        return folder / "run"

    # Faults ------------------------------------------------------------------------------------------------

    def kills(self, kind: str, count: int, numbers: random.Random) -> Row:
        """SIGKILL at a random moment, sometimes again while it resumes."""
        row = Row("SIGKILL", kind)
        for number in range(count):
            run = self.place(f"killed {kind} {number}")
            for _ in range(numbers.choice((1, 1, 2))):
                self.attempt(kind, run, kill_after=numbers.uniform(0, self.seconds(kind)))
            self.finish(kind, run, row)
        return row

    def operations(self, kind: str) -> int:
        """How often an undisturbed run writes, renames or syncs: counted once, then each of them can fail."""
        run, counted = self.place("counted"), self.folder / "operations"

        def count(disk: FaultyDisk, number: int) -> None:
            counted.write_text(str(number))

        self.attempt(kind, run, lambda: FaultyDisk(run.parent, count).install())
        shutil.rmtree(run.parent)
        return int(counted.read_text())

    def disk(self, fault: str, kind: str, make: Callable[[int], Any], points: int) -> Row:
        """One fault at every operation, or at some of them, evenly spaced."""
        last = self.operations(kind)
        tried = range(1, last + 1, max(last // points, 1) if points else 1)
        row = Row(f"{fault}, {'each' if len(tried) == last else len(tried)} of {last} operations", kind)
        for number in tried:
            run = self.place(f"{fault} {kind} {number}".replace(" ", "-"))
            code = self.attempt(kind, run, lambda n=number, r=run: FaultyDisk(r.parent, make(n)).install())
            if code not in (0, REFUSED, CUT):
                print(f"{fault}, {kind}, operation {number}: exit code {code}", file=sys.stderr)
                row.unequal += 1
            self.finish(kind, run, row)
        return row

    def slow_disk(self, kind: str) -> Row:
        row, run = Row("slow disk", kind), self.place(f"slow {kind}")
        self.attempt(kind, run, lambda: FaultyDisk(run.parent, slow(0.02)).install(), kill_after=3 + self.seconds(kind))
        self.finish(kind, run, row)
        return row

    def clock(self, kind: str, numbers: random.Random) -> Row:
        """A clock that jumps, until the run is killed, and in a whole run."""
        row = Row("clock jumps", kind)
        for seconds in (self.seconds(kind) / 2, HANGS):
            run, seed = self.place(f"clock {kind}"), numbers.getrandbits(32)
            self.attempt(kind, run, lambda seed=seed: jumping_clock(seed).__enter__(), seconds)
            self.finish(kind, run, row)
        return row


def _content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100, help="SIGKILLs, over all kinds")
    parser.add_argument("--points", type=int, default=0, help="operations at which a disk fails; 0: every one")
    parser.add_argument("--folder", default="/dev/shm", help="where runs are made; the faults do not depend on it")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args()
    numbers, rows = random.Random(options.seed), []
    print("| fault | run | faults | lost or unequal |\n| --- | --- | --- | --- |", flush=True)
    with tempfile.TemporaryDirectory(dir=options.folder if Path(options.folder).is_dir() else None) as folder:
        for row in table(Path(folder).resolve(), options.kills, options.points, numbers):
            rows.append(row)
            print(f"| {row.fault} | {row.kind} | {row.faults} | {row.unequal} |", flush=True)
    print(f"\n{sum(row.faults for row in rows):,} faults, seed {options.seed}")
    return int(any(row.unequal for row in rows))


def table(folder: Path, kills: int, points: int, numbers: random.Random) -> Iterator[Row]:
    """All faults: kills and clocks of every kind of run, every write of one kind, some writes of the others."""
    campaign, short = Campaign(folder / "long"), Campaign(folder / "short", SHORT)
    for kind in KINDS:
        yield campaign.kills(kind, -(-kills // len(KINDS)), numbers)
        yield campaign.clock(kind, numbers)
        if kind != "two ranks":
            yield campaign.slow_disk(kind)
    for fault, make in (("full disk", full_from), ("power cut", power_cut_at)):
        yield short.disk(fault, "coupled", make, points)
        for kind in ("global", "adapt", "distill", "plain", "tune"):
            yield short.disk(fault, kind, make, points or SOME)


if __name__ == "__main__":
    sys.exit(main())
