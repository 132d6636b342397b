"""Makers of inputs: valid ones with a few changes, which reach further than noise; and noise.

All draw from a ``random.Random``: hypothesis passes its own, whose draws it can make small again; the campaign passes
Python's, which is a hundred times faster.
"""

from __future__ import annotations

import copy
import struct
from random import Random
from typing import Any

ODD_NUMBERS = (0, -1, 1, 2, 3, 7, 255, 2**16, 2**31, 2**32, 2**63, 2**64, 10**9, 10**12, 10**30, -(2**63))
ODD_FLOATS = (0.5, -0.5, 1e308, 1e-320, float("inf"), float("-inf"), float("nan"), 0.0, 1.5)
ODD_TEXTS = ("", "\x00", "../x", "/etc/passwd", "\x1b[31m", "[/b]", "nan", "²", "\ud800", "a" * 300, "\n", "none", "{}")
ODD_TREES: tuple[Any, ...] = ({}, [], [[]], [[[[]]]], {"": {"": {}}})


def unsigned(random: Random, bits: int = 64) -> int:
    if random.random() < 0.5:
        return random.choice([n for n in ODD_NUMBERS if 0 <= n < 2**bits])
    return random.getrandbits(bits) if random.random() < 0.3 else random.randrange(min(300, 2**bits))


def text(random: Random, longest: int = 12, alphabet: str = "") -> str:
    if not alphabet and random.random() < 0.4:
        return random.choice(ODD_TEXTS)
    letters = range(random.randrange(longest + 1))
    if alphabet:
        return "".join(random.choice(alphabet) for _ in letters)
    return "".join(chr(random.choice((random.randrange(128), random.randrange(0x11_0000)))) for _ in letters)


def noise(random: Random, longest: int = 8) -> bytes:
    return bytes(random.randrange(256) for _ in range(random.randrange(1, longest + 1)))


def scalar(random: Random) -> Any:
    makers = (
        lambda: None,
        lambda: random.random() < 0.5,
        lambda: random.choice(ODD_NUMBERS),
        lambda: random.randrange(-300, 300),
        lambda: random.choice(ODD_FLOATS),
        lambda: struct.unpack("<d", random.getrandbits(64).to_bytes(8, "little"))[0],
        lambda: text(random),
    )
    return random.choice(makers)()


def value(random: Random) -> Any:
    kind = random.randrange(6)
    if kind == 0:
        return [scalar(random) for _ in range(random.randrange(4))]
    if kind == 1:
        return {text(random): scalar(random) for _ in range(random.randrange(4))}
    return copy.deepcopy(random.choice(ODD_TREES)) if kind == 2 else scalar(random)


def changed_tree(random: Random, tree: Any, changes: int = 3) -> Any:
    """A JSON value with up to a few entries replaced, removed, repeated or added, anywhere in it."""
    tree = copy.deepcopy(tree)
    for _ in range(random.randrange(1, changes + 1)):
        _change(random, tree)
    return tree


def _change(random: Random, tree: Any) -> None:
    node = tree
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not keys:
            return
        key = random.choice(keys)
        inner = node[key]
        if not isinstance(inner, (dict, list)) or not inner or random.random() < 0.25:
            break
        node = inner
    how = random.choice(("replace", "replace", "remove", "add", "nudge"))
    if how == "remove":
        del node[key]
    elif how == "add" and isinstance(node, dict):
        node[text(random)] = value(random)
    elif how == "add":
        node.insert(key, copy.deepcopy(inner) if random.random() < 0.5 else value(random))
    elif how == "nudge" and type(inner) in (int, float):
        node[key] = inner + random.choice((-1, 1))
    else:
        node[key] = value(random)


def changed_bytes(random: Random, content: bytes, changes: int = 4) -> bytes:
    """Bytes with a few overwritten, inserted, removed, or cut off."""
    found = bytearray(content)
    for _ in range(random.randrange(changes + 1)):
        place = random.randrange(max(len(found), 1))
        how = random.choice(("write", "write", "write", "insert", "remove", "cut"))
        some = random.choice((noise(random), noise(random), b"\xff" * 8, b"\0" * 8, b"\n", b"[" * 200))
        if how == "write":
            found[place : place + len(some)] = some
        elif how == "insert":
            found[place:place] = some
        elif how == "remove":
            del found[place : place + random.randrange(1, 40)]
        else:
            del found[place:]
    return bytes(found)


def perhaps_changed(random: Random, content: bytes, changes: int = 2) -> bytes:
    """The bytes as they are, mostly."""
    return changed_bytes(random, content, changes) if random.random() < 0.3 else content
