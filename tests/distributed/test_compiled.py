"""Compiled and eager runs make the same choices; the compiled loss is the loss."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from test_ranks import recipe

from dwindle.pruning.ledger import read_ledger
from dwindle.run.pretrain import pretrain
from dwindle.training.loss import _loss_and_gradient, chunked_cross_entropy
from runs import choices, metrics
from tiny import tiny_directory

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on a CPU needs g++")


@needs_compiler
def test_compiled_and_eager_runs_have_the_same_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """18 steps with events of several types and a compaction at the target."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setattr("torch._inductor.config.compile_threads", 1)
    monkeypatch.setattr("torch._inductor.config.cpp.simdlen", 1)  # plain loops compile in a fraction of the time
    torch._dynamo.utils.counters.clear()
    tiny_directory(tmp_path / "model", num_hidden_layers=2)
    prune = {"attention": "regular", "target": "75%", "milestones": [], "compact_threshold": 0.99}
    for name, compiled in (("eager", False), ("compiled", True)):
        settings = recipe(tmp_path, prune=prune, tokens=18 * 168, compile=compiled, micro_batch=7)
        settings.data.valid, settings.validation.every = [], 0
        pretrain(settings, tmp_path / name)
    eager, compiled_run = tmp_path / "eager", tmp_path / "compiled"
    assert choices(compiled_run) == choices(eager)
    kinds = [event["event"] for event in read_ledger(eager)]
    assert kinds.count("prune") >= 10 and kinds.count("compact") >= 1
    ours, theirs = ([line["loss"] for line in metrics(run)] for run in (compiled_run, eager))
    assert ours == pytest.approx(theirs, abs=1e-5)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs == 1 + kinds.count("compact"), "equal layers share one graph, and each compaction makes a new one"
    torch.compiler.reset()


@pytest.mark.parametrize(("z_loss", "logits_scaling"), [(0.0, 1.0), (1e-2, 3.0)])
def test_the_written_out_gradient_is_autograds(z_loss: float, logits_scaling: float) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(11, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(13, 6, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 13, (11,))
    expected = chunked_cross_entropy(
        hidden, weight, targets, chunk_tokens=11, scale=0.25, z_loss=z_loss, logits_scaling=logits_scaling
    )
    expected.objective.backward()
    logits = (hidden @ weight.t()).detach()
    sums, gradient = _loss_and_gradient(
        logits, targets, torch.tensor(0.25, dtype=torch.float64), z_loss, logits_scaling
    )
    torch.testing.assert_close(0.25 * sums[0], expected.objective.detach())
    torch.testing.assert_close(sums[1], expected.cross_entropy)
    torch.testing.assert_close(gradient @ weight, hidden.grad)
    torch.testing.assert_close(gradient.t() @ hidden, weight.grad)
