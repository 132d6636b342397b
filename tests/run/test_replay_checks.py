"""``replay`` believes no line of a ledger: each is checked against the model; nothing published tells a local path."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dwindle
from dwindle.core.names import public_name
from dwindle.pruning.ledger import read_ledger
from tiny import tiny_directory

Events = list[dict[str, Any]]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_directory(tmp_path_factory.mktemp("place") / "model")


@pytest.fixture(scope="module")
def written(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("pruned") / "out"
    dwindle.prune(source, "60%", metric="magnitude", out=out)
    return out


def first(events: Events, kind: str) -> dict[str, Any]:
    return next(event for event in events if event.get("type") == kind)


def with_extra(event: dict[str, Any]) -> Callable[[Events], None]:
    return lambda events: events.insert(3, event | {"parameters": events[2]["parameters"]})


TAMPERED: dict[str, Callable[[Events], Any]] = {
    "index out of range": lambda e: first(e, "ffn")["indices"][0].__setitem__(0, 10**6),
    "negative index": lambda e: first(e, "ffn")["indices"][0].__setitem__(0, -1),
    "a fraction": lambda e: first(e, "ffn")["indices"][0].__setitem__(0, 0.5),
    "true": lambda e: first(e, "ffn")["indices"][0].__setitem__(0, True),
    "text": lambda e: first(e, "ffn").__setitem__("indices", "all"),
    "fewer layers": lambda e: first(e, "ffn")["indices"].pop(),
    "more layers": lambda e: first(e, "ffn")["indices"].append([0]),
    "twice in a line": lambda e: first(e, "ffn")["indices"][0].append(first(e, "ffn")["indices"][0][0]),
    "all of a layer": lambda e: first(e, "ffn")["indices"].__setitem__(0, list(range(40))),
    "unknown type": lambda e: first(e, "ffn").__setitem__("type", "layers"),
    "another type": lambda e: first(e, "ffn").__setitem__("type", "attn"),
    "unknown event": lambda e: e[1].__setitem__("event", "grow"),
    "no event": lambda e: e[1].pop("event"),
    "a second source": lambda e: e.insert(2, e[0]),
    "missing line": lambda e: e.pop(len(e) // 2),
    "repeated line": lambda e: e.insert(3, dict(e[2])),
    "exchanged lines": lambda e: e.__setitem__(slice(1, 3), [e[2], e[1]]),
    "wrong parameters": lambda e: e[1].__setitem__("parameters", e[1]["parameters"] - 1),
    "parameters as text": lambda e: e[1].__setitem__("parameters", str(e[1]["parameters"])),
    "step going back": lambda e: (e[1].__setitem__("step", 5), e[2].__setitem__("step", 4)),
    "nothing removed": with_extra({"event": "prune", "step": 0, "tokens": 0, "type": "stem", "indices": [[]]}),
    "impossible compaction": with_extra({"event": "compact", "hidden": 99, "heads": 8, "ffn": 40}),
    "allocation of other layers": with_extra({"event": "allocation", "importance": [1.0], "sparsity": [0.5]}),
    "other layers at the start": lambda e: e[0].__setitem__("layer_parameters", [1, 2, 3]),
    "no parameters at the start": lambda e: e[0].pop("parameters"),
    "not a table": lambda e: e.__setitem__(1, 5),
}


@pytest.mark.parametrize("how", TAMPERED)
def test_a_tampered_ledger_is_refused(source: Path, written: Path, tmp_path: Path, how: str) -> None:
    events = read_ledger(written)
    TAMPERED[how](events)
    ledger = tmp_path / "ledger.jsonl"
    ledger.write_text("".join(json.dumps(event) + "\n" for event in events))
    with pytest.raises(dwindle.UserError, match=r"ledger"):
        dwindle.replay(source, ledger)


def test_an_honest_ledger_is_accepted(source: Path, written: Path, tmp_path: Path) -> None:
    events = read_ledger(written)
    assert dwindle.replay(source, written).after.total == events[-1]["parameters"]
    adapted = dwindle.prune(source, "80%", method="adapt", rounds=2, sequences=2, seq_len=16, out=tmp_path / "adapted")
    assert dwindle.replay(source, tmp_path / "adapted").structure == adapted.structure


def test_no_file_of_a_result_holds_a_local_path(source: Path, written: Path, tmp_path: Path) -> None:
    for path in written.rglob("*"):
        assert not path.is_file() or str(source.parent).encode() not in path.read_bytes(), path.name
    structure = json.loads((written / "structure.json").read_text())
    assert structure["source"] == read_ledger(written)[0]["source"] == "model"
    names = ("org/name", "smollm2-135m", "/a/b/", "~/x/y.gguf", "./z", r"C:\models\m", "a/b/c")
    assert [public_name(name) for name in names] == ["org/name", "smollm2-135m", "b", "y.gguf", "z", "m", "c"]


def test_a_second_export_still_knows_the_licence(source: Path, tmp_path: Path) -> None:
    from dwindle.export.exporting import export

    (source / "README.md").write_text("---\nlicense: mit\nbase_model: org/base\n---\n")
    dwindle.prune(source, "90%", metric="magnitude", out=tmp_path / "out")
    export(tmp_path / "out", "hf", tmp_path / "again", verify=False)
    card = (tmp_path / "again" / "README.md").read_text()
    assert 'license: "mit"' in card and 'base_model: "org/base"' in card
