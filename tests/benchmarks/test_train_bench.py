"""The training benchmark: every row is there, events happen where they should, ratios are of what they say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import train
from benchmarks.train import InTurns, different, measure_training, render, whole_numbers
from benchmarks.train_parts import TrainBench
from dwindle.anatomy.structure import Structure
from dwindle.core.errors import UserError
from dwindle.training import float8
from dwindle.training.float8 import quantized
from dwindle.training.flops import PEAK_FLOPS

SMALL = {"shape": "tiny", "device": "cpu", "precision": "fp32", "compile": False, "batch": 1, "seq_len": 8, "warmup": 1}


def test_all_rows(tmp_path: Path) -> None:
    rows = ["off", "pruning", "compacted", "ffn", "attn", "stem"]
    bench = TrainBench(
        **SMALL, rows=rows, steps=5, multiples=[8, 16], rounded=16, compacted_batches=[1, 2], gram_tokens=8
    )  # type: ignore[arg-type]
    found = measure_training(bench, tmp_path, lambda line: None)
    names = ["off", "pruning", *["compacted-16"] * 2, *["compacted-8"] * 2, *["rounded-16"] * 2, "attn", "ffn", "stem"]
    assert [row.name for row in found] == names
    by_name = {row.name: row for row in found}
    assert by_name["pruning"].details["events"] == 1 + 5  # one to warm up, five in the second block
    assert all(by_name[kind].details["events"] == 3 for kind in ("attn", "ffn", "stem"))
    assert all("slower_at_1_to_9" in by_name[kind].details for kind in ("attn", "ffn", "stem"))
    assert by_name["compacted-16"].details["shape"] == {"hidden": 48, "heads": 3, "ffn": 96}
    assert by_name["compacted-8"].details["shape"] == {"hidden": 40, "heads": 3, "ffn": 96}
    assert by_name["rounded-16"].details["shape"] == {"hidden": 32, "heads": 3, "ffn": 96}
    assert [row.details["batch"] for row in found if row.name.startswith("compacted")] == [1, 2, 1, 2]
    for row in found:
        tokens = row.details.get("batch", 1) * 8
        assert row.tokens_per_s == pytest.approx(1000 * tokens / row.step_ms)
    # by hand: 512 × 64 embeddings (tied, so once), four square and three FFN matrices and two norms a layer, one norm
    weights = 512 * 64 + 3 * (4 * 64 * 64 + 3 * 64 * 192 + 2 * 64) + 64
    flops = 6 * weights + 12 * 3 * 64 * 8
    assert found[0].parameters == weights
    assert found[0].utilisation == pytest.approx(found[0].tokens_per_s * flops / PEAK_FLOPS["H200"])
    lines = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    assert [line["name"] for line in lines] == names
    shown = [text for text in render(found, bench).renderables if isinstance(text, str)]
    assert not any(sign in text for text in shown for sign in "{}_'")
    [line] = [text for text in shown if text.startswith("compacted-8:") and "compaction" in text]
    assert "shape (hidden 40, heads 3, ffn 96), batch 1, compaction " in line and line.endswith(" s")


def test_memory_is_predicted_for_the_same_switches() -> None:
    """Micro-batches leave the step as it is; the prediction is that of the plan."""
    settings = {**SMALL, "batch": 4, "rows": ["off"], "steps": 1, "optimizer": "muon"}
    lean = {"micro_batch": 1, "moments": "bf16", "activation_checkpointing": True}
    [plain] = measure_training(TrainBench(**settings), None, lambda line: None)  # type: ignore[arg-type]
    [saving] = measure_training(TrainBench(**settings | lean), None, lambda line: None)  # type: ignore[arg-type]
    assert saving.loss == pytest.approx(plain.loss, rel=1e-3)
    assert 0 < saving.details["predicted_peak_gb"] < plain.details["predicted_peak_gb"]


def test_unequal_layers() -> None:
    """What differs between layers is what the row says, and the model is as large as its structure."""
    names = ["unequal-ffn", "unequal-heads", "unequal-groups"]
    rows = measure_training(TrainBench(**SMALL, rows=names, steps=2), None, lambda line: None)  # type: ignore[arg-type]
    assert [row.name for row in rows] == names
    assert [row.details["heads"] for row in rows] == ["1+1+1+1", "1+1+1 1+1+1+1", "1+1+1 1+1+1+1"]
    # by hand: FFN of 32, 80 and 128 of 192 channels; one head of four less in the second layer
    widths = 512 * 64 + 3 * (4 * 64 * 64 + 2 * 64) + 3 * 64 * (32 + 80 + 128) + 64
    assert [row.parameters for row in rows] == [widths, widths - 4 * 64 * 16, widths - 4 * 64 * 16]
    assert rows[0].details["ffn"] == "32–128"
    assert all(row.details["all_compiling_s"] == pytest.approx(row.details["of_training_s"], abs=5) for row in rows)


def test_unequal_groups_of_queries() -> None:
    """SmolLM2's three queries for each of three key/value heads: equal groups stay equal, others never are."""
    source = Structure.full(hidden=8, ffn=[48] * 6, kv_of_query=[[0, 0, 0, 1, 1, 1, 2, 2, 2]] * 6)
    groups = {
        name: [layer.queries_per_kv for layer in different(source, name).layers]
        for name in ("unequal-ffn", "unequal-heads", "unequal-groups")
    }
    assert groups["unequal-ffn"] == [(3, 3, 3)] * 6
    assert groups["unequal-heads"] == [(3, 3, 3), (3, 3), (2, 2, 2), (2, 2), (3, 3, 3), (3, 3)]
    assert groups["unequal-groups"] == [(1, 2, 3), (2, 3), (3, 1, 2), (1, 2), (2, 3, 1), (3, 1)]


def test_turns() -> None:
    turns = InTurns(first_step=2, block=3)
    assert [step for step in range(1, 16) if turns.active(step)] == [2, 6, 7, 8, 12, 13, 14]
    assert [step for step in range(1, 16) if turns.measured(step)] == [6, 7, 8, 12, 13, 14]
    assert turns.due(2, 0, 0) and not turns.due(2, 0, 1) and not turns.due(3, 0, 0)


def test_lists_of_numbers() -> None:
    assert whole_numbers(" 64, 128", "--multiples") == [64, 128] and whole_numbers("", "--multiples") == []
    with pytest.raises(UserError, match="--multiples 64,big"):
        whole_numbers("64,big", "--multiples")


def test_rows_in_float8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the compacted ones; a CPU is refused otherwise."""
    chosen = SMALL | {"precision": "fp8", "seq_len": 16}
    bench = TrainBench(**chosen, rows=["off", "compacted"], steps=1, multiples=[16])  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"^--precision: fp8 needs a GPU"):
        measure_training(bench, None, lambda line: None)
    products: list[torch.Size] = []

    def counted(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        products.append(x.shape)
        return quantized(x, dtype)

    monkeypatch.setattr(train, "check_float8", lambda device, key: None)
    monkeypatch.setattr(float8, "quantized", counted)
    with torch.backends.mkldnn.flags(enabled=False):
        found = measure_training(bench, None, lambda line: None)
    assert [row.name for row in found] == ["off", "compacted-16"]
    assert torch.Size([192, 64]) in products and torch.Size([96, 48]) in products, "FFN of both models"
