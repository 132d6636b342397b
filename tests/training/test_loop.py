"""The loop against a plain one, and its behaviour around bad steps, replaced models and requests to stop."""

from __future__ import annotations

import math
import os
import signal
import threading
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tiny_run import RandomBatches, make_trainer, portable_bf16, tiny_llama
from torch import Tensor
from transformers import LlamaForCausalLM

from dwindle.core.run_directory import RunDirectory
from dwindle.training.callbacks import Callback, Checkpointer
from dwindle.training.config import TrainingConfig
from dwindle.training.loop import Trainer, TrainingDiverged
from dwindle.training.optim import build_optimizer
from dwindle.training.stop import StopSignal


class Recorder(Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []
        self.grad_norms: list[float] = []
        self.after_backward_steps: list[int] = []

    def after_backward(self, trainer: Trainer) -> None:
        self.after_backward_steps.append(trainer.step)

    def after_step(self, trainer: Trainer) -> None:
        assert trainer.last is not None
        assert all(p.grad is None for p in trainer.model.parameters())
        self.losses.append(trainer.last.loss)
        self.grad_norms.append(trainer.last.grad_norm)


def assert_same_weights(left: torch.nn.Module, right: torch.nn.Module) -> None:
    for (name, ours), theirs in zip(left.state_dict().items(), right.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name


def plain_loop(model: LlamaForCausalLM, sizes: tuple[int, ...], num_steps: int, clip: float) -> list[float]:
    decayed = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8)

    def factor(step: int) -> float:
        if step < 2:
            return (step + 1) / 2
        return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (step - 2) / (num_steps - 2)))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    batches, losses = RandomBatches(sizes), []
    model.train()
    for _ in range(num_steps):
        micro_batches = batches.next_step()
        num_tokens = sum(tokens[:, 1:].numel() for tokens in micro_batches)
        total = 0.0
        for tokens in micro_batches:
            logits = model(input_ids=tokens[:, :-1]).logits.float()
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum") / num_tokens
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


@pytest.mark.parametrize("sizes", [(5,), (3, 2, 1)])
@pytest.mark.parametrize("tied", [True, False])
def test_equals_a_plain_loop_bit_for_bit(sizes: tuple[int, ...], tied: bool) -> None:
    expected_model, model = tiny_llama(tied=tied), tiny_llama(tied=tied)
    expected = plain_loop(expected_model, sizes, num_steps=8, clip=0.5)
    recorder = Recorder()
    trainer = make_trainer(model, [recorder], sizes=sizes, num_steps=8, clip=0.5)
    assert trainer.run() == "finished"
    assert_same_weights(model, expected_model)
    assert recorder.losses == pytest.approx(expected, rel=1e-6)
    if len(sizes) == 1:
        assert recorder.losses == expected
    assert trainer.tokens == 8 * sum(sizes) * 12 and trainer.step == 8


def test_micro_batches_and_chunks_do_not_change_the_mathematics() -> None:
    runs = []
    for sizes, chunk in (((6,), 10_000), ((1, 1, 1, 1, 1, 1), 10_000), ((4, 2), 5), ((1, 5), 17)):
        model = tiny_llama(dtype=torch.float64)
        recorder = Recorder()
        make_trainer(model, [recorder], sizes=sizes, precision="fp64", ce_chunk_tokens=chunk, z_loss=1e-3).run()
        runs.append((recorder.losses, recorder.grad_norms, model))
    for losses, norms, model in runs[1:]:
        assert losses == pytest.approx(runs[0][0], rel=1e-11)
        assert norms == pytest.approx(runs[0][1], rel=1e-10)
        for ours, first in zip(model.parameters(), runs[0][2].parameters(), strict=True):
            assert torch.allclose(ours, first, rtol=0, atol=1e-9)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_activation_checkpointing_has_the_same_bits(precision: str) -> None:
    """Autocast's copies of the weights, which only cost memory there, are not kept."""
    models, kept = [tiny_llama(), tiny_llama()], []
    for model, on in zip(models, (False, True), strict=True):
        model.model.norm.register_forward_hook(lambda *_: kept.append(torch.is_autocast_cache_enabled()))
        with portable_bf16():
            make_trainer(model, activation_checkpointing=on, precision=precision, num_steps=3).run()
    assert models[1].is_gradient_checkpointing
    assert kept == [True] * 3 + [precision != "bf16"] * 3
    assert_same_weights(*models)


