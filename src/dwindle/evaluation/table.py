"""``dwindle table``: several models side by side, as in the tables of papers."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dwindle.core.config import takes
from dwindle.core.errors import UserError
from dwindle.core.json_safe import finite
from dwindle.core.sizes import format_count
from dwindle.evaluation.config import EvalConfig
from dwindle.evaluation.evaluate import (
    EvalData,
    check_engine,
    evaluate_model,
    load_data,
    trained_tokens,
)
from dwindle.evaluation.generation_tasks import GENERATION_TASKS
from dwindle.evaluation.in_memory import load_with_tokenizer
from dwindle.evaluation.perplexity import text_names
from dwindle.evaluation.published import PUBLISHED, Published
from dwindle.evaluation.results import EvalResult, read_result
from dwindle.evaluation.tasks import COMMONSENSE, FEW_SHOT_TASKS, TASKS, WIKITEXT, resolve_tasks
from dwindle.sources.loading import check_source, chosen_device, model_of_run

MEASURED = "measured"
PUBLISHED_KIND = "published"
_NONE = "–"
_OTHER_THAN_ZERO_SHOT = [
    *(task.title for task in FEW_SHOT_TASKS.values()),
    *(task.title for task in GENERATION_TASKS.values()),
]
_PERPLEXITY = {"WikiText-2": "word perplexity"}
_PER_TEXT = ("bits/byte", "nats/token")
_LEFT = ("model", "source", "items")
_ALL = "all"
WIDTH = 100
"""Characters per line of a terminal; wider tables continue below."""
_LONGEST_TEXT = 24


@dataclass(slots=True)
class ModelRow:
    """One model; values by column name, accuracies in percent."""

    model: str
    kind: str
    """``measured`` or ``published``."""
    parameters: str
    tokens: str
    values: dict[str, float]
    note: str = ""
    items: str = _ALL
    """Items of each task: ``all``, or ``first 100``."""


@dataclass(slots=True)
class ModelTable:
    """The table: columns in the usual order of papers, measured rows first."""

    columns: list[str]
    metrics: dict[str, str]
    """The metric of each column: ``acc``, ``acc_norm``, ``average``, ``word perplexity``."""
    rows: list[ModelRow]
    results: list[EvalResult]

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "columns": self.columns,
            "metrics": self.metrics,
            "rows": [asdict(row) for row in self.rows],
            "warnings": self.warnings,
            "results": [result.to_json() for result in self.results],
        }
        return finite(found)  # type: ignore[no-any-return]

    def text(self) -> str:
        """Aligned columns; those that do not fit into ``WIDTH`` follow in another block, with the model's name."""
        fixed, values = self._fixed(), self._values()
        names = fixed.pop(0)
        blocks, first = [], True
        while first or values:
            block = [names, *(fixed if first else [])]
            while values and (len(block) == 1 or _width([*block, values[0]]) <= WIDTH):
                block.append(values.pop(0))
            blocks.append(_aligned(block if first else _measured_rows(block)))
            first = False
        return "\n\n".join([*blocks, *(textwrap.fill(line, WIDTH) for line in self._footer())])

    def markdown(self) -> str:
        """The table as Markdown."""
        columns = [*self._fixed(), *self._values()]
        rows = [[cell.replace("|", "\\|") for cell in row] for row in zip(*columns, strict=True)]
        head, *body = ["| " + " | ".join(row) + " |" for row in rows]
        marks = "|".join(":--" if column[0] in _LEFT else "---:" for column in columns)
        return "\n".join([head, f"|{marks}|", *body, *(f"\n{line}" for line in self._footer())])

    def _fixed(self) -> list[list[str]]:
        """The columns before the scores, each from its head down; only those that distinguish rows or have content."""
        columns = [
            ["model", *(_short(row.model) for row in self.rows)],
            ["source", *(row.kind for row in self.rows)],
            ["items", *(row.items for row in self.rows)],
            ["parameters", *(row.parameters for row in self.rows)],
            ["tokens", *(row.tokens for row in self.rows)],
        ]
        return [column for column in columns if column[0] not in ("source", "items") or len(set(column[1:])) > 1]

    def _values(self) -> list[list[str]]:
        """A column per score."""
        found = []
        for name in self.columns:
            digits = 4 if name.endswith(_PER_TEXT) else 2
            cells = (f"{row.values[name]:.{digits}f}" if name in row.values else _NONE for row in self.rows)
            found.append([name, *cells])
        return found

    def _footer(self) -> list[str]:
        """What the columns mean, notes on rows, and whatever keeps rows from being compared."""
        notes = [f"{_short(row.model)}: {row.note}." for row in self.rows if row.note]
        return [line for line in (self._legend(), *notes, *self.warnings) if line]

    def _legend(self) -> str:
        """Explains the columns; empty if their names are enough."""
        shown = {name: f"{name}: {metric}" for name, metric in self.metrics.items() if name in self.columns}
        tasks = ", ".join(text for name, text in shown.items() if name not in _PERPLEXITY)
        limits = {row.items for row in self.rows}
        limited = f", the {limits.pop()} items of each" if len(limits) == 1 and _ALL not in limits else ""
        is_zero_shot = all(name not in self.columns for name in _OTHER_THAN_ZERO_SHOT)
        unit = "Zero-shot, in percent" if is_zero_shot else "In percent"
        legend = f"{unit}{limited}; {tasks}." if tasks else ""
        legend += "".join(f" {text}." for name, text in shown.items() if name in _PERPLEXITY)
        if any(row.kind == PUBLISHED_KIND for row in self.rows):
            legend += " Published rows are from the papers (harness 0.4.3; MMLU with Lighteval), not measured here."
        return legend.strip()

    @property
    def warnings(self) -> list[str]:
        """Reasons not to compare the rows: they were measured on different items, or in different ways."""
        found = []
        if len({row.items for row in self.rows}) > 1:
            found.append("Rows with different items (first N, or all) were not measured on the same questions.")
        for name, key in (("longest sequence", "max_length"), ("engine", "engine"), ("precision", "dtype")):
            values = [getattr(result, key) for result in self.results]
            if len(set(values)) > 1:
                pairs = zip(self.results, values, strict=True)
                said = ", ".join(f"{_short(result.model)} {value}" for result, value in pairs)
                found.append(f"Rows differ in {name}: {said}.")
        return found


