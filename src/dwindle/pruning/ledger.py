"""The architecture's history: append-only JSON lines, one per event, with the source's indices.

    {"event": "source", "format": 1, "source": …, "parameters": …, "layer_parameters": […],
     "layer_kv_heads": […], "options": {…}}
    {"event": "prune", "step": …, "tokens": …, "type": "ffn", "indices": [[…], …],
     "saliency": {"attn": …, "ffn": …, "stem": …}, "parameters": …}
    {"event": "compact", …}
    {"event": "allocation", "step": …, "importance": […], "sparsity": […]}

A ledger written by ``replay`` has ``"replayed": true`` in its first line: its model was not trained between events.
``indices`` has one list per layer (``attn``, ``ffn``) or one list (``stem``); ``parameters`` is the remaining count.
``allocation`` precedes the events that it led to (methods adapt and uniform): one number per layer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from dwindle.anatomy.anatomy import Anatomy
from dwindle.anatomy.structure import KINDS, Group, Structure
from dwindle.core.errors import UserError
from dwindle.core.json_safe import finite
from dwindle.core.jsonl import JsonLinesFile
from dwindle.core.run_directory import LEDGER
from dwindle.core.sizes import parse_count
from dwindle.pruning.strategies.base import Choice

FORMAT = 1

Event = dict[str, Any]


class Ledger:
    """The ledger file of a run; ``events`` holds all of its lines, because every saved model gets a copy."""

    def __init__(self, path: Path) -> None:
        self._lines = JsonLinesFile(path)
        self._events: list[Event] | None = None

    @property
    def events(self) -> list[Event]:
        """All events as ``read_ledger`` returns them; those of a resumed run are read from the file at first use."""
        if self._events is None:
            path = self._lines.path
            self._events = read_ledger(path) if path.is_file() and path.stat().st_size else []
        return self._events

    def append(self, event: Event) -> None:
        events = self.events
        self._lines.append(event)
        events.append(finite(event))

    def close(self) -> None:
        self._lines.close()


def source_event(source: str, anatomy: Anatomy, options: Mapping[str, Any]) -> Event:
    """The first line: the source and the settings."""
    return {
        "event": "source",
        "format": FORMAT,
        "source": source,
        "parameters": anatomy.count(anatomy.source).total,
        "layer_parameters": anatomy.layer_counts(anatomy.source),
        "layer_kv_heads": [len(la.kv_heads) for la in anatomy.source.layers],
        "options": dict(options),
    }


def prune_event(choice: Choice, *, step: int, tokens: int) -> Event:
    return {
        "event": "prune",
        "step": step,
        "tokens": tokens,
        "type": choice.group.kind,
        "indices": [list(members) for members in choice.group.members],
        "saliency": {kind: choice.saliency.get(kind) for kind in KINDS},
        "parameters": choice.num_parameters,
    }


def read_ledger(path: str | PathLike[str]) -> list[Event]:
    """All events; an incomplete last line (the run is being written or was interrupted) is ignored."""
    path = Path(path)
    if path.is_dir():
        path = path / LEDGER
    if not path.is_file():
        raise UserError(f"ledger {path} does not exist: give a {LEDGER} or a directory that holds one")
    events: list[Event] = []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        try:
            events.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number == len(lines) and not line.endswith("\n"):
                break
            raise UserError(f"{path}:{number}: not a JSON line ({error.msg}): the ledger is damaged") from error
    if not events or events[0].get("event") != "source" or events[0].get("format") != FORMAT:
        raise UserError(f"{path}: does not begin with a source line of format {FORMAT}: not a dwindle ledger")
    return events


def ledger_until(events: Sequence[Event], at: int | str | None = None) -> list[Event]:
    """The events up to ``at``: a number of prune events, or the first count of at most a size; None: all events."""
    if at is None:
        return list(events)
    if isinstance(at, int) and at < 0:
        raise UserError(f"at {at}: give a number of prune events of at least 0, or a size such as '100M'")
    size, done = (None if isinstance(at, int) else parse_count(at, "at")), 0
    for number, event in enumerate(events):
        if event["event"] not in ("source", "prune"):
            continue
        done += event["event"] == "prune"
        if done == at if size is None else event["parameters"] <= size:
            return list(events[: number + 1])
    if size is None:
        raise UserError(f"at {at}: the ledger has only {done} prune events")
    raise UserError(f"at {at}: the ledger never reaches that size: choose a larger one")


def replay_structure(source: Structure, events: Iterable[Event]) -> Structure:
    """The structure after all events of a ledger."""
    structure = source
    for event in events:
        if event["event"] == "prune":
            structure = structure.without(Group(event["type"], tuple(tuple(m) for m in event["indices"])))
    return structure
