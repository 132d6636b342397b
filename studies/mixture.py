"""Cuts a training mixture and its held-out texts out of a folder of corpora, as JSON lines to tokenize.

    python studies/mixture.py CORPUS --out mixture      # campaign_inputs.py does this and more

CORPUS holds the ``.train.jsonl.xz`` files named below, ``textbooks.valid.jsonl.xz`` (two books, of which psychology is
chosen on and marketing reported) and ``mixed.valid`` / ``mixed.test``. Documents are shuffled with seed 0 and taken
until a number of characters is reached, about 17.6M tokens of SmolLM2 in all; ``more`` has 48.9M tokens of the
documents that are left, for runs of up to 64M tokens.
"""

from __future__ import annotations

import argparse
import json
import lzma
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

from dwindle.commands.main import run_command

PARTS = {
    "wikipedia": (["wikipedia-0", "wikipedia-1", "wikipedia-2"], 38_700_000),
    "textbooks": (["textbooks", "textbooks2"], 17_390_000),
    "elife": (["elife"], 9_450_000),
    "standardebooks": (["standardebooks"], 6_160_000),
    "mdn": (["mdn"], 6_300_000),
}
"""Files of each source, and the characters to take."""
MORE_CHARACTERS = 216_000_000
HELD_OUT = ("mixed.valid", "mixed.test")


def documents(path: Path) -> Iterator[dict[str, str]]:
    with lzma.open(path, "rt", encoding="utf-8") as file:
        yield from map(json.loads, file)


def write(path: Path, texts: Iterable[str]) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")


def until(texts: list[str], characters: int) -> Iterator[str]:
    """Texts in order until they reach so many characters."""
    taken = 0
    for text in texts:
        if taken >= characters:
            return
        taken += len(text)
        yield text


def cut(corpus: Path, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    left: list[str] = []
    for name, (files, characters) in PARTS.items():
        texts = [d["text"] for file in files for d in documents(corpus / f"{file}.train.jsonl.xz")]
        random.Random(0).shuffle(texts)
        taken = list(until(texts, characters))
        write(out / f"{name}.jsonl", taken)
        left += texts[len(taken) :]
    random.Random(0).shuffle(left)
    write(out / "more.jsonl", until(left, MORE_CHARACTERS))
    books: dict[str, list[str]] = {"psychology": [], "marketing": []}
    for document in documents(corpus / "textbooks.valid.jsonl.xz"):
        books["psychology" if "psychology" in document["book"] else "marketing"].append(document["text"])
    for name, texts in books.items():
        write(out / f"{name}.jsonl", texts)
    for name in HELD_OUT:
        write(out / f"{name}.jsonl", (d["text"] for d in documents(corpus / f"{name}.jsonl.xz")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    cut(args.corpus, args.out)


if __name__ == "__main__":
    run_command(main)