def _measured_rows(columns: Sequence[Sequence[str]]) -> list[list[str]]:
    """Columns without the rows that have no score in them."""
    rows = list(zip(*columns, strict=True))
    kept = [row for place, row in enumerate(rows) if place == 0 or set(row[1:]) != {_NONE}]
    return [list(column) for column in zip(*kept, strict=True)]


def _width(columns: Sequence[Sequence[str]]) -> int:
    return sum(max(map(len, _stacked(column))) + 2 for column in columns) - 2


def _aligned(columns: Sequence[Sequence[str]]) -> str:
    """Columns as lines with a rule below the heads; words are flush left, numbers flush right."""
    stacked = [_stacked(column) for column in columns]
    above = 0 if any(column[0] for column in stacked) else 1  # no second line of heads without a text
    cells = []
    for column in stacked:
        width, left = max(map(len, column)), column[1] in _LEFT
        cells.append([cell.ljust(width) if left else cell.rjust(width) for cell in column[above:]])
    lines = ["  ".join(row).rstrip() for row in zip(*cells, strict=True)]
    return "\n".join([*lines[: 2 - above], "-" * _width(columns), *lines[2 - above :]])


def _stacked(column: Sequence[str]) -> list[str]:
    """The head as two lines, the cells as they are: a text's name stands above its measure."""
    head = column[0]
    name, _, measure = head.rpartition(" ") if head.endswith(_PER_TEXT) else ("", "", head)
    return [_short(name, _LONGEST_TEXT), measure, *column[1:]]


def _short(name: str, longest: int = 32) -> str:
    """The last part of a long path, or the end of a long name; JSON has all of it."""
    if len(name) <= longest:
        return name
    last = "…/" + Path(name).name
    return last if "/" in name and len(last) <= longest else "…" + name[1 - longest :]


@takes(EvalConfig)
def model_table(
    models: Sequence[str],
    *,
    config: EvalConfig,
    tasks: Sequence[str] | None = None,
    places: Sequence[str] = (),
    texts: Sequence[str] = (),
    text_field: str = "text",
    device: str = "auto",
    published: bool = False,
    notes: Mapping[str, str] | None = None,
) -> ModelTable:
    """Evaluate models and runs, or read saved results, and put them side by side.

    Without ``tasks`` saved results are shown completely, and models are evaluated on ``texts`` or, without any, on the
    commonsense tasks. ``notes`` maps models to notes on their rows.
    """
    if not models and not published:
        raise UserError("table: name at least one model, run or result file, or pass --published")
    check_engine(config)
    plans = [_plan(name, (notes or {}).get(name, "")) for name in models]
    for plan in plans:
        if plan.result is not None and tasks is not None:
            plan.result = _only(plan.result, resolve_tasks(tasks, "--tasks"), plan.source)
    data = EvalData()
    if any(plan.result is None for plan in plans):
        wanted = tasks if tasks is not None else [] if texts else ["commonsense"]
        data = load_data(wanted, places, texts=texts, text_field=text_field, limit=config.limit)
    results = [plan.result or _measure(plan, data, config, device) for plan in plans]
    return _table(results, [plan.note for plan in plans], PUBLISHED if published else ())


