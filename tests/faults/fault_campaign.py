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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "faults"), str(TESTS / "distributed"), str(TESTS.parent / "src")]
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch  # noqa: E402
from layer import CUT, FaultyDisk, full_from, jumping_clock, power_cut_at, slow  # noqa: E402
from processes import start_ranks  # noqa: E402

from dwindle.core.errors import UserError  # noqa: E402
from dwindle.recipe.recipe import Recipe  # noqa: E402
from runs import COMPACT_OFTEN, go_on, kill, metrics, start, tiny_recipe, wait  # noqa: E402
from tiny import tiny_directory  # noqa: E402

STEPS = 14
KINDS: dict[str, dict[str, Any]] = {
    "coupled": {"prune": {"target": "60%", "horizon": 0.8, "milestones": ["80%"], **COMPACT_OFTEN}},
    "global": {"prune": {"target": "60%", "horizon": 0.8, "selection": "global", **COMPACT_OFTEN}},
    "adapt": {"prune": {"target": "70%", "method": "adapt", "interleaves": 4}},
    "distill": {"prune": {"target": "70%", "horizon": 0.8}, "distill": {"weight": 0.5}},
    "plain": {"prune": {"enabled": False}},
    "two ranks": {"prune": {"target": "70%", "horizon": 0.8}},
}
REFUSED = 2


@dataclass
class Row:
    """One line of the table."""

    fault: str
    kind: str
    faults: int = 0
    unequal: int = 0


class Campaign:
    """A folder with a model, and an undisturbed run of every kind."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        tiny_directory(folder / "model")
        self._seconds: dict[str, float] = {}

    def recipe(self, kind: str) -> Recipe:
        tables: dict[str, Any] = {"training": {"micro_batch": 4}, "checkpoint": {"every": 3}} | KINDS[kind]
        return tiny_recipe(self.folder, steps=STEPS, **tables)

    def reference(self, kind: str) -> Path:
        run = self.folder / f"reference {kind}" / "run"
        if not run.exists():
            began = time.monotonic()
            assert self.attempt(kind, run) == 0, kind
            self._seconds[kind] = time.monotonic() - began
        return run

    def attempt(
        self, kind: str, run: Path, before: Callable[[], object] = lambda: None, kill_after: float = 600
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
        """How often an undisturbed run writes, renames or syncs."""
        run, counted = self.place("counted"), self.folder / "operations"

        def count(disk: FaultyDisk, number: int) -> None:
            counted.write_text(str(number)) if number % 10 == 0 else None

        self.attempt(kind, run, lambda: FaultyDisk(run.parent, count).install())
        shutil.rmtree(run.parent)
        return int(counted.read_text())

    def disk(self, fault: str, kind: str, make: Callable[[int], Any], points: int) -> Row:
        """One fault at each of some operations, evenly spaced."""
        row, last = Row(fault, kind), self.operations(kind)
        for number in range(1, last + 1, max(last // points, 1) if points else 1):
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
        row, run = Row("clock jumps", kind), self.place(f"clock {kind}")
        self.attempt(kind, run, lambda: jumping_clock(numbers.getrandbits(32)).__enter__(), self.seconds(kind) / 2)
        self.finish(kind, run, row)
        return row


def _content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100, help="SIGKILLs, over all kinds")
    parser.add_argument("--points", type=int, default=60, help="operations at which a disk fails; 0: every one")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args()
    numbers, rows = random.Random(options.seed), []
    with tempfile.TemporaryDirectory() as folder:
        campaign = Campaign(Path(folder).resolve())
        for kind in KINDS:
            rows.append(campaign.kills(kind, -(-options.kills // len(KINDS)), numbers))
            rows.append(campaign.clock(kind, numbers))
            if kind != "two ranks":
                rows.append(campaign.slow_disk(kind))
        for kind in ("coupled", "plain"):
            rows.append(campaign.disk("full disk", kind, full_from, options.points))
            rows.append(campaign.disk("power cut", kind, power_cut_at, options.points))
    print("| fault | run | faults | lost or unequal |\n| --- | --- | --- | --- |")
    for row in rows:
        print(f"| {row.fault} | {row.kind} | {row.faults} | {row.unequal} |")
    print(f"\n{sum(row.faults for row in rows):,} faults, seed {options.seed}")
    return int(any(row.unequal for row in rows))


if __name__ == "__main__":
    sys.exit(main())
