"""The file itself: self-contained, small, escaped, written whole."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from made_runs import make_run

from dwindle.core.errors import UserError
from dwindle.report.page import render_page, write_page
from dwindle.report.run import open_run
from dwindle.report.summary import summarise

NASTY = "</script><script>alert(1)</script>\"'&<img src=x onerror=alert(2)>\u2028"


def page_of(run: Path) -> str:
    return render_page(summarise(open_run(run)))


def embedded(page: str) -> dict:
    return json.loads(re.search(r'id="run-data">(.*?)</script>', page, re.DOTALL)[1])


def test_the_page_needs_nothing_else(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path / "run"))
    assert not re.search(r"""(?:src|href)\s*=\s*["'](?!data:,)""", page.split('id="run-data"')[0])
    without_namespaces = page.replace("http://www.w3.org/2000/svg", "")
    assert "http://" not in without_namespaces and "https://" not in without_namespaces and "@import" not in page
    assert "default-src 'none'" in page and "connect-src 'none'" in page


def test_everything_from_the_run_is_inert(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run<b>&", recipe=f"# {NASTY}\n[source]\nmodel = '''{NASTY[:40]}'''\n")
    row = {"model": NASTY, "runtime": NASTY, "threads": 1, "parameters": 1}
    row |= {"prefill_ms_per_token": NASTY, "decode_ms_per_token": {"median": NASTY}}
    (run / "latency.json").write_text(json.dumps({"rows": [row]}))
    page = page_of(run)
    assert page.count("<script") == 2 and "<img" not in page and "\u2028" not in page and "<b>" not in page
    data = embedded(page)
    assert NASTY in data["recipe"] and data["tables"][0]["rows"][0][:2] == [NASTY, NASTY] and data["name"] == "run<b>&"


def test_a_run_of_days_stays_small(long_run: Path) -> None:
    page = page_of(long_run)
    assert len(page.encode()) < 1_000_000
    data = embedded(page)
    losses = [json.loads(line)["loss"] for line in (long_run / "metrics.jsonl").read_text().splitlines()]
    shown = next(f for f in data["figures"] if f["id"] == "loss")["panels"][0]["series"][0]["y"]
    assert len(shown) < 2000
    assert max(shown) == pytest.approx(max(losses), rel=1e-4) and min(shown) == pytest.approx(min(losses), rel=1e-4)


def test_other_files_are_not_replaced(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path / "run"))
    out = write_page(page, tmp_path / "deep" / "er" / "report.html")
    assert write_page(page, out) == out and out.read_text(encoding="utf-8") == page
    other = tmp_path / "thesis.html"
    other.write_text("<p>years of work")
    with pytest.raises(UserError, match=r"thesis\.html: exists and is not a dwindle report"):
        write_page(page, other)
    assert other.read_text() == "<p>years of work"
    write_page(page, other, overwrite=True)
    with pytest.raises(UserError, match="is a directory"):
        write_page(page, tmp_path)
    with pytest.raises(UserError, match="could not be written"):
        write_page(page, other / "report.html")
    assert not list(tmp_path.rglob("*.tmp"))


def test_the_room_never_imports_torch(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    script = (
        "import sys, pkgutil, importlib, dwindle.report, dwindle.export.llamacpp\n"
        "for m in pkgutil.iter_modules(dwindle.report.__path__): importlib.import_module('dwindle.report.' + m.name)\n"
        "from dwindle.report.run import open_run; from dwindle.report.summary import summarise\n"
        f"summarise(open_run({str(run)!r}))\n"
        "assert not {'torch', 'transformers', 'matplotlib'} & set(sys.modules), 'heavy import'\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
