"""``dwindle report``, ``dwindle plot`` and ``dwindle runs`` as a person types them."""

from __future__ import annotations

import fcntl
import json
import signal
import subprocess
import sys
import urllib.request
import xml.etree.ElementTree as ElementTree
from functools import partial
from pathlib import Path

import pytest
from made_runs import make_run


def test_report_writes_one_file(shell, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    code, out, err = shell("report", "run")
    assert (code, out) == (0, "run/report.html\n") and err.startswith("next: dwindle export run ")
    assert (run / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    (run / "ledger.jsonl").unlink()
    code, out, err = shell("report", "run", "--out", "other.html", "--json")
    assert code == 0 and json.loads(out)["report"] == "other.html" and json.loads(out)["missing"] and err == ""
    assert (tmp_path / "other.html").is_file()
    make_run(tmp_path / "priced")
    for option, rows in (((), "null"), (("--published",), '{"id":"cost"')):
        assert shell("report", "priced", *option)[0] == 0
        assert f'"cost":{rows}' in (tmp_path / "priced" / "report.html").read_text(encoding="utf-8")
    code, out, err = shell("report", "run")
    assert code == 0 and "note: ledger.jsonl is missing" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("report", "nothing"), "nothing: is not a directory"),
        (("report", "."), "has no recipe.toml"),
        (("report", "run", "--out", "."), "--out .: is a directory"),
        (("report", "run", "--watch", "--out", "x.html"), "--out: cannot be combined with --watch"),
        (("report", "run", "--watch", "--port", "70000"), "--port 70000: cannot be used"),
        (("plot", "run", "--out", "run"), "--out run already exists"),
        (("plot", "run", "--out", "p", "--dpi", "5"), "--dpi 5: must be between 30 and 1200"),
        (("plot", "run", "--out", "p.png"), "--out p.png: give a directory"),
        (("runs", "nothing"), "nothing: is not a directory"),
    ],
)
def test_mistakes_are_one_line(shell, tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    make_run(tmp_path / "run")
    code, out, err = shell(*arguments)
    assert code == 2 and out == "" and message in err and err.count("\n") == 1


def test_plot_writes_png_and_svg(shell, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="extra [plots] is not installed")
    make_run(tmp_path / "$x_1$<run>", steps=200, events=60)
    code, out, _ = shell("plot", "$x_1$<run>", "--out", "plots", "--dpi", "50", "--json")
    names = json.loads(out)["files"]
    assert code == 0
    for figure in ("saliency", "share", "loss", "throughput", "optimizer", "architecture"):
        assert {f"{figure}.png", f"{figure}.svg"} <= set(names)
        assert (tmp_path / "plots" / f"{figure}.png").read_bytes().startswith(b"\x89PNG")
        ElementTree.parse(tmp_path / "plots" / f"{figure}.svg")
    assert set(json.loads((tmp_path / "plots" / "figures.json").read_text())) >= {"loss", "architecture"}
    assert shell("plot", "$x_1$<run>", "--out", "plots")[0] == 2


def test_plot_of_a_run_that_has_not_begun(shell, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.toml").touch()
    code, _, err = shell("plot", "run", "--out", "plots")
    assert code == 2 and "nothing to draw yet" in err and not (tmp_path / "plots").exists()


def test_runs_are_listed_with_their_status(shell, tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "a" / "done", steps=50)
    make_run(tmp_path / "runs" / "stopped", steps=30, finished=False)
    going = make_run(tmp_path / "runs" / "going", steps=20, finished=False)
    (tmp_path / "runs" / "notes").mkdir()
    with (going / ".lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        code, out, _ = shell("runs", "--json")
        rows = {row["run"]: row for row in json.loads(out)}
    assert code == 0 and list(rows) == ["a/done", "going", "stopped"]
    if Path("/proc/locks").exists():
        assert [rows[name]["status"] for name in rows] == ["finished", "running", "stopped"]
    last = json.loads((tmp_path / "runs" / "stopped" / "metrics.jsonl").read_text().splitlines()[-1])
    assert rows["stopped"]["tokens"] == last["tokens"] and rows["stopped"]["loss"] == last["loss"]
    unpruned = '[source]\nmodel = "org/source"\n[prune]\nenabled = false\ntarget = "50%"\n'
    make_run(tmp_path / "plain" / "adapted", steps=50, recipe=unpruned)
    assert json.loads(shell("runs", "plain", "--json")[1])[0]["target"] == ""
    assert rows["stopped"]["target"] == "50%" and rows["stopped"]["source"] == "org/source"
    code, out, _ = shell("runs")
    assert code == 0 and "a/done" in out and "50%" in out
    assert shell("runs", "runs/notes")[1] == "no runs in runs/notes\n"
    make_run(tmp_path / "one" / "half-of-the-source", steps=50)
    assert " half-of-the-source " in shell("runs", "one")[1]
    make_run(tmp_path / "one" / "other", steps=50, recipe='[source]\nmodel = "org/another-source"\n')
    out = shell("runs", "one")[1]  # a table for each source
    assert out.count("org/source, ") == out.count("org/another-source, ") == 1 and " half-of-the-source " in out


def test_an_exported_source_is_not_pruned(shell, tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "made", steps=10)
    lines = (run / "ledger.jsonl").read_text().splitlines(keepends=True)
    for name, kept in (("smaller", lines), ("copy", lines[:1])):
        (tmp_path / "runs" / name).mkdir()
        for file in ("config.json", "structure.json"):
            (tmp_path / "runs" / name / file).write_bytes((run / "model" / file).read_bytes())
        (tmp_path / "runs" / name / "ledger.jsonl").write_text("".join(kept))
    rows = {row["run"]: row["status"] for row in json.loads(shell("runs", "--json")[1])}
    assert rows == {"made": "finished", "smaller": "pruned", "copy": "unpruned"}
    code, _, _ = shell("report", "runs/copy")
    page = (tmp_path / "runs" / "copy" / "report.html").read_text()
    assert code == 0 and '"status_text":"not pruned"' in page and "recipe.toml is not there" not in page


def test_damaged_runs_are_listed_too(shell, tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "[red]x", finished=False, recipe="not toml [")
    (run / "ledger.jsonl").write_bytes(b"\xff\n")
    (run / "metrics.jsonl").write_bytes((run / "metrics.jsonl").read_bytes()[:-20])
    code, out, _ = shell("runs", "runs")
    assert code == 0 and "[red]x" in out
    assert json.loads(shell("runs", "runs", "--json")[1])[0]["step"] == 199


def test_watch_serves_until_interrupted(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    command = [sys.executable, "-m", "dwindle", "report", "run", "--watch", "--json"]
    pipe, default = subprocess.PIPE, partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # shells' "&" ignores it
    process = subprocess.Popen(command, cwd=tmp_path, stdout=pipe, stderr=pipe, text=True, preexec_fn=default)
    try:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"]
        assert url.startswith("http://127.0.0.1:")
        with urllib.request.urlopen(url, timeout=60) as reply:
            assert b"dwindle" in reply.read()
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=300) == 0
    finally:
        process.kill()
        process.communicate()
