"""Measures a few steps of a run before it is started, with random tokens, and predicts its time and memory from them.

The steps are those of the run: its model, teacher, optimizer and pruning events, but one micro-batch each. Then the
model is cut to about its final size, and as many steps are measured again. What the first use of a size costs
(compiling, above all) is measured separately and counted once for each graph of a size.
"""

from __future__ import annotations

import os
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dwindle.anatomy.anatomy import Anatomy
from dwindle.anatomy.structure import Layer, Structure
from dwindle.core.errors import UserError
from dwindle.core.progress import status
from dwindle.core.run_directory import RunDirectory
from dwindle.data.batches import BatchStream
from dwindle.data.estimate import estimate
from dwindle.data.mixture import Mixture, PackedDataset, Windows
from dwindle.data.packing import ChatStream, PackedChat
from dwindle.data.pydoc_text import pydoc_documents
from dwindle.data.token_stream import MemoryTokens, TokenStream
from dwindle.data.tokenizing import DocumentEncoder, EncodedPiece
from dwindle.data.training_data import TrainingData
from dwindle.distributed.precision import cpu_multiplies_bf16
from dwindle.export.process import peak_memory_bytes
from dwindle.pruning.pacing import Horizon, Ratio, Stages
from dwindle.pruning.pruner import Pruner
from dwindle.pruning.surgery import Prunable
from dwindle.recipe.recipe import Recipe, resolve_recipe
from dwindle.run.plan import (
    Plan,
    PruningPlan,
    device_of,
    joined_for,
    make_plan,
    micro_batch_of,
    packs,
    plan_pruning,
    precision_of,
)
from dwindle.run.pretrain import Job
from dwindle.run.start import Start, start_of
from dwindle.training.callbacks import Callback, Validator
from dwindle.training.compiling import MAX_GRAPHS
from dwindle.training.rng import seed_everything
from dwindle.training.sampling import NEW_TOKENS, greedy_tokens
from dwindle.training.stop import StopSignal

_WARM, _TIMED = 1, 2
"""Steps that are not timed (first use of kernels and memory), and steps that are."""
_SLOW_S = 5.0
"""A first step that takes longer is timed itself, and no other: what first use costs is little beside it."""
_WINDOWS, _FEW_WINDOWS = 8, 1
_SAMPLES = 2
_DISK_PROBE_BYTES = 1 << 25
_QUICK_S = 0.25
"""A step that takes longer is that of a model for which threads are worth their waiting: it is not tried with one."""
_MUCH_FASTER, _FASTER = 2.0, 1.3
"""From where on one thread, and bf16, are recommended: the first depends on what else runs, the second does not."""


@dataclass(slots=True)
class Cost:
    """Seconds of one size of the model."""

    micro_batch_s: float
    """Forward and backward pass of a micro-batch, the teacher's included."""
    rest_s: float
    """The rest of a step: saliencies, events, optimizer."""
    window_s: float
    """Validation of one window."""
    sample_s: float
    """One greedy sample."""
    first_s: float = 0.0
    """What the first step and the first validation take beyond an ordinary one."""

    def step_s(self, micro_batches: int) -> float:
        return micro_batches * self.micro_batch_s + self.rest_s


@dataclass(slots=True)
class Rehearsed:
    """What was measured, and what it predicts."""

    begin_s: float
    """Loading the models."""
    start: Cost
    end: Cost
    disk_bytes_per_s: float
    memory_bytes: int
    is_one_step: bool = False
    """Only one step was run at the first size: its memory is without the optimizer's moments, which follow it."""
    run_s: float = 0.0
    """The whole run, without tokenizing the text."""
    advice: tuple[str, ...] = ()
    """Settings that trained much faster than the recipe's."""


def planned(recipe: Recipe, *, measure: bool = True, price: float | None = None) -> Plan:
    """The plan of a run; with ``measure`` also its time and memory; ``price`` is that of an hour on this machine."""
    start = start_of(recipe)
    plan = make_plan(recipe, start)
    if price is not None and not price >= 0:
        raise UserError(f"price {price}: give the price of an hour, such as 2.5")
    if measure:
        with status("running a few steps to predict time and memory"):
            found = rehearse(recipe, start)
            tokenizing_s = sum(plan.text_tokens.values()) / _tokens_per_s(start)
        least = plan.memory_bytes_estimate if found.is_one_step else 0
        plan.seconds, plan.memory_bytes_measured = found.run_s + tokenizing_s, max(found.memory_bytes, least)
        plan.cost = None if price is None else price * plan.seconds / 3600
        plan.warnings += found.advice
    return plan


