"""A text that every machine has: the language reference inside CPython (``pydoc_data.topics``), with a split.

Topics quote each other (``compound`` contains all of ``if``, ``for``, ``with`` …), so a split by topic alone would
validate on trained text. Topics that share a paragraph form a cluster, and clusters are assigned as a whole.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections import defaultdict

DEFAULT_TEXT = "pydoc"
"""The calibration text if none is given: the prose of CPython's documentation, which every machine has."""

VALID_SHARE = 0.1
_PARAGRAPH_MIN_CHARS = 60


def pydoc_documents(split: str | None = None) -> list[str]:
    """One document per topic, sorted by topic; ``split`` is None (everything), ``"train"`` or ``"valid"``."""
    from pydoc_data.topics import topics

    if split is None:
        return [topics[name] for name in sorted(topics)]
    assert split in ("train", "valid"), split
    valid = _valid_topics()
    return [topics[name] for name in sorted(topics) if (name in valid) == (split == "valid")]


@functools.cache
def _valid_topics() -> frozenset[str]:
    """Whole clusters, in an order that depends only on their names, up to the size of the validation split."""
    from pydoc_data.topics import topics

    budget = VALID_SHARE * sum(map(len, topics.values()))
    clusters = _clusters(topics)
    clusters.sort(key=lambda names: hashlib.sha256(names[0].encode()).digest())
    valid: set[str] = set()
    for names in clusters:
        size = sum(len(topics[name]) for name in names)
        if size <= budget:
            valid.update(names)
            budget -= size
    return frozenset(valid)


def _clusters(topics: dict[str, str]) -> list[list[str]]:
    """Topics joined wherever two of them contain the same paragraph."""
    parent = {name: name for name in topics}

    def root(name: str) -> str:
        while parent[name] != name:
            name = parent[name]
        return name

    first_with: dict[str, str] = {}
    for name in sorted(topics):
        for paragraph in paragraphs(topics[name]):
            other = first_with.setdefault(paragraph, name)
            parent[root(name)] = root(other)
    members: defaultdict[str, list[str]] = defaultdict(list)
    for name in sorted(topics):
        members[root(name)].append(name)
    return list(members.values())


def paragraphs(text: str) -> list[str]:
    """Paragraphs that are long enough to compare, with whitespace normalised."""
    flat = (" ".join(part.split()) for part in re.split(r"\n\s*\n", text))
    return [part for part in flat if len(part) >= _PARAGRAPH_MIN_CHARS]
