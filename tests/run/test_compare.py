"""``dwindle compare``: every metric at every size in one table, one figure and one JSON file."""

from __future__ import annotations

import json
import math
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import dwindle
from dwindle.commands import main as cli
from dwindle.core.errors import UserError
from dwindle.recipe.recipe import Recipe
from dwindle.run import compare as comparing
from dwindle.run.compare import Cell, CompareConfig, Comparison, compare, removal_target
from dwindle.run.pretrain import pretrain
from tiny import tiny_directory

SMALL: dict[str, Any] = {"sequences": 4, "seq_len": 24, "valid_tokens": 480}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(tiny_directory(tmp_path_factory.mktemp("compared") / "model"))


def test_every_cell_equals_pruning_by_hand(source: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    text = ["pydoc:train"]
    result = compare(
        source,
        metrics=["taylor", "wanda"],
        to=["10%", "30%nonemb"],
        second_order=True,
        data=text,
        valid=["pydoc:valid"],
        out=tmp_path / "out",
        **SMALL,
    )
    assert len(result.cells) == 2 * 2 * 2
    for cell in result.cells:
        to = {"10%": "90%", "30%nonemb": "70%nonemb"}[cell.ratio]
        pruned = dwindle.prune(
            source, to, data=text, metric=cell.metric, second_order=cell.second_order, sequences=4, seq_len=24
        )
        assert cell.parameters == pruned.after.total
        assert cell.shape == pruned.to_json()["shape"]
        assert cell.loss == pytest.approx(loss_of(pruned.model, source), rel=1e-5)
    written = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert written == result.to_json()
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"compare.json", "compare.png", "compare.svg"}
    drawn = (tmp_path / "out" / "compare.svg").read_text()
    assert f">{source.name}<" in drawn and str(source.parent) not in drawn  # figures are published
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(result.render())
    text_table = console.export_text()
    assert "taylor + second order" in text_table and "30%nonemb" in text_table
    assert f"{result.cells[0].loss:.3f}" in text_table


def test_layers_of_different_sizes_are_compared_too(source: Path) -> None:
    (cell,) = compare(source, metrics=["taylor"], to=["30k"], selection="global", **SMALL).cells
    pruned = dwindle.prune(source, "30k", selection="global", sequences=4, seq_len=24, data=["pydoc:train"])
    assert cell.shape == pruned.to_json()["shape"] and not pruned.structure.is_uniform
    assert cell.loss == pytest.approx(loss_of(pruned.model, source), rel=1e-5)


def test_accuracies_are_those_of_eval(source: Path, tmp_path: Path) -> None:
    """Of questions and of generated answers; a perplexity is no accuracy, and is refused before anything is loaded."""
    piqa = [{"goal": f"to cut {n}", "sol1": "use a knife", "sol2": "wait", "label": n % 2} for n in range(4)]
    asked = [{"question": f"{n}+1?", "answer": str(n + 1)} for n in range(6)]
    for name, rows in {"piqa.validation": piqa, "exact_match.test": asked[5:], "exact_match.dev": asked[:5]}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks, data = ["piqa", "exact_match"], [str(tmp_path)]
    found = compare(source, metrics=["magnitude"], to=["10%"], tasks=tasks, task_data=data, **SMALL)
    pruned = dwindle.prune(source, "90%", metric="magnitude")
    for model, scores in ((dwindle.load(source), found.tasks), (pruned, found.cells[0].tasks)):
        right = dwindle.evaluate(model, tasks, data=data)  # type: ignore[arg-type]
        assert scores == {"piqa": right.tasks[0].value, "exact_match": right.generated[0].value}
    (tmp_path / "wikitext-2-raw.test.txt").write_text(" = Ice = \n Ice melts . \n")
    with pytest.raises(UserError, match=r"^--tasks: wikitext has no accuracy"):
        compare(source, metrics=["magnitude"], tasks=["piqa", "wikitext"], task_data=data, **SMALL)


def loss_of(model: Any, source: Path) -> float:
    from dwindle.data.text_windows import validation_windows
    from dwindle.training.loss import evaluate_loss

    windows = validation_windows(["pydoc:valid"], dwindle.load(source).tokenizer, 24, 480)
    return evaluate_loss(model, windows)


