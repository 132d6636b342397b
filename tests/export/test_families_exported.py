"""Every exporter supports each family, or refuses in one line that names another way."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from dwindle.core.errors import UserError
from dwindle.export.exporting import export
from dwindle.export.verification import Mismatch
from dwindle.quantization.quantize import load as load_quantized
from dwindle.quantization.quantize import quantize
from dwindle.run.family_table import NONE, family_rows
from edge_models import tiny_loaded
from tiny import FAMILIES

pytest.importorskip("gguf", reason="pip install -e '.[gguf]'")
pytest.importorskip("xllamacpp", reason="pip install -e '.[gguf]'")
pytest.importorskip("onnxruntime", reason="pip install -e '.[onnx]'")

FORMATS = ("hf", "gguf", "onnx")
"""transformers.js and ExecuTorch have tests of their own."""
HYBRIDS = ("granite_swa", "granitemoehybrid", "lfm2", "qwen3_5_text")


@pytest.fixture(scope="module")
def table() -> dict[str, Any]:
    return {row.family: row for row in family_rows()}


@pytest.mark.parametrize("structure", ["full", "layers"])
@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("family", FAMILIES)
def test_exported_or_refused(family: str, to: str, structure: str, tmp_path: Path, table: dict[str, Any]) -> None:
    out, refusal = tmp_path / ("m.gguf" if to == "gguf" else "m"), ""
    options = {"sliding_window": 256} if family == "ministral3" else {}  # in GGUF the window is the context
    try:
        loaded = tiny_loaded(family, structure, **options)
        found = export(loaded, to, out, type="f32" if to == "gguf" else None)
        assert found.verified is not None
        assert to == "hf" or getattr(table[family], to) != NONE
    except Mismatch:
        raise
    except UserError as error:
        refusal = str(error)
    assert out.exists() != bool(refusal)
    if refusal:
        assert to != "hf"
        assert re.fullmatch(rf"--to {to}: .*: (export to (hf|hf or onnx) instead|pass --stock to .*)", refusal), refusal


def test_heads_pruned_from_lfm2_are_refused_by_gguf_only(tmp_path: Path) -> None:
    loaded = tiny_loaded("lfm2", "cluster", conv_bias=False)
    with pytest.raises(UserError, match=r"lfm2 requires hidden size = heads × head size.*: export to hf instead"):
        export(loaded, "gguf", tmp_path / "m.gguf", type="f32", stock=True)
    assert export(loaded, "hf", tmp_path / "stock", stock=True).architecture == "lfm2"


@pytest.mark.parametrize("scheme", ["w8a8", "w8"])
@pytest.mark.parametrize("family", HYBRIDS)
def test_other_blocks_are_quantized(family: str, scheme: str, tmp_path: Path) -> None:
    loaded = tiny_loaded(family)
    quantize(loaded, scheme=scheme, sequences=2, seq_len=24, out=tmp_path / "out")
    batch = torch.arange(40).view(2, 20) + 3
    models = (loaded.model, load_quantized(tmp_path / "out").model)
    with torch.inference_mode():
        before, after = (model(input_ids=batch).logits for model in models)
    assert (after - before).abs().mean() < 0.1 * before.abs().mean()
