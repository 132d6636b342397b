"""The architecture's history: append-only JSON lines, one per event, with the source's indices.

    {"event": "source", "format": 1, "source": …, "parameters": …, "layer_parameters": […],
     "hidden": …, "layer_kv_of_query": [[…], …], "layer_ffn": […], "options": {…}}
    {"event": "vocabulary", "rows": 49152, "kept": [[0, 31998], [34519, 34519]], "parameters": …}
    {"event": "prune", "step": …, "tokens": …, "type": "ffn", "indices": [[…], …],
     "saliency": {"attn": …, "ffn": …, "stem": …}, "parameters": …}
    {"event": "compact", …}
    {"event": "allocation", "step": …, "importance": […], "sparsity": […]}
    {"event": "rotate", "hidden": …, "of": …, "energy": …, "head": "untied", "parameters": …}
    {"event": "resume", "step": …, "tokens": …, "changed": {"training.lr": {"was": …, "is": …}}}

A ledger written by ``replay`` has ``"replayed": true`` in its first line: its model was not trained between events.
``indices`` has one list per layer (``attn``, ``ffn``) or one list (``stem``); ``parameters`` is the remaining count.
``layer`` has one list per layer, too: 0 is its attention block, 1 its FFN, both together the whole layer.
``vocabulary`` follows the source directly if tokens were removed: runs of kept ids, first and last. ``allocation``
precedes the events that it led to (methods adapt and uniform): one number per layer. ``rotate`` (slicegpt) cannot be
replayed: hidden channels are then directions that the ledger does not hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from types import NoneType
from typing import Any

from dwindle.anatomy.anatomy import Anatomy
from dwindle.anatomy.structure import ALL_KINDS, KINDS, UNIT_OF, Group, Layer, Structure
from dwindle.core.errors import UserError
from dwindle.core.json_safe import finite
from dwindle.core.jsonl import JsonLinesFile
from dwindle.core.names import public_name
from dwindle.core.reading import MAX_STATE_BYTES, parse_json, read_limited
from dwindle.core.run_directory import LEDGER
from dwindle.core.sizes import parse_count
from dwindle.pruning.strategies.base import Choice
from dwindle.pruning.target import Sizes, sizes_of
from dwindle.sources.vocabulary import Vocabulary

FORMAT = 1
EVENTS = ("vocabulary", "prune", "compact", "allocation", "resume")
"""What may follow the first line."""
_NONE: list[int] = []
"""Shared by the layers that lose nothing: of a large mixture's lines they are nearly all lists."""

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
        "source": public_name(source),
        "parameters": anatomy.count(anatomy.source).total,
        **_source_sizes(anatomy),
        "options": dict(options),
    }


def first_events(
    source: str, anatomy: Anatomy, options: Mapping[str, Any], vocabulary: Vocabulary | None
) -> list[Event]:
    """The first line and, for a model with a trimmed vocabulary (``anatomy`` is the trimmed one's), the kept ids."""
    if vocabulary is None:
        return [source_event(source, anatomy, options)]
    whole = anatomy.with_vocabulary(vocabulary.num_rows)
    left = anatomy.count(anatomy.source).total
    return [
        source_event(source, whole, options),
        {"event": "vocabulary", **vocabulary.to_json(), "parameters": left},
    ]


def vocabulary_in(events: Sequence[Mapping[str, Any]], where: str) -> Vocabulary | None:
    """The kept ids of a ledger; None if all were kept."""
    found = next((event for event in events if event.get("event") == "vocabulary"), None)
    return None if found is None else Vocabulary.from_json(found, where)


def _source_sizes(anatomy: Anatomy) -> dict[str, Any]:
    source = anatomy.source
    return {
        "layer_parameters": anatomy.layer_counts(source),
        "hidden": len(source.hidden),
        "layer_kv_of_query": [list(la.kv_of_query) for la in source.layers],
        "layer_ffn": [len(la.ffn) for la in source.layers],
    }


def prune_event(choice: Choice, *, step: int, tokens: int) -> Event:
    return {
        "event": "prune",
        "step": step,
        "tokens": tokens,
        "type": choice.group.kind,
        "indices": [list(members) if members else _NONE for members in choice.group.members],
        "saliency": {kind: choice.saliency.get(kind) for kind in ALL_KINDS if kind in (*KINDS, *choice.saliency)},
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
    lines = read_limited(path, MAX_STATE_BYTES).splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        try:
            events.append(parse_json(line))
            if not isinstance(events[-1], dict):
                raise ValueError("it is not a table")
        except ValueError as error:
            if number == len(lines) and not line.endswith(b"\n"):
                break
            reason = getattr(error, "msg", error)
            raise UserError(f"{path}:{number}: not a JSON line ({reason}): the ledger is damaged") from error
    if not events or events[0].get("event") != "source" or events[0].get("format") != FORMAT:
        raise UserError(f"{path}: does not begin with a source line of format {FORMAT}: not a dwindle ledger")
    return events


def ledger_until(events: Sequence[Event], at: int | str | None = None) -> list[Event]:
    """The events up to ``at``: a number of prune events, or the first count of at most a size; None: all events.

    After no prune events, the vocabulary is trimmed already.
    """
    if at is None:
        return list(events)
    counted = [number for number, event in enumerate(events, 1) if event.get("event") in ("vocabulary", "prune")]
    if isinstance(at, str):
        size = parse_count(at, "at")
        for number in (1, *counted):
            if events[number - 1]["parameters"] <= size:
                return list(events[:number])
        raise UserError(f"at {at}: the ledger never reaches that size: choose a larger one")
    ends = counted if counted and events[counted[0] - 1]["event"] == "vocabulary" else [1, *counted]
    if at < 0:
        raise UserError(f"at {at}: give a number of prune events of at least 0, or a size such as '100M'")
    if at >= len(ends):
        raise UserError(f"at {at}: the ledger has only {len(ends) - 1} prune events")
    return list(events[: ends[at]])


def replay_structure(source: Structure, events: Iterable[Event]) -> Structure:
    """The structure after all events of a ledger."""
    return source.without_all(_group(event) for event in events if event["event"] == "prune")


def verified_structure(anatomy: Anatomy, events: Sequence[Event], where: str) -> Structure:
    """The structure after all events, each checked against the model: a tampered or incomplete ledger is an error.

    Every removed index must still exist, and every line's ``parameters`` must be the remaining count.
    """
    structure, before = anatomy.source, (0, 0)
    for number, event in enumerate(events, 1):
        try:
            if number == 1:
                _check_source(anatomy, event)
            elif number == 2 and event["event"] == "vocabulary":
                anatomy = _trimmed(anatomy, event, where)
            else:
                structure = _checked_step(anatomy, structure, event)
                before = _checked_order(event, before)
            count = anatomy.count(structure).total
            if event["event"] in ("source", "vocabulary", "prune") and event["parameters"] != count:
                raise ValueError(f"parameters is {event['parameters']!r:.30} where {count:,} are left")
        except (KeyError, TypeError, ValueError) as error:
            reason = f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)
            raise UserError(f"{where}:{number}: {reason}: the ledger does not describe this model") from error
    return structure


