"""Weights are read straight to their device and written from it: host memory holds a few tensors beside the model."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from dwindle.anatomy.anatomy import Anatomy
from dwindle.core.errors import UserError
from dwindle.distributed.safetensors_stream import file_blocks
from dwindle.export.huggingface import save_model
from dwindle.pruning.ledger import source_event
from dwindle.sources import stored_tensors
from dwindle.sources.loading import load
from dwindle.sources.stored_tensors import StoredTensor
from tiny import FAMILIES, tiny_model

MEASURE = """
import gc, sys, json
from pathlib import Path
from dwindle.sources.loading import load
from dwindle.anatomy.anatomy import Anatomy
from dwindle.core.errors import UserError
from dwindle.export.huggingface import save_model

def memory(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

source, dtype, device, out = sys.argv[1:]
load(source + "-small", dtype=dtype, device=device)  # imports
gc.collect()
before = memory("VmRSS")
model, _ = load(source, dtype=dtype, device=device)
loaded = memory("VmHWM") - before
if device == "cpu":
    save_model(model, None, out, structure=Anatomy.of(model).source, source=source, ledger=[])
print(json.dumps([loaded, memory("VmHWM") - before]))
"""


def make(folder: Path, hidden: int, layers: int) -> int:
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=8,
        vocab_size=512,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return (folder / "model.safetensors").stat().st_size


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A model of 310 MB in bf16, of which no tensor is larger than 2 % of it, and a small one beside it."""
    folder = tmp_path_factory.mktemp("large") / "model"
    make(folder.with_name("model-small"), 64, 1)
    return folder, make(folder, 1024, 12)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
@pytest.mark.parametrize(
    ("dtype", "device", "held"), [("bfloat16", "cpu", 1), ("float32", "cpu", 2), ("auto", "meta", 0)]
)
def test_host_memory(large: tuple[Path, int], tmp_path: Path, dtype: str, device: str, held: int) -> None:
    """Of a load to a device (here one that keeps nothing) only what is being read is in host memory."""
    source, size = large
    command = [sys.executable, "-c", MEASURE, str(source), dtype, device, str(tmp_path / "out")]
    found = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    loading, saving = json.loads(found.stdout)
    assert held * size <= loading <= (held + 0.2) * size
    assert saving <= (held + 0.2) * size


def test_a_tensor_is_read_when_it_is_wanted(large: tuple[Path, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each once, to the device and in the dtype that are asked for."""
    read: list[str] = []

    def counted(self: StoredTensor, device: object, dtype: torch.dtype) -> torch.Tensor:
        read.append(str((self.offset, self.shape)))
        return original(self, device, dtype)

    original = StoredTensor.to
    monkeypatch.setattr(StoredTensor, "to", counted)
    model = load(large[0], device="meta").model
    assert all(p.is_meta and p.dtype == torch.float32 for p in model.parameters())
    assert len(read) == len(set(read)) == len(list(model.parameters()))


@pytest.mark.parametrize("family", FAMILIES)
def test_equal_to_transformers(family: str, tmp_path: Path) -> None:
    """The same values come back, and the file has the bytes that transformers writes."""
    model = tiny_model(family).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "theirs")
    loaded = load(tmp_path / "theirs", dtype="auto").model
    theirs, ours = model.state_dict(), loaded.state_dict()
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs) and theirs.keys() == ours.keys()
    anatomy = Anatomy.of(loaded)
    first = source_event("theirs", anatomy, {})
    save_model(loaded, None, tmp_path / "ours", structure=anatomy.source, source="theirs", ledger=[first])
    files = [tmp_path / place / "model.safetensors" for place in ("theirs", "ours")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_in_parts_and_cut_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors larger than the buffer, converted on the way; a file that was shortened after it was opened."""
    monkeypatch.setattr(stored_tensors, "_BUFFER_BYTES", 12)
    monkeypatch.setattr(stored_tensors, "_KEPT", threading.local())
    tensors = {"a": torch.randn(4, 2), "b": torch.randn(5).bfloat16(), "c": torch.zeros(0, 3), "d": torch.tensor(2.0)}
    save_file(tensors, path := tmp_path / "a.safetensors")
    stored = stored_tensors.stored_tensors([path], torch.device("cpu"))
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for name, tensor in tensors.items():
            assert torch.equal(stored[name].to("cpu", dtype), tensor.to(dtype))
    path.write_bytes(path.read_bytes()[:-4])
    for dtype in (torch.bfloat16, torch.float32):
        with pytest.raises(EOFError, match=r"a\.safetensors has become shorter"):
            stored["b"].to("cpu", dtype)


def test_types_without_a_torch_dtype_are_named(tmp_path: Path) -> None:
    make(tmp_path, 64, 1)
    path = tmp_path / "model.safetensors"
    header = json.dumps({"w": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(2))
    with pytest.raises(UserError, match=r"the model cannot be loaded \(tensor w is stored as F4\)"):
        load(tmp_path)


def test_blocks_are_the_file(tmp_path: Path) -> None:
    """Mixed dtypes, no elements and no dimensions; a tied tensor is stored once."""
    tensors = {"b": torch.randn(3, 5).bfloat16(), "a": torch.randn(7), "c": torch.zeros(0, 3), "d": torch.tensor(2.0)}
    save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    assert b"".join(map(bytes, file_blocks(tensors))) == (tmp_path / "theirs").read_bytes()
    (tmp_path / "tied").write_bytes(b"".join(map(bytes, file_blocks(tensors | {"e": tensors["b"]}))))
    assert load_file(tmp_path / "tied").keys() == tensors.keys()
