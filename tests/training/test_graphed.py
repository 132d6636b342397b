"""Recorded passes: the same bits as plain ones. CUDA graphs themselves need a GPU; the bookkeeping does not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import make_trainer, tiny_llama
from torch import Tensor, nn

from dwindle.evaluation.config import SamplingConfig
from dwindle.evaluation.sampling import BatchDecoder
from dwindle.training import graphed
from dwindle.training.callbacks import Callback, Checkpointer
from dwindle.training.checkpoint import latest_checkpoint, open_checkpoint
from dwindle.training.distill import Distillation, HiddenStates, Teacher
from dwindle.training.graphed import GraphedPasses
from dwindle.training.loop import Trainer
from dwindle.training.sampling import evaluating
from dwindle.training.stop import StopSignal
from tiny import tiny_model

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


class Played:
    """Stands for a CUDA graph on a CPU: what a replay writes, it writes to the places of the recording."""

    def __init__(self, passes: graphed.Passes, model: nn.Module, batch: Tensor) -> None:
        self.passes, self.scale, self.batch = passes, torch.ones((), dtype=torch.float64), batch
        self.parameters = list(model.parameters())
        self.adds = all(p.grad is not None for p in self.parameters)
        if not self.adds:
            for p in self.parameters:
                p.grad = torch.full_like(p, torch.nan)  # recording computes nothing
        self.places = [p.grad for p in self.parameters]
        self.sums = torch.full((1,), torch.nan)

    def replay(self, batch: Tensor, scale: float) -> Tensor:
        self.batch.copy_(batch)
        self.scale.fill_(scale)
        for p in self.parameters:
            p.grad = None
        self.sums.copy_(self.passes(self.batch, self.scale))
        for p, place in zip(self.parameters, self.places, strict=True):
            assert place is not None and p.grad is not None
            place.copy_(place + p.grad if self.adds else p.grad)
            p.grad = place
        return self.sums.clone()


def rows(size: int, generator: torch.Generator, planes: int) -> Tensor:
    """Text, or two packed conversations of 6 and 7 tokens of which some are learned."""
    ids = torch.randint(0, 67, (size, 13), generator=generator)
    if planes == 1:
        return ids
    learned, positions = torch.rand((size, 13), generator=generator) < 0.5, torch.arange(13) % 6
    return torch.stack([ids, learned.long(), positions.expand_as(ids)], dim=1)


def steps(passes: Any, model: nn.Module, sizes: Sequence[tuple[int, ...]], planes: int = 1) -> list[list[Tensor]]:
    """Gradients and sums of each step, whose micro-batches have these sizes."""
    generator, found = torch.Generator().manual_seed(3), []
    for step in sizes:
        model.zero_grad(set_to_none=True)
        scale = 0.01 * (1 + len(found) % 3)  # conversations have other numbers of learned tokens in every step
        sums = [passes(rows(size, generator, planes), scale) for size in step]
        found.append([*(p.grad.clone() for p in model.parameters() if p.grad is not None), *sums])
    return found


@pytest.mark.parametrize("planes", [1, 3])
def test_recorded_passes_write_and_add_gradients_like_plain_ones(monkeypatch: pytest.MonkeyPatch, planes: int) -> None:
    """Steps of three micro-batches with a smaller last one; shapes that were not recorded; the first shapes again."""
    model = tiny_llama()
    trainer = make_trainer(model)
    plain = trainer._passes
    monkeypatch.setattr(GraphedPasses, "_record", lambda _, batch: Played(plain, model, batch.clone()))
    recorded = GraphedPasses(plain, list(model.parameters()), conversations=True)
    usual, others = (4, 4, 2), ((3, 4), (4, 3))
    sizes: list[tuple[int, ...]] = [*[usual] * 6, *others, *others, usual, usual]
    ours, expected = (steps(passes, model, sizes, planes) for passes in (recorded, plain))
    assert recorded.num_recordings == 3, "the first of a step, the others, and the smaller one"
    for step, (some, same) in enumerate(zip(ours, expected, strict=True)):
        assert len(some) == len(same)
        assert all(torch.equal(a, b) for a, b in zip(some, same, strict=True)), step


def test_conversations_of_varying_shapes_are_not_recorded() -> None:
    model = tiny_llama()
    passes = GraphedPasses(make_trainer(model)._passes, list(model.parameters()))
    steps(passes, model, [(4, 4)] * 6, planes=3)
    assert passes.num_recordings == 0


def test_a_cpu_records_nothing() -> None:
    trainer = make_trainer(tiny_llama(), cuda_graphs=True)
    trainer.run()
    assert trainer._graphs is None


@pytest.mark.parametrize(("family", "kind"), [("llama", "dynamic"), ("phi3", "longrope")])
def test_frequencies_that_follow_the_length_are_not_recorded(family: str, kind: str) -> None:
    """transformers reads the largest position in every pass, and nothing can be read while a graph is recorded."""
    factors = {"short_factor": [1.0, 1.0], "long_factor": [2.0, 2.0]} if kind == "longrope" else {}
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16, **factors}
    following, plain = (tiny_model(family, **own).float() for own in ({"rope_parameters": rope}, {}))
    assert make_trainer(following, device="cuda")._graphs is None
    trainer = make_trainer(plain, device="cuda")
    assert trainer._graphs is not None
    trainer.teacher = Teacher.of(HiddenStates(following), Distillation(0.5))
    trainer.replace_model(trainer.model, trainer.optimizer)
    assert trainer._graphs is None
    with evaluating(following):
        decoder = BatchDecoder(following, [[1, 2, 3]], SamplingConfig(), None, fixed=True)
        decoder.step()
    assert decoder._fixed is None


class Watcher(Callback):
    """Watches the passes of the first steps, as a pruner does."""

    def __init__(self, until: int) -> None:
        self.until, self.step = until, 0

    @property
    def is_watching(self) -> bool:
        return self.step < self.until

    def after_step(self, trainer: Trainer) -> None:
        self.step = trainer.step
        assert not self.is_watching or not trainer._graphs or not trainer._graphs.num_recordings


def on_gpu(run: Path, *, graphs: bool, stop: StopSignal | None = None, until: int = 0, **options: Any) -> Trainer:
    model = tiny_llama().to("cuda")
    callbacks = [Watcher(until), Checkpointer(run, every=0)]
    chosen: dict[str, Any] = {"sizes": (4, 4, 2), "num_steps": 12, "precision": "bf16", **options}
    trainer = make_trainer(model, callbacks, stop=stop, device="cuda", cuda_graphs=graphs, **chosen)
    torch.manual_seed(5)
    trainer.teacher = Teacher.of(HiddenStates(tiny_llama().to("cuda", torch.bfloat16)), Distillation(0.5))
    return trainer


def assert_equal(one: Trainer, other: Trainer) -> None:
    for group, tensors in one.tensors().items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, other.tensors()[group][name]), f"{group}/{name}"


@needs_gpu
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("compile", [False, True])
def test_graphs_give_the_same_bits(tmp_path: Path, optimizer: str, compile: bool) -> None:
    from dwindle.training.compiling import compile_blocks, forget_graphs

    trainers = []
    for graphs in (False, True):
        trainer = on_gpu(tmp_path / str(graphs), graphs=graphs, until=2, optimizer=optimizer, compile=compile)
        if compile:
            compile_blocks(trainer.model)
        assert trainer.run() == "finished"
        trainers.append(trainer)
    forget_graphs()
    assert trainers[1]._graphs is not None and trainers[1]._graphs.num_recordings == 3
    assert_equal(*trainers)


@needs_gpu
@pytest.mark.parametrize("compile", [False, True])
def test_graphs_of_conversations_give_the_same_bits(compile: bool) -> None:
    """With a compiled loss their passes have fixed shapes; nothing in them waits for the device."""
    from dwindle.training.compiling import compile_blocks, forget_graphs

    found = []
    for recorded in (False, True):
        model = tiny_llama().to("cuda")
        trainer = make_trainer(model, device="cuda", precision="bf16", compile=compile)
        trainer.fused_loss = True
        trainer.teacher = Teacher.of(HiddenStates(tiny_llama().to("cuda", torch.bfloat16)), Distillation(0.5))
        if compile:
            compile_blocks(model)
        passes = GraphedPasses(trainer._passes, list(model.parameters()), conversations=True)
        on_device = passes if recorded else trainer._passes
        found.append(steps(lambda b, s, on=on_device: on(b.cuda(), s), model, [(4, 4, 2)] * 8, planes=3))
        assert passes.num_recordings == (3 if recorded else 0)
    forget_graphs()
    for step, (some, same) in enumerate(zip(*found, strict=True)):
        assert all(torch.equal(a, b) for a, b in zip(some, same, strict=True)), step


@needs_gpu
def test_a_resumed_run_with_graphs_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    whole = on_gpu(tmp_path / "whole", graphs=True)
    assert whole.run() == "finished"

    class StopAt(Callback):
        def after_step(self, trainer: Trainer) -> None:
            if trainer.step == 7:
                trainer.stop.request()

    part = on_gpu(tmp_path / "parts", graphs=True)
    part.callbacks.insert(0, StopAt())
    assert part.run() in ("running", "stopped")
    resumed = on_gpu(tmp_path / "parts", graphs=True)
    resumed.load_checkpoint(open_checkpoint(latest_checkpoint(tmp_path / "parts")))
    assert 7 <= resumed.step < 12 and resumed.run() == "finished"
    assert_equal(whole, resumed)


@needs_gpu
def test_nothing_waits_for_the_device_in_the_passes(tmp_path: Path) -> None:
    """The host can run ahead: a synchronising call would raise."""
    trainer = on_gpu(tmp_path, graphs=False)
    batches = [batch.to("cuda") for batch in trainer.batches.next_step()]
    for _ in range(graphed._PLAIN_CALLS):
        trainer._passes(batches[0], 0.01)
    torch.cuda.set_sync_debug_mode("error")
    try:
        trainer._passes(batches[0], 0.01)
    finally:
        torch.cuda.set_sync_debug_mode("default")
