"""What the latency table holds; never how fast anything was."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import dwindle
from dwindle.core.errors import UserError
from dwindle.core.run_directory import RunDirectory
from dwindle.evaluation import latency
from dwindle.evaluation.latency import LatencyTable, Spread, measure_latency
from dwindle.export.process import RuntimeFailure, RuntimeProcess
from dwindle.export.torch_runtime import one_layer
from tiny import tiny_directory, tiny_model, tokens

SHORT: dict[str, Any] = {"prompt_tokens": 8, "new_tokens": 4, "repeats": 3}


def test_live_models_in_this_process() -> None:
    threads = torch.get_num_threads()
    models = {"source": tiny_model(dtype=torch.float32), "pruned": tiny_model(num_hidden_layers=2)}
    table = measure_latency(models, **SHORT)
    assert [row.name for row in table.rows] == ["source", "pruned"]
    assert torch.get_num_threads() == threads
    for row in table.rows:
        assert row.prefill_ms.low <= row.prefill_ms.median <= row.prefill_ms.high
        assert row.decode_ms.median > 0 and row.outside_share is not None and 0 <= row.outside_share <= 1
    assert table.row("source").decode_speedup == 1.0
    assert table.row("pruned").parameters == sum(p.numel() for p in models["pruned"].parameters())
    json.dumps(table.to_json())
    table.render()


def test_directories_in_their_own_processes(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="pip install -e '.[onnx]'")
    pytest.importorskip("onnx", reason="pip install -e '.[onnx]'")
    folder = tiny_directory(tmp_path / "a")
    table = measure_latency([folder], runtime="onnx", **SHORT)
    (row,) = table.rows
    assert row.peak_memory is not None and row.peak_memory > row.num_bytes > 0
    assert row.odd_sizes == "hidden 32, FFN 40"


def test_llamacpp(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="pip install -e '.[gguf]'")
    pytest.importorskip("xllamacpp", reason="pip install -e '.[gguf]'")
    from dwindle.export.exporting import export
    from dwindle.sources.loading import Loaded
    from edge_models import byte_pair_tokenizer

    model = tiny_model(dtype=torch.float32, vocab_size=300, attention_bias=False, mlp_bias=False)
    loaded = Loaded(model, byte_pair_tokenizer(), "tiny", "huggingface")
    table = measure_latency({"a": loaded}, runtime="llamacpp", type="f32", **SHORT)
    assert table.rows[0].outside_share is not None
    path = export(loaded, "gguf", tmp_path / "m.gguf", type="f32", verify=False).out
    table = measure_latency([path], runtime="llamacpp", **SHORT)
    assert table.rows[0].num_bytes == path.stat().st_size and table.rows[0].outside_share is None


def test_one_layer_shares_everything() -> None:
    model = tiny_model(dtype=torch.float32)
    shorter = one_layer(model)
    assert len(model.model.layers) == 3 and len(shorter.model.layers) == 1
    assert model.config.num_hidden_layers == 3 and shorter.config.num_hidden_layers == 1
    assert shorter.lm_head is model.lm_head
    batch = tokens(1, 6)
    with torch.inference_mode():
        hidden = model.model(input_ids=batch, output_hidden_states=True).hidden_states[1]
        expected = model.lm_head(model.model.norm(hidden))
        assert torch.allclose(shorter(input_ids=batch).logits, expected, atol=1e-5)


def test_one_layer_of_a_directory_is_described_as_one(tmp_path: Path) -> None:
    pytest.importorskip("onnx", reason="pip install -e '.[onnx]'")
    dwindle.prune(tiny_directory(tmp_path / "model"), "80%", metric="magnitude", out=tmp_path / "small")
    source = latency._Source("small", 0, str(tmp_path / "small"), tmp_path, "f16", None)
    whole, single = source.files("onnx")
    assert single is not None
    for path, num_layers in ((whole, 3), (single, 1)):
        assert len(json.loads((path.parent / "structure.json").read_text())["layers"]) == num_layers


def test_the_share_outside_the_layers_is_a_straight_line() -> None:
    """10 ms outside, 2 ms a layer, 30 layers: 10 / 70."""
    assert latency._outside([70.0], [12.0], 30) == pytest.approx(10 / 70)
    assert latency._outside([70.0], [], 30) is None
    assert latency._outside([5.0], [5.0], 1) is None


def test_sizes(tmp_path: Path) -> None:
    model = tiny_model(intermediate_size=64)
    assert latency.unaligned_widths(model) == "hidden 32" and latency.unaligned_widths(model, 64) == ""
    assert latency._file_size(tmp_path / "an alias") is None
    (tmp_path / "model.onnx").write_bytes(b"12")
    (tmp_path / "model.onnx.data").write_bytes(b"345")
    assert latency._file_size(tmp_path / "model.onnx") == latency._file_size(tmp_path) == 5


def test_ratios_are_taken_within_a_turn() -> None:
    assert latency._ratio([10.0, 20.0, 40.0], [5.0, 10.0, 20.0]) == 2.0
    assert Spread.of([1.0, 2.0, 3.0, 4.0, 5.0]) == Spread(3.0, 2.0, 4.0)
    assert f"{Spread(3.0, 2.0, 4.0):.1f}" == "3.0\n2.0–4.0"


def test_a_model_that_is_not_faster_is_explained() -> None:
    one = Spread(1.0, 1.0, 1.0)
    base = latency.Latency("a", "torch", 1, 100, 1, one, one, 0.2, None, "", 1.0, 1.0)
    slow = latency.Latency("b", "torch", 1, 50, 1, one, one, 0.4, None, "hidden 563", 1.0, 1.0)
    (note,) = LatencyTable([base, slow]).notes()
    assert "1.00 ×" in note and "40% of its time" in note and "hidden 563" in note and "--round" in note


def test_user_errors(tmp_path: Path) -> None:
    model = {"a": tiny_model()}
    with pytest.raises(UserError, match="--runtime"):
        measure_latency(model, runtime="tensorrt")
    with pytest.raises(UserError, match="--threads"):
        measure_latency(model, threads=100_000)
    with pytest.raises(UserError, match="--repeats"):
        measure_latency(model, repeats=0)
    with pytest.raises(UserError, match="at least one model"):
        measure_latency({})
    with pytest.raises(UserError, match="does not exist"):
        measure_latency([str(tmp_path / "none.gguf")])


def test_what_a_runtime_cannot_run_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tiny_directory(tmp_path / "broken")

    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeFailure("llamacpp-default: error loading model vocabulary")

    for method in ("__init__", "call"):
        with monkeypatch.context() as patch:
            for name in ("__init__", "close"):  # no process is started
                patch.setattr(RuntimeProcess, name, lambda *_, **__: None)
            patch.setattr(RuntimeProcess, method, refuse)
            with pytest.raises(UserError, match=r"broken cannot be run .*error loading model vocabulary.*--runtime"):
                measure_latency([folder], **SHORT)


def test_the_model_of_a_run_is_named_after_the_run(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "half")
    run.model.mkdir(parents=True)
    for file in (run.recipe, run.metrics):
        file.touch()
    assert list(latency.named_models([run.model, tmp_path / "other" / "model"])) == ["half", "model"]


def test_a_model_given_twice_is_two_rows(tmp_path: Path) -> None:
    assert latency.named_models(["x/a", "x/a", "y/b"]) == {"a": "x/a", "a (2)": "x/a", "b": "y/b"}
    assert latency.named_models(["x/a", "y/a", Path("x/a")]) == {"x/a": "x/a", "y/a": "y/a", "x/a (2)": "x/a"}
    assert latency.named_models(["a (2)", "a", "a"]) == {"a (2)": "a (2)", "a": "a", "a (3)": "a"}


def test_the_table_fits_into_80_columns() -> None:
    one = Spread(12.345, 11.345, 13.345)
    rows = [
        latency.Latency(name, "llamacpp", 16, 134_515_008, 269_000_000, one, one, 0.4, 1_234_000_000, "", 0.98, 1.23)
        for name in ("smollm2-135m", "a-model-with-a-long-name-that-wraps")
    ]
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(LatencyTable(rows, 64, 32, 5, "f16").render())
    text = console.export_text()
    assert "…" not in text and max(map(len, text.splitlines())) <= 80
    for figure in ("12.35", "11.35–13.35", "llamacpp, 16", "0.98", "1.23", "81.0", "135M", "269 MB", "40%", "1.23 GB"):
        assert text.count(figure) >= 2, figure
