"""Progress is written to standard error: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import io
import sys
from types import SimpleNamespace

import pytest

from dwindle.core import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_line_every_ten_seconds_off_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    times = iter([0.0, 3.0, 10.0, 10.0, 19.0, 21.0, 21.0])
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(times)))
    with progress.Bar("calibrating", total=8) as bar:
        for _ in range(4):
            bar.advance(2)
    out, err = capsys.readouterr()
    assert out == "" and [line.split(",")[0] for line in err.splitlines()] == ["calibrating: 4/8", "calibrating: 8/8"]
    assert err.endswith(", 0 s left\n")


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert list(progress.track("abc", "reading", 3)) == ["a", "b", "c"]
    drawn = sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert "reading" in drawn and "3/3" in drawn and "s left" not in drawn and capsys.readouterr().out == ""
