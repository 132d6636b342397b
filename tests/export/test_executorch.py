"""ExecuTorch programs, run in its Python runtime: stock, cluster and unequal-layers models, and the bench's row."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import dwindle
from dwindle.core.errors import UserError
from dwindle.export.executorch_program import StaticDecoder, unsupported
from dwindle.export.verification import logits_of
from tiny import tiny_directory, tiny_model

HAS_EXECUTORCH = find_spec("executorch") is not None and find_spec("torchao") is not None
needs_executorch = pytest.mark.skipif(not HAS_EXECUTORCH, reason="pip install -c constraints.txt -e '.[executorch]'")


@pytest.fixture(scope="module")
def pruned(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("pte")
    source = str(tiny_directory(place / "source", head_dim=8, num_hidden_layers=2, hidden_size=32))
    small: dict[str, Any] = {"sequences": 4, "seq_len": 24, "measure": False}
    dwindle.prune(source, to="80%", out=place / "stock", **small)
    dwindle.prune(source, to="hidden=32,heads=5,ffn=37", attention="cluster", out=place / "cluster", **small)
    dwindle.prune(source, to="80%", selection="global", out=place / "unequal", **small)
    return {name: place / name for name in ("source", "stock", "cluster", "unequal")}


@pytest.mark.parametrize("kind", ["stock", "cluster", "unequal"])
def test_the_decoder_computes_what_the_model_does(kind: str, pruned: dict[str, Path]) -> None:
    """In torch, without ExecuTorch: prefill, then tokens one by one, then from the beginning again."""
    model, _ = dwindle.load(pruned[kind])
    model.config._attn_implementation = "eager"
    decoder = StaticDecoder(model, 24)
    with torch.inference_mode():
        for ids in ([5, 6, 7, 8, 9, 10, 11], [9, 8, 7, 3, 2]):
            found = [decoder(torch.tensor([ids[:4]]), torch.arange(4))]
            found += [decoder(torch.tensor([[ids[n]]]), torch.tensor([n])) for n in range(4, len(ids))]
            torch.testing.assert_close(torch.cat(found, 1)[0], logits_of(model, ids), atol=1e-5, rtol=1e-5)


def test_refused_in_a_line(tmp_path: Path, pruned: dict[str, Path]) -> None:
    assert "sliding window of 5" in (unsupported(tiny_model("ministral3")) or "")
    assert "layers without attention" in (unsupported(tiny_model("lfm2")) or "")
    if not HAS_EXECUTORCH:
        with pytest.raises(UserError, match=r"executorch needs executorch: run `pip install .*\[executorch\]"):
            dwindle.export_model(pruned["stock"], "executorch", tmp_path / "x.pte")
        return
    with pytest.raises(UserError, match=r"ends in \.pte"):
        dwindle.export_model(pruned["stock"], "executorch", tmp_path / "x")


@needs_executorch
@pytest.mark.parametrize(("kind", "type_"), [("stock", "int8"), ("cluster", "f32"), ("unequal", "f32")])
def test_parity_in_its_runtime(kind: str, type_: str, pruned: dict[str, Path], tmp_path: Path) -> None:
    found = dwindle.export_model(pruned[kind], "executorch", tmp_path / "model.pte", type=type_)
    assert found.verified is not None and found.verified.max_error <= found.verified.tolerance
    assert found.verified.runtime == "ExecuTorch" and found.num_bytes == (tmp_path / "model.pte").stat().st_size


@needs_executorch
def test_a_row_of_the_bench(pruned: dict[str, Path]) -> None:
    from dwindle.evaluation.latency import measure_latency

    table = measure_latency([str(pruned["stock"])], runtime=["executorch"], prompt_tokens=8, new_tokens=4, repeats=1)
    (row,) = table.rows
    assert row.runtime == "executorch" and row.decode_ms.median > 0 and row.num_bytes > 0
