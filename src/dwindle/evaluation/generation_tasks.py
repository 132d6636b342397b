"""Tasks whose answers are generated (greedy) and then scored: IFEval, and exact match after a few examples."""

from __future__ import annotations

import re
import string
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from dwindle.core.errors import UserError
from dwindle.core.progress import Bar
from dwindle.evaluation.data import Items, open_dataset, shot_dataset, usable
from dwindle.evaluation.generation import Answerer, plan_groups, room_for
from dwindle.evaluation.ifeval import Checkers, levels
from dwindle.evaluation.metrics import standard_error
from dwindle.evaluation.prompts import is_id, prompt_ids
from dwindle.evaluation.results import GenerationResult
from dwindle.evaluation.tasks import BrokenItem, Dataset


@dataclass(frozen=True, slots=True)
class GenerationTask:
    """A prompt format, where an answer ends, and what is compared."""

    name: str
    title: str
    metric: str
    """The main one of its values."""
    prompt: str
    """The format, for display."""
    dataset: Dataset
    max_tokens: int
    until: tuple[str, ...] = ()
    """An answer ends before any of these."""
    num_shots: int = 0
    chat: bool = False
    """The prompt goes into the model's chat template, if it has one."""
    extract: Callable[[str], Mapping[str, str]] = lambda answer: {"exact_match": answer}
    """What is compared, by metric."""
    normalise: Callable[[str], str] = lambda text: text


@dataclass(frozen=True, slots=True)
class GenerationItem:
    index: int
    id: int | str
    prompt: str
    document: Mapping[str, Any]


@dataclass(slots=True)
class GenerationData(Items):
    """The usable items of a task, and why others were skipped."""

    task: GenerationTask
    items: list[GenerationItem] = field(default_factory=list)


def _last_number(answer: str) -> str:
    """The last number, as the harness's flexible-extract finds it."""
    found = re.findall(r"(-?[$0-9.,]{2,})|(-?[0-9]+)", answer)
    return "" if not found else next(part for part in found[-1] if part).strip()


def _gsm8k(answer: str) -> dict[str, str]:
    strict = re.search(r"#### (\-?[0-9\.\,]+)", answer)
    return {
        "exact_match": strict[1].strip() if strict else "[invalid]",
        "flexible": _last_number(answer) or "[invalid]",
    }


def _gsm8k_normal(text: str) -> str:
    for pattern in (",", r"\$", r"(?s).*#### ", r"\.$"):
        text = re.sub(pattern, "", text)
    return text.lower()


def _first_line(answer: str) -> dict[str, str]:
    return {"exact_match": answer.strip().split("\n")[0]}


def _plain_words(text: str) -> str:
    return " ".join(text.lower().translate(str.maketrans("", "", string.punctuation)).split())


GENERATION_TASKS: dict[str, GenerationTask] = {
    task.name: task
    for task in (
        GenerationTask(
            "ifeval",
            "IFEval",
            "inst_loose",
            "{prompt}, in the model's chat template if it has one",
            Dataset(("ifeval",), ("prompts", "train", "test"), ("google/IFEval", None), "", hub_split="train"),
            max_tokens=1280,
            chat=True,
        ),
        GenerationTask(
            "gsm8k",
            "GSM8K",
            "exact_match",
            "five solved questions of the training split, then Question: {question}\\nAnswer:",
            Dataset(("gsm8k",), ("test",), ("openai/gsm8k", "main"), "", shot_split="train"),
            max_tokens=256,
            until=("Question:", "</s>", "<|im_end|>"),
            num_shots=5,
            extract=_gsm8k,
            normalise=_gsm8k_normal,
        ),
        GenerationTask(
            "exact_match",
            "exact match",
            "exact_match",
            "five questions of the dev split with answers, then Question: {question}\\nAnswer:",
            Dataset(("exact_match",), ("test",), ("", None), "", shot_split="dev"),
            max_tokens=64,
            until=("\nQuestion:", "\n\n"),
            num_shots=5,
            extract=_first_line,
            normalise=_plain_words,
        ),
    )
}
"""``exact_match`` reads files of your own: ``exact_match.test.jsonl`` (question, answer), and examples, ``.dev``."""


# Data ---------------------------------------------------------------------------------------------------------


def load_generation(task: GenerationTask, places: Sequence[str], *, limit: int | None = None) -> GenerationData:
    """The first ``limit`` documents with their prompts."""
    where, split, rows = open_dataset(task.dataset, task.name, places)
    data = GenerationData(task, where=where, split=split)
    before = "".join(_shots(task, places))
    seen: dict[int | str, str] = {}
    checkers = Checkers() if task.name == "ifeval" else None
    for label, item in usable(rows, data, limit, lambda number, row: _item(task, number, row, before, checkers)):
        if item.id in seen:
            raise UserError(
                f"--data: {where}, {label}: the id {item.id!r} is also that of {seen[item.id]}: give each its own"
            )
        seen[item.id] = label
        data.items.append(item)
    if not data.items:
        reason = f" ({data.skipped[0]})" if data.skipped else ""
        raise UserError(f"--data: {where} has no usable {task.name} item{reason}: check the file")
    return data


def _item(
    task: GenerationTask, number: int, row: Mapping[str, Any], before: str, checkers: Checkers | None
) -> GenerationItem:
    try:
        if checkers is not None:
            checkers.check_document(row)
            return GenerationItem(number, _id(row["key"]), row["prompt"], row)
        question, answer = _solved(row)
        if not task.normalise(answer):
            raise ValueError("nothing of the answer is compared, so no answer at all would be right")
        name = number if row.get("id") is None else row["id"]
        return GenerationItem(number, _id(name), before + question, row)
    except KeyError as error:
        raise BrokenItem(f"field {error} is missing") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise BrokenItem(f"a field has the wrong form ({error})") from error


