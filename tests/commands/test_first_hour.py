"""From a model and a text to an answer of the small model in llama.cpp: five commands, each printed by the last."""

from __future__ import annotations

import ast
import contextlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import dwindle
from dwindle.commands import main as cli
from dwindle.export.running import ways_to_run
from dwindle.pruning.ledger import read_ledger
from edge_models import tiny_loaded
from tiny import tiny_directory


def next_command(err: str) -> str:
    """The first command that was printed."""
    found = re.search(r"^next: (.*?)  +# ", err, re.MULTILINE)
    assert found, err
    return found[1]


def test_five_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("xllamacpp", reason="pip install -c constraints.txt -e '.[gguf]'")
    monkeypatch.chdir(tmp_path)
    source = tiny_loaded(hidden_size=64, intermediate_size=96, head_dim=32)
    source.model.save_pretrained("model")
    source.tokenizer.save_pretrained("model")
    (tmp_path / "book.txt").write_text("It was the best of times, it was the worst of times. " * 300)

    def run(command: str) -> tuple[str, str]:
        monkeypatch.setattr(sys, "argv", shlex.split(command))
        capsys.readouterr()
        with contextlib.suppress(SystemExit):
            cli.main()
        return capsys.readouterr()

    out, err = run("dwindle new model book.txt --to 50%")
    assert "about" in out and "measured" in out and (tmp_path / "model-to-50pct.toml").is_file()
    assert next_command(err) == "dwindle pretrain model-to-50pct.toml"

    out, err = run(next_command(err))
    assert re.search(r"^validation: source \d+\.\d{3} → \d+\.\d{3} \([+-]\d+\.\d{3}\)", out, re.MULTILINE)
    assert out.count("  source: ") == out.count("  result: ") == 2
    assert next_command(err) == "dwindle report runs/model-to-50pct"

    out, err = run(next_command(err))
    assert Path(out.strip()).is_file()
    assert next_command(err).startswith("dwindle export runs/model-to-50pct --to gguf --type q8_0")

    out, err = run(next_command(err))
    assert "verified in llama.cpp" in out and (tmp_path / "runs/model-to-50pct.gguf").is_file()
    assert "ollama" in err and "llama-cli" in err
    assert next_command(err) == "dwindle generate runs/model-to-50pct.gguf 'Once upon a time'"

    out, _ = run(next_command(err))
    assert out.startswith("Once upon a time") and len(out.strip()) > len("Once upon a time")
    assert len(read_ledger(tmp_path / "runs/model-to-50pct")) > 2


def test_both_runs_of_teacher_correction_can_be_pasted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my text").mkdir()
    monkeypatch.chdir(tmp_path / "my text")
    tiny_directory("model", hidden_size=64, intermediate_size=96)
    Path("book.txt").write_text("It was the best of times, it was the worst of times. " * 300)

    def run(command: str) -> str:
        monkeypatch.setattr(sys, "argv", shlex.split(command))
        capsys.readouterr()
        with contextlib.suppress(SystemExit):
            cli.main()
        return capsys.readouterr().err

    start, first, second = re.findall(
        "^next: (.*?)  +# ",
        run("dwindle new model book.txt --to 70% --tokens 16M --no-measure --out 'my run.toml'"),
        re.M,
    )
    assert start == "dwindle pretrain 'my run.toml'"
    few = "data.seq_len=32 data.valid_tokens=64 training.tokens_per_step=256 validation.every=0"
    assert "error" not in run(f"{first} {few} training.tokens=1k") and Path("runs/my run-source/model").is_dir()
    assert "error" not in run(f"{second} {few} training.tokens=12k data.skip=1k")
    source, *_ = read_ledger(Path("runs/my run"))
    assert source["source"] == "my run-source"


def started(script: str, **environment: str) -> str:
    """What a new interpreter prints."""
    variables = {**os.environ, **environment}
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=variables).stdout


