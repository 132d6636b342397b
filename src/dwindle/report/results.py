"""Tables of evaluation and latency results found in a run's directory.

Files of ``dwindle eval --out`` and ``dwindle bench latency --json`` get their own columns; other JSON files with rows
of named values are shown as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dwindle.core.sizes import format_bytes, format_count
from dwindle.report.evaluations import evaluation_tables, is_evaluation
from dwindle.report.jsonlines import read_json
from dwindle.report.run import Run
from dwindle.report.tables import Table

MAX_ROWS = 60
MAX_COLUMNS = 14
MAX_TABLES = 12

Row = dict[str, Any]


def result_tables(run: Run) -> list[Table]:
    """Evaluations, the source beside the result, then a table per other result file in the run and its model."""
    evaluations: list[tuple[str, Row]] = []
    others: list[Table] = []
    for title, path in run.directory.result_files():
        place, value = path.relative_to(run.folder).as_posix(), read_json(path)
        if is_evaluation(value):
            evaluations.append((place, value))
            continue
        note, rows = _recognised(value)
        if rows and len(others) < MAX_TABLES:
            others.append(_table(f"result-{len(others)}", title, f"{note}From {place}", rows))
    return [*evaluation_tables(run, evaluations), *others]


def _recognised(value: Any) -> tuple[str, list[Row]]:
    """Note and rows of a file."""
    try:
        if isinstance(value, dict) and "decode_ms_per_token" in value["rows"][0]:
            return _latency_note(value), [_latency_row(row) for row in value["rows"]]
    except (KeyError, IndexError, TypeError, ValueError, AttributeError):
        pass  # another version: shown as is
    return "", rows_of(value)


def _latency_note(value: Row) -> str:
    given = {key: value.get(key) for key in ("prompt_tokens", "new_tokens", "repeats")}
    return ", ".join(f"{number:,} {key.replace('_', ' ')}" for key, number in given.items() if number) + ". "


def _latency_row(row: Row) -> Row:
    return {
        "model": row["model"],
        "runtime": row["runtime"],
        "threads": row["threads"],
        "parameters": format_count(row["parameters"]),
        "file": format_bytes(row["bytes"]) if row.get("bytes") else "",
        "prefill ms/token": row["prefill_ms_per_token"],
        "decode ms/token": row["decode_ms_per_token"],
        "tokens/s": row.get("tokens_per_second"),
        "decode speed-up": row.get("decode_speedup"),
    }


def rows_of(value: Any) -> list[Row]:
    """``[{…}, …]``, ``{"rows": […]}``, ``{"task": {"acc": …}, …}`` or ``{"name": value, …}``."""
    if isinstance(value, list):
        return [flat(row) for row in value if isinstance(row, dict)]
    if not isinstance(value, dict):
        return []
    for key in ("rows", "results", "tasks", "models"):
        if isinstance(value.get(key), (list, dict)) and value[key]:
            return rows_of(value[key])
    if value and all(isinstance(row, dict) for row in value.values()):
        return [{"": name, **flat(row)} for name, row in value.items()]
    return [{"": name, "value": item} for name, item in flat(value).items()]


def flat(row: Mapping[str, Any], prefix: str = "") -> Row:
    """Nested names joined by spaces, spreads as one cell, without lists."""
    result: Row = {}
    for key, value in row.items():
        if isinstance(value, dict) and not {"median", "low", "high"} <= value.keys():
            result |= flat(value, f"{prefix}{key} ")
        elif not isinstance(value, list):
            result[f"{prefix}{key}"] = value
    return result


def _table(identity: str, title: str, note: str, rows: list[Row]) -> Table:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    shown, cut = columns[:MAX_COLUMNS], ""
    if len(columns) > MAX_COLUMNS or len(rows) > MAX_ROWS:
        cut = f"; shortened from {len(rows)} rows and {len(columns)} columns"
    cells = [[_cell(row.get(column)) for column in shown] for row in rows[:MAX_ROWS]]
    return Table(identity, title, f"{note}{cut}.", shown, cells)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, dict):
        return f"{_cell(value.get('median'))} ({_cell(value.get('low'))}–{_cell(value.get('high'))})"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 10_000 else f"{value:,.0f}"
    return str(value)[:200]
