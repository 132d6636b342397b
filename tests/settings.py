"""``make settings``: the tests under other vector instructions and numbers of threads; prints a table.

A setting is ``ATEN_CPU_CAPABILITY:OMP_NUM_THREADS``. What follows ``--`` goes to pytest: ``default:4 -- -m parity``.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

SETTINGS = [f"{unit}:{threads}" for unit, threads in itertools.product(("default", "avx2", "avx512"), (1, 2, 4))]
PROBE = "import torch; x = torch.randn(9999); (x.exp().sum() + x.softmax(0).sort().values[0]).item()"
"""Torch does not look whether the CPU has the instructions that it is told to use: it ends in SIGILL."""


def environment(setting: str) -> dict[str, str]:
    unit, threads = setting.split(":")
    waits = {"OMP_WAIT_POLICY": "passive"}  # more threads than cores must not spin
    return os.environ | {"ATEN_CPU_CAPABILITY": unit, "OMP_NUM_THREADS": threads} | waits


def run(setting: str, arguments: list[str]) -> tuple[bool, str]:
    """Whether all is well, and pytest's last line."""
    probe = subprocess.run([sys.executable, "-c", PROBE], env=environment(setting), stderr=subprocess.DEVNULL)
    if probe.returncode:
        return True, "not run: this CPU does not have these instructions"
    command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "worksteal", *arguments]
    tests = Path(__file__).resolve().parent
    summary = "no test was run"
    with subprocess.Popen(
        command, env=environment(setting), cwd=tests.parent, stdout=subprocess.PIPE, text=True
    ) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            if re.search(r"\b(?:passed|failed|error).* in ", line):
                summary = line.strip("= \n")
    return process.returncode == 0, summary


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("settings", nargs="*", default=SETTINGS, metavar="UNIT:THREADS")
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    settings = parser.parse_args(sys.argv[1:split]).settings
    found = {setting: run(setting, sys.argv[split + 1 :]) for setting in settings}
    print("| `ATEN_CPU_CAPABILITY` | `OMP_NUM_THREADS` | result |\n| --- | --- | --- |")
    for setting, (_, result) in found.items():
        print(f"| {setting.replace(':', ' | ')} | {result} |")
    return int(not all(well for well, _ in found.values()))


if __name__ == "__main__":
    sys.exit(main())