def test_bf16_trains_fp32_weights_and_moments() -> None:
    model = tiny_llama()
    recorder = Recorder()
    batches = RandomBatches()
    fixed = batches.step_tokens(0)
    batches.step_tokens = lambda step: fixed  # type: ignore[method-assign]
    trainer = make_trainer(model, [recorder], batches=batches, precision="bf16", num_steps=15)
    with portable_bf16():
        trainer.run()
    assert recorder.losses[-1] < recorder.losses[0] - 0.5
    assert {t.dtype for s in trainer.optimizer.state.values() for t in s.values()} == {torch.float32}


class Poison(Callback):
    """Makes the weights give NaN in the steps with the given numbers, and only there."""

    def __init__(self, steps: set[int]) -> None:
        self.steps, self.saved = steps, None

    def on_start(self, trainer: Trainer) -> None:
        self._prepare(trainer)

    def after_step(self, trainer: Trainer) -> None:
        norm = trainer.model.model.norm.weight
        with torch.no_grad():
            if self.saved is not None:
                norm.copy_(self.saved)
                self.saved = None
        self._prepare(trainer)

    def _prepare(self, trainer: Trainer) -> None:
        if trainer.step in self.steps and trainer.status == "running":
            norm = trainer.model.model.norm.weight
            self.saved = norm.detach().clone()
            with torch.no_grad():
                norm.fill_(math.nan)


def test_a_bad_step_changes_nothing_but_the_counters() -> None:
    class Watch(Callback):
        def __init__(self) -> None:
            self.before: list[Tensor] = []
            self.changed: list[bool] = []

        def after_step(self, trainer: Trainer) -> None:
            now = [p.detach().clone() for p in trainer.model.model.layers.parameters()]
            now += [t.clone() for s in trainer.optimizer.state.values() for t in s.values()]
            same = len(now) == len(self.before) and all(map(torch.equal, now, self.before))
            self.changed.append(not same)
            self.before = now

    recorder, watch = Recorder(), Watch()
    trainer = make_trainer(tiny_llama(), [Poison({2, 3}), recorder, watch])
    assert trainer.run() == "finished"
    assert watch.changed == [True, True, False, False, True, True]
    assert [math.isfinite(loss) for loss in recorder.losses] == [True, True, False, False, True, True]
    assert recorder.after_backward_steps == [0, 1, 4, 5]
    assert (trainer.bad_steps, trainer.bad_steps_in_a_row, trainer.step) == (2, 0, 6)
    assert trainer.batches.state_dict() == {"position": 6}
    assert {int(s["step"]) for s in trainer.optimizer.state.values()} == {4}


def test_a_finite_loss_with_an_infinite_gradient_is_skipped() -> None:
    model = tiny_llama()
    weight = model.model.layers[0].mlp.up_proj.weight
    weight.register_hook(lambda grad: grad * math.inf if trainer.step == 1 else grad)
    recorder = Recorder()
    trainer = make_trainer(model, [recorder])
    trainer.run()
    assert trainer.bad_steps == 1
    assert all(map(math.isfinite, recorder.losses))
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_too_many_bad_steps_stop_and_keep_the_checkpoints_from_before(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, every=1, keep_last=1)
    trainer = make_trainer(tiny_llama(), [Poison({2, 3, 4, 5}), checkpointer], max_bad_steps=1)
    with pytest.raises(TrainingDiverged, match=r"step 4 .* 2 in a row"):
        trainer.run()
    assert [path.name for path in RunDirectory(tmp_path).list_checkpoints()] == ["step-00000002"]
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())


