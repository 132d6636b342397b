"""``dwindle runs DIR``: every run below a directory in one table, from the ends of their files only."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from dwindle.errors import UserError
from dwindle.report.jsonlines import Record, number
from dwindle.report.run import is_run, parse_recipe, setting, short_name, status_of
from dwindle.sizes import format_count

MAX_DEPTH = 4
_TAIL_BYTES = 1 << 18
_INNER = {"model", "checkpoints", "milestones", "tokens", "tensorboard"}


@dataclass(slots=True)
class RunRow:
    """One line of the table."""

    run: str
    status: str
    source: str
    target: str
    parameters: int | None
    source_parameters: int | None
    step: int | None
    tokens: int | None
    loss: float | None
    valid_loss: float | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def list_runs(folder: Path) -> list[RunRow]:
    """Runs in ``folder`` and below it, by path; ``folder`` itself may be one."""
    if not folder.is_dir():
        raise UserError(f"{folder}: is not a directory: give the one that holds your runs, such as runs")
    return [_row(path, folder) for path in _find(folder, MAX_DEPTH)]


def _find(folder: Path, depth: int) -> Iterator[Path]:
    if is_run(folder):
        yield folder
        return
    if depth == 0:
        return
    try:
        inside = sorted(path for path in folder.iterdir() if path.is_dir() and not path.is_symlink())
    except OSError:
        return
    for path in inside:
        if not path.name.startswith(".") and path.name not in _INNER:
            yield from _find(path, depth - 1)


def _row(path: Path, root: Path) -> RunRow:
    recipe = parse_recipe(_text(path / "recipe.toml"))
    first = _first_record(path / "ledger.jsonl")
    prunes = [record for record in _last_records(path / "ledger.jsonl") if record.get("event") == "prune"]
    steps = [record for record in _last_records(path / "metrics.jsonl") if number(record.get("step")) is not None]
    last = steps[-1] if steps else {}
    valid = next((r["valid_loss"] for r in reversed(steps) if number(r.get("valid_loss")) is not None), None)
    left = prunes[-1].get("parameters") if prunes else last.get("parameters", first.get("parameters"))
    source = setting(recipe, "source", "model") or first.get("source") or ""
    return RunRow(
        run=path.relative_to(root).as_posix() if path != root else path.resolve().name,
        status=status_of(path),
        source=short_name(str(source)),
        target=str(setting(recipe, "prune", "target") or ""),
        parameters=_whole(left),
        source_parameters=_whole(first.get("parameters")),
        step=_whole(last.get("step")),
        tokens=_whole(last.get("tokens")),
        loss=number(last.get("loss")),
        valid_loss=number(valid),
    )


def render_runs(rows: list[RunRow]) -> Table:
    """The table for a terminal."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("run", "status", "source", "target"):
        table.add_column(column, overflow="fold", no_wrap=column in ("status", "target"))
    for column in ("before", "now", "tokens", "loss", "valid"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        losses = ["" if loss is None else f"{loss:.4f}" for loss in (row.loss, row.valid_loss)]
        counts = map(_count, (row.source_parameters, row.parameters, row.tokens))
        table.add_row(*map(escape, (row.run, row.status, row.source, row.target, *counts, *losses)))
    return table


def _count(value: int | None) -> str:
    return "" if value is None else format_count(value)


def _whole(value: Any) -> int | None:
    found = number(value)
    return None if found is None else int(found)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _first_record(path: Path) -> Record:
    try:
        with path.open("rb") as file:
            return _record(file.readline(_TAIL_BYTES))
    except OSError:
        return {}


def _last_records(path: Path) -> list[Record]:
    """What the end of a file holds; the first line there may be half of one and is left out."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(size - _TAIL_BYTES, 0))
            lines = file.read().split(b"\n")
    except OSError:
        return []
    return [record for line in lines[size > _TAIL_BYTES :] if (record := _record(line))]


def _record(line: bytes) -> Record:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
