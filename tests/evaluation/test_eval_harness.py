"""Against lm-evaluation-harness itself: the same requests, log-likelihoods, accuracies and perplexities."""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

pytest.importorskip("lm_eval", reason="needs the eval extra (lm_eval)")

from eval_sets import DOCUMENTS, PAGES, write_sets

from dwindle.evaluation.config import EvalConfig
from dwindle.evaluation.evaluate import _versions, check_engine, evaluate, evaluate_model, load_data
from dwindle.evaluation.harness import stock_tasks
from dwindle.evaluation.perplexity import detokenize
from dwindle.evaluation.results import EvalResult
from dwindle.evaluation.tasks import TASKS, WIKITEXT
from tiny import tiny_directory, tiny_model, tiny_tokenizer

NUM_ITEMS, NUM_SCORED = 100, 25


def requests_of(task: Any) -> list[tuple[list[tuple[str, str]], int, list[str]]]:
    """What the harness would ask, its answer, and its choices, for every document."""
    found = []
    task.build_all_requests(limit=None, rank=0, world_size=1)
    by_document: dict[int, list[tuple[str, str]]] = {}
    for instance in task.instances:
        by_document.setdefault(instance.doc_id, []).append(instance.args)
    for index, document in enumerate(task.eval_docs):
        gold = task.doc_to_text(document) if task.multiple_input else task.doc_to_target(document)
        choices = task.doc_to_choice(document)
        found.append((by_document[index], choices.index(gold) if isinstance(gold, str) else gold, choices))
    return found


@pytest.mark.parametrize("shared", [False, True], ids=["made-up", "real"])
@pytest.mark.parametrize("name", TASKS)
def test_requests_are_the_stock_ones(name: str, shared: bool, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue("shared_data") / "eval" if shared else write_sets(tmp_path)
    data = load_data([name], [str(folder)], limit=NUM_ITEMS).tasks[0]
    assert not data.num_skipped
    with stock_tasks({name: data.documents}) as stock:
        for item, (requests, gold, choices) in zip(data.items, requests_of(stock[name]), strict=True):
            assert list(item.question.requests) == requests
            assert item.question.gold == gold
            assert list(item.question.choices) == choices


def test_pages_are_the_stock_ones(shared_data: Path) -> None:
    pages = [*PAGES, *load_data([WIKITEXT], [str(shared_data / "corpus")]).texts[0].originals]
    assert len(pages) == 2 + 62
    with stock_tasks({WIKITEXT: [{"page": page} for page in pages]}) as stock:
        assert [stock[WIKITEXT].doc_to_target({"page": page}) for page in pages] == list(map(detokenize, pages))


def compare_items(files: list[Path], tolerance: float) -> int:
    """Log-likelihoods of the same items of two engines."""
    ours, theirs = ([json.loads(line) for line in file.read_text().splitlines()] for file in files)
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine["task"], mine["item"]) == (other["task"], other["item"])
        # above a thousand nats the harness's own fp32 sums are 1.2e-4 apart
        assert mine["loglikelihoods"] == pytest.approx(other["loglikelihoods"], abs=tolerance, rel=2e-7)
    return len(ours)


def assert_equal_results(ours: EvalResult, theirs: EvalResult) -> None:
    assert [task.task for task in ours.tasks] == [task.task for task in theirs.tasks]
    for mine, other in zip(ours.tasks, theirs.tasks, strict=True):
        assert (mine.acc, mine.acc_norm, mine.num_items) == (other.acc, other.acc_norm, other.num_items), mine.task
        assert mine.acc_stderr == pytest.approx(other.acc_stderr)
        assert mine.acc_norm_stderr == pytest.approx(other.acc_norm_stderr)
    for text, same in zip(ours.texts, theirs.texts, strict=True):
        assert text.word_perplexity == pytest.approx(same.word_perplexity, rel=1e-6)
        assert text.bits_per_byte == pytest.approx(same.bits_per_byte, rel=1e-6)


@pytest.mark.parity
def test_all_tasks_on_a_tiny_model(tmp_path: Path) -> None:
    data = load_data(["all"], [str(write_sets(tmp_path / "sets"))])
    model = tiny_model("llama", vocab_size=257, max_position_embeddings=200)
    files = [tmp_path / "dwindle.jsonl", tmp_path / "harness.jsonl"]
    both = [
        evaluate_model(model, tiny_tokenizer(), data, engine=engine, batch=4, items=file)
        for engine, file in zip(("dwindle", "harness"), files, strict=True)
    ]
    assert_equal_results(*both)
    assert compare_items(files, 1e-9) == sum(task.num_items for task in both[0].tasks)
    assert both[1].versions["lm_eval"]


def test_long_items_are_cut_alike(tmp_path: Path) -> None:
    data = load_data(["hellaswag,boolq,wikitext"], [str(write_sets(tmp_path / "sets"))])
    both = [
        evaluate_model(tiny_model("llama", vocab_size=257), tiny_tokenizer(), data, engine=engine, max_length=20)
        for engine in ("dwindle", "harness")
    ]
    assert_equal_results(*both)


@pytest.mark.slow
def test_items_of_the_seven_on_a_trained_model(shared_data: Path, tmp_path: Path) -> None:
    source = shared_data / "models" / "stories260K" / "stories260K.bin"
    files = [tmp_path / "dwindle.jsonl", tmp_path / "harness.jsonl"]
    both = [
        evaluate(source, data=[str(shared_data / "eval")], limit=NUM_SCORED, engine=engine, items=file)
        for engine, file in zip(("dwindle", "harness"), files, strict=True)
    ]
    assert_equal_results(*both)
    assert compare_items(files, 1e-4) == 7 * NUM_SCORED
    assert both[0].average() == both[1].average()


def test_any_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Once upon a time there was a tea pot. " * 20)
    both = [
        evaluate(tiny_directory(tmp_path / f"model-{engine}"), [], text=[str(tmp_path / "a.txt")], engine=engine)
        for engine in ("dwindle", "harness")
    ]
    assert_equal_results(*both)


@pytest.mark.parametrize("training", [True, False])
def test_a_model_is_left_as_it_was(training: bool, tmp_path: Path) -> None:
    """And measured without dropout, whatever it was."""
    data = load_data(["piqa,wikitext"], [str(write_sets(tmp_path / "sets"))])
    model = tiny_model("llama", vocab_size=257, attention_dropout=0.5).train(training)
    both = [evaluate_model(model, tiny_tokenizer(), data, engine=engine) for engine in ("dwindle", "harness")]
    assert_equal_results(*both)
    assert all(module.training == training for module in model.modules())


def test_the_harness_keeps_nobody_else_from_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """``--engine harness --data hub`` fetches documents; the harness itself then asks no hub."""
    import datasets

    monkeypatch.delenv("HF_DATASETS_OFFLINE", raising=False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    check_engine(EvalConfig(engine="harness"))
    assert "HF_DATASETS_OFFLINE" not in os.environ and not datasets.config.HF_HUB_OFFLINE
    with stock_tasks({"piqa": DOCUMENTS["piqa"]}):
        assert datasets.config.HF_HUB_OFFLINE
    assert not datasets.config.HF_HUB_OFFLINE


def test_a_harness_in_a_folder_is_not_recorded_with_the_version_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with ``--target``, or a path to its source: there is no metadata of a package."""
    check_engine(EvalConfig(engine="harness"))

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    monkeypatch.setattr(sys.modules["lm_eval"], "__version__", "0.4.13", raising=False)
    assert _versions("harness") == {
        "dwindle": "source",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "lm_eval": "0.4.13",
    }