def test_with_training(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells with and without training differ in the training alone."""
    recipes: list[Recipe] = []
    monkeypatch.setattr(comparing, "pretrain", lambda recipe, out: recipes.append(recipe) or pretrain(recipe, out))
    config = CompareConfig(**SMALL, tokens=1200, tokens_per_step=240, lr=3e-3, second_order=True)
    result = compare(source, metrics=["taylor", "obc"], to=["20%"], config=config)
    assert {recipe.prune.effective_selection for recipe in recipes} == {config.effective_selection} == {"coupled"}
    assert {(recipe.teacher_weight, recipe.training.optimizer) for recipe in recipes} == {(0.0, "adamw")}
    assert len(result.cells) == 4 and result.training_tokens == 1200
    assert all(cell.trained_loss is not None and cell.trained_loss < cell.loss for cell in result.cells)


def test_held_out_windows_of_the_same_text(source: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    result = compare(source, metrics=["random"], to=["20%"], data=[str(tmp_path / "text.txt")], **SMALL)
    assert result.calibration_tokens == 96 and result.valid_tokens == 20 * 23


def test_text_of_another_field(source: Path, tmp_path: Path) -> None:
    text = "the quick brown fox jumps over the lazy dog. " * 40
    data = [str(tmp_path / "train.jsonl")]
    valid = [str(tmp_path / "valid.jsonl")]
    for path, words in ((data, text), (valid, text.upper())):
        Path(path[0]).write_text(json.dumps({"content": words}) + "\n")
    given: dict[str, Any] = {"metrics": ["random"], "to": ["20%"], "data": data, "valid": valid}
    trained = {"tokens": 240, "tokens_per_step": 240}
    with pytest.raises(UserError, match="has no field 'text'"):
        compare(source, **given, **SMALL)
    result = compare(source, **given, **SMALL, **trained, text_field="content")
    assert result.cells[0].trained_loss is not None


def test_a_text_too_short_to_hold_windows_out_is_refused(source: Path, tmp_path: Path) -> None:
    """576 tokens are four windows to calibrate on and twenty to measure on; the tokenizer adds one to the text."""
    text, given = tmp_path / "text.txt", {"metrics": ["random"], "to": ["20%"], **SMALL}
    text.write_text("a" * 575)
    assert compare(source, data=[str(text)], **given).valid_tokens == 20 * 23
    text.write_text("a" * 574)
    with pytest.raises(UserError, match=r"--data: fewer than 576 tokens.*--valid.*--sequences"):
        compare(source, data=[str(text)], **given)
    assert compare(source, data=[str(text)], valid=["pydoc:valid"], **given).cells


def test_a_metric_that_draws_does_not_depend_on_the_other_sizes(source: Path) -> None:
    alone, beside = (compare(source, metrics=["random"], to=to, **SMALL).cells[-1] for to in (["50%"], ["10%", "50%"]))
    assert alone == beside


@pytest.mark.parametrize("first", [True, False])
def test_an_interrupted_comparison_keeps_what_is_done(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], first: bool
) -> None:
    """Ctrl-C while the first or the second of two cells trains."""
    pytest.importorskip("matplotlib")
    interrupt_training(monkeypatch, 0 if first else 1)
    out = tmp_path / "out"
    arguments = ["compare", str(source), "--out", str(out), "--metrics", "magnitude,random", "--to", "10%"]
    sizes = ["--sequences", "4", "--seq-len", "24", "--valid-tokens", "480", "--tokens", "480"]
    monkeypatch.setattr(sys, "argv", ["dwindle", *arguments, *sizes, "--tokens-per-step", "240"])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    said = capsys.readouterr().err
    assert stopped.value.code == 130 and "interrupted" in said and "Traceback" not in said
    if first:
        assert not out.exists()
        return
    written = json.loads((out / "compare.json").read_text())
    assert [cell["metric"] for cell in written["cells"]] == ["magnitude"] and not written["complete"]
    assert f"done and in {out}: 1;" in " ".join(said.split())


def interrupt_training(monkeypatch: pytest.MonkeyPatch, done: int) -> None:
    """A signal to this process as training begins, after ``done`` trainings."""
    import dwindle.run.pretrain as module

    count, begin = [0], module.Trainer.run

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        if count[0] > done:
            signal.raise_signal(signal.SIGINT)
        return begin(self, *args, **kwargs)

    monkeypatch.setattr(module.Trainer, "run", run)


def test_a_loss_that_is_not_finite_is_json() -> None:
    found = Comparison("m", 100, math.inf, {}, 1, 1, 0, 0, [])
    assert json.loads(json.dumps(found.to_json(), allow_nan=False))["loss"] is None


@pytest.mark.parametrize(
    ("text", "kept"),
    [("10%", "90%"), ("36 %", "64%"), ("12.5%nonemb", "87.5%nonemb"), ("0.25", "75%"), ("100M", "100M")],
)
def test_ratios_say_what_is_removed(text: str, kept: str) -> None:
    assert removal_target(text) == kept


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"metrics": ["wonder"]}, "'wonder' is unknown"),
        ({"metrics": []}, "metrics: none given"),
        ({"to": []}, "--to: no size given"),
        ({"to": ["100%"]}, "must be between 0% and 100%"),
        ({"to": ["99%"]}, "smallest reachable"),
        ({"data": ["no.txt"]}, "no.txt"),
        ({"data": ["pydoc"], "tokens": 10_000}, "name it with --valid"),
        ({"tokens": 10}, "tokens 10: is less than one step of 8192"),
        ({"tokens": "lots"}, "tokens: 'lots' is not a number"),
        ({"sequences": 0}, "sequences: 0 must be at least 1"),
        ({"seq_len": 1}, "seq_len: 1 must be at least 2"),
        ({"groups": ["everything"]}, "groups.0: expected one of"),
        ({"config": CompareConfig(method="adapt")}, "method: adapt cannot be compared"),
    ],
)
def test_mistakes_are_found_before_work_begins(source: Path, given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        compare(source, **given)


def test_an_existing_output_is_refused(source: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious.txt").write_text("mine")
    with pytest.raises(UserError, match="already exists"):
        compare(source, out=tmp_path / "out")
    with pytest.raises(UserError, match="already exists and has no"):
        compare(source, out=tmp_path / "out", overwrite=True)


def test_the_commands(source: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from typer.testing import CliRunner

    import dwindle.commands.compare
    import dwindle.commands.prune
    from dwindle.commands.app import app

    small = ["--sequences", "4", "--seq-len", "24", "--json"]
    arguments = ["compare", str(source), "--metrics", "wanda,random", "--to", "10%,36%", "--out", str(tmp_path / "out")]
    shown = CliRunner().invoke(app, [*arguments, "--second-order", "--valid-tokens", "480", *small])
    assert shown.exit_code == 0, shown.output
    found = json.loads(shown.stdout.splitlines()[-1])
    assert [(c["metric"], c["ratio"]) for c in found["cells"]][::2] == [
        (metric, ratio) for metric in ("wanda", "random") for ratio in ("10%", "36%")
    ]
    losses = {}
    for flag in ([], ["--second-order", "--gram-tokens", "50", "--damping", "0.1"]):
        out = tmp_path / f"pruned{len(flag)}"
        shown = CliRunner().invoke(app, ["prune", str(source), "--to", "80%", "--out", str(out), *flag, *small])
        assert shown.exit_code == 0, shown.output
        losses[len(flag)] = loss_of(dwindle.load(out).model, source)
    assert losses[0] != losses[5]


def test_accuracies_are_labelled() -> None:
    made = {"parameters": 80, "shape": {}, "removed": 0.2, "ratio": "20%", "second_order": False}
    cell = Cell(metric="taylor", loss=2.5, tasks={"piqa": 0.5, "boolq": 0.7}, **made)  # type: ignore[arg-type]
    found = Comparison("m", 100, 2.0, {"piqa": 0.6, "boolq": 0.8}, 1, 1, 0, 0, [cell])
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(found.render())
    lines = console.export_text().splitlines()
    assert any("mean of 2 tasks" in line and "60.0%" in line for line in lines[2:])
    assert "untouched 70.0%" in " ".join(" ".join(lines).split())
