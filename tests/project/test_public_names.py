"""``import dwindle`` is instant, and everything that it promises is there."""

from __future__ import annotations

import subprocess
import sys

import dwindle
from dwindle.evaluation.evaluate import evaluate
from dwindle.export.exporting import export
from dwindle.quantization.quantize import quantize


def test_names_are_the_functions_of_the_rooms() -> None:
    assert dwindle.evaluate is evaluate and dwindle.quantize is quantize and dwindle.export.export is export
    assert all(getattr(dwindle, name) is not None for name in dwindle.__all__)


def test_nothing_heavy_is_imported_before_it_is_used() -> None:
    script = (
        "import sys, dwindle, dwindle.export\n"
        "assert not {'torch', 'transformers'} & sys.modules.keys()\n"
        "print(callable(dwindle.export.export), 'torch' in sys.modules)\n"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["True", "True"]