def _id(value: Any) -> int | str:
    if not is_id(value):
        raise ValueError(f"the id {value!r:.60} is neither a number nor a text")
    name: int | str = value
    return name


def _solved(row: Mapping[str, Any]) -> tuple[str, str]:
    question, answer = row["question"], row["answer"]
    if not isinstance(question, str) or not isinstance(answer, str):
        raise ValueError("question and answer must be texts")
    return f"Question: {question}\nAnswer:", answer


def _shots(task: GenerationTask, places: Sequence[str]) -> Iterator[str]:
    """The first examples of their split, each with its answer."""
    if not task.num_shots:
        return
    name = f"{task.name} ({task.dataset.shot_split})"
    rows = open_dataset(shot_dataset(task.dataset), name, places)[2]
    count = 0
    for (label, row), _ in zip(rows, range(task.num_shots), strict=False):
        try:
            question, answer = _solved(row)
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"--data: example {label} of {task.name} is broken ({error}): correct it") from error
        count += 1
        yield f"{question} {answer}\n\n"
    if count < task.num_shots:
        raise UserError(f"--data: {name} has {count} examples: {task.num_shots} are needed")


# Answers ------------------------------------------------------------------------------------------------------


def answer_items(answerer: Answerer, data: GenerationData, *, tokens: int | None, quiet: bool) -> list[str]:
    """Whole answers, which ``score_answers`` cuts where the task says that they end."""
    task, tokenizer = data.task, answerer.tokenizer
    is_chat = task.chat and bool(getattr(tokenizer, "chat_template", None))
    wanted = tokens or task.max_tokens
    rows = []
    for item in data.items:
        chat = [{"role": "user", "content": item.prompt}]
        ids = prompt_ids(tokenizer, chat, f"item {item.index}", chat=is_chat, advice="give the model another template")
        room = min(wanted, answerer.max_length // 2)
        ids = ids if is_chat else ids[-(answerer.max_length - room) :]  # as the harness: the last examples stay
        room_for(len(ids), wanted, answerer.max_length, f"{data.where}, item {item.index}")
        rows.append(ids)
    answers = [""] * len(rows)
    started, done = time.perf_counter(), 0
    with nullcontext() if quiet else Bar(task.title, len(rows)) as bar:
        for group, room in plan_groups(answerer, [len(row) for row in rows], wanted):
            found = answerer.answer([rows[index] for index in group], [(index,) for index in group], room)
            for index, answer in zip(group, found, strict=True):
                answers[index] = answer.text
            done += sum(answer.num_tokens for answer in found)
            if bar is not None:
                bar.advance(len(group), f"{task.title}, {done / (time.perf_counter() - started):,.0f} tokens/s")
    return answers


def _cut(text: str, until: Sequence[str]) -> str:
    for end in until:
        text = text.split(end)[0]
    return text


# Scores -------------------------------------------------------------------------------------------------------


def score_answers(
    data: GenerationData, answers: Mapping[int | str, str] | Sequence[str]
) -> tuple[GenerationResult, list[dict[str, Any]]]:
    """The task's result, and a record per item; items without an answer are skipped and counted.

    ``answers`` are by id (of a file), or those of all items in order (of a model).
    """
    task = data.task
    result = GenerationResult(
        task=task.name,
        title=task.title,
        metric=task.metric,
        values={},
        stderrs={},
        num_items=0,
        left_out={},
        prompt=task.prompt,
        **data.about(),
    )
    given = []
    found = [answers.get(item.id) for item in data.items] if isinstance(answers, Mapping) else answers
    for item, answer in zip(data.items, found, strict=True):
        if answer is not None:
            given.append((item, _cut(answer, task.until)))
        else:
            result.skip(f"no answer for {item.id!r}")
    if not given:
        raise UserError(f"{task.name}: none of its {len(data.items)} items has an answer: give answers to {data.where}")
    records = _ifeval(result, given) if task.name == "ifeval" else _exact(task, result, given)
    result.num_items = len(given)
    return result, records


def _ifeval(result: GenerationResult, given: Sequence[tuple[GenerationItem, str]]) -> list[dict[str, Any]]:
    checkers, found = Checkers(), []
    for item, answer in given:
        missing = checkers.left_out(item.document)
        for name in missing:
            reason = f"{name} needs {checkers.missing[name]}"
            result.left_out[reason] = result.left_out.get(reason, 0) + 1
        found.append(checkers.check(item.document, answer) | {"whole": not missing})
    for level, values in levels(found).items():
        if not values and level.startswith("prompt"):
            continue  # every prompt lost an instruction: there is no such value
        if not values:
            raise UserError("ifeval: no instruction can be checked here: " + "; ".join(result.left_out))
        result.values[level] = sum(values) / len(values)
        result.stderrs[level] = standard_error(values) if level.startswith("prompt") else None
    return [
        {"task": "ifeval", "item": item.index, "id": item.id, "answer": answer, **one}
        for (item, answer), one in zip(given, found, strict=True)
    ]


def _exact(
    task: GenerationTask, result: GenerationResult, given: Sequence[tuple[GenerationItem, str]]
) -> list[dict[str, Any]]:
    records = []
    for item, answer in given:
        gold = task.normalise(item.document["answer"])
        right = {name: task.normalise(text) == gold for name, text in task.extract(answer).items()}
        records.append({"task": task.name, "item": item.index, "id": item.id, "answer": answer, **right})
    for name in task.extract(""):
        values = [float(record[name]) for record in records]
        result.values[name] = sum(values) / len(values)
        result.stderrs[name] = standard_error(values)
    return records