def _check_source(anatomy: Anatomy, event: Event) -> None:
    for key, expected in _source_sizes(anatomy).items():
        if event.get(key, expected) != expected:  # ledgers of before have fewer sizes
            raise ValueError(f"{key} is not that of the source")


def _trimmed(anatomy: Anatomy, event: Event, where: str) -> Anatomy:
    vocabulary = Vocabulary.from_json(event, where)
    if vocabulary.num_rows != anatomy.num_embeddings:
        raise ValueError(f"rows is {vocabulary.num_rows:,}, the source's embedding has {anatomy.num_embeddings:,}")
    return anatomy.with_vocabulary(len(vocabulary.kept))


def _checked_step(anatomy: Anatomy, structure: Structure, event: Event) -> Structure:
    if event["event"] not in EVENTS:
        raise ValueError(f"{event['event']!r:.30} is not an event that may follow the first line")
    if event["event"] == "vocabulary":
        raise ValueError("a vocabulary is trimmed before anything else")
    if event["event"] == "allocation":
        for key in ("importance", "sparsity"):
            if key == "importance" and event[key] == []:  # methods that give all layers the same share measure none
                continue
            if len(event[key]) != anatomy.num_layers or not all(type(n) in (int, float, NoneType) for n in event[key]):
                raise ValueError(f"{key} is not one number for each of {anatomy.num_layers} layers")
    if event["event"] == "compact":
        layers: Sizes = {"layers": anatomy.num_layers}  # named only where some are gone
        _check_sizes(layers | event, sizes_of(structure), layers | sizes_of(anatomy.source))
    if event["event"] != "prune":
        return structure
    if event["type"] not in ALL_KINDS:
        raise ValueError(f"type is {event['type']!r:.30}, not one of {', '.join(ALL_KINDS)}")
    if event["type"] == "layer" and "layer" not in anatomy.family.groups:
        raise ValueError("type is layer: this family keeps such groups whole")
    group = _group(event)
    alive = (structure.hidden,) if group.kind == "stem" else tuple(_alive(group, la) for la in structure.layers)
    if len(group.members) != len(alive):
        raise ValueError(f"indices has {len(group.members)} lists where {len(alive)} are needed")
    if not any(group.members):
        raise ValueError("indices is empty")
    for members, there in zip(group.members, alive, strict=True):
        if any(type(index) is not int for index in members) or len(set(members)) != len(members):
            raise ValueError("indices are not whole numbers, each once")
        if missing := set(members).difference(there):
            raise ValueError(f"index {min(missing)} of {group.kind} is not there or was removed before")
        if there and len(members) == len(there) and group.kind != "layer":
            raise ValueError(f"nothing of {group.kind} would be left")
    rest = structure.without(group)
    if group.kind == "layer" and not anatomy.has_every_kind(rest):
        raise ValueError("no layer, no attention block or no FFN of some kind would be left")
    return rest


def _alive(group: Group, layer: Layer) -> tuple[int, ...]:
    if group.kind == "layer":
        return layer.block_places
    return layer.unit(UNIT_OF[group.kind])


def _check_sizes(event: Event, least: Sizes, most: Sizes) -> None:
    """The sizes of a compaction lie between what is alive and the source's."""
    for key in least:
        size, low, high = (
            value if isinstance(value, list) else [value] for value in (event[key], least[key], most[key])
        )
        if not all(type(n) is int and min(low) <= n <= max(high) for n in size):
            raise ValueError(f"{key} is {event[key]!r:.40}, not between {min(low):,} and {max(high):,}")


def _checked_order(event: Event, before: tuple[int, int]) -> tuple[int, int]:
    """Steps and tokens never decrease; methods without training omit them or write 0."""
    now = (event.get("step", before[0]), event.get("tokens", before[1]))
    if any(type(value) is not int for value in now) or now[0] < before[0] or now[1] < before[1]:
        raise ValueError(f"step and tokens are {now[0]!r:.30} and {now[1]!r:.30} after {before[0]} and {before[1]}")
    return now


def _group(event: Event) -> Group:
    return Group(event["type"], tuple(tuple(members) for members in event["indices"]))