def _tokens_per_s(start: Start) -> float:
    """Speed of the tokenizer, on text that every machine has."""
    encoder, text = DocumentEncoder(start.tokenizer()), "\n".join(pydoc_documents("valid"))
    started = time.perf_counter()
    count = sum(len(piece.ids) for piece in encoder.encode([text]))
    return count / max(time.perf_counter() - started, 1e-9)


def rehearse(recipe: Recipe, start: Start) -> Rehearsed:
    """Measure a few steps on this machine and predict the run; nothing is written but to a temporary folder."""
    recipe = resolve_recipe(recipe)
    device = device_of(recipe)
    config = start.config()
    chooses_precision = recipe.training.precision == "auto"
    recipe.training.precision = precision_of(recipe, device)
    recipe.training.micro_batch = micro_batch_of(recipe, device, config)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as folder, joined_for(recipe) as world, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        seed_everything(recipe.training.seed)
        started = time.perf_counter()
        run = RunDirectory(Path(folder))
        if start.vocabulary is not None:
            run.vocabulary.write_text(start.record())  # as a run that has begun: its text is not counted again
        job = _Rehearsal(recipe, run, None, StopSignal(), world, ())
        begin_s = time.perf_counter() - started
        first = job.measure()
        is_one_step = job.trainer.step == _WARM
        memory = torch.cuda.max_memory_reserved() if device == "cuda" else peak_memory_bytes()
        end = job.measure() if job.shrink() else first
        advice = job.advice(end.step_s(1), chooses_precision) if device == "cpu" else ()
        disk = _disk_bytes_per_s(Path(folder))
    found = Rehearsed(begin_s, first, end, disk, memory, is_one_step, advice=advice)
    found.run_s = _predict(recipe, found, Anatomy.of_config(config), start)
    return found


class _Marks(Callback):
    """Times the parts of each step. One instance is the first callback, to see the end of the backward pass; another
    the last."""

    def __init__(self, place: str, times: list[tuple[str, float]]) -> None:
        self._place, self._times = place, times

    @property
    def name(self) -> str:
        return f"marks {self._place}"

    def _mark(self, what: str, device: str) -> None:
        if device == "cuda":
            torch.cuda.synchronize()
        self._times.append((what, time.perf_counter()))

    def on_start(self, trainer: Any) -> None:
        if self._place == "last":
            self._mark("begin", trainer.device)

    def edit_gradients(self, trainer: Any) -> None:
        if self._place == "first":
            self._mark("backward", trainer.device)

    def after_step(self, trainer: Any) -> None:
        if self._place == "last":
            self._mark("end", trainer.device)


