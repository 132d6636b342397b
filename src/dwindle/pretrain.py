"""Pruning-aware pretraining from a recipe: ``dwindle pretrain`` and ``dwindle resume``.

This is where the rooms meet: it opens the data, builds the model (from the source, or from a checkpoint at its
shapes), the optimizer, the callbacks and the loop, and writes the result.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dwindle.anatomy import Anatomy
from dwindle.anatomy.build import build, config_for
from dwindle.config import write_toml
from dwindle.errors import UserError
from dwindle.export.huggingface import save_model
from dwindle.plan import PruningPlan, device_of, micro_batch_of, plan_pruning, precision_of
from dwindle.pruning.ledger import read_ledger, source_event
from dwindle.pruning.pruner import Pruner, PrunerOptions, physical_structure
from dwindle.pruning.surgery import Prunable
from dwindle.recipe import Recipe, absolute_paths, load_recipe
from dwindle.runlock import RunLock
from dwindle.sources import load, load_config, load_tokenizer
from dwindle.training.callbacks import Callback, Checkpointer, Validator, truncate_to
from dwindle.training.checkpoint import Checkpoint, latest_checkpoint, list_checkpoints, open_checkpoint
from dwindle.training.data import BatchStream, open_training_data
from dwindle.training.display import Display
from dwindle.training.loop import Trainer, TrainerOptions
from dwindle.training.loss import weights_dtype
from dwindle.training.metrics import MetricsWriter, TensorBoardWriter, tensorboard_installed
from dwindle.training.optim import build_adamw, build_schedule
from dwindle.training.rng import seed_everything
from dwindle.training.stop import StopSignal

LOGS = ("metrics.jsonl", "ledger.jsonl")


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


def pretrain(recipe: Recipe, out: str | PathLike[str], *, overwrite: bool = False) -> RunResult:
    """Start a run in a new directory and train to its end, or to the next signal."""
    run = Path(out)
    recipe = absolute_paths(recipe)
    recipe.validate()
    recipe.data.check()
    check_run_directory(run, overwrite=overwrite)
    plan_pruning(recipe, Anatomy.of_config(load_config(recipe.source.model)))
    if run.exists():
        shutil.rmtree(run)
    run.mkdir(parents=True)
    write_toml(recipe, run / "recipe.toml")
    try:
        return _continue(recipe, run)
    except UserError:
        if not list_checkpoints(run) and not any((run / log).exists() for log in LOGS):
            shutil.rmtree(run)  # nothing has begun: a mistake in the recipe leaves nothing behind
        raise


def resume(run: str | PathLike[str]) -> RunResult:
    """Continue a run from its newest good checkpoint; its directory is all that is needed."""
    run = Path(run)
    if not (run / "recipe.toml").is_file():
        raise UserError(f"{run}: holds no recipe.toml: give the directory that dwindle pretrain wrote")
    return _continue(load_recipe(run / "recipe.toml"), run)


def check_run_directory(run: Path, *, overwrite: bool) -> None:
    """Never write over another run unasked."""
    if not run.exists() or (run.is_dir() and not any(run.iterdir())):
        return
    if not (run / "recipe.toml").is_file():
        raise UserError(f"--out {run}: exists and is not a run: choose another directory")
    if not overwrite:
        raise UserError(f"--out {run}: a run is there: `dwindle resume {run}` continues it, --overwrite replaces it")


def _continue(recipe: Recipe, run: Path) -> RunResult:
    with RunLock(run), StopSignal() as stop:
        seed_everything(recipe.training.seed)
        checkpoint = None
        if list_checkpoints(run):
            checkpoint = open_checkpoint(latest_checkpoint(run))
        else:
            for log in LOGS:
                truncate_to(run / log, 0)
        job = Job(recipe, run, checkpoint, stop)
        status = job.trainer.run()
        return job.finish(status)


class Job:
    """A run assembled from its recipe, at the beginning or at a checkpoint."""

    def __init__(self, recipe: Recipe, run: Path, checkpoint: Checkpoint | None, stop: StopSignal) -> None:
        self.recipe = recipe
        self.run = run
        training = recipe.training
        self.device = device_of(recipe)
        self.precision = precision_of(recipe, self.device)
        self.tokenizer = load_tokenizer(recipe.source.model)
        cache = Path(recipe.data.cache_dir) if recipe.data.cache_dir else run / "tokens"
        data = open_training_data(recipe.data, self.tokenizer, seed=training.seed, cache_dir=cache)
        batches = BatchStream(
            data.mixture,
            tokens_per_step=recipe.num_tokens_per_step,
            micro_batch=micro_batch_of(recipe, self.device),
        )
        model = self._model(checkpoint)
        optimizer = self._prepare(model)
        self.validator = None if data.valid_windows is None else Validator(data.valid_windows, recipe.validation.every)
        self.trainer = Trainer(
            model,
            optimizer,
            build_schedule(
                training.schedule,
                lr=training.lr,
                num_steps=recipe.num_steps,
                warmup=training.warmup,
                decay=training.decay,
                min_lr_ratio=training.min_lr_ratio,
            ),
            batches,
            options=self._options(),
            callbacks=self._callbacks(),
            stop=stop,
        )
        if checkpoint is not None:
            self.trainer.load_checkpoint(checkpoint)

    def finish(self, status: str) -> RunResult:
        """The final model, exactly as small as it is alive."""
        trainer = self.trainer
        written = self._save(self.run / "model") if status == "finished" else None
        return RunResult(
            run=self.run,
            status=status,
            step=trainer.step,
            tokens=trainer.tokens,
            parameters=self._count(),
            loss=None if trainer.last is None else trainer.last.loss,
            valid_loss=None if self.validator is None else self.validator.last,
            model=written,
            target_reached=self.pruner is None or self.pruner.finished,
        )

    def _model(self, checkpoint: Checkpoint | None) -> nn.Module:
        """The source's weights, or those of a checkpoint at the shapes they were saved with; sets up the pruner."""
        recipe, source = self.recipe, self.recipe.source.model
        dtype = weights_dtype(self.precision)
        config = load_config(source)
        self.anatomy = Anatomy.of_config(config)
        physical = self.anatomy.source
        if checkpoint is None:
            model: nn.Module = load(source, dtype=dtype, device=self.device).model
        else:
            saved = checkpoint.state["callbacks"].get("Pruner")
            physical = physical_structure(saved) if saved else physical
            tensors = {name: t.to(self.device) for name, t in checkpoint.tensors("model").items()}
            model = build(config_for(config, physical), tensors)
        self.pruner: Pruner | None = None
        plan = plan_pruning(recipe, self.anatomy)
        if plan is not None:
            self.pruner = self._pruner(Prunable(model, self.anatomy, physical), plan)
        return model

    def _pruner(self, prunable: Prunable, plan: PruningPlan) -> Pruner:
        prune = self.recipe.prune
        return Pruner(
            prunable,
            plan.target,
            plan.pacing,
            selection=plan.selection,
            options=PrunerOptions(
                metric=prune.metric,
                fisher=prune.fisher,
                smoothing=prune.smoothing,
                round_to=prune.round_to,
                compact_threshold=prune.compact_threshold,
                compact_multiple=prune.compact_multiple,
                seed=self.recipe.training.seed,
            ),
            ledger=self.run / "ledger.jsonl",
            source=self.recipe.source.model,
            rebuild=self._prepare,
            milestones=plan.milestones,
            on_milestone=self._save_milestone,
        )

    def _prepare(self, model: nn.Module) -> torch.optim.Optimizer:
        """What every model needs before it trains, also after a compaction: compiled blocks and an optimizer."""
        training = self.recipe.training
        if training.compile:
            torch.compiler.reset()
            layers: Any = model.model.layers  # type: ignore[union-attr]
            for layer in layers:
                layer.compile()
        return build_adamw(
            model,
            lr=training.lr,
            betas=(training.betas[0], training.betas[1]),
            eps=training.eps,
            weight_decay=training.weight_decay,
        )

    def _options(self) -> TrainerOptions:
        training = self.recipe.training
        return TrainerOptions(
            num_steps=self.recipe.num_steps,
            clip=training.clip,
            z_loss=training.z_loss,
            ce_chunk_tokens=training.ce_chunk_tokens,
            precision=self.precision,
            activation_checkpointing=training.activation_checkpointing,
            max_bad_steps=training.max_bad_steps,
            device=self.device,
        )

    def _callbacks(self) -> list[Callback]:
        callbacks: list[Callback] = []
        if self.pruner is not None:
            callbacks.append(self.pruner)
        if self.validator is not None:
            callbacks.append(self.validator)
        callbacks.append(MetricsWriter(self.run / "metrics.jsonl"))
        if tensorboard_installed():
            callbacks.append(TensorBoardWriter(self.run / "tensorboard"))
        callbacks.append(Display())
        settings = self.recipe.checkpoint
        callbacks.append(Checkpointer(self.run, settings.every, settings.keep_last, extra_files=LOGS))
        return callbacks

    def _count(self) -> int:
        if self.pruner is not None:
            return self.pruner.prunable.num_parameters
        return self.anatomy.count(self.anatomy.source).total

    def _save_milestone(self, name: str) -> None:
        self._save(self.run / "milestones" / name.replace("/", "-"))

    def _save(self, out: Path) -> Path:
        model, structure = self.trainer.model, self.anatomy.source
        ledger = [source_event(self.recipe.source.model, self.anatomy.count(structure).total, {})]
        if self.pruner is not None:
            prunable = self.pruner.prunable
            model, structure = prunable.compacted(), prunable.alive
            ledger = read_ledger(self.run / "ledger.jsonl")
        return save_model(
            model,
            self.tokenizer,
            out,
            structure=structure,
            source=self.recipe.source.model,
            ledger=ledger,
            overwrite=True,
        )
