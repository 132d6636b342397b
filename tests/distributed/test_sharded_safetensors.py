"""Tensors in one file or in the files of several processes read the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dwindle.distributed.safetensors_stream import write_tensors
from dwindle.distributed.sharded_safetensors import TensorPieces, files_of, piece_name


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_rows_of_several_files(tmp_path: Path, count: int) -> None:
    whole = {"a": torch.randn(7, 3), "b": torch.randn(4), "alone": torch.tensor(5.0)}
    for number in range(count):
        held = {}
        for name in ("a", "b"):
            each = -(-len(whole[name]) // count)
            held[name] = whole[name][number * each : (number + 1) * each].clone()
        held["tied"] = held["a"]
        if number == 0:
            held["alone"] = whole["alone"]
        name = piece_name("model", number, count) if count > 1 else "model.safetensors"
        write_tensors(tmp_path / name, held)
    pieces = TensorPieces(files_of(tmp_path, "model"))
    assert set(pieces) == {"a", "b", "tied", "alone"} and len(pieces) == 4
    for name, tensor in {**whole, "tied": whole["a"]}.items():
        assert torch.equal(pieces[name], tensor)
    for first in range(7):
        for rows in range(1, 7 - first + 1):
            assert torch.equal(pieces.rows("tied", first, rows), whole["a"][first : first + rows])
    with pytest.raises(KeyError):
        pieces["nothing"]
    assert files_of(tmp_path, "optimizer") == []
