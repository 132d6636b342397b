"""What a step, an event, a compaction and a checkpoint cost each rank of a large world, counted without any GPU.

Engine, loss, optimizer, pruner and surgery are those of a run; tensors have no storage and ranks do not exist
(``distributed.simulated``). Nothing is measured: no weights are read, no text is opened.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from rich.table import Table
from torch import Tensor, nn

from dwindle.anatomy.anatomy import Anatomy
from dwindle.anatomy.build import build, build_on_meta
from dwindle.anatomy.structure import Structure
from dwindle.core.errors import UserError
from dwindle.core.notebook import Shown
from dwindle.core.sizes import format_bytes, format_count
from dwindle.distributed.engines import Engine, Parallel, choose_engine
from dwindle.distributed.lazy_weights import Fetch
from dwindle.distributed.precision import Precision, weights_dtype
from dwindle.distributed.simulated import SimulatedReplicas, simulated_world, weightless
from dwindle.distributed.traffic import Tally, Traffic
from dwindle.distributed.world import World
from dwindle.pruning.pruner import Pruner
from dwindle.pruning.surgery import Prunable
from dwindle.recipe.recipe import Recipe, resolve_recipe
from dwindle.run.plan import (
    check_processes,
    liked_micro_batch,
    parallel_of,
    plan_pruning,
    teacher_dtype,
    teacher_of,
)
from dwindle.run.rehearsal import cut_evenly
from dwindle.run.start import Start, start_of
from dwindle.training.distill import Distillation, HiddenStates, Teacher
from dwindle.training.flops import flops_per_token, forward_flops_per_token
from dwindle.training.loop import Trainer
from dwindle.training.loss import language_model_loss
from dwindle.training.optim import LRSchedule, build_optimizer

RANKS_PER_NODE = 8
"""GPUs of a machine, unless given."""
_SUSTAINED_FLOPS = 400e12
"""About 40 % of the bf16 peak of an H100 or H200, to compare traffic with compute."""


@dataclass(slots=True)
class WorldPlan(Shown):
    """What each rank of a world would send and hold."""

    model: str
    world: int
    ranks_per_node: int
    parallel: Parallel
    precision: Precision
    optimizer: str
    parameters: int
    parameters_compacted: int | None
    """After the counted compaction; None without pruning."""
    tokens_per_step: int
    micro_batches: int
    """Per rank and step."""
    sequences_per_micro_batch: int
    flops_per_step: float
    """FLOPs of one rank, the teacher's included."""
    state_bytes: int
    """Weights and moments of one rank, the teacher's weights included."""
    checkpoint_bytes: int
    """What one rank writes."""
    parts: dict[str, Traffic]
    """``step``, ``event``, ``compaction``, ``checkpoint``."""
    not_counted: list[str]

    @property
    def peak_bytes(self) -> int:
        """Largest memory of one rank."""
        return max(part.peak_bytes for part in self.parts.values())

    def render(self) -> Table:
        nodes = -(-self.world // self.ranks_per_node)
        where = f"{self.world:,} ranks, {self.parallel}" + (f" on {nodes} nodes" if nodes > 1 else "")
        title = f"{self.model} ({format_count(self.parameters)}) on {where}: each rank, counted and not measured"
        table = Table("", "collectives", "sent", "between nodes", "peak memory", title=title, title_justify="left")
        for name, part in self.parts.items():
            kinds = ", ".join(f"{count:,} {kind}" for kind, count in sorted(part.collectives.items()))
            sizes = (part.bytes_sent, part.bytes_between_nodes, part.peak_bytes)
            table.add_row(name, kinds or "none", *map(format_bytes, sizes))
        batches = f"{self.micro_batches} × {self.sequences_per_micro_batch} sequences a rank"
        bandwidth = self.parts["step"].bytes_sent / (self.flops_per_step / _SUSTAINED_FLOPS)
        lines = [
            f"{self.tokens_per_step:,} tokens a step, {batches}, {self.precision}, {self.optimizer}, not compiled",
            f"weights and moments {format_bytes(self.state_bytes)}; a checkpoint writes "
            f"{format_bytes(self.checkpoint_bytes)} from each rank",
            f"compute {self.flops_per_step / 1e12:,.0f} TFLOP a step: at 400 TFLOP/s as long as the traffic at "
            f"{format_bytes(bandwidth)}/s",
            *self.not_counted,
        ]
        table.caption, table.caption_justify = "\n".join(lines), "left"
        return table


def simulate(recipe: Recipe, world: int, *, ranks_per_node: int = RANKS_PER_NODE) -> WorldPlan:
    """Count a step, an event, a compaction and a checkpoint of a recipe on ``world`` ranks, one per GPU."""
    recipe = resolve_recipe(recipe)
    _check(recipe, world, ranks_per_node)
    ranks_per_node = min(ranks_per_node, world)
    start = start_of(recipe)
    with simulated_world(world, ranks_per_node) as ranks:
        simulation = Simulation(recipe, start, ranks)
        return simulation.run()


def _check(recipe: Recipe, world: int, ranks_per_node: int) -> None:
    if world < 1:
        raise UserError(f"--world {world}: give the number of processes, at least 1")
    check_processes(recipe, world, "--world")
    if world > ranks_per_node and world % ranks_per_node:
        raise UserError(
            f"--world {world}: machines have {ranks_per_node} processes each: give a multiple, or another --nproc"
        )
    if recipe.training.lora_rank:
        raise UserError("--world: adapters are not simulated: set training.lora_rank to 0")


class _Batches:
    """What the loop asks its data for."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens_per_step = self.num_predictions = num_tokens

    def next_step(self) -> list[Tensor]:
        raise AssertionError("the simulation passes micro-batches itself")

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("nothing is saved")


class _Pruner(Pruner):
    """Scores after every step."""

    def scores_step(self, step: int) -> bool:
        return True


class Simulation:
    """Rank 0 of a run, assembled like ``run.pretrain.Job``, without data, files and weights."""

    def __init__(self, recipe: Recipe, start: Start, world: World) -> None:
        self.recipe, self.start, self.world = recipe, start, world
        training = recipe.training
        on_cpu = recipe.source.device == "cpu"
        self.precision: Precision = (
            ("fp32" if on_cpu else "bf16") if training.precision == "auto" else training.precision
        )
        self.config = start.config()
        self.anatomy = Anatomy.of_config(self.config)
        self.parallel = parallel_of(recipe, world, self.anatomy)
        self.tally = Tally(world.local_size)
        self.plan = plan_pruning(recipe, self.anatomy, start)
        largest = -(-recipe.num_sequences_per_step // world.size)
        self.micro_batches = -(-largest // liked_micro_batch(recipe, "cpu" if on_cpu else "cuda"))
        self.sequences = -(-largest // self.micro_batches)
        self.engine = self._engine()
        model = self._model(self.config, weights_dtype(self.precision))
        with weightless(self.tally):
            self._assemble(model, "cpu" if on_cpu else "cuda")

    def _engine(self) -> Engine:
        if self.parallel == "ddp":
            return SimulatedReplicas(language_model_loss, self.world)
        return choose_engine(self.world, self.parallel, language_model_loss, device="cpu", precision=self.precision)

    def _model(self, config: Any, dtype: torch.dtype) -> nn.Module:
        """The model of the engine; one that is not sharded has tensors without storage."""

        def whole() -> nn.Module:
            with weightless(self.tally):
                return build(config, {name: self._fetch(dtype, config)(name) for name in _shapes(config)})

        return self.engine.build(config, dtype, whole)

    def _fetch(self, dtype: torch.dtype, config: Any) -> Fetch:
        shapes = _shapes(config)
        return lambda name: torch.empty(shapes[name], dtype=dtype)

    def _assemble(self, model: nn.Module, device: str) -> None:
        recipe, training = self.recipe, self.recipe.training
        self.pruner: Pruner | None = None
        if self.plan is not None:
            self.pruner = self._pruner(Prunable(model, self.anatomy, self.anatomy.source))
        optimizer = self._prepare(model, self._fetch(weights_dtype(self.precision), self.config))
        if self.pruner is not None:
            self.pruner.prunable.refresh()
        self.trainer = Trainer(
            model,
            optimizer,
            LRSchedule.of(training, recipe.num_steps),
            _Batches(recipe.num_tokens_per_step),
            config=training,
            num_steps=recipe.num_steps,
            precision=self.precision,
            callbacks=[] if self.pruner is None else [self.pruner],
            engine=self.engine,
            teacher=self._teacher(device),
        )

    def _prepare(self, model: nn.Module, fetch: Fetch | None = None) -> torch.optim.Optimizer:
        self.engine.materialize(model, fetch)
        return build_optimizer(model, self.recipe.training, fused=True)  # as on a GPU

    def _pruner(self, prunable: Prunable) -> Pruner:
        assert self.plan is not None
        return _Pruner(
            prunable,
            self.plan.target,
            self.plan.pacing,
            config=self.recipe.prune,
            ledger=Path(os.devnull),
            source=self.recipe.source.model,
            rebuild=self._prepare,
        )

    def _teacher(self, device: str) -> Teacher | None:
        source = teacher_of(self.recipe, self.config)
        if source is None:
            return None
        dtype, config = teacher_dtype(self.precision, device), self.start.like(source).config()
        states = HiddenStates(self._model(config, dtype))
        self.engine.materialize_frozen(states, self._fetch(dtype, config))
        distill = self.recipe.distill
        return Teacher.of(states, Distillation(self.recipe.teacher_weight, distill.temperature, distill.top_k))

    def run(self) -> WorldPlan:
        """Count the parts of a run, one after the other."""
        keep = None  # what is left at about the target
        if self.pruner is not None:
            keep = cut_evenly(self.anatomy, self.anatomy.source, self.pruner.end_count)
        with weightless(self.tally):
            one = self.step(1)  # makes the moments
            two = self.step(min(self.micro_batches, 2), keep)
            each = two.plus(one, times=-1)  # all but the last micro-batch cost the same
            parts = {"step": two.plus(each, times=max(0, self.micro_batches - 2))}
            state_bytes = self.tally.held_bytes
            if keep is not None:
                parts["event"] = self.event
            parts["checkpoint"], written = self.checkpoint()  # of the whole model, which is the largest
            if self.pruner is not None and keep is not None:
                self.pruner.compact(self.trainer, keep)
                parts["compaction"] = self.tally.lap()
        return self._plan(parts, state_bytes, written, keep)

    def step(self, num_micro_batches: int, keep: Structure | None = None) -> Traffic:
        """The traffic of a step of so many micro-batches; that of its event, if it prunes, is in ``event``."""
        trainer, shape = self.trainer, (self.sequences, self.recipe.data.seq_len + 1)
        self.tally.lap()
        trainer.forward_backward([torch.zeros(shape, dtype=torch.int64) for _ in range(num_micro_batches)])
        for callback in trainer.callbacks:
            callback.edit_gradients(trainer)
        norm = trainer.engine.grad_norm(trainer.model.parameters())
        before, self.event = self.tally.lap(), Traffic()
        if keep is not None and self.pruner is not None:
            self.pruner.after_backward(trainer)
            self.event = self.tally.lap()
        trainer.update(norm, healthy=True, clip=trainer.config.clip > 0)
        after = self.tally.lap()
        if keep is not None and self.pruner is not None:
            self.pruner.prunable.prune_to(keep, trainer.optimizer)
            self.event = self.event.plus(self.tally.lap())
        return before.plus(after)

    def checkpoint(self) -> tuple[Traffic, int]:
        """Collect what this rank writes (with its bytes), and wait for the others."""
        files = self.engine.files(self.trainer.tensors())
        sizes = {
            (tensor.untyped_storage()._cdata, tensor.storage_offset()): tensor.numel() * tensor.element_size()
            for named in files.values()
            for tensor in named.values()
        }
        self.world.barrier()
        return self.tally.lap(), sum(sizes.values())

    def _plan(self, parts: dict[str, Traffic], state_bytes: int, written: int, keep: Structure | None) -> WorldPlan:
        recipe, source = self.recipe, self.anatomy.source
        seq_len = recipe.data.seq_len
        each = flops_per_token(self.anatomy, source, seq_len)
        if self.trainer.teacher is not None:
            each += forward_flops_per_token(Anatomy.of_config(cast(Any, self.trainer.teacher.model).config), seq_len)
        return WorldPlan(
            model=recipe.source.model,
            world=self.world.size,
            ranks_per_node=self.world.local_size,
            parallel=self.parallel,
            precision=self.precision,
            optimizer=recipe.training.optimizer,
            parameters=self.anatomy.count(source).total,
            parameters_compacted=None if keep is None else self.anatomy.count(keep).total,
            tokens_per_step=recipe.num_tokens_per_step,
            micro_batches=self.micro_batches,
            sequences_per_micro_batch=self.sequences,
            flops_per_step=each * self.micro_batches * self.sequences * seq_len,
            state_bytes=state_bytes,
            checkpoint_bytes=written,
            parts=parts,
            not_counted=list(_not_counted(recipe)),
        )


def _not_counted(recipe: Recipe) -> Iterator[str]:
    prune = recipe.prune
    if not prune.enabled:
        return
    if prune.second_order:
        yield "prune.second_order: what ranks exchange of the layers' inputs is not counted"
    if prune.has_own_score or prune.effective_metric in ("wanda", "obc"):
        yield f"{prune.effective_metric}: what its scores exchange is not counted"


def _shapes(config: Any) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in build_on_meta(config).named_parameters()}
