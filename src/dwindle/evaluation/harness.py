"""lm-evaluation-harness on local files (extra ``[eval]``).

Every task includes the harness's stock definition by path. Only the data set is replaced by local documents, and
``acc_norm`` is added where it is missing. No prompt is repeated here, so the results are the harness's own.
"""

from __future__ import annotations

import importlib
import json
import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from dwindle.core.errors import UserError
from dwindle.evaluation.data import TaskData
from dwindle.evaluation.encoding import Pair
from dwindle.evaluation.engines import Scored
from dwindle.evaluation.metrics import Accuracy, accuracy
from dwindle.evaluation.perplexity import TextData, detokenize
from dwindle.evaluation.tasks import WIKITEXT
from dwindle.training.sampling import evaluating

INSTALL = "pip install 'lm_eval==0.4.13' accelerate"
_SPLIT, _SHOTS, NUM_SHOTS = "test", "dev", 5
_BOTH = [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm")]

STOCK = {
    "arc_challenge": "arc/arc_challenge.yaml",
    "arc_easy": "arc/arc_easy.yaml",
    "boolq": "super_glue/boolq/default.yaml",
    "hellaswag": "hellaswag/hellaswag.yaml",
    "openbookqa": "openbookqa/openbookqa.yaml",
    "piqa": "piqa/piqa.yaml",
    "winogrande": "winogrande/default.yaml",
    "social_iqa": "siqa/siqa.yaml",
    "copa": "super_glue/copa/default.yaml",
    "mmlu": "mmlu/continuation/_continuation_template_yaml",
    WIKITEXT: "wikitext/wikitext.yaml",
    "mmlu_5shot": "mmlu/default/_default_template_yaml",
}
"""Paths of the definitions below ``lm_eval/tasks``."""

# MMLU is 57 stock tasks that differ only in this line; as one task all items weigh the same, as in its stock group.
_MMLU_DESCRIPTIONS = {
    "mmlu": "The following are questions (with answers) about {{subject.replace('_', ' ')}}.\n\n",
    "mmlu_5shot": "The following are multiple choice questions (with answers) about {{subject.replace('_', ' ')}}.\n\n",
}


def import_harness() -> Any:
    """Import ``lm_eval``, or raise with the command that installs it."""
    try:
        for module in ("lm_eval.evaluator", "lm_eval.models.huggingface", "lm_eval.tasks"):
            importlib.import_module(module)
        return importlib.import_module("lm_eval")
    except ImportError as error:
        raise UserError(f"--engine harness: needs lm-evaluation-harness: run `{INSTALL}`") from error


@contextmanager
def stock_tasks(
    documents: Mapping[str, Sequence[Mapping[str, Any]]], shots: Sequence[Mapping[str, Any]] = ()
) -> Iterator[dict[str, Any]]:
    """The harness's tasks over these documents, by our task names; their files exist within the context.

    ``shots`` are the examples of a few-shot task; the harness puts the first five before every document.
    """
    lm_eval = import_harness()
    root = Path(lm_eval.tasks.__file__).parent
    with tempfile.TemporaryDirectory(prefix="dwindle-harness-") as temporary, _quiet(), _offline():
        folder = Path(temporary)
        for name, rows in documents.items():
            file = folder / f"{name}.jsonl"
            file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
            definition = _definition(name, root / STOCK[name], file, folder / "cache")
            if shots:
                examples = folder / f"{name}.shots.jsonl"
                examples.write_text("".join(json.dumps(row) + "\n" for row in shots), encoding="utf-8")
                definition["dataset_kwargs"]["data_files"][_SHOTS] = str(examples)
                definition |= {"fewshot_split": _SHOTS, "num_fewshot": NUM_SHOTS}
            (folder / f"{name}.yaml").write_text(json.dumps(definition), encoding="utf-8")  # JSON is YAML
        manager = lm_eval.tasks.TaskManager(include_defaults=False, include_path=str(folder))
        loaded = manager.load([_task_name(name) for name in documents])
        yield {name: loaded["tasks"][_task_name(name)] for name in documents}


@contextmanager
def _offline() -> Iterator[None]:
    """Within the context ``datasets`` does not access the hub; documents may have been fetched before."""
    from datasets import config

    before, config.HF_HUB_OFFLINE = config.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        config.HF_HUB_OFFLINE = before


def _task_name(name: str) -> str:
    return f"dwindle_{name}"


def _definition(name: str, stock: Path, file: Path, cache: Path) -> dict[str, Any]:
    definition: dict[str, Any] = {
        "include": str(stock),
        "task": _task_name(name),
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {_SPLIT: str(file)}, "cache_dir": str(cache)},
        "training_split": None,
        "validation_split": None,
        "fewshot_split": None,
        "test_split": _SPLIT,
        "num_fewshot": 0,
    }
    if name != WIKITEXT:
        definition["metric_list"] = _BOTH
    if name in _MMLU_DESCRIPTIONS:
        definition["description"] = _MMLU_DESCRIPTIONS[name]
    return definition


