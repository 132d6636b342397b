"""``dwindle eval`` and ``dwindle table`` as a person types them."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from eval_sets import write_sets

from dwindle.commands import main as cli
from dwindle.core.errors import UserError
from dwindle.core.files import write_text_atomic
from dwindle.evaluation.evaluate import trained_tokens
from dwindle.evaluation.perplexity import text_names
from dwindle.evaluation.results import EvalResult, read_result
from tiny import tiny_directory

Command = Any


@pytest.fixture
def dwindle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    monkeypatch.chdir(tmp_path)
    write_sets(tmp_path / "sets")
    tiny_directory(tmp_path / "model", max_position_embeddings=256)

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["dwindle", *arguments])
        capsys.readouterr()
        try:
            cli.main()
            code = 0
        except SystemExit as done:
            code = int(done.code or 0)
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def test_eval_prints_tables_and_json(dwindle: Command) -> None:
    code, out, err = dwindle("eval", "model", "--data", "sets", "--out", "result.json", "--items", "items.jsonl")
    assert "next: dwindle table result.json OTHER.json" in err
    assert code == 0
    for word in ("ARC-c", "WinoGrande", "acc_norm", "average of the seven", "prompt: Question:"):
        assert word in out
    code, out, _ = dwindle("eval", "model", "--tasks", "all", "--data", "sets", "--json")
    found = json.loads(out)
    assert len(found["tasks"]) == 10
    assert found["texts"][0]["name"] == "wikitext"
    assert found["average"]["value"] == pytest.approx(read_result(Path("result.json")).average())
    item = json.loads(Path("items.jsonl").read_text().splitlines()[0])
    assert set(item) == {"task", "item", "gold", "loglikelihoods"}


def test_a_result_survives_its_file(dwindle: Command) -> None:
    dwindle("eval", "model", "--tasks", "piqa,wikitext", "--data", "sets", "--out", "result.json")
    result = read_result(Path("result.json"))
    assert EvalResult.from_json(result.to_json(), "x") == result
    whole = json.loads(Path("result.json").read_text())
    row = whole["tasks"][0]
    for damaged in (
        {"texts": [1]},
        {"texts": {"a": 1}},
        {"tasks": [row | {"acc": "x"}]},
        {"generated": 3},
        {"limit": "a"},
    ):
        Path("damaged.json").write_text(json.dumps(whole | damaged))
        code, _, err = dwindle("table", "damaged.json")
        assert code == 2 and "damaged.json: is not a result of" in err


def test_skipped_items_are_shown(dwindle: Command) -> None:
    with Path("sets/piqa.validation.jsonl").open("a") as file:
        file.write("{}\n" + json.dumps({"goal": "g", "sol1": "a" * 300, "sol2": "b", "label": 0}) + "\n")
    code, out, _ = dwindle("eval", "model", "--tasks", "piqa", "--data", "sets")
    assert code == 0
    assert "2 skipped: line 3: field 'goal' is missing" in " ".join(out.split())
    assert "more than 256" in " ".join(out.split())


def test_perplexity_of_any_text(dwindle: Command) -> None:
    Path("story.txt").write_text("Once upon a time. " * 30)
    code, out, _ = dwindle("eval", "model", "--text", "story.txt", "--json")
    (text,) = json.loads(out)["texts"]
    assert (code, text["name"], text["num_tokens"]) == (0, "text:story.txt", 540)
    assert json.loads(out)["tasks"] == []


def test_text_of_another_field(dwindle: Command) -> None:
    Path("other.jsonl").write_text(json.dumps({"content": "Once upon a time. " * 30}) + "\n")
    code, _, err = dwindle("eval", "model", "--text", "other.jsonl")
    assert code == 2 and err.rstrip().endswith("set data.text_field or --text-field")
    for command in ("eval", "table"):
        code, out, _ = dwindle(command, "model", "--text", "other.jsonl", "--text-field", "content", "--json")
        assert code == 0 and '"num_tokens": 540' in out


def test_texts_of_the_same_name_have_their_own_columns(dwindle: Command) -> None:
    for folder, words in (("ta", "Once upon a time. "), ("tb", "A tea pot! ")):
        Path(folder).mkdir()
        Path(folder, "test.txt").write_text(words * 20)
        dwindle("eval", "model", "--text", f"{folder}/test.txt", "--out", f"{folder}.json")
    texts = ("--text", "ta/test.txt", "--text", "tb/test.txt", "--text", "./ta/test.txt")
    found = json.loads(dwindle("table", "model", *texts, "--json")[1])
    kinds = ("bits/byte", "nats/token")
    assert found["columns"] == [f"text:{folder}/test.txt {kind}" for folder in ("ta", "tb") for kind in kinds]
    assert len(found["results"][0]["texts"]) == 2
    saved = json.loads(dwindle("table", "ta.json", "tb.json", "--json")[1])
    assert saved["columns"] == found["columns"]
    assert saved["rows"][0]["values"] | saved["rows"][1]["values"] == pytest.approx(found["rows"][0]["values"])
    alone = json.loads(dwindle("table", "ta.json", "ta.json", "--json")[1])
    assert alone["columns"] == [f"text:test.txt {kind}" for kind in kinds]


def test_names_of_texts() -> None:
    assert text_names(["a/x.txt", "b/y.txt"]) == {"a/x.txt": "text:x.txt", "b/y.txt": "text:y.txt"}
    found = text_names(["x.txt", "a/x.txt", "/b/a/x.txt", "/x.txt", "c/y.txt"])
    assert list(found.values()) == ["text:x.txt", "text:a/x.txt", "text:b/a/x.txt", "text:/x.txt", "text:y.txt"]


def test_an_infinite_perplexity_is_json(dwindle: Command) -> None:
    Path("story.txt").write_text("Once upon a time. " * 30)
    dwindle("eval", "model", "--text", "story.txt", "--out", "result.json")
    result = read_result(Path("result.json"))
    result.texts[0].nats_per_token = math.inf
    result.save("result.json", overwrite=True)
    out = dwindle("table", "result.json", "--json")[1]
    assert "Infinity" not in out and json.loads(out)["rows"][0]["values"]["text:story.txt nats/token"] is None


def test_a_place_that_vanished_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"^--out .*x\.json could not be written"):
        write_text_atomic(tmp_path / "file" / "x.json", "{}", option="--out")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("eval", "model", "--tasks", "nothing"), "--tasks: unknown task 'nothing'"),
        (("eval", "model", "--data", "nowhere"), "--data: nowhere is not a folder"),
        (
            ("eval", "model", "--data", "sets", "--engine", "x"),
            '--engine: expected one of "dwindle", "harness", got "x"',
        ),
        (("eval", "model", "--data", "sets", "--batch", "-1"), "--batch: -1 must be"),
        (("eval", "model", "--data", "sets", "--limit", "0"), "--limit: 0 must be"),
        (("eval", "model", "--data", "sets", "--max-length", "9999"), "--max-length: 9999 must lie between"),
        (("eval", "model", "--text", "none.txt"), "--text: none.txt does not exist"),
        (("eval", "model", "--data", "sets", "--out", "sets"), "--out sets is a directory"),
        (("eval", "model", "--data", "sets", "--out", "bad.json/x.json"), "--out bad.json/x.json cannot be written"),
        (("eval", "model", "--data", "sets", "--items", "bad.json/x/y"), "--items bad.json/x/y cannot be written"),
        (("eval", "model", "--data", "sets", "--out", "r", "--items", "./r"), "--items: ./r collides with --out r"),
        (("eval", "model", "--data", "sets", "--out", "r", "--items", "r/i"), "--items: r/i collides with --out r"),
        (("eval", "none/", "--data", "sets"), "none/"),
        (("table",), "table: name at least one model"),
        (("table", "nope.json"), "error: nope.json: does not exist"),
        (("eval", "nope.json"), "error: source nope.json: does not exist"),
        (("table", "bad.json"), "bad.json: is not a result of `dwindle eval --out`"),
    ],
)
def test_mistakes_are_one_line(dwindle: Command, arguments: tuple[str, ...], message: str) -> None:
    Path("bad.json").write_text('{"format": "other"}')
    code, out, err = dwindle(*arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.strip().splitlines()) == 1


def test_no_harness_is_one_line(dwindle: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [name for name in sys.modules if name.split(".")[0] == "lm_eval"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "lm_eval", None)  # type: ignore[arg-type]
    code, _, err = dwindle("eval", "model", "--data", "sets", "--engine", "harness")
    assert code == 2
    assert "--engine harness: needs lm-evaluation-harness: run `pip install" in err


def test_quantized_models(dwindle: Command) -> None:
    from dwindle.quantization.quantize import quantize

    Path("story.txt").write_text("Once upon a time there was a tea pot. " * 100)
    sizes = {"sequences": 2, "seq_len": 32, "valid_seq_len": 32, "valid_tokens": 64}
    quantize("model", scheme="w8a8", out="small", data=["story.txt"], valid=["story.txt"], **sizes)
    whole, small = (json.loads(dwindle("eval", name, "--data", "sets", "--json")[1]) for name in ("model", "small"))
    assert small["parameters"] == whole["parameters"]
    assert [task["num_items"] for task in small["tasks"]] == [task["num_items"] for task in whole["tasks"]]


def make_run(folder: Path) -> None:
    tiny_directory(folder / "model", max_position_embeddings=256)
    (folder / "recipe.toml").write_text("")
    (folder / "metrics.jsonl").write_text('{"step": 1, "tokens": 1000}\n{"step": 2, "tokens": 2000000}\n')


def test_table_of_a_run_a_model_and_a_saved_result(dwindle: Command, tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    assert trained_tokens(tmp_path / "run") == 2_000_000
    dwindle("eval", "model", "--data", "sets", "--out", "result.json")
    sources = ("run", "model", "result.json")
    code, out, _ = dwindle("table", *sources, "--data", "sets", "--published", "--json")
    rows = json.loads(out)["rows"]
    assert code == 0
    assert [row["kind"] for row in rows[:4]] == ["measured"] * 3 + ["published"]
    assert rows[0]["tokens"] == "2M"
    assert rows[0]["values"] == rows[1]["values"] == rows[2]["values"]
    assert {
        "model": rows[3]["model"],
        "average": rows[3]["values"]["average"],
    } == {"model": "SmolLM-135M", "average": 49.87}
    _, text, _ = dwindle("table", "result.json", "--published")
    assert "not measured here" in text
    assert sum(" published " in line for line in text.splitlines()) == 11
    _, markdown, _ = dwindle("table", "result.json", "--markdown")
    assert markdown.startswith("| model | parameters | tokens | ARC-c | ARC-e |")
    _, markdown, _ = dwindle("table", "result.json", "--published", "--markdown")
    assert markdown.startswith("| model | source | parameters | tokens | ARC-c | ARC-e |")


def test_a_table_fits_a_terminal_and_loses_nothing(dwindle: Command) -> None:
    """Seven tasks, an average and one text were 182 columns wide."""
    for name in ("story", "another-story-with-a-name-that-is-too-long-for-a-column"):
        Path(f"{name}.txt").write_text("Once upon a time. " * 30)
    texts = ("--text", "story.txt", "--text", "another-story-with-a-name-that-is-too-long-for-a-column.txt")
    dwindle("eval", "model", "--tasks", "commonsense", *texts, "--data", "sets", "--out", "result.json")
    code, out, _ = dwindle("table", "result.json", "--published")
    assert code == 0 and max(map(len, out.splitlines())) <= 100
    found = json.loads(dwindle("table", "result.json", "--json")[1])
    assert len(found["columns"]) == 12
    for name, value in found["rows"][0]["values"].items():
        assert f"{value:.{4 if name.endswith(('/byte', '/token')) else 2}f}" in out.split()
    assert sum(line.startswith("SmolLM-135M ") for line in out.splitlines()) >= 2, "its name is in every block"
    assert len(dwindle("table", "result.json", "--markdown")[1].splitlines()[0]) > 100, "Markdown is not cut"


def test_different_limits_are_never_mixed_silently(dwindle: Command) -> None:
    for limit in ("1", "2"):
        dwindle("eval", "model", "--tasks", "piqa", "--data", "sets", "--limit", limit, "--out", f"{limit}.json")
    dwindle("eval", "model", "--tasks", "piqa", "--data", "sets", "--out", "all.json")
    for option in ([], ["--markdown"]):
        _, out, _ = dwindle("table", "1.json", "2.json", "all.json", *option)
        assert "items" in out.splitlines()[0] and "were not measured on the same questions" in out
        assert [word in out for word in ("first 1", "first 2", " all ")] == [True] * 3
        _, out, _ = dwindle("table", "2.json", *option)
        assert "the first 2 items of each" in out and "not measured" not in out
    found = json.loads(dwindle("table", "1.json", "all.json", "--json")[1])
    assert [row["items"] for row in found["rows"]] == ["first 1", "all"] and len(found["warnings"]) == 1
    _, out, _ = dwindle("table", "2.json", "--published")
    assert "were not measured on the same questions" in out
    _, out, _ = dwindle("table", "all.json", "all.json")
    assert "items" not in out
    other = json.loads(Path("all.json").read_text()) | {"dtype": "bfloat16"}
    Path("other.json").write_text(json.dumps(other))
    assert "Rows differ in precision: model float32, model bfloat16." in dwindle("table", "all.json", "other.json")[1]


def test_a_table_of_saved_results_needs_no_data(dwindle: Command) -> None:
    dwindle("eval", "model", "--tasks", "piqa", "--data", "sets", "--limit", "1", "--out", "result.json")
    code, out, _ = dwindle("table", "result.json")
    assert code == 0
    assert "the first 1 items of each" in out
    assert "average" not in out.splitlines()[0]


def test_an_unfinished_run_is_named(dwindle: Command) -> None:
    Path("begun").mkdir()
    Path("begun/recipe.toml").write_text("")
    code, _, err = dwindle("table", "begun", "--data", "sets")
    assert code == 2
    assert "dwindle resume begun" in err


def test_an_empty_folder_is_named_before_the_sets_are_looked_for(dwindle: Command) -> None:
    Path("empty").mkdir()
    code, _, err = dwindle("table", "empty")
    assert code == 2
    assert err.startswith("error: source empty: empty/config.json does not exist: give a directory")


def test_eval_of_a_run_is_that_of_its_model(dwindle: Command, tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    whole, model = (
        json.loads(dwindle("eval", name, "--tasks", "piqa", "--data", "sets", "--json")[1])
        for name in ("run", "run/model")
    )
    assert whole["model"] == "run" and whole["tasks"] == model["tasks"]
    assert whole["tokens"] == model["tokens"] == 2_000_000
    dwindle("eval", "run", "--tasks", "piqa", "--data", "sets", "--out", "run.json")
    rows = json.loads(dwindle("table", "run.json", "run", "--tasks", "piqa", "--data", "sets", "--json")[1])["rows"]
    assert [row["tokens"] for row in rows] == ["2M", "2M"]
    Path("begun").mkdir()
    Path("begun/recipe.toml").write_text("")
    code, _, err = dwindle("eval", "begun", "--data", "sets")
    assert code == 2 and "dwindle resume begun" in err


def test_tasks_choose_among_those_of_a_saved_result(dwindle: Command) -> None:
    dwindle("eval", "model", "--tasks", "piqa,boolq,wikitext", "--data", "sets", "--out", "result.json")
    _, out, _ = dwindle("table", "result.json", "--tasks", "piqa", "--json")
    assert json.loads(out)["columns"] == ["PIQA"]
    _, out, _ = dwindle("table", "result.json", "--json")
    assert set(json.loads(out)["columns"]) == {"PIQA", "BoolQ", "WikiText-2"}
    code, _, err = dwindle("table", "result.json", "--tasks", "piqa,arc_easy")
    assert code == 2 and "--tasks: result.json has no results for arc_easy" in err


def test_a_table_of_texts_alone(dwindle: Command) -> None:
    """Its legend was "Zero-shot, in percent; ."."""
    Path("story.txt").write_text("Once upon a time. " * 30)
    dwindle("eval", "model", "--text", "story.txt", "--out", "result.json")
    text = read_result(Path("result.json")).texts[0]
    _, out, _ = dwindle("table", "result.json", "--json")
    found = json.loads(out)
    assert found["columns"] == ["text:story.txt bits/byte", "text:story.txt nats/token"]
    assert found["rows"][0]["values"]["text:story.txt nats/token"] == text.nats_per_token
    for option in ([], ["--markdown"]):
        _, out, _ = dwindle("table", "result.json", *option)
        assert f"{text.nats_per_token:.4f}" in out and "Zero-shot" not in out and out.endswith("\n") and ";" not in out
    dwindle("eval", "model", "--tasks", "wikitext", "--data", "sets", "--out", "wiki.json")
    assert dwindle("table", "wiki.json")[1].splitlines()[-1] == "WikiText-2: word perplexity."
    dwindle("eval", "model", "--tasks", "piqa,wikitext", "--data", "sets", "--out", "both.json")
    assert dwindle("table", "both.json")[1].splitlines()[-1] == (
        "Zero-shot, in percent; PIQA: acc. WikiText-2: word perplexity."
    )


def test_a_run_that_missed_its_target_is_told_from_others(dwindle: Command, tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    Path("run/recipe.toml").write_text('[prune]\ntarget = "100"\n')
    source = {"event": "source", "parameters": 9000, "options": {"pacing": {"end_count": 100}}}
    Path("run/ledger.jsonl").write_text(json.dumps(source) + "\n")
    code, out, err = dwindle("table", "run", "--tasks", "piqa", "--data", "sets")
    assert code == 0 and "\nrun: target missed.\n" in out
    assert err.startswith("run is a run: using its model, run/model\n")
