"""``make fuzz``: every target, turn by turn, for an hour or until a number of inputs; prints a table.

Turns are of equal processor time. A cheap target sits out while it has more than its share of all inputs.

An input that fails is added to ``corpus.json``, which the tests replay. An input may take 20 seconds of the processor
and a turn may add 1 GB to the peak of the process; more is a failure too.
"""

from __future__ import annotations

import argparse
import base64
import json
import resource
import sys
import tempfile
import time
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "fuzz"), str(TESTS.parent / "src")]

from targets import TARGETS, Place, survives  # noqa: E402

from hostile import BYTES_PER_INPUT, limited_time  # noqa: E402

CORPUS = TESTS / "fuzz" / "corpus.json"
SECONDS_PER_TURN = 5.0
LARGEST_SHARE = 0.15


@dataclass
class Count:
    """Of one target."""

    inputs: int = 0
    failures: int = 0
    seconds: float = 0.0


def fuzz(name: str, place: Place, random: Random, count: Count, most: float) -> None:
    """A few seconds of one target."""
    started, before = time.process_time(), _peak_bytes()
    while time.process_time() - started < SECONDS_PER_TURN and count.inputs < most:
        given = TARGETS[name][0](random, place)
        count.inputs += 1
        try:
            with limited_time():
                survives(name, place, given)
        except Exception:
            _fail(name, given, count, traceback.format_exc())
        if _peak_bytes() - before > BYTES_PER_INPUT:
            _fail(name, given, count, "more than 1 GB of memory")
            before = _peak_bytes()
    count.seconds += time.process_time() - started


def _fail(name: str, given: Any, count: Count, what: str) -> None:
    count.failures += 1
    keep(name, given)
    print(f"{name}: {given!r:.300}\n{what}", file=sys.stderr)


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def known(name: str) -> list[Any]:
    """Inputs of a target that failed once."""
    found = json.loads(CORPUS.read_text()) if CORPUS.exists() else {}
    return [_decoded(one) for one in found.get(name, [])]


def keep(name: str, given: Any) -> None:
    """Add an input to the corpus."""
    found = json.loads(CORPUS.read_text()) if CORPUS.exists() else {}
    if (one := _encoded(given)) not in found.setdefault(name, []):
        found[name].append(one)
        CORPUS.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


def _encoded(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    return {"parts": [_encoded(part) for part in value]} if isinstance(value, tuple) else value


def _decoded(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return base64.b64decode(value["bytes"]) if "bytes" in value else tuple(map(_decoded, value["parts"]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--inputs", type=int, default=0, help="end after so many, if that is sooner")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--log", default="", help="a file for the table so far, after every round")
    parser.add_argument("--only", default="", help="targets whose name contains this")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    counts = {name: Count() for name in TARGETS if options.only in name}
    random, end = Random(options.seed), time.monotonic() + 60 * options.minutes
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        place = Place(Path(folder).resolve())
        while time.monotonic() < end and not 0 < options.inputs <= _total(counts):
            for name, count in counts.items():
                most = LARGEST_SHARE * max(_total(counts), 10_000) if len(counts) > 1 else float("inf")
                fuzz(name, place, random, count, most)
            if options.log:
                Path(options.log).write_text(table(counts, options.seed))
    print(table(counts, options.seed))
    return int(any(count.failures for count in counts.values()))


def table(counts: dict[str, Count], seed: int) -> str:
    lines = ["| target | inputs | failures | inputs per CPU second |", "| --- | --- | --- | --- |"]
    for name, count in counts.items():
        lines.append(
            f"| {name} | {count.inputs:,} | {count.failures} | {count.inputs / max(count.seconds, 1e-9):.0f} |"
        )
    return "\n".join([*lines, "", f"{_total(counts):,} inputs, seed {seed}"])


def _total(counts: dict[str, Count]) -> int:
    return sum(count.inputs for count in counts.values())


if __name__ == "__main__":
    sys.exit(main())