def test_the_help_follows_a_users_path_and_imports_no_torch() -> None:
    script = (
        "import sys; sys.argv = ['dwindle', '-h']\n"
        "from dwindle.commands.main import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print('torch' in sys.modules)"
    )
    out = started(script, COLUMNS="120")
    titles = re.findall(r"╭─ ([A-Z][a-z ]+) ─", out)
    assert titles == ["Options", "Look", "Make smaller", "Judge", "Run and ship"]
    assert "dwindle new MODEL TEXT --to 50%" in out and out.rstrip().endswith("False")


def test_a_misspelt_recipe_is_told_without_waiting_for_torch() -> None:
    script = (
        "import sys; sys.argv = ['dwindle', 'pretrain', 'demmo']; sys.stderr = sys.stdout\n"
        "from dwindle.commands.main import main\n"
        "try: main()\n"
        "except SystemExit as end: print(end.code)\n"
        "print('torch' in sys.modules)"
    )
    assert re.search(r"did you mean demo\?\n2\nFalse$", started(script).rstrip())


def test_ctrl_c_in_the_body_of_a_class(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Python 3.11 makes a RuntimeError of it; other errors of that kind stay."""

    def interrupted() -> None:
        raise RuntimeError("Error calling __set_name__") from cause

    monkeypatch.setattr(cli, "_run", interrupted)
    cause: BaseException = KeyboardInterrupt()
    with pytest.raises(SystemExit, match="130"):
        cli.main()
    assert capsys.readouterr().err == "interrupted\n"
    cause = ValueError()
    with pytest.raises(RuntimeError):
        cli.main()


@pytest.mark.parametrize("module", ["typer", "dwindle.commands.prune"])
def test_ctrl_c_while_modules_are_imported(module: str) -> None:
    script = (
        "import runpy, sys; sys.argv = ['dwindle', 'keys']\n"
        "class Press:\n"
        "    def find_spec(self, name, *rest):\n"
        f"        if name == {module!r}: raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Press())\n"
        "runpy.run_module('dwindle', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


@pytest.mark.parametrize(
    ("words", "found"),
    [("dwindle pre", "pretrain"), ("dwindle pretrain smollm2-135m-to-80m-m", "smollm2-135m-to-80m-mixed")],
)
def test_shells_complete_commands_and_recipes(words: str, found: str) -> None:
    script = "import sys; sys.argv = ['dwindle']\nfrom dwindle.commands.main import main\nmain()"
    number = str(len(words.split()) - 1)
    out = started(script, _DWINDLE_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=number)
    assert found in out.split()


def test_results_are_tables_in_a_notebook(tmp_path: Path) -> None:
    source = tiny_directory(tmp_path / "model")
    pruned = dwindle.prune(source, "70%", sequences=4, seq_len=32)
    shown = pruned._repr_html_()
    assert "<pre" in shown and "non-embedding" in shown and f"{pruned.after.total:,}" in shown and "loss " in shown
    exported = dwindle.export_model(source, "hf", tmp_path / "out")
    assert "verified in transformers" in exported._repr_html_()
    assert dwindle.generate(tmp_path / "out", "Once", tokens=4)


@pytest.mark.parametrize("out", ["half", "it's mine", 'a "b"'])
def test_the_line_of_python_can_be_read_and_pasted(out: str) -> None:
    line = ways_to_run(out, "hf", custom_code=True)["Python"]
    program, flag, code = shlex.split(line)
    assert (program, flag) == ("python", "-c") and repr(out)[1:-1] in ast.unparse(ast.parse(code))
    assert out != "half" or line.count("'") == 2


@pytest.mark.parametrize(
    ("file", "name"), [("runs/Half.gguf", "half"), ("a b/Größe 2.gguf", "gr-e-2"), ("ö.gguf", "small")]
)
def test_ollama_gets_a_name_that_it_takes(file: str, name: str) -> None:
    words = shlex.split(ways_to_run(file, "gguf")["Ollama"])
    assert words[:3] == ["ollama", "create", name] and words[words.index("run") + 1] == name
