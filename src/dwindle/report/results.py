"""Tables of the results of ``dwindle eval --out`` and ``dwindle bench latency --json`` found in a run's directory."""

from __future__ import annotations

from typing import Any

from dwindle.core.sizes import format_bytes, format_count
from dwindle.report.evaluations import evaluation_tables, is_evaluation
from dwindle.report.jsonlines import Record, read_json
from dwindle.report.run import Run
from dwindle.report.tables import Table

MAX_ROWS = 60
MAX_TABLES = 12


def result_tables(run: Run) -> list[Table]:
    """Evaluations, the source beside the result, then a table per file of latencies; other files are left out."""
    evaluations: list[tuple[str, Record]] = []
    latencies: list[Table] = []
    for path in run.directory.result_files():
        place, value = path.relative_to(run.folder).as_posix(), read_json(path)
        if is_evaluation(value):
            evaluations.append((place, value))
        elif (table := _latency(value, place, len(latencies))) is not None:
            latencies.append(table)
    return [*evaluation_tables(run, evaluations), *latencies[:MAX_TABLES]]


def _latency(value: Any, place: str, number: int) -> Table | None:
    """None for other files, or those of another version."""
    try:
        rows = [_latency_row(row) for row in value["rows"][:MAX_ROWS]]
        given = {key: value.get(key) for key in ("prompt_tokens", "new_tokens", "repeats")}
        note = ", ".join(f"{count:,} {key.replace('_', ' ')}" for key, count in given.items() if count)
        note = f"{note}. From {place}." if note else f"From {place}."
        cells = [[_cell(cell) for cell in row.values()] for row in rows]
        return Table(f"latency-{number}", "Latency", note, list(rows[0]), cells)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError):
        return None


def _latency_row(row: Record) -> Record:
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


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, dict):
        return f"{_cell(value.get('median'))} ({_cell(value.get('low'))}–{_cell(value.get('high'))})"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 10_000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)[:200]
