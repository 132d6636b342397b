"""Exports for transformers.js: run in onnxruntime, and by transformers.js itself in Node where it is installed.

The package is looked for in the folder ``DWINDLE_NODE`` names (``npm install @huggingface/transformers`` there).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dwindle
from dwindle.core.errors import UserError
from dwindle.export import transformers_js
from dwindle.export.onnx_graph import rounded_blocks
from dwindle.export.verification import logits_of
from tiny import tiny_directory

onnx = pytest.importorskip("onnx", reason="pip install -c constraints.txt -e '.[onnx]'")
pytest.importorskip("onnxruntime")

TEXT = "The cat sat on the mat."


@pytest.fixture(scope="module")
def pruned(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A stock, a cluster and an unequal-layers model."""
    place = tmp_path_factory.mktemp("js")
    source = str(tiny_directory(place / "source", head_dim=8, tie_word_embeddings=True))
    small: dict[str, Any] = {"sequences": 4, "seq_len": 24, "measure": False}
    dwindle.prune(source, to="80%", out=place / "stock", **small)
    dwindle.prune(source, to="hidden=30,heads=5,ffn=37", attention="cluster", out=place / "cluster", **small)
    dwindle.prune(source, to="80%", selection="global", out=place / "unequal", **small)
    return {name: place / name for name in ("stock", "cluster", "unequal")}


@pytest.mark.parametrize("bits", [8, 4])
def test_blocks_against_a_loop(bits: int) -> None:
    rows = np.random.default_rng(0).normal(size=(3, 50)).astype(np.float32)
    rows[1, 32:] = 0
    packed, scales, back = rounded_blocks(rows, bits)
    middle = 2 ** (bits - 1)
    for row in range(3):
        for column in range(50):
            block, place = divmod(column, 32)
            if bits == 8:
                whole = int(packed[row, block, place])
            else:
                whole = int(packed[row, block, place // 2]) >> (4 * (place % 2)) & 15
            assert back[row, column] == pytest.approx((whole - middle) * scales[row, block], abs=1e-7)
            assert abs(back[row, column] - rows[row, column]) <= abs(scales[row, block]) * (
                0.501 if bits == 8 else 1.001
            )


@pytest.mark.parametrize("kind", ["stock", "cluster", "unequal"])
def test_layout_and_parity_in_onnxruntime(kind: str, pruned: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "web"
    if kind != "stock":
        with pytest.raises(UserError, match="equal layers only: add stock"):
            dwindle.export_model(pruned[kind], "transformers.js", out)
    found = dwindle.export_model(pruned[kind], "transformers.js", out, stock=kind != "stock")
    assert found.verified is not None and found.verified.max_error <= 1e-4
    files = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    wanted = {"onnx/model.onnx", "onnx/model_quantized.onnx", "onnx/model_q4.onnx", "config.json", "tokenizer.json"}
    assert wanted | {"generation_config.json", "README.md", "ledger.jsonl"} <= files
    for path in out.rglob("*"):
        mode = path.stat().st_mode & 0o777
        assert mode == 0o644 if path.is_file() else mode & 0o111, path
    sizes = [(out / "onnx" / f"{name}.onnx").stat().st_size for name in transformers_js.GRAPHS]
    assert sizes[0] > sizes[1] > sizes[2]
    graph = onnx.load(out / "onnx" / "model_q4.onnx").graph
    config = json.loads((out / "config.json").read_text())
    names = [f"{n}.{part}" for n in range(config["num_hidden_layers"]) for part in ("key", "value")]
    past, present = [f"past_key_values.{name}" for name in names], [f"present.{name}" for name in names]
    assert [i.name for i in graph.input] == ["input_ids", "attention_mask", "position_ids", *past]
    assert [o.name for o in graph.output] == ["logits", *present]
    shape = [d.dim_value for d in graph.input[3].type.tensor_type.shape.dim]
    assert shape[1] == config["num_key_value_heads"] and shape[3] == config["head_dim"]
    assert "@huggingface/transformers" in (out / "README.md").read_text()


def test_refused_in_a_line(tmp_path: Path) -> None:
    source = tiny_directory(tmp_path / "exaone4", "exaone4")
    with pytest.raises(UserError, match="it does not know exaone4: export to onnx"):
        dwindle.export_model(source, "transformers.js", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def node(folder: Path, dtype: str) -> dict[str, Any]:
    place = Path(os.environ.get("DWINDLE_NODE", ""))
    if shutil.which("node") is None or not (place / "node_modules/@huggingface/transformers").is_dir():
        pytest.skip("transformers.js is not installed: npm install @huggingface/transformers, DWINDLE_NODE=its folder")
    script = place / "run_node.mjs"
    shutil.copyfile(Path(__file__).with_name("run_node.mjs"), script)
    command = ["node", str(script), str(folder), dtype, TEXT, "8"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.parametrize(("kind", "beside"), [("stock", False), ("cluster", False), ("unequal", True)])
def test_parity_in_transformers_js(
    kind: str, beside: bool, pruned: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits and greedy tokens; the last model has its weights in a file beside the graph, as large ones do."""
    if beside:
        monkeypatch.setattr(transformers_js, "MAX_FILE_BYTES", 1000)
    source = pruned[kind]
    out = tmp_path / kind
    dwindle.export_model(source, "transformers.js", out, stock=kind != "stock")
    assert (out / "onnx" / "model_q4.onnx_data").is_file() is beside
    dwindle.export_model(source, "hf", tmp_path / "hf", stock=kind != "stock")
    for dtype, bits in {"fp32": None, "q8": 8, "q4": 4}.items():
        model, tokenizer = dwindle.load(tmp_path / "hf")
        if bits is not None:
            round_weights(model, bits)
        found = node(out, dtype)
        ids = tokenizer(TEXT, add_special_tokens=False).input_ids
        assert found["ids"] == ids
        expected = logits_of(model, ids)
        logits = torch.tensor(found["logits"]).view(expected.shape)
        assert float((logits - expected).abs().max() / expected.abs().max()) < 1e-4, dtype
        with torch.inference_mode():
            greedy = model.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False, eos_token_id=-1)
        assert found["output"] == greedy[0].tolist(), dtype


def round_weights(model: Any, bits: int) -> None:
    """Every matrix as the file stores it; embedding and head have 8 bits."""
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            own = bits if ".layers." in name else 8
            parameter.data = torch.from_numpy(rounded_blocks(parameter.detach().numpy(), own)[2])
    model.tie_weights()
