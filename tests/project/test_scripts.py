"""Scripts of ``studies/`` and ``benchmarks/``: what their user can mend is one line and exit code 2."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MISTAKES = {
    "studies/adapt_pruner.py": "--model nosuch --data x --wikitext y --out o.json",
    "studies/campaign.py": "peers --inputs i --work w --out o --only nosuch --list",
    "studies/campaign_inputs.py": "nosuch --eval x --instruct y --out o",
    "studies/evaluate_seven.py": "--data nosuch --out o",
    "studies/main_table.py": "--rows nosuch --data pydoc:train --valid pydoc:valid --out o.json",
    "studies/merge.py": "nosuch.json other.json",
    "studies/mixture.py": "nosuch --out o",
    "studies/peers_speed.py": "nosuch.json",
    "studies/quantize_wikitext.py": "--model nosuch --valid x --out o",
    "studies/scalability.py": "nosuch.json --out o",
    "studies/second_order.py": "quality --model nosuch --data x --valid y --out o",
    "studies/tables.py": "nosuch.md",
    "studies/token_curve.py": "nosuch.json --out o",
    "studies/tune.py": "ask nosuch --out o",
    "benchmarks/prune.py": "--shape tiny --rows nosuch",
    "benchmarks/select.py": "--shape tiny --rows nosuch",
    "benchmarks/train.py": "--shape nosuch",
}


@pytest.mark.parametrize("script", MISTAKES)
def test_a_mistake_is_one_line(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str((ROOT / script).parent))
    monkeypatch.setattr(sys, "argv", [script, *MISTAKES[script].split()])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    (line,) = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and line.startswith("error: ") and "nosuch" in line
