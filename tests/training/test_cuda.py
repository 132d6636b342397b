"""On a GPU: fused AdamW, bf16, and a resumed run. Skipped where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_run import make_trainer, tiny_llama

from dwindle.training.callbacks import Checkpointer
from dwindle.training.checkpoint import latest_checkpoint, open_checkpoint
from dwindle.training.loop import Trainer
from dwindle.training.stop import StopSignal

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def build(run: Path, precision: str, stop: StopSignal | None = None) -> Trainer:
    model = tiny_llama().to("cuda")
    checkpointer = Checkpointer(run, every=0)
    return make_trainer(model, [checkpointer], stop=stop, precision=precision, device="cuda", num_steps=8)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_resumed_equals_uninterrupted(tmp_path: Path, precision: str) -> None:
    whole = build(tmp_path / "whole", precision)
    assert whole.run() == "finished"
    assert whole.optimizer.param_groups[0]["fused"]

    stop = StopSignal()
    stop.request()
    assert build(tmp_path / "parts", precision, stop).run() == "stopped"
    resumed = build(tmp_path / "parts", precision)
    resumed.load_checkpoint(open_checkpoint(latest_checkpoint(tmp_path / "parts")))
    assert resumed.step == 1
    assert all(s["step"].device.type == "cuda" for s in resumed.optimizer.state.values())
    assert resumed.run() == "finished"
    for group, tensors in whole.tensors().items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, resumed.tensors()[group][name]), f"{group}/{name}"


def test_fp32_on_the_gpu_is_close_to_the_cpu(tmp_path: Path) -> None:
    gpu = build(tmp_path, "fp32")
    gpu.run()
    model = tiny_llama()
    make_trainer(model, num_steps=8).run()
    for ours, theirs in zip(gpu.model.parameters(), model.parameters(), strict=True):
        assert torch.allclose(ours.cpu(), theirs, rtol=1e-3, atol=1e-3)