def test_gradients_edited_by_a_callback_are_what_is_clipped() -> None:
    class Halve(Callback):
        def edit_gradients(self, trainer: Trainer) -> None:
            for p in trainer.model.parameters():
                assert p.grad is not None
                p.grad *= 0.5

    plain, halved = Recorder(), Recorder()
    make_trainer(tiny_llama(), [plain], num_steps=1).run()
    make_trainer(tiny_llama(), [Halve(), halved], num_steps=1).run()
    assert halved.grad_norms[0] == pytest.approx(plain.grad_norms[0] / 2, rel=1e-6)


def test_replace_model_wants_the_optimizer_of_that_model() -> None:
    trainer = make_trainer(tiny_llama())
    other = tiny_llama()
    with pytest.raises(AssertionError, match="exactly the model's own"):
        trainer.replace_model(other, trainer.optimizer)
    trainer.replace_model(other, build_optimizer(other, TrainingConfig(tokens=1, lr=1e-2, optimizer="adamw")))
    trainer.run()
    expected = tiny_llama()
    make_trainer(expected).run()
    assert_same_weights(other, expected)


def test_callbacks_run_in_list_order_and_the_checkpointer_is_last(tmp_path: Path) -> None:
    calls: list[str] = []

    class Named(Callback):
        def __init__(self, label: str) -> None:
            self.label = label

        @property
        def name(self) -> str:
            return self.label

        def on_start(self, trainer: Trainer) -> None:
            calls.append(f"{self.label} start")

        def after_step(self, trainer: Trainer) -> None:
            calls.append(f"{self.label} step")

        def on_end(self, trainer: Trainer) -> None:
            calls.append(f"{self.label} end")

    make_trainer(tiny_llama(), [Named("b"), Named("a")], num_steps=1).run()
    assert calls == ["b start", "a start", "b step", "a step", "b end", "a end"]
    with pytest.raises(AssertionError, match="last"):
        make_trainer(tiny_llama(), [Checkpointer(tmp_path, every=1), Named("a")])
    with pytest.raises(AssertionError, match="differ"):
        make_trainer(tiny_llama(), [Named("a"), Named("a")])


class SignalAt(Callback):
    def __init__(self, step: int, number: signal.Signals) -> None:
        self.step, self.number = step, number

    def after_backward(self, trainer: Trainer) -> None:
        if trainer.step == self.step:
            os.kill(os.getpid(), self.number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_finishes_the_step_and_saves(tmp_path: Path, number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with StopSignal() as stop:
        callbacks = [SignalAt(2, number), Checkpointer(tmp_path, every=0)]
        trainer = make_trainer(tiny_llama(), callbacks, stop=stop)
        assert trainer.run() == "stopped"
    assert signal.getsignal(number) is before
    assert trainer.step == 3
    assert [path.name for path in RunDirectory(tmp_path).list_checkpoints()] == ["step-00000003"]


def test_a_second_interrupt_aborts_at_once() -> None:
    ended: list[bool] = []

    class Twice(Callback):
        def after_backward(self, trainer: Trainer) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGINT)
            raise AssertionError("the second signal must not be ignored")

        def on_end(self, trainer: Trainer) -> None:
            ended.append(True)

    with StopSignal() as stop, pytest.raises(KeyboardInterrupt):
        make_trainer(tiny_llama(), [Twice()], stop=stop).run()
    assert ended == [True]


def test_outside_the_main_thread_it_is_only_a_flag() -> None:
    before = signal.getsignal(signal.SIGINT)
    seen: list[object] = []

    def work() -> None:
        with StopSignal() as stop:
            seen.append(signal.getsignal(signal.SIGINT))
            stop.request()
            seen.append(stop.requested)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before, True]