class _Rehearsal(Job):
    """The job of a run on random tokens, one micro-batch a step, without files."""

    def _data(self) -> tuple[TrainingData, BatchStream]:
        recipe, micro_batch = self.recipe, self.recipe.training.micro_batch
        seq_len = recipe.data.seq_len
        rows: Windows
        if recipe.task.kind == "chat":
            rows = chat = self._chat_rows(2 * max(micro_batch, _WINDOWS) + 1)
            windows = chat.spread(_WINDOWS * seq_len)
        else:
            vocabulary = self.config.vocab_size
            count = (max(micro_batch, _WINDOWS) * 2 + 1) * seq_len + 1
            ids = np.random.default_rng(0).integers(vocabulary, size=count, dtype=np.uint32)
            stream = TokenStream([MemoryTokens("rehearsal", ids, np.zeros(1, dtype=np.uint64))])
            rows = PackedDataset("rehearsal", stream, seq_len, 0)
            windows = torch.from_numpy(stream.read(0, _WINDOWS * (seq_len + 1)).reshape(_WINDOWS, seq_len + 1))
        mixture = Mixture([rows], [1.0])
        batches = BatchStream(mixture, tokens_per_step=micro_batch * seq_len, micro_batch=micro_batch)
        return TrainingData(mixture=mixture, valid_windows=windows), batches

    def _chat_rows(self, count: int) -> PackedChat:
        """Rows with as many examples, and as many learned tokens at their ends, as the run's rows have on average."""
        data, config = self.recipe.data, self.config
        packed = packs(self.recipe, config)
        found = estimate(data, self.recipe.task, lambda: self.tokenizer, packed=packed)
        in_row = min(max(round(found.examples_per_row), 1), (data.seq_len + 1) // 2)
        size, rng = (data.seq_len + 1) // in_row, np.random.default_rng(0)
        answers = np.array([[size - min(max(round(found.learned * size), 1), size - 1), size]], dtype=np.uint64)
        ids = rng.integers(config.vocab_size, size=(count * in_row, size), dtype=np.uint32)
        stream = ChatStream([MemoryTokens.of_examples("rehearsal", [EncodedPiece(row, True, answers) for row in ids])])
        return PackedChat("rehearsal", stream, data.seq_len, 0, filler=0, packed=packed)

    def _pruner(self, prunable: Prunable, plan: PruningPlan) -> Pruner:
        """Events from the first step on, as many in each as the run will have."""
        pacing = plan.pacing
        if isinstance(pacing, Horizon):
            pacing = replace(pacing, first_step=0, last_step=pacing.last_step - pacing.first_step)
        if isinstance(pacing, Ratio):
            pacing = replace(pacing, first_step=0)
        if isinstance(pacing, Stages):
            pacing = replace(pacing, first_step=0, num_steps=pacing.num_steps - pacing.first_step)
        return super()._pruner(prunable, replace(plan, pacing=pacing, milestones=[]))

    def _callbacks(self, others: Sequence[Callback]) -> list[Callback]:
        self._times = list[tuple[str, float]]()
        pruning = [] if self.pruner is None else [self.pruner]
        return [_Marks("first", self._times), *pruning, _Marks("last", self._times)]

    def measure(self) -> Cost:
        """Run a few steps, and a forward pass of each other kind, at the present size."""
        self._times.clear()
        compiled = self.recipe.training.compile
        warm_s = self._run(_WARM)
        slow = warm_s > _SLOW_S and not compiled
        if not slow:
            self._run(_TIMED)
        timed = self._steps() if slow else self._steps()[_WARM:]
        micro_batch_s = sum(backward - begin for begin, backward, _ in timed) / len(timed)
        rest_s = sum(end - backward for _, backward, end in timed) / len(timed)
        windows = _FEW_WINDOWS if slow else _WINDOWS
        first_window_s = self._window_s(windows)
        window_s = self._window_s(windows) if compiled else first_window_s
        first_s = 0.0 if slow else max(warm_s - _WARM * (micro_batch_s + rest_s), 0.0)
        first_s += windows * max(first_window_s - window_s, 0.0)
        return Cost(micro_batch_s, rest_s, window_s, self._sample_s(), first_s)

    def _steps(self) -> list[tuple[float, float, float]]:
        """Begin, end of the backward pass, and end of each step since the marks were cleared."""
        found, begin, backward = list[tuple[float, float, float]](), 0.0, 0.0
        for what, moment in self._times:
            if what == "backward":
                backward = moment
                continue
            if what == "end":
                found.append((begin, backward, moment))
            begin = moment
        return found

    def _run(self, steps: int) -> float:
        """Seconds of so many more steps."""
        started = time.perf_counter()
        self.trainer.num_steps = self.trainer.step + steps
        self.trainer.run()
        return time.perf_counter() - started

    def advice(self, step_s: float, chooses_precision: bool) -> tuple[str, ...]:
        """What would train much faster on this CPU: one thread for a tiny model, bf16 for a larger one."""
        if step_s <= _QUICK_S:
            threads, gain = torch.get_num_threads(), self.gain_of_one_thread()
            text = f"one thread trains {gain:.1f} times as fast as {threads} here: other programs may be using this "
            return (text + "CPU: set OMP_NUM_THREADS=1",) if gain >= _MUCH_FASTER else ()
        if not chooses_precision or self.precision != "fp32" or not cpu_multiplies_bf16():
            return ()
        gain = step_s / self.step_in_bf16_s()
        text = f"bf16 trains {gain:.1f} times as fast as fp32 on this CPU: set training.precision=bf16"
        return (text,) if gain >= _FASTER else ()

    def step_in_bf16_s(self) -> float:
        """Seconds of one more step, first use included, so that a gain is not exaggerated."""
        self.trainer.precision = "bf16"
        try:
            return self._run(1)
        finally:
            self.trainer.precision = self.precision

    def gain_of_one_thread(self) -> float:
        """How much faster a few steps are with one thread than with those that this process has."""
        threads = torch.get_num_threads()
        if threads == 1:
            return 1.0
        with_all = self._run(_TIMED)
        try:
            torch.set_num_threads(1)
            return with_all / self._run(_TIMED)
        finally:
            torch.set_num_threads(threads)

    def _window_s(self, count: int) -> float:
        assert self.validator is not None
        started = time.perf_counter()
        Validator(self.validator.windows_NT[:count], 0).measure(self.trainer)
        return (time.perf_counter() - started) / count

    def _sample_s(self) -> float:
        started = time.perf_counter()
        prompt, few = [1] * 8, 4
        found = greedy_tokens(self.trainer.model, prompt, few, self.tokenizer)
        return (time.perf_counter() - started) / max(len(found), 1) * NEW_TOKENS

    def shrink(self) -> bool:
        """Cut the model to about its final size; False without pruning."""
        if self.pruner is None:
            return False
        prunable = self.pruner.prunable
        keep = cut_evenly(prunable.anatomy, prunable.alive, self.pruner.end_count)
        prunable.prune_to(keep, self.trainer.optimizer)
        self.pruner.compact(self.trainer, keep)
        self.trainer.callbacks.remove(self.pruner)
        return True


def cut_evenly(anatomy: Anatomy, structure: Structure, most: int) -> Structure:
    """About ``most`` parameters: the same share of each layer's key/value heads and FFN channels, then of the rest."""

    def cut(share: float, hidden: float) -> Structure:
        layers = tuple(_cut_layer(layer, share) for layer in structure.layers)
        return Structure(structure.hidden[: max(round(hidden * len(structure.hidden)), 8)], layers)

    for hidden in (1.0, 0.5, 0.25):
        low, high = 0.0, 1.0
        for _ in range(12):
            middle = (low + high) / 2
            if anatomy.count(cut(middle, hidden)).total <= most:
                low = middle
            else:
                high = middle
        if low or anatomy.count(cut(0, hidden)).total <= most:
            break
    return cut(low, hidden)


def _cut_layer(layer: Layer, share: float) -> Layer:
    kept = layer.kv_heads[: max(round(share * len(layer.kv_heads)), 1)]
    gone = [query for query, kv in zip(layer.query_heads, layer.kv_of_query, strict=True) if kv not in kept]
    return layer.without(query_heads=gone, ffn=layer.ffn[max(round(share * len(layer.ffn)), 8) :])


def _disk_bytes_per_s(folder: Path) -> float:
    started = time.perf_counter()
    with (folder / "probe").open("wb") as file:
        file.write(os.urandom(_DISK_PROBE_BYTES))
        file.flush()
        os.fsync(file.fileno())
    return _DISK_PROBE_BYTES / max(time.perf_counter() - started, 1e-9)


def _predict(recipe: Recipe, found: Rehearsed, anatomy: Anatomy, begin: Start | None = None) -> float:
    """Seconds: steps at both sizes, validation, samples, checkpoints and the model."""
    plan, steps = plan_pruning(recipe, anatomy, begin), recipe.num_steps
    parameters = anatomy.count(anatomy.source).total
    final = parameters if plan is None else plan.end_count
    pruning = 0 if plan is None else min(plan.pacing.last_step or steps, steps)
    micro_batches = -(-recipe.num_sequences_per_step // recipe.training.micro_batch)
    start, end = (cost.step_s(micro_batches) for cost in (found.start, found.end))
    while_pruning = start if pruning <= recipe.prune.compact_wait else (start + end) / 2  # rebuilt on the way
    before = 0 if plan is None else min(recipe.num_steps_before_pruning, pruning)
    unequal = recipe.prune.method == "adapt" or recipe.prune.selection == "global"
    graphs = 0 if plan is None else MAX_GRAPHS if unequal and recipe.training.compile else 1
    total = found.begin_s + found.start.first_s + graphs * found.end.first_s
    no_event = replace(found.start, rest_s=min(found.start.rest_s, found.end.rest_s)).step_s(micro_batches)
    total += before * no_event + (pruning - before) * while_pruning + (steps - pruning) * end
    if recipe.data.validated_on(recipe.task):
        windows = recipe.num_validation_tokens // recipe.data.seq_len
        every = recipe.validation.every
        total += windows * (found.start.window_s + (max(steps // every, 1) if every else 1) * found.end.window_s)
    total += _SAMPLES * (found.start.sample_s + found.end.sample_s)
    moments = (2 if recipe.training.optimizer == "adamw" else 1) * (2 if recipe.training.moments == "bf16" else 4)
    checkpoints = 1 + (steps // recipe.checkpoint.every if recipe.checkpoint.every else 0)
    return total + final * (checkpoints * (4 + moments) + 4) / found.disk_bytes_per_s
