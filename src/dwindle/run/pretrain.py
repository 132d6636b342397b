"""Pruning-aware pretraining from a recipe: ``dwindle pretrain`` and ``dwindle resume``.

This is where the rooms meet: it opens the data, builds the model (from the source, or from a checkpoint at its
shapes), the optimizer, the callbacks and the loop, and writes the result.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from shlex import quote
from typing import Any

import torch
from torch import nn

from dwindle.anatomy import Anatomy, Structure
from dwindle.anatomy.build import build, build_random, config_for
from dwindle.core.config import write_toml
from dwindle.core.directories import NotWritten, atomic_directory, refuse_place
from dwindle.core.errors import UserError
from dwindle.core.json_safe import finite
from dwindle.core.run_lock import RunLock
from dwindle.data import BatchStream, open_training_data
from dwindle.distributed.engines import Parallel, choose_engine, choose_parallel, num_shards
from dwindle.distributed.lazy_weights import Fetch, from_main, on_first_use, source_tensors
from dwindle.distributed.precision import weights_dtype
from dwindle.distributed.world import World, joined
from dwindle.export.huggingface import save_model
from dwindle.pruning.ledger import read_ledger, source_event
from dwindle.pruning.pruner import Pruner, physical_structure
from dwindle.pruning.surgery import Prunable
from dwindle.recipe.recipe import Recipe, load_recipe, resolve_recipe
from dwindle.run.overwrite import (
    discard_replaced,
    forget_if_not_begun,
    put_aside,
    refuse_inputs,
    restore_replaced,
    tidy,
)
from dwindle.run.plan import (
    PlanWarning,
    PruningPlan,
    check_data,
    device_of,
    micro_batch_of,
    plan_pruning,
    plan_warnings,
    precision_of,
    repetition,
    teacher_dtype,
    teacher_of,
)
from dwindle.sources import load, load_config, load_tokenizer
from dwindle.training.callbacks import Callback, Checkpointer, FirstStep, Validator, truncate_to
from dwindle.training.checkpoint import (
    Checkpoint,
    has_begun,
    latest_checkpoint,
    list_checkpoints,
    open_checkpoint,
    write_failure,
)
from dwindle.training.compiling import compile_blocks
from dwindle.training.display import Display
from dwindle.training.distill import Distillation, HiddenStates, Teacher
from dwindle.training.loop import Trainer
from dwindle.training.loss import language_model_loss
from dwindle.training.metrics import MetricsWriter, TensorBoardWriter, tensorboard_installed
from dwindle.training.optim import LRSchedule, build_optimizer
from dwindle.training.rng import seed_everything
from dwindle.training.stop import StopSignal

LOGS = ("metrics.jsonl", "ledger.jsonl")
Results = dict[str, float | int | str]


@dataclass(slots=True)
class RunResult:
    """How a run ended; ``model`` is None while it can still be resumed."""

    run: Path
    status: str
    step: int
    tokens: int
    parameters: int
    loss: float | None
    valid_loss: float | None
    model: Path | None
    target_reached: bool
    skipped_steps: int = 0
    """Steps whose loss or gradient was not finite."""
    signal: int | None = None
    """What stopped it, where a signal did."""


def pretrain(
    recipe: Recipe, out: str | PathLike[str], *, overwrite: bool = False, callbacks: Sequence[Callback] = ()
) -> RunResult:
    """Start a run in a new directory and train to its end, or to the next signal; with more ``callbacks`` than its own.

    What those add to ``trainer.extra_metrics`` stands in the run's metrics, what they keep in its checkpoints.
    """
    run = Path(out)
    recipe = resolve_recipe(recipe)
    recipe.check()
    with joined(device_of(recipe)) as world:
        world.main_first("begin", lambda: begin_run(recipe, run, overwrite=overwrite) if world.is_main else None)
        try:
            return _continue(recipe, run, world, callbacks)
        except BaseException as error:
            if world.is_main:
                forget_if_not_begun(run, only_replacing=not isinstance(error, UserError))
            raise


def begin_run(recipe: Recipe, run: Path, *, overwrite: bool) -> None:
    """Refuse what cannot work, then make the run's directory; ``resume`` does the rest.

    A run that is replaced is put aside until the new one has made a step.
    """
    restore_replaced(run)
    check_data(recipe)
    check_run_directory(run, overwrite=overwrite)
    refuse_inputs(recipe, run)
    config = load_config(recipe.source.model)
    plan = plan_pruning(recipe, Anatomy.of_config(config))
    teacher_of(recipe, config)
    for warning in plan_warnings(recipe, config, plan):
        warnings.warn(warning, PlanWarning, stacklevel=2)
    aside = put_aside(run) if (run / "recipe.toml").is_file() else nullcontext()
    with aside, atomic_directory(run, marker="recipe.toml", overwrite=True) as folder:  # no kill leaves half a run
        write_toml(recipe, folder / "recipe.toml")
        RunLock(folder).path.touch()  # marks a run: a recipe.toml may be anyone's


def resume(run: str | PathLike[str], *, callbacks: Sequence[Callback] = ()) -> RunResult:
    """Continue a run from its newest good checkpoint; its recipe says where source and text are."""
    run = Path(run)
    restore_replaced(run)
    if not (run / "recipe.toml").is_file():
        raise UserError(f"{run}: holds no recipe.toml: give the directory that dwindle pretrain wrote")
    recipe = load_recipe(run / "recipe.toml")
    with joined(device_of(recipe)) as world:
        return _continue(recipe, run, world, callbacks)


def check_run_directory(run: Path, *, overwrite: bool) -> None:
    """Never write over another run unasked."""
    refuse_place(run)
    if not run.exists() or (run.is_dir() and not any(run.iterdir())):
        return
    if not (run / "recipe.toml").is_file() or not (RunLock(run).path.exists() or has_begun(run)):
        raise UserError(f"--out {run}: exists and is not a run: choose another directory")
    if not overwrite:
        again = f"dwindle resume {quote(str(run))}"
        raise UserError(f"--out {run}: a run is there: `{again}` continues it, --overwrite replaces it")


def _continue(recipe: Recipe, run: Path, world: World, callbacks: Sequence[Callback]) -> RunResult:
    with RunLock(run) if world.is_main else nullcontext(), StopSignal() as stop:
        if world.is_main:
            tidy(run)
        recipe = settle(recipe, run, world)
        seed_everything(recipe.training.seed)
        checkpoint = world.main_first("checkpoint", lambda: _newest(run, world))
        job = Job(recipe, run, checkpoint, stop, world, callbacks)
        result = job.finish(job.trainer.run())
        result.signal = stop.number if result.status == "stopped" else None
        return result


def settle(recipe: Recipe, run: Path, world: World) -> Recipe:
    """What depends on the machine is chosen once, by the main process, and kept in the run's recipe.

    So all processes do the same on unequal devices, and so does a run that goes on elsewhere.
    """

    def choose() -> None:
        training = recipe.training
        if not world.is_main or (training.micro_batch and training.precision != "auto"):
            return
        training.precision = precision_of(recipe, device_of(recipe))
        if not training.micro_batch:
            config = load_config(recipe.source.model)
            shards = num_shards(world, parallel_of(recipe, world, Anatomy.of_config(config)))
            training.micro_batch = micro_batch_of(recipe, device_of(recipe), config, shards)
        try:
            write_toml(recipe, run / "recipe.toml")
        except OSError as error:
            raise NotWritten.file(run / "recipe.toml", error) from error

    world.main_first("settle", choose)
    return load_recipe(run / "recipe.toml")


def parallel_of(recipe: Recipe, world: World, anatomy: Anatomy) -> Parallel:
    return choose_parallel(world, recipe.training.parallel, anatomy.count(anatomy.source).total)


def _newest(run: Path, world: World) -> Checkpoint | None:
    """The newest good checkpoint; without one, logs of an earlier attempt are emptied."""
    if list_checkpoints(run):
        return open_checkpoint(latest_checkpoint(run))
    for log in LOGS if world.is_main else ():
        truncate_to(run / log, 0)
    return None


class Job:
    """A run assembled from its recipe, at the beginning or at a checkpoint."""

    def __init__(
        self,
        recipe: Recipe,
        run: Path,
        checkpoint: Checkpoint | None,
        stop: StopSignal,
        world: World,
        callbacks: Sequence[Callback],
    ) -> None:
        self.recipe, self.run, self.world = recipe, run, world
        training = recipe.training
        self.device = device_of(recipe)
        self.precision = precision_of(recipe, self.device)
        self.tokenizer = load_tokenizer(recipe.source.model)
        cache = Path(recipe.data.cache_dir) if recipe.data.cache_dir else run / "tokens"
        data = self.world.main_first(
            "data", lambda: open_training_data(recipe.data, self.tokenizer, seed=training.seed, cache_dir=cache)
        )
        batches = BatchStream(
            data.mixture,
            tokens_per_step=recipe.num_tokens_per_step,
            micro_batch=recipe.training.micro_batch,
            rank=self.world.rank,
            world_size=self.world.size,
        )
        if checkpoint is None and self.world.is_main and (doubt := repetition(data.mixture.epochs, recipe)):
            warnings.warn(doubt, PlanWarning, stacklevel=2)
        model, optimizer = self._model(checkpoint)
        teacher = self._teacher(model.config)
        self.validator = None if data.valid_windows is None else Validator(data.valid_windows, recipe.validation.every)
        self.trainer = Trainer(
            model,
            optimizer,
            LRSchedule.of(training, recipe.num_steps),
            batches,
            config=training,
            num_steps=recipe.num_steps,
            device=self.device,
            precision=self.precision,
            callbacks=self._callbacks(callbacks),
            stop=stop,
            engine=self.engine,
            teacher=teacher,
        )
        if checkpoint is not None:
            self.trainer.load_checkpoint(checkpoint)

    def finish(self, status: str) -> RunResult:
        """The final model, exactly as small as it is alive."""
        trainer = self.trainer
        written = self._save(self.run / "model", self._results()) if status == "finished" else None
        return RunResult(
            run=self.run,
            status=status,
            step=trainer.step,
            tokens=trainer.tokens,
            parameters=self._count(),
            loss=finite(trainer.loss),
            valid_loss=None if self.validator is None else finite(self.validator.last),
            model=written,
            target_reached=self.pruner is None or self.pruner.finished,
            skipped_steps=trainer.bad_steps,
        )

    def _model(self, checkpoint: Checkpoint | None) -> tuple[nn.Module, torch.optim.Optimizer]:
        """The source's weights, or those of a checkpoint at the shapes they were saved with; sets up the pruner."""
        recipe, source = self.recipe, self.recipe.source.model
        config = load_config(source)
        self.anatomy = Anatomy.of_config(config)
        physical = self.anatomy.source
        if checkpoint is not None and (saved := checkpoint.state["callbacks"].get("Pruner")):
            physical = physical_structure(saved)
        parallel = parallel_of(recipe, self.world, self.anatomy)
        self.engine = choose_engine(
            self.world, parallel, language_model_loss, device=self.device, precision=self.precision
        )
        resized = config_for(config, physical)
        model = self.engine.build(
            resized, weights_dtype(self.precision), lambda: self._whole_model(checkpoint, resized)
        )
        plan = plan_pruning(recipe, self.anatomy)
        self.pruner: Pruner | None = None
        if plan is not None:
            self.pruner = self._pruner(Prunable(model, self.anatomy, physical), plan)
        optimizer = self._prepare(model, on_first_use(lambda: self._tensors(checkpoint)))
        if self.pruner is not None:
            self.pruner.prunable.refresh()
        return model, optimizer

    def _whole_model(self, checkpoint: Checkpoint | None, config: Any) -> nn.Module:
        if checkpoint is None:
            return self._fresh_model()
        return build(config, {name: t.to(self.device) for name, t in checkpoint.tensors("model").items()})

    def _fresh_model(self) -> nn.Module:
        """The source at the start of training."""
        source, dtype = self.recipe.source, weights_dtype(self.precision)
        if source.random_init:
            return build_random(load_config(source.model), self.recipe.training.seed).to(self.device, dtype)
        model: nn.Module = load(source.model, dtype=dtype, device=self.device).model
        return model

    def _teacher(self, config: Any) -> Teacher | None:
        """The frozen model of [distill]: whole in every process, or sharded like the model that is trained."""
        source = teacher_of(self.recipe, config)
        if source is None:
            return None
        dtype = teacher_dtype(self.precision, self.device)
        model = self.engine.build(
            load_config(source), dtype, lambda: load(source, dtype=dtype, device=self.device).model
        )
        if self.recipe.training.compile:
            compile_blocks(model)
        states = HiddenStates(model)
        self.engine.materialize_frozen(states, on_first_use(lambda: source_tensors(source, dtype, self.world)))
        distill = self.recipe.distill
        return Teacher.of(states, Distillation(distill.weight, distill.temperature, distill.top_k))

    def _tensors(self, checkpoint: Checkpoint | None) -> Fetch:
        """Weights by name, one at a time, for an engine that shards the model."""
        dtype = weights_dtype(self.precision)
        if checkpoint is not None:
            return checkpoint.pieces("model").__getitem__
        if self.recipe.source.random_init:
            return from_main(self._fresh_model, self.world)
        return source_tensors(self.recipe.source.model, dtype, self.world)

    def _pruner(self, prunable: Prunable, plan: PruningPlan) -> Pruner:
        return Pruner(
            prunable,
            plan.target,
            plan.pacing,
            config=self.recipe.prune,
            seed=self.recipe.training.seed,
            ledger=self.run / "ledger.jsonl" if self.world.is_main else Path(os.devnull),
            source=self.recipe.source.model,
            rebuild=self._prepare,
            milestones=plan.milestones,
            on_milestone=self._save_milestone,
        )

    def _prepare(self, model: nn.Module, fetch: Fetch | None = None) -> torch.optim.Optimizer:
        """Compile the layers and build the optimizer, at the start and after each compaction.

        ``fetch`` gives the weights of a model on the meta device.
        """
        training = self.recipe.training
        if training.compile:
            compile_blocks(model)
        self.engine.materialize(model, fetch)
        return build_optimizer(model, training)

    def _callbacks(self, others: Sequence[Callback]) -> list[Callback]:
        callbacks: list[Callback] = []
        if self.pruner is not None:
            callbacks.append(self.pruner)
        if self.validator is not None:
            callbacks.append(self.validator)
        if self.recipe.validation.tasks:
            callbacks.append(self._task_evaluator())
        callbacks += others
        if self.world.is_main:
            callbacks += [MetricsWriter(self.run / "metrics.jsonl"), FirstStep(lambda: discard_replaced(self.run))]
            if tensorboard_installed():
                callbacks.append(TensorBoardWriter(self.run / "tensorboard"))
            callbacks.append(Display())
        settings = self.recipe.checkpoint
        last = Checkpointer(self.run, settings.every, settings.keep_last, extra_files=LOGS, engine=self.engine)
        return [*callbacks, last]

    def _count(self) -> int:
        if self.pruner is not None:
            return self.pruner.prunable.num_parameters
        return self.anatomy.count(self.anatomy.source).total

    def _save_milestone(self, name: str) -> None:
        """Without a validation loss: the last one is of an earlier step, and of a larger model."""
        self._save(self.run / "milestones" / name.replace("/", "-"), {"training tokens": self.trainer.tokens})

    def _task_evaluator(self) -> Callback:
        from dwindle.evaluation.callback import TaskEvaluator, recipe_data

        settings = self.recipe.validation
        return TaskEvaluator(recipe_data(settings), self.tokenizer, settings.every, batch=settings.batch)

    def _results(self) -> Results:
        """What the final card says about the training; the last step is always validated, after its events."""
        found: Results = {"training tokens": self.trainer.tokens}
        if self.validator is not None and self.validator.last is not None:
            found["validation loss (nats per token)"] = round(self.validator.last, 4)
        return found

    def _save(self, out: Path, results: Results) -> Path:
        """All processes gather the weights of a sharded model; the main one writes, and the others wait for it."""
        if self.pruner is not None:
            model, structure = self.pruner.prunable.compacted(), self.pruner.prunable.alive
        else:
            model, structure = self.engine.gather(self.trainer.model), self.anatomy.source
        main = self.world.is_main
        self.world.main_first(f"save {out}", lambda: self._write(model, structure, out, results) if main else None)
        self.world.barrier()  # the main process hosts the store and must not exit before all have read it
        return out

    def _write(self, model: nn.Module, structure: Structure, out: Path, results: Results) -> None:
        ledger = [source_event(self.recipe.source.model, self.anatomy, {})]
        try:
            save_model(
                model,
                self.tokenizer,
                out,
                structure=structure,
                source=self.recipe.source.model,
                ledger=ledger if self.pruner is None else read_ledger(self.run / "ledger.jsonl"),
                recipe=(self.run / "recipe.toml").read_text(encoding="utf-8"),
                results=results,
                overwrite=True,
            )
        except NotWritten as failure:
            raise write_failure(failure.error, self.run, out, dict(model.named_parameters())) from failure
