"""``dwindle runs DIR``: a table of all runs below a directory; only the ends of their files are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table

from dwindle.core.errors import UserError
from dwindle.core.names import public_name
from dwindle.core.reading import open_regular, parse_json
from dwindle.core.run_directory import FOLDERS, RunDirectory
from dwindle.core.sizes import format_count
from dwindle.report.jsonlines import Record, number
from dwindle.report.run import parse_recipe, read_structure, recipe_text, setting
from dwindle.report.settings import Settings, different_settings, settings_of, short_settings
from dwindle.report.target import target_missed

MAX_DEPTH = 4
MISSED = "target missed"
"""Status of a run that finished above its target."""
_TAIL_BYTES = 1 << 18
_MAX_LINE_BYTES = 1 << 26
_COLUMNS = ("source.model", "prune.target", "training.tokens")
"""Settings with their own column."""


@dataclass(slots=True)
class RunRow:
    """One row of the table."""

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
    source_valid_loss: float | None = None
    """The untouched source on the same text."""
    settings: Settings = field(default_factory=dict)
    """Settings that differ between the runs of the table, by dotted name."""


def list_runs(folder: Path) -> list[RunRow]:
    """Runs in and below ``folder``, sorted by path; ``folder`` itself may be one."""
    if not folder.is_dir():
        raise UserError(f"{folder}: is not a directory: give the one that contains your runs, such as runs")
    rows = [_row(path, folder) for path in _find(folder, MAX_DEPTH)]
    for row, different in zip(rows, different_settings([row.settings for row in rows]), strict=True):
        row.settings = {key: value for key, value in different.items() if key not in _COLUMNS}
    return rows


def missed_target(folder: str) -> bool:
    """Whether ``folder`` is a run that finished above its target."""
    path = Path(folder)
    return RunDirectory(path).has_logs and _row(path, path).status == MISSED


def _find(folder: Path, depth: int) -> Iterator[Path]:
    if RunDirectory(folder).has_logs:
        yield folder
        return
    if depth == 0:
        return
    try:
        inside = sorted(path for path in folder.iterdir() if path.is_dir() and not path.is_symlink())
    except OSError:
        return
    for path in inside:
        if not path.name.startswith(".") and path.name not in FOLDERS:
            yield from _find(path, depth - 1)


def _row(path: Path, root: Path) -> RunRow:
    run = RunDirectory(path)
    recipe = parse_recipe(recipe_text(run))
    first = _first_record(run.history)
    prunes = _last_records(run.history, lambda record: record.get("event") in ("vocabulary", "prune", "rotate"))
    steps = _last_records(run.metrics, lambda record: number(record.get("step")) is not None)
    last = steps[-1] if steps else {}
    valid, source_valid = (_last(steps, name) for name in ("valid_loss", "source_valid_loss"))
    left = prunes[-1].get("parameters") if prunes else last.get("parameters", first.get("parameters"))
    source = setting(recipe, "source", "model") or first.get("source") or ""
    status: str = run.status
    if status == "pruned" and prunes and prunes[-1]["event"] == "vocabulary":
        status = "trimmed"
    if status == "finished" and target_missed(recipe, first, number(left), read_structure(run)):
        status = MISSED
    return RunRow(
        run=path.relative_to(root).as_posix() if path != root else path.resolve().name,
        status=status,
        source=public_name(str(source)),
        target=str(setting(recipe, "prune", "target") or "")
        if setting(recipe, "prune", "enabled") is not False
        else "",
        parameters=_whole(left),
        source_parameters=_whole(first.get("parameters")),
        step=_whole(last.get("step")),
        tokens=_whole(last.get("tokens")),
        loss=number(last.get("loss")),
        valid_loss=valid,
        source_valid_loss=source_valid,
        settings=settings_of(recipe, first),
    )


def render_runs(rows: list[RunRow]) -> Group:
    """One table for each source; below them the settings that most runs share."""
    usual = _usual(rows)
    own = [{key: value for key, value in row.settings.items() if value != usual.get(key)} for row in rows]
    sources = dict.fromkeys((row.source, row.source_parameters) for row in rows)
    tables = [
        _table(
            [(row, had) for row, had in zip(rows, own, strict=True) if (row.source, row.source_parameters) == source]
        )
        for source in sources
    ]
    return Group(*tables, *([f"unless noted: {short_settings(usual)}"] if usual else []))


def _table(rows: list[tuple[RunRow, Settings]]) -> Table:
    """Runs of one source, each with its own settings; a column that no run fills is left out."""
    columns: dict[str, list[str]] = {
        "run": [row.run for row, _ in rows],
        "status": [row.status for row, _ in rows],
        "target": [row.target for row, _ in rows],
        "now": [_count(row.parameters) for row, _ in rows],
        "tokens": [_count(row.tokens) for row, _ in rows],
        "loss": [_four_digits(row.loss) for row, _ in rows],
        "valid": [_four_digits(row.valid_loss) for row, _ in rows],
        "to source": [_four_digits(_above_source(row), "+") for row, _ in rows],
        "differs in": [short_settings(own) for _, own in rows],
    }
    shown = {name: cells for name, cells in columns.items() if any(cells)}
    first = rows[0][0]
    table = Table(box=SIMPLE_HEAD, padding=0, title_justify="left")
    size = f", {_count(first.source_parameters)} parameters" if first.source_parameters else ""
    table.title = first.source + size
    for name in shown:
        if name in ("run", "differs in"):
            table.add_column(name, overflow="fold", min_width=12)
        else:
            left = name in ("status", "target")
            table.add_column(name, justify="left" if left else "right", no_wrap=True)
    for cells in zip(*shown.values(), strict=True):
        table.add_row(*cells)
    return table


def _above_source(row: RunRow) -> float | None:
    """Validation loss above that of the untouched source."""
    if row.valid_loss is None or row.source_valid_loss is None:
        return None
    return row.valid_loss - row.source_valid_loss


def _last(records: list[Record], name: str) -> float | None:
    return next((found for r in reversed(records) if (found := number(r.get(name))) is not None), None)


def _usual(rows: list[RunRow]) -> Settings:
    """The most common value of every setting that differs; omitted if most runs do not set it."""
    usual: Settings = {}
    for key in dict.fromkeys(key for row in rows for key in row.settings):
        values = [row.settings.get(key) for row in rows]
        commonest = max(values, key=values.count)
        usual |= {} if commonest is None else {key: commonest}
    return usual


def _count(value: int | None) -> str:
    return "" if value is None else format_count(value)


def _four_digits(value: float | None, sign: str = "") -> str:
    return "" if value is None else f"{value:{sign}.4f}"


def _whole(value: Any) -> int | None:
    found = number(value)
    return None if found is None else int(found)


def _first_record(path: Path) -> Record:
    try:
        with open_regular(path) as file:
            return _record(file.readline(_MAX_LINE_BYTES))
    except OSError:
        return {}


def _last_records(path: Path, wanted: Callable[[Record], bool]) -> list[Record]:
    """Wanted records near the end of a file, reading backwards until at least one is found.

    The first line that is read may be incomplete and is skipped.
    """
    tail = _TAIL_BYTES
    while True:
        try:
            with open_regular(path) as file:
                size = file.seek(0, 2)
                file.seek(max(size - tail, 0))
                lines = file.read().split(b"\n")
        except OSError:
            return []
        found = [record for line in lines[size > tail :] if (record := _record(line)) and wanted(record)]
        if found or size <= tail or tail > _MAX_LINE_BYTES:
            return found
        tail *= 4


def _record(line: bytes) -> Record:
    try:
        value = parse_json(line)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
