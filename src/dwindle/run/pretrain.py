"""Pruning-aware pretraining from a recipe: ``dwindle pretrain`` and ``dwindle resume``.

Opens the data, builds the model (from the source, or from a checkpoint at its shapes), the optimizer, the callbacks and
the training loop, and writes the result.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from os import PathLike
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from dwindle.anatomy.anatomy import Anatomy
from dwindle.anatomy.build import aligned, build, build_random, config_for
from dwindle.anatomy.structure import Structure
from dwindle.core.config import to_toml
from dwindle.core.errors import UserError
from dwindle.core.files import NotWritten, refuse_sources
from dwindle.core.json_safe import finite
from dwindle.core.quality import Quality
from dwindle.core.run_directory import LOGS, RunDirectory
from dwindle.data.batches import BatchStream
from dwindle.data.chat import ChatEncoder
from dwindle.data.training_data import TrainingData, open_training_data
from dwindle.distributed.elastic import job_id
from dwindle.distributed.engines import choose_engine
from dwindle.distributed.lazy_weights import Fetch, from_main, on_first_use
from dwindle.distributed.precision import weights_dtype
from dwindle.distributed.world import World
from dwindle.export.huggingface import save_model, try_save
from dwindle.pruning.ledger import first_events
from dwindle.pruning.pruner import Pruner, physical_structure
from dwindle.pruning.sheared import ShearedPruner
from dwindle.pruning.surgery import Prunable
from dwindle.recipe.recipe import Recipe, load_recipe, resolve_recipe
from dwindle.run.identity import RunState, accept_changes, generation_of, identity_of
from dwindle.run.judging import QualityRecorder, whole_source
from dwindle.run.plan import (
    PlanWarning,
    PruningPlan,
    check_data,
    device_of,
    joined_for,
    packs,
    parallel_of,
    plan_pruning,
    plan_warnings,
    precision_of,
    repetition,
    settle,
    teacher_dtype,
    teacher_of,
)
from dwindle.run.result import RunResult
from dwindle.run.start import start_of
from dwindle.sources.generation import stopping_at
from dwindle.training.callbacks import Callback, Checkpointer, FirstStep, Validator, truncate_to
from dwindle.training.checkpoint import Checkpoint, fitting, latest_checkpoint, open_checkpoint, write_failure
from dwindle.training.compiling import compile_blocks
from dwindle.training.display import Display
from dwindle.training.distill import Distillation, HiddenStates, Teacher
from dwindle.training.float8 import use_float8
from dwindle.training.loop import Trainer, TrainingDiverged
from dwindle.training.lora import add_adapters, merged
from dwindle.training.loss import language_model_loss
from dwindle.training.metrics import MetricsWriter
from dwindle.training.optim import LRSchedule, build_optimizer
from dwindle.training.rng import seed_everything
from dwindle.training.stop import StopSignal
from dwindle.training.trackers import TRACKERS, chosen_tools, require_installed

Results = dict[str, float | int | str]


def pretrain(
    recipe: Recipe, out: str | PathLike[str], *, overwrite: bool = False, callbacks: Sequence[Callback] = ()
) -> RunResult:
    """Start a run in a new directory and train to its end, or until a signal.

    ``callbacks`` are called beside the run's own: their ``trainer.extra_metrics`` are written to its metrics, their
    state to its checkpoints. Restarted by torchrun, the run that an earlier attempt of the same job began is resumed.
    """
    run = RunDirectory(Path(out))
    recipe = resolve_recipe(recipe)
    recipe.check()
    with joined_for(recipe) as world:

        def begin() -> None:
            if world.is_main and not run.belongs_to(job := job_id()):
                begin_run(recipe, run, overwrite=overwrite, job=job)

        world.main_first("begin", begin)
        try:
            return _continue(load_recipe(run.recipe), run, world, callbacks)
        except BaseException as error:
            if world.is_main:
                run.forget_if_not_begun(only_replacing=not isinstance(error, UserError))
            raise


def begin_run(recipe: Recipe, run: RunDirectory, *, overwrite: bool, job: str = "") -> None:
    """Refuse what cannot work, then make the run's directory; ``resume`` trains it.

    A replaced run is kept aside until the new one has made a step. ``job`` may continue the run automatically.
    """
    run.restore_replaced()
    check_data(recipe)
    require_installed(chosen_tools(recipe.logging))
    run.check_free(overwrite=overwrite)
    texts = [*recipe.task.chat, *recipe.data.trained_on(), *recipe.data.valid, *recipe.validation.data]
    refuse_sources(run.path, [recipe.source.model, recipe.distill.teacher, *texts, *recipe.vocabulary.text])
    start = start_of(recipe)
    config = start.config()
    plan = plan_pruning(recipe, Anatomy.of_config(config), start)
    teacher_of(recipe, config)
    for warning in plan_warnings(recipe, config, plan):
        warnings.warn(warning, PlanWarning, stacklevel=2)
    run.create(to_toml(recipe), start.record(), job)


def resume(run: str | PathLike[str], *, callbacks: Sequence[Callback] = ()) -> RunResult:
    """Continue a run from its newest good checkpoint; its recipe says where source and text are."""
    directory = RunDirectory(Path(run))
    directory.restore_replaced()
    directory.check_is_run()
    recipe = load_recipe(directory.recipe)
    with joined_for(recipe) as world:
        return _continue(recipe, directory, world, callbacks)


def _continue(recipe: Recipe, run: RunDirectory, world: World, callbacks: Sequence[Callback]) -> RunResult:
    with run.locked() if world.is_main else nullcontext(), StopSignal() as stop:
        if world.is_main:
            run.tidy()
        recipe = settle(recipe, run, world)
        seed_everything(recipe.training.seed)
        checkpoint = world.main_first("checkpoint", lambda: _newest(run, world))
        job = Job(recipe, run, checkpoint, stop, world, callbacks)
        try:
            status = job.trainer.run()
        except TrainingDiverged as error:
            raise _after_divergence(error, run, job.trainer.step, world) from error
        result = job.finish(status)
        result.signal = stop.number if result.status == "stopped" else None
        return result


def _after_divergence(error: TrainingDiverged, run: RunDirectory, step: int, world: World) -> TrainingDiverged:
    """The same error with advice; the run records that its rate may now be changed."""
    if world.is_main:
        run.note_divergence(step)
    if not (good := run.list_checkpoints()):
        return TrainingDiverged(f"{error}; it has no checkpoint: begin again with {run.restart_command}")
    edit = f"lower training.lr in {run.recipe}"
    return TrainingDiverged(f"{error}: {edit}, then `{run.resume_command}` continues from {good[-1].name}")


def _newest(run: RunDirectory, world: World) -> Checkpoint | None:
    """The newest good checkpoint; without one, the logs of an attempt that never wrote one are emptied."""
    if run.list_checkpoints():
        return open_checkpoint(latest_checkpoint(run.path))
    if not world.is_main:
        return None
    if run.last_checkpoint_step is not None:
        raise UserError(
            f"{run.checkpoints}: holds no checkpoint, although step {run.last_checkpoint_step:,} was saved: mount or "
            f"restore it, or begin again with {run.restart_command}"
        )
    if run.has_begun:
        warnings.warn(f"{run.path}: ended before its first checkpoint: begins again", PlanWarning, stacklevel=2)
    for log in (run.metrics, run.ledger):
        truncate_to(log, 0)
    return None


class Job:
    """A run assembled from its recipe, at the beginning or at a checkpoint."""

    def __init__(
        self,
        recipe: Recipe,
        run: RunDirectory,
        checkpoint: Checkpoint | None,
        stop: StopSignal,
        world: World,
        callbacks: Sequence[Callback],
    ) -> None:
        self.recipe, self.run, self.world = recipe, run, world
        training = recipe.training
        self.device = device_of(recipe)
        self.precision = precision_of(recipe, self.device)
        self.start = start_of(recipe, run)
        self.config = self.start.config()
        self.tokenizer = self.start.tokenizer()
        if recipe.task.kind == "chat":
            self.tokenizer.chat_template = ChatEncoder(self.tokenizer).template
        data, batches = self._data()
        self.anatomy = Anatomy.of_config(self.config)
        self.state = self._state(checkpoint, data)
        if checkpoint is None and self.world.is_main:
            for warning in filter(None, (data.warning, repetition(data.mixture.epochs, recipe))):
                warnings.warn(warning, PlanWarning, stacklevel=2)
        model, optimizer = self._model(checkpoint)
        teacher = self._teacher(model.config)
        self.validator = None if data.valid_windows is None else Validator(data.valid_windows, recipe.validation.every)
        self.recorder = QualityRecorder(
            run.quality, self.tokenizer, self.validator, recipe.data.validated_on(recipe.task), whole_source(self)
        )
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
        if checkpoint is None:
            self.world.main_first("try to save", self._try_save)
        else:
            self.trainer.load_checkpoint(checkpoint)
            self._report_changes()

    def _state(self, checkpoint: Checkpoint | None, data: TrainingData) -> RunState:
        """What a checkpoint records of the run as a whole; another run's checkpoint is refused."""
        with nullcontext() if checkpoint is None else fitting(checkpoint.path):
            generation = generation_of(checkpoint) or stopping_at(self.start.generation(), data.end_of_turn)
        state = RunState({}, generation)

        def compare() -> None:
            if self.world.is_main:
                state.identity = identity_of(self.recipe, data.valid_windows, self.start.vocabulary)
                with nullcontext() if checkpoint is None else fitting(checkpoint.path):
                    state.changes = accept_changes(checkpoint, state.identity, self.run, self.anatomy)

        self.world.main_first("identity", compare)
        return state

    def _report_changes(self) -> None:
        """Report the changes that this ``resume`` makes, in the ledger and on standard error."""
        for event in self.state.new_changes if self.world.is_main else ():
            if self.pruner is not None:
                self.pruner.ledger.append(event)
            changed = ", ".join(f"{name} from {c['was']} to {c['is']}" for name, c in event["changed"].items())
            warnings.warn(f"{self.run.path}: from step {event['step']:,} on: {changed}", PlanWarning, stacklevel=2)

    def _try_save(self) -> None:
        """Called before the first step: what cannot be written must fail now, not at the end."""
        if self.world.is_main:
            self._write(merged(self.trainer.model), self.anatomy.source, self.run.model, {}, save=try_save)

    def _data(self) -> tuple[TrainingData, BatchStream]:
        """The texts of the recipe, and the batches of this process."""
        settings, seed = self.recipe.data, self.recipe.training.seed
        cache = Path(settings.cache_dir) if settings.cache_dir else self.run.tokens
        task, packed = self.recipe.task, packs(self.recipe, self.config)

        def open_data() -> TrainingData:
            return open_training_data(settings, self.tokenizer, seed=seed, cache_dir=cache, task=task, packed=packed)

        data = self.world.main_first("data", open_data)
        batches = BatchStream(
            data.mixture,
            tokens_per_step=self.recipe.num_tokens_per_step,
            micro_batch=self.recipe.training.micro_batch,
            rank=self.world.rank,
            world_size=self.world.size,
            first_sample=self.recipe.first_sample,
        )
        return data, batches

    def finish(self, status: str) -> RunResult:
        """Write the final model, cut to what is alive, if training finished; returns how the run ended."""
        trainer = self.trainer
        quality = self.recorder.quality
        written = self._save(self.run.model, self._results(), quality) if status == "finished" else None
        return RunResult(
            run=self.run.path,
            recipe=self.recipe,
            status=status,
            step=trainer.step,
            tokens=trainer.tokens,
            parameters=self._count(),
            loss=finite(trainer.loss),
            valid_loss=None if self.validator is None else finite(self.validator.last),
            model=written,
            target_reached=self.pruner is None or self.pruner.finished,
            skipped_steps=trainer.bad_steps,
            quality=quality,
        )

    def _model(self, checkpoint: Checkpoint | None) -> tuple[nn.Module, torch.optim.Optimizer]:
        """The source's weights, or those of a checkpoint at the shapes they were saved with; sets up the pruner."""
        recipe = self.recipe
        physical = self.anatomy.source
        if checkpoint is not None and (saved := checkpoint.state["callbacks"].get("Pruner")):
            with fitting(checkpoint.path):
                physical = physical_structure(saved)
                if not self.anatomy.source.contains(physical):
                    raise ValueError("its structure is not part of the source's")
        parallel = parallel_of(recipe, self.world, self.anatomy)
        self.engine = choose_engine(
            self.world, parallel, language_model_loss, device=self.device, precision=self.precision
        )
        resized = config_for(self.config, physical)
        model = self.engine.build(
            resized, weights_dtype(self.precision), lambda: self._whole_model(checkpoint, resized)
        )
        cast(Any, model).generation_config = self.state.generation
        if recipe.training.lora_rank:
            add_adapters(model, recipe.training.lora_rank)
        plan = plan_pruning(recipe, self.anatomy, self.start)
        self.pruner: Pruner | None = None
        if plan is not None:
            self.pruner = self._pruner(Prunable(model, self.anatomy, physical), plan)
        optimizer = self._prepare(model, on_first_use(lambda: self._tensors(checkpoint)))
        if self.pruner is not None:
            self.pruner.prunable.refresh()
        return model, optimizer

    def _whole_model(self, checkpoint: Checkpoint | None, config: Any) -> nn.Module:
        if checkpoint is None or self.recipe.training.lora_rank:
            return self._fresh_model()
        with fitting(checkpoint.path):
            tensors = {name: t.to(self.device) for name, t in checkpoint.tensors("model").items()}
            try:
                return aligned(build(config, tensors))
            except RuntimeError as error:
                if "size mismatch" not in str(error):
                    raise
                raise ValueError("its tensors do not have the sizes that its state says") from error

    def _fresh_model(self) -> nn.Module:
        """The source at the start of training."""
        dtype = weights_dtype(self.precision)
        if self.recipe.source.random_init:
            return build_random(self.config, self.recipe.training.seed).to(self.device, dtype)
        return self.start.model(dtype, self.device)

    def _teacher(self, config: Any) -> Teacher | None:
        """The frozen model of [distill]: whole in every process, or sharded like the model that is trained."""
        source = teacher_of(self.recipe, config)
        if source is None:
            return None
        dtype, start = teacher_dtype(self.precision, self.device), self.start.like(source)
        model = self.engine.build(start.config(), dtype, lambda: start.model(dtype, self.device))
        if self.recipe.training.compile:
            compile_blocks(model)
        states = HiddenStates(model)
        self.engine.materialize_frozen(states, on_first_use(lambda: start.tensors(dtype, self.world)))
        weight, distill = self.recipe.teacher_weight, self.recipe.distill
        return Teacher.of(states, Distillation(weight, distill.temperature, distill.top_k))

    def _tensors(self, checkpoint: Checkpoint | None) -> Fetch:
        """Weights by name, one at a time, for an engine that shards the model."""
        dtype = weights_dtype(self.precision)
        if checkpoint is not None:
            return checkpoint.pieces("model").__getitem__
        if self.recipe.source.random_init:
            return from_main(self._fresh_model, self.world)
        return self.start.tensors(dtype, self.world)

    def _pruner(self, prunable: Prunable, plan: PruningPlan) -> Pruner:
        kind = ShearedPruner if self.recipe.prune.method == "sheared" else Pruner
        return kind(
            prunable,
            plan.target,
            plan.pacing,
            config=self.recipe.prune,
            seed=self.recipe.training.seed,
            ledger=self.run.ledger if self.world.is_main else Path(os.devnull),
            source=self.recipe.source.model,
            rebuild=self._prepare,
            milestones=plan.milestones,
            on_milestone=self._save_milestone,
            vocabulary=self.start.vocabulary,
        )

    def _prepare(self, model: nn.Module, fetch: Fetch | None = None) -> torch.optim.Optimizer:
        """Prepare the layers (float8, compiled) and build the optimizer, at the start and after each compaction.

        ``fetch`` gives the weights of a model on the meta device.
        """
        training = self.recipe.training
        if self.precision == "fp8":
            use_float8(model)
        if training.compile:
            compile_blocks(model)
        self.engine.materialize(model, fetch)
        return build_optimizer(model, training)

    def _callbacks(self, others: Sequence[Callback]) -> list[Callback]:
        callbacks: list[Callback] = [self.state]
        if self.pruner is not None:
            callbacks.append(self.pruner)
        if self.validator is not None:
            callbacks.append(self.validator)
        callbacks.append(self.recorder)
        if self.recipe.validation.tasks:
            callbacks.append(self._task_evaluator())
        callbacks += others
        if self.world.is_main:
            callbacks += [MetricsWriter(self.run.metrics), FirstStep(self.run.discard_replaced)]
            callbacks += self._trackers()
            callbacks.append(Display())
        settings = self.recipe.checkpoint
        last = Checkpointer(self.run.path, settings.every, settings.keep_last, extra_files=LOGS, engine=self.engine)
        return [*callbacks, last]

    def _trackers(self) -> list[Callback]:
        recipe, title = self.recipe, self.run.path.resolve().name
        shown = {"training": recipe.training.model_dump(), "prune": recipe.prune.model_dump()}
        tools = chosen_tools(recipe.logging)
        return [TRACKERS[name](self.run.tool(name), recipe.logging, title, shown) for name in tools]

    def _count(self) -> int:
        if self.pruner is not None:
            return self.pruner.prunable.num_parameters
        return self.anatomy.count(self.anatomy.source).total

    def _save_milestone(self, name: str) -> None:
        """Without a validation loss: the last one belongs to an earlier step and a larger model."""
        self._save(self.run.milestone(name), {"training tokens": self.trainer.tokens})

    def _task_evaluator(self) -> Callback:
        from dwindle.evaluation.callback import TaskEvaluator, recipe_data

        settings = self.recipe.validation
        return TaskEvaluator(recipe_data(settings), self.tokenizer, settings.every, batch=settings.batch)

    def _results(self) -> Results:
        """Results for the final model's card; the last step is always validated, after its events."""
        found: Results = {"training tokens": self.trainer.tokens}
        if self.validator is not None and self.validator.last is not None:
            found["validation loss (nats per token)"] = round(self.validator.last, 4)
        return found

    def _save(self, out: Path, results: Results, quality: Quality | None = None) -> Path:
        """All processes gather the weights of a sharded model; the main one writes, and the others wait for it."""
        if self.pruner is not None:
            model, structure = self.pruner.prunable.compacted(), self.pruner.prunable.alive
        else:
            model, structure = merged(self.engine.gather(self.trainer.model)), self.anatomy.source

        def write() -> None:
            if self.world.is_main:
                self._write(model, structure, out, results, quality)

        self.world.main_first(f"save {out}", write)
        self.world.barrier()  # the main process hosts the store and must not exit before all have read it
        return out

    def _write(
        self,
        model: nn.Module,
        structure: Structure,
        out: Path,
        results: Results,
        quality: Quality | None = None,
        save: Callable[..., object] | None = None,
    ) -> None:
        source = self.recipe.source.model
        ledger = [] if self.pruner is None else self.pruner.ledger.events
        try:
            (save or save_model)(
                model,
                self.tokenizer,
                out,
                structure=structure,
                source=source,
                ledger=ledger or [*first_events(source, self.anatomy, {}, self.start.vocabulary), *self.state.changes],
                recipe=to_toml(self.recipe),
                results=results,
                quality=quality,
                overwrite=True,
            )
        except NotWritten as failure:
            raise write_failure(failure.error, self.run, out, dict(model.named_parameters())) from failure