class HarnessEngine:
    """The reference engine."""

    name = "harness"

    def __init__(self, model: nn.Module, tokenizer: Any, *, max_length: int, batch: int = 0) -> None:
        self._harness = import_harness()
        self.batch = batch or 16
        self._model = model
        with _quiet(), evaluating(model):  # HFLM calls model.eval() and does not undo it
            self._lm = self._harness.models.huggingface.HFLM(
                pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=self.batch, max_length=max_length
            )

    def score_questions(self, data: TaskData, pairs: Sequence[Sequence[Pair]]) -> Scored:
        if data.task.num_shots:
            return self._score_few_shot(data)
        found, samples = self._run(data.task.name, data.documents)
        scores = [[float(answer[0][0]) for answer in sample["resps"]] for sample in samples]
        return Scored(
            Accuracy(
                acc=found["acc,none"],
                acc_stderr=_number(found["acc_stderr,none"]),
                acc_norm=found["acc_norm,none"],
                acc_norm_stderr=_number(found["acc_norm_stderr,none"]),
            ),
            scores,
        )

    def _score_few_shot(self, data: TaskData) -> Scored:
        """Group by group, as the harness's stock tasks are: each has its own examples."""
        group = data.task.group
        scores: list[list[float]] = [[] for _ in data.items]
        for value in dict.fromkeys(document[group] for document in data.documents):
            places = [place for place, document in enumerate(data.documents) if document[group] == value]
            shots = [document for document in data.shot_documents if document[group] == value]
            _, samples = self._run(data.task.name, [data.documents[place] for place in places], shots=shots)
            for place, sample in zip(places, samples, strict=True):
                scores[place] = [float(answer[0][0]) for answer in sample["resps"]]
        return Scored(accuracy([item.question for item in data.items], scores), scores)

    def score_texts(self, data: TextData, windows: Sequence[Sequence[Pair]]) -> list[float]:
        if data.name == WIKITEXT:
            _, samples = self._run(WIKITEXT, [{"page": page} for page in data.originals], bootstrap=0)
            assert [sample["arguments"][0][0] for sample in samples] == list(map(detokenize, data.originals))
            return [float(sample["resps"][0][0]) for sample in samples]
        instances = [
            self._harness.api.instance.Instance("loglikelihood_rolling", {}, (text,), index)
            for index, text in enumerate(data.texts)
        ]
        with _quiet(), evaluating(self._model):
            return [float(score) for score in self._lm.loglikelihood_rolling(instances)]

    def _run(
        self,
        name: str,
        documents: Sequence[Mapping[str, Any]],
        bootstrap: int = 1000,
        shots: Sequence[Mapping[str, Any]] = (),
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The harness's results, and its samples in the order of the documents."""
        with stock_tasks({name: documents}, shots) as tasks, _quiet(), evaluating(self._model):
            loaded = {"tasks": {_task_name(name): tasks[name]}, "groups": {}, "group_map": {}}
            found = self._harness.evaluator.evaluate(self._lm, loaded, bootstrap_iters=bootstrap, log_samples=True)
        samples = sorted(found["samples"][_task_name(name)], key=lambda sample: int(sample["doc_id"]))
        assert len(samples) == len(documents)
        return found["results"][_task_name(name)], samples


def _number(value: Any) -> float | None:
    """A float, or None for "N/A", which the harness writes for a missing standard error."""
    return float(value) if isinstance(value, (int, float)) else None


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence warnings about what is intended here; the harness's progress bars stay."""
    from datasets.utils.logging import disable_progress_bar

    disable_progress_bar()
    loggers = [logging.getLogger(name) for name in ("lm_eval", "datasets")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
