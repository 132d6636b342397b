"""Merges rows of a study that were made on several machines into one file.

    python studies/merge.py docs/results/main-table.json GPU-1.json GPU-2.json

Existing rows are kept. Another run of a row with the same seed and settings is added as its ``repeat``: GPU sums are
not deterministic, so it is another sample.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from common import KEY

from dwindle.commands.main import run_command
from dwindle.core.errors import UserError
from dwindle.core.files import write_text_atomic


def merged(rows: list[Any], more: list[Any]) -> list[Any]:
    """``rows`` followed by the new ones of ``more``; repeats are counted from 1."""
    found = list(rows)
    for row in more:
        alike = [one for one in found if all(one.get(name) == row.get(name) for name in KEY)]
        if not any(without_repeat(one) == without_repeat(row) for one in alike):
            found.append(without_repeat(row) | ({"repeat": len(alike)} if alike else {}))
    return found


def without_repeat(row: Any) -> Any:
    return {name: value for name, value in row.items() if name != "repeat"}


def read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not a study's JSON file ({error})") from None


def merge(into: Path, others: list[Path]) -> str:
    content = read(into)
    before = len(content["rows"])
    for path in others:
        other = read(path)
        if (other.get("study"), other.get("format")) != (content["study"], content["format"]):
            raise UserError(f"{path}: of another study or format than {into}")
        content["rows"] = merged(content["rows"], other["rows"])
    write_text_atomic(into, json.dumps(content, indent=1) + "\n", option="INTO")
    repeats = sum("repeat" in row for row in content["rows"][before:])
    return f"{into}: {len(content['rows'])} rows, {len(content['rows']) - before} of them new ({repeats} repeats)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("into", type=Path, help="the file to add to")
    parser.add_argument("others", type=Path, nargs="+", help="files of the same study")
    args = parser.parse_args()
    print(merge(args.into, args.others))


if __name__ == "__main__":
    run_command(main)
