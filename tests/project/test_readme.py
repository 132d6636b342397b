"""Every ``dwindle`` command of the README runs, with a tiny model in the place of the real one."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from dwindle.commands import main as cli
from tiny import tiny_directory

ROOT = Path(__file__).resolve().parents[2]
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


def commands() -> list[str]:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```console\n(.*?)```", text, re.DOTALL)
    lines = [line.removeprefix("$ ") for block in blocks for line in block.splitlines()]
    return [line for line in lines if line.startswith("dwindle ")]


def tiny_form(command: str) -> list[str]:
    """The same command at a size for a test."""
    words = [word.replace("smollm2-135m", "model") for word in shlex.split(command)[1:]]
    words = ["80%" if words[i - 1] == "--to" else word for i, word in enumerate(words)]
    if words[0] == "pretrain":
        words[1] = str(ROOT / shlex.split(command)[2])
        words += SMALL
    if words[0] == "prune":
        words += ["--sequences", "4", "--seq-len", "32"]
    return words


def test_the_commands_of_the_readme(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny_directory(tmp_path / "model")
    (tmp_path / "books.txt").write_text("It was the best of times, it was the worst of times. " * 60)
    shown = commands()
    assert len(shown) >= 6
    for command in shown:
        monkeypatch.setattr(sys, "argv", ["dwindle", *tiny_form(command)])
        code: object = 0
        try:
            cli.main()
        except SystemExit as done:
            code = done.code
        assert not code, f"{command}\n{capsys.readouterr().err}"


def test_the_links_of_the_readme_lead_somewhere() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        if not target.startswith("http"):
            assert (ROOT / target).exists(), target