@dataclass(slots=True)
class _Plan:
    label: str
    source: str
    tokens: int | None
    result: EvalResult | None = None
    note: str = ""


def _plan(name: str, note: str) -> _Plan:
    """Resolve an argument: a saved result, a run, or a model source."""
    path = Path(name)
    if path.is_file() and path.suffix == ".json":
        result = read_result(path)
        return _Plan(result.model, name, result.tokens, result)
    if path.suffix == ".json" and not path.exists():
        raise UserError(f"{name}: does not exist: give a result of `dwindle eval --out`, or a model")
    if (model := model_of_run(path)) is not None:
        return _Plan(name, str(model), trained_tokens(path), note=note)
    check_source(name)
    return _Plan(name, name, trained_tokens(path), note=note)


def _only(result: EvalResult, names: Sequence[str], file: str) -> EvalResult:
    """A saved result reduced to the requested tasks; raises if it lacks one."""
    held = (
        {task.task for task in result.tasks}
        | {one.task for one in result.generated}
        | {text.name for text in result.texts}
    )
    if missing := [name for name in names if name not in held]:
        raise UserError(f"--tasks: {file} has no results for {', '.join(missing)}: name other tasks, or give the model")
    tasks = [task for task in result.tasks if task.task in names]
    texts = [text for text in result.texts if text.name != WIKITEXT or WIKITEXT in names]
    generated = [one for one in result.generated if one.task in names]
    return replace(result, tasks=tasks, texts=texts, generated=generated)


def _measure(plan: _Plan, data: EvalData, config: EvalConfig, device: str) -> EvalResult:
    model, tokenizer = load_with_tokenizer(plan.source, config.dtype or "float32", chosen_device(device))
    result = evaluate_model(model, tokenizer, data, name=plan.label, config=config)
    result.tokens = plan.tokens
    return result


def _table(results: Sequence[EvalResult], notes: Sequence[str], published: Sequence[Published]) -> ModelTable:
    measured = {task.task for result in results for task in result.tasks}
    metrics: dict[str, str] = {
        TASKS[name].title: TASKS[name].metric for name in (*COMMONSENSE, *TASKS) if name in measured
    }
    labels = _text_labels(results)
    rows = [_row(result, note, labels) for result, note in zip(results, notes, strict=True)]
    others = [
        ModelRow(row.model, PUBLISHED_KIND, row.parameters, row.tokens, {"average": row.average, "MMLU": row.mmlu})
        for row in published
    ]
    has_average = bool(others) or any("average" in row.values for row in rows)
    seven = [TASKS[name].title for name in COMMONSENSE if name in measured]
    columns = [*seven, *(["average"] if has_average else [])]
    columns += [title for title in metrics if title not in seven]
    if others and "MMLU" not in columns:
        columns.append("MMLU")
    columns += dict.fromkeys(name for row in rows for name in row.values if name not in columns)
    metrics |= {one.title: one.metric for result in results for one in result.generated}
    metrics |= {"average": "mean of the seven", "MMLU": "acc of the full answer"} | _PERPLEXITY
    return ModelTable(columns, metrics, rows + others, list(results))


def _text_labels(results: Sequence[EvalResult]) -> dict[tuple[str, str], str]:
    """Column names of texts by (name, path): saved results may contain different texts of the same name."""
    texts = [text for result in results for text in result.texts]
    labels: dict[tuple[str, str], str] = {}
    for name in dict.fromkeys(text.name for text in texts):
        sizes = {text.where: text.num_bytes for text in texts if text.name == name}
        longer = text_names(list(sizes)) if len(set(sizes.values())) > 1 else {}
        labels |= {(name, where): longer.get(where, name) for where in sizes}
    return labels


def _row(result: EvalResult, note: str, labels: dict[tuple[str, str], str]) -> ModelRow:
    values = {task.title: 100 * task.value for task in result.tasks}
    values |= {one.title: 100 * one.value for one in result.generated}
    if (average := result.average()) is not None:
        values["average"] = 100 * average
    for text in result.texts:
        if text.name == WIKITEXT:
            values["WikiText-2"] = text.word_perplexity
        else:
            label = labels[text.name, text.where]
            values |= {f"{label} bits/byte": text.bits_per_byte, f"{label} nats/token": text.nats_per_token}
    skipped = sum(count for _, count, _ in result.skipped())
    notes = [note] if note else []
    notes += [f"{skipped} skipped"] if skipped else []
    return ModelRow(
        result.model,
        MEASURED,
        format_count(result.parameters) if result.parameters else _NONE,
        _NONE if result.tokens is None else format_count(result.tokens),
        values,
        ", ".join(notes),
        _ALL if result.limit is None else f"first {result.limit}",
    )
