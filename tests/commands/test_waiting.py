"""What a terminal shows while a command works; with ``--json``, and elsewhere, nothing."""

from __future__ import annotations

import io
import json
import re
import sys
import time
from pathlib import Path

import pytest

import dwindle
from dwindle.commands import main as cli
from dwindle.core import progress
from tiny import tiny_directory


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def drawn(self) -> str:
        """Without escape sequences."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.getvalue())


def terminal_from_here(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Standard error of this test; not a fixture, since pytest sets it once more before the test begins."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", found := Terminal())
    return found


def test_a_bar_is_drawn_below_the_spinner_that_it_is_part_of(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = terminal_from_here(monkeypatch)
    with progress.status("loading"), progress.Bar("reading", 3):
        for _ in range(1000):  # it is drawn with the spinner's next picture
            if "reading" in terminal.getvalue():
                break
            time.sleep(0.01)
    assert "loading\nreading" in terminal.drawn()


def test_prune_says_what_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = ("loading", "reading the calibration text", "measuring the source", "measuring the result", "writing")
    terminal = terminal_from_here(monkeypatch)
    source, small = tiny_directory(tmp_path / "model"), {"sequences": 4, "seq_len": 32}
    dwindle.prune(source, "70%", out=tmp_path / "smaller", **small)
    drawn = terminal.drawn()
    places = [drawn.find(step) for step in steps]
    assert -1 not in places and places == sorted(places)

    without = terminal_from_here(monkeypatch)
    command = f"dwindle prune {source} --to 70% --out {tmp_path}/other --sequences 4 --seq-len 32 --json"
    monkeypatch.setattr(sys, "argv", command.split())
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code in (0, None) and json.loads(capsys.readouterr().out)["parameters"]
    assert not any(step in without.drawn() for step in steps)
    with progress.status("as before"):
        pass
    assert "as before" in without.drawn()


def test_new_says_that_it_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = terminal_from_here(monkeypatch)
    source = tiny_directory(tmp_path / "model")
    (tmp_path / "book.txt").write_text("It was the best of times, it was the worst of times. " * 300)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["dwindle", "new", str(source), "book.txt", "--to", "70%"])
    with pytest.raises(SystemExit):
        cli.main()
    assert "predict time and memory" in terminal.drawn()


def test_export_says_that_it_compares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tiny_directory(tmp_path / "model")
    terminal = terminal_from_here(monkeypatch)
    dwindle.export_model(source, "hf", tmp_path / "out")
    assert "and comparing it with its source" in terminal.drawn().replace("\n", " ")
