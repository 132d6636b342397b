"""Results of ``dwindle eval --out`` as tables, the source beside the result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

from dwindle.core.names import public_name
from dwindle.report.jsonlines import number
from dwindle.report.run import Run
from dwindle.report.tables import Table

SOURCE, RESULT = "source", "result"
_MEASURES = {"nats_per_token": "nats per token", "bits_per_byte": "bits per byte", "word_perplexity": "word perplexity"}
_MAX_MODELS = 6

Record = dict[str, Any]


@dataclass(slots=True)
class Measured:
    """One model's results: a column of the tables. Files of the same model with other tasks are joined."""

    label: str
    settings: tuple[Any, ...]
    """What must be equal for scores to be comparable: the item limit and the longest sequence."""
    tasks: dict[str, Record]
    texts: dict[str, Record]
    average: float | None
    about: str


def is_evaluation(value: Any) -> bool:
    """Whether a file's content is a result of ``dwindle eval``, as this version writes it."""
    try:
        tasks_known = all(number(task[task["metric"]]) is not None and task["task"] for task in value["tasks"])
        named = all(isinstance(task["task"], str) for task in value["tasks"])
        whole = all(type(value.get(key)) in (int, NoneType) for key in ("limit", "max_length"))
        shaped = isinstance(value.get("average") or {}, dict) and isinstance(value.get("texts") or [], list)
        ours = str(value["format"]).startswith("dwindle-eval") and bool(value["model"])
        return ours and tasks_known and named and whole and shaped
    except (KeyError, TypeError, AttributeError):
        return False


def evaluation_tables(run: Run, found: Sequence[tuple[str, Record]]) -> list[Table]:
    """Tasks and perplexities, a column per model; ``found`` are file names and contents."""
    models: list[Measured] = []
    for place, value in found:
        _add(models, _measured(run, place, value))
    models = sorted(models, key=lambda model: not model.label.startswith(SOURCE))[:_MAX_MODELS]
    if len(models) == 1 and models[0].label != SOURCE:
        models[0].label = "score"
    note = " ".join(part for part in (_about(models, found), _limits(models), _advice(run, models, found)) if part)
    tables = [_tasks(models, note), _texts(models, note)]
    return [table for table in tables if table.rows]


def _measured(run: Run, place: str, value: Record) -> Measured:
    parts = (public_name(str(value["model"])), value.get("engine"), value.get("dtype"))
    limit = value.get("limit")
    return Measured(
        label=_label(run, value),
        settings=(limit, value.get("max_length")),
        tasks={task["task"]: task for task in value["tasks"]},
        texts={str(text.get("name")): text for text in value.get("texts") or () if isinstance(text, dict)},
        average=number((value.get("average") or {}).get("value")),
        about=f"{', '.join(str(part) for part in parts if part)} ({place})",
    )


def _label(run: Run, value: Record) -> str:
    """``source``, ``result``, or the name of another model, by its size and by its name."""
    size, name = number(value.get("parameters")), public_name(str(value["model"]))
    if run.parameters_before != run.parameters_after and size is not None and size == run.parameters_before:
        return SOURCE
    if name == run.source_name:
        return SOURCE
    return RESULT if size is None or size == run.parameters_after else name


def _add(models: list[Measured], new: Measured) -> None:
    for old in models:
        apart = not (old.tasks.keys() & new.tasks.keys()) and not (old.texts.keys() & new.texts.keys())
        if (old.label, old.settings) == (new.label, new.settings) and apart:
            old.tasks |= new.tasks
            old.texts |= new.texts
            old.average = new.average if old.average is None else old.average
            old.about += f"; {new.about}"
            return
    same = sum(old.label.split(" · ")[0] == new.label for old in models)
    new.label += f" · {same + 1}" if same else ""
    models.append(new)


def _about(models: Sequence[Measured], found: Sequence[Any]) -> str:
    shown = [f"{model.label}: {model.about}" if len(models) > 1 else model.about for model in models]
    return "; ".join(shown) + "." if found else ""


def _limits(models: Sequence[Measured]) -> str:
    """A warning if columns were measured under different limits."""
    limits = {model.label: model.settings[0] for model in models}
    if len(set(limits.values())) < 2:
        limit = next(iter(limits.values()), None)
        return "" if limit is None else f"First {limit:,} items of each task."
    said = (f"{label}: {'all items' if limit is None else f'first {limit:,}'}" for label, limit in limits.items())
    return f"Measured on different items, so the columns cannot be compared ({', '.join(said)})."


def _advice(run: Run, models: Sequence[Measured], found: Sequence[tuple[str, Record]]) -> str:
    labels = {model.label for model in models}
    if SOURCE in labels or not found or not run.source_name or run.parameters_before == run.parameters_after:
        return ""
    return f"For the source beside it: `dwindle eval {run.source_name} … --out {run.name}/evaluation-source.json`."


def _comparable(models: Sequence[Measured]) -> bool:
    return [model.label for model in models] == [SOURCE, RESULT] and models[0].settings == models[1].settings


def _tasks(models: Sequence[Measured], note: str) -> Table:
    models = [model for model in models if model.tasks]
    names = list(dict.fromkeys(name for model in models for name in model.tasks))
    difference, rows = _comparable(models), []
    for name in names:
        own = [model.tasks.get(name) for model in models]
        first = next(task for task in own if task is not None)
        cells = [_score(task) for task in own]
        change = _change([_value(task) for task in own], 100, 2) if difference else []
        items = {str(task["num_items"]) for task in own if task is not None and task.get("num_items")}
        rows.append([first.get("title") or name, first["metric"], *cells, *change, " / ".join(sorted(items))])
    averages = [model.average for model in models]
    if any(value is not None for value in averages):
        change = _change(averages, 100, 2) if difference else []
        rows.append(["average of the seven", "", *map(_percent, averages), *change, ""])
    columns = ["task", "metric", *(model.label for model in models), *(["difference"] * difference), "items"]
    return Table("evaluation", "Evaluation", f"Zero-shot, in percent. {note}", columns, rows)


def _texts(models: Sequence[Measured], note: str) -> Table:
    models = [model for model in models if model.texts]
    names = list(dict.fromkeys(name for model in models for name in model.texts))
    difference, rows = _comparable(models), []
    for name in names:
        for key, measure in _MEASURES.items():
            values = [number(model.texts.get(name, {}).get(key)) for model in models]
            if any(value is not None for value in values):
                digits = 3 if key != "word_perplexity" else 1
                cells = ["–" if value is None else f"{value:,.{digits}f}" for value in values]
                change = _change(values, 1, digits) if difference else []
                rows.append([f"{name.removeprefix('text:')}: {measure}", *cells, *change])
    columns = ["", *(model.label for model in models), *(["difference"] * difference)]
    return Table("perplexity", "Perplexity", note, columns, rows)


def _value(task: Record | None) -> float | None:
    return None if task is None else number(task[task["metric"]])


def _score(task: Record | None) -> str:
    if task is None:
        return "–"
    error = number(task.get(f"{task['metric']}_stderr"))
    return _percent(_value(task)) + ("" if error is None else f" ± {100 * error:.2f}")


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.2f}"


def _change(values: Sequence[float | None], scale: float, digits: int) -> list[str]:
    source, result = values
    return [""] if source is None or result is None else [f"{scale * (result - source):+,.{digits}f}"]
