"""``import dwindle`` is instant, and everything that it promises is there."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import dwindle
from dwindle.core.errors import in_python
from dwindle.evaluation.evaluate import evaluate
from dwindle.export.exporting import export
from dwindle.pruning.metrics import register_metric
from dwindle.quantization.quantize import quantize
from dwindle.recipe.recipe import load_recipe
from dwindle.run.pretrain import pretrain, resume


def test_names_are_the_functions_of_the_rooms() -> None:
    rooms = (evaluate, export, load_recipe, pretrain, quantize, register_metric, resume)
    names = ("evaluate", "export_model", "load_recipe", "pretrain", "quantize", "register_metric", "resume")
    for name, function in zip(names, rooms, strict=True):
        ours = getattr(dwindle, name)
        assert ours.__wrapped__ is function and ours is getattr(dwindle, name)
        assert inspect.signature(ours) == inspect.signature(function)
    assert all(getattr(dwindle, name) is not None for name in dwindle.__all__)


def test_names_mean_the_same_whatever_was_imported_before() -> None:
    """A submodule that is imported becomes an attribute of the package, so no function may bear its name."""
    modules = {path.stem for path in Path(dwindle.__file__).parent.iterdir()} - {"__init__", "export"}
    assert modules.isdisjoint(dwindle.__all__)
    assert set(dwindle.__all__) <= set(dir(dwindle))


def test_nothing_heavy_is_imported_before_it_is_used() -> None:
    script = (
        "import sys, dwindle, dwindle.export\n"
        "assert not {'torch', 'transformers'} & sys.modules.keys()\n"
        "print(callable(dwindle.export_model), 'torch' in sys.modules)\n"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["True", "True"]


def test_results_are_shown_in_a_line(tmp_path: Path) -> None:
    """In a notebook, the last expression of a cell: no modules, no tensors, no ledger."""
    from tiny import tiny_directory

    source = str(tiny_directory(tmp_path / "model"))
    pruned = dwindle.prune(source, to="80%", sequences=4, seq_len=24)
    quantized = dwindle.quantize(source, scheme="w8")
    exported = dwindle.export_model(source, "hf", tmp_path / "out")
    for shown in map(repr, (dwindle.load(source), pruned, quantized, exported)):
        assert len(shown) < 900 and "\n" not in shown, shown
        assert tmp_path.name in shown


def test_errors_name_arguments_not_options(tmp_path: Path) -> None:
    from tiny import tiny_directory

    source = tiny_directory(tmp_path / "model")
    small: dict[str, Any] = {"sequences": 4, "seq_len": 24, "measure": False}
    dwindle.prune(source, to="80%", out=tmp_path / "out", **small)
    with pytest.raises(dwindle.UserError, match=r"^out .* pass overwrite=True$"):
        dwindle.prune(source, to="80%", out=tmp_path / "out", **small)
    with pytest.raises(dwindle.UserError, match=r"^to 900M: the source has"):
        dwindle.prune(source, to="900M", **small)
    with pytest.raises(dwindle.UserError, match=r"^type 'q9': for gguf give one of"):
        dwindle.export_model(source, "gguf", tmp_path / "x.gguf", type="q9")


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (
            "--out x: use --round-to 32, or `dwindle export --round 32`",
            "out x: use round_to 32, or `dwindle export --round 32`",
        ),
        ("a run exists there: `dwindle resume x` continues it, --overwrite replaces it", None),
        ("no option--here and none --", "no option--here and none --"),
    ],
)
def test_options_as_arguments(message: str, said: str | None) -> None:
    expected = said or "a run exists there: `dwindle resume x` continues it, overwrite=True replaces it"
    assert in_python(message) == expected
