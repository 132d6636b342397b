"""Pruning during training, as a callback: saliencies from the training gradients, events after the step.

After the backward pass of a step after which groups are due, the groups are chosen (one small copy from the device);
after the optimizer step they are zeroed with their moments and written to the ledger. When enough is pruned, the model
is rebuilt at smaller shapes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from dwindle.anatomy.anatomy import Row
from dwindle.anatomy.structure import Structure
from dwindle.core.config import from_dict
from dwindle.core.errors import UserError
from dwindle.core.sizes import format_count
from dwindle.distributed.collectives import num_processes
from dwindle.distributed.shards import local
from dwindle.pruning.compaction import rounded_up
from dwindle.pruning.config import DEFAULT_GRAM_TOKENS, PretrainPruneConfig
from dwindle.pruning.curvature import AdamFisher, LayerCurvature
from dwindle.pruning.layouts import final_count
from dwindle.pruning.ledger import Ledger, first_events, prune_event
from dwindle.pruning.metrics import metric_named
from dwindle.pruning.pacing import Horizon, Pacing, training_pacing
from dwindle.pruning.saliency import Scores, begin_scores, rows_with_gradients
from dwindle.pruning.second_order import InputWatch, repair, units_to_watch
from dwindle.pruning.strategies import make_strategy, settled
from dwindle.pruning.strategies.base import Choice
from dwindle.pruning.surgery import MOMENTS, Prunable
from dwindle.pruning.target import Target, parse_target, sizes_of
from dwindle.sources.vocabulary import Vocabulary
from dwindle.training.callbacks import Callback, synced_length, truncate_to
from dwindle.training.muon import ALIVE_SIZES, Muon, layer_matrices

if TYPE_CHECKING:
    from dwindle.training.loop import Trainer


class Pruner(Callback):
    """Prunes groups while the model trains, until the target; then only keeps pruned parts at zero."""

    def __init__(
        self,
        prunable: Prunable,
        target: Target,
        pacing: Pacing,
        *,
        config: PretrainPruneConfig,
        ledger: Path,
        source: str,
        rebuild: Callable[..., torch.optim.Optimizer],
        seed: int = 0,
        milestones: Sequence[tuple[str, int]] = (),
        on_milestone: Callable[[str], None] = lambda name: None,
        vocabulary: Vocabulary | None = None,
    ) -> None:
        self.prunable = prunable
        self.pacing = pacing
        self.config = config = settled(config, prunable.anatomy, target)
        self.seed = seed
        self.source, self.vocabulary = source, vocabulary
        self.rebuild = rebuild
        self.milestones = sorted(milestones, key=lambda item: -item[1])
        self.on_milestone = on_milestone
        self.num_events = 0
        self.ledger = Ledger(ledger)
        self._scores: Scores | None = None
        """The last ones, smoothed: for the next, and for a last step that is skipped."""
        self._rounded: Structure | None = None  # what was alive when sizes to rebuild at were last looked for
        self._pending: Callable[[], Scores] | None = None
        self._metric = metric = None if config.has_own_score else metric_named(config.effective_metric)
        self._scores_inputs = metric is not None and "inputs" in metric.needs
        units = () if metric is None else units_to_watch(metric, config.effective_groups, config.second_order)
        self._watch = InputWatch(units, config.num_gram_tokens or DEFAULT_GRAM_TOKENS)
        self._strategy = make_strategy(prunable.anatomy, target, config)

    @classmethod
    def attach(
        cls,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        num_steps: int,
        ledger: str | PathLike[str] | None = None,
        source: str = "",
        seed: int = 0,
        state: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        **settings: Any,
    ) -> AttachedPruner:
        """A pruner for your own loop of ``num_steps`` steps; ``settings`` are the keys of a recipe's [prune] table.

        ``ledger`` is the file that events are written to, ``source`` the name of the model in it. ``state`` is what
        ``state_dict`` returned when the weights were saved, to continue there; without it, a ledger that holds events
        is replaced only with ``overwrite``.
        """
        config = own_loop_config(settings)
        _refuse_model(model)
        if config.fisher == "adam" and (isinstance(optimizer, Muon) or "betas" not in optimizer.defaults):
            name = type(optimizer).__name__
            raise UserError(f'fisher: "adam" needs AdamW, {name} keeps no second moment of the layers: leave it out')
        prunable = Prunable(model)
        anatomy, first = prunable.anatomy, config.warmup_steps or 0
        if first >= num_steps:
            raise UserError(f"warmup_steps: {first} leaves none of the {num_steps} steps for events: lower it")
        target = parse_target(config.target, anatomy, "target")
        start, end = anatomy.count(anatomy.source).total, final_count(anatomy, target)
        pacing = training_pacing(config, start=start, end=end, first_step=first, num_steps=num_steps)
        its_config = cast(Any, model).config
        source = source or getattr(its_config, "_name_or_path", "") or its_config.model_type
        place = Path(os.devnull if ledger is None else ledger)
        pruner = cls(
            prunable, target, pacing, config=config, ledger=place, source=source, seed=seed, rebuild=_no_rebuild
        )
        return AttachedPruner(pruner, optimizer, num_steps, place, state, overwrite=overwrite)

    @property
    def end_count(self) -> int:
        """Parameters at the target."""
        return final_count(self.prunable.anatomy, self._strategy.target)

    @property
    def _pace(self) -> Pacing:
        """The pacing to the real end: rounding chooses a shape below the target's count from the first saliencies."""
        return replace(self.pacing, end_count=self.end_count) if isinstance(self.pacing, Horizon) else self.pacing

    @property
    def finished(self) -> bool:
        """Whether nothing more will be removed."""
        return self._strategy.is_finished(self.prunable.alive, self.prunable.num_parameters)

    @property
    def is_watching(self) -> bool:
        return not self.finished

    def on_start(self, trainer: Trainer) -> None:
        assert trainer.model is self.prunable.model
        if trainer.step == 0:
            anatomy = self.prunable.anatomy
            pacing = {"end_count": self.end_count} | asdict(self.pacing)  # type: ignore[call-overload]
            settings = self.config.record() | {"seed": self.seed, "pacing": pacing}
            for event in first_events(self.source, anatomy, settings, self.vocabulary):
                self.ledger.append(event)
        self._listen(trainer)
        self._report(trainer)

    def edit_gradients(self, trainer: Trainer) -> None:
        self.prunable.mask_gradients()

    def after_backward(self, trainer: Trainer) -> None:
        if self.scores_step(trainer.step + 1):
            self._pending = self._begin_score(trainer)

    def scores_step(self, step: int) -> bool:
        """Whether the gradients of this step are needed."""
        if self.finished:
            return False
        return bool(self.config.smoothing) or self._pace.due(step, self.prunable.num_parameters, self.num_events)

    def after_step(self, trainer: Trainer) -> None:
        is_scored = self._pending is not None
        choices = self._choose_due(trainer)
        if choices:
            if self.config.second_order and is_scored:
                repair(self.prunable, choices[-1].rest, self._watch.inputs, damping=self.config.damping)
            self.prunable.prune_to(choices[-1].rest, trainer.optimizer)
            for note in self._strategy.notes(trainer.step):
                self.ledger.append(note)
            for choice in choices:
                self.ledger.append(prune_event(choice, step=trainer.step, tokens=trainer.tokens))
            self.num_events += len(choices)
            if self._scores is not None:
                self._scores.mask(self.prunable.pruned)
            while self.milestones and self.prunable.num_parameters <= self.milestones[0][1]:
                self.on_milestone(self.milestones.pop(0)[0])
        self._watch.forget()
        self._maybe_compact(trainer)
        self._listen(trainer)
        trainer.extra_metrics["parameters"] = self.prunable.num_parameters
        trainer.extra_metrics["events"] = len(choices)
        self._report(trainer)

    def on_end(self, trainer: Trainer) -> None:
        self.ledger.close()

    def _listen(self, trainer: Trainer) -> None:
        """Observe in the next step what is needed after it: the layers' inputs, and how much each layer changes
        them."""
        if self.finished:
            return
        due = self._pace.due(trainer.step + 1, self.prunable.num_parameters, self.num_events)
        if due:
            self._strategy.listen(self.prunable.model)
        if not (self.config.second_order or self._scores_inputs):
            return
        self._watch.attach(self.prunable)
        if due or (self.config.smoothing and self._scores_inputs):
            self._watch.listen(trainer.batches)

    def _choose_due(self, trainer: Trainer) -> list[Choice]:
        """The groups to remove now, by the scores begun before the update: the update runs while they are chosen."""
        last, end = self.pacing.last_step, trainer.num_steps
        if self._pending is not None:
            self._scores = self._pending().smoothed(self._scores, self.config.smoothing or 0.0)
        elif self._scores is None or trainer.step < end or self.finished or self._strategy.watches_layers:
            return []  # after a step that is skipped, the next one catches up; the last one has the scores before it
        scores, self._pending = self._scores.copy(), None
        if not self.config.smoothing and last is not None and last < end:
            self._scores = None
        if not self._pace.due(trainer.step, self.prunable.num_parameters, self.num_events):
            return []
        return list(self._strategy.choose(scores, self.prunable.alive, self._pace, trainer.step, self.num_events))

    @property
    def scored_rows(self) -> list[Row]:
        """The tensors whose gradients the scores are made of."""
        return rows_with_gradients(self.prunable, self._metric, blocks="layer" in self.config.effective_groups)

    def _begin_score(self, trainer: Trainer) -> Callable[[], Scores]:
        if self.config.has_own_score:
            seen = Scores.zero(self.prunable.physical)
            return lambda: seen
        metric = metric_named(self.config.effective_metric, seed=self.seed * 1_000_003 + trainer.step)
        parameters, blocks = self.prunable.parameters, "layer" in self.config.effective_groups
        gradients = {row.name: local(g) for row in self.scored_rows if (g := parameters[row.name].grad) is not None}
        fishers: Mapping[str, Tensor] | None = None
        if metric.curvature is not None:
            fishers = LayerCurvature(self.prunable, self._watch.inputs, metric, self.config.damping)
        elif self.config.fisher == "adam":
            fishers = AdamFisher(trainer.optimizer, {name: parameters[name] for name in gradients}) or None
        return begin_scores(self.prunable, gradients, fishers, metric, fused=trainer.fused_loss, blocks=blocks)

    def _maybe_compact(self, trainer: Trainer) -> None:
        """Rebuild the model at round sizes once enough of it is pruned."""
        threshold = self.config.compact_threshold
        if threshold >= 1 or (self.prunable.pruned_share < threshold and not self.finished):
            return
        last = self.pacing.last_step
        if not self.finished and last is not None and last - trainer.step < self.config.compact_wait:
            return
        alive, physical = self.prunable.alive, self.prunable.physical
        if alive is self._rounded:
            return
        self._rounded = alive
        keep = rounded_up(alive, physical, self.config.compact_multiple)
        if keep != physical:
            self.compact(trainer, keep)

    def compact(self, trainer: Trainer, keep: Structure) -> None:
        """Continue with a smaller model; the pause is in the metrics."""
        started = time.perf_counter()
        optimizer = self.prunable.compact(keep, trainer.optimizer, self.rebuild)
        assert optimizer is not None
        trainer.replace_model(self.prunable.model, optimizer)
        if self._scores is not None:
            self._scores = self._scores.restricted(keep)
        shape = sizes_of(keep)
        self.ledger.append({"event": "compact", "step": trainer.step, "tokens": trainer.tokens, **shape})
        trainer.extra_metrics["compacted"] = shape
        trainer.extra_times["compaction"] = time.perf_counter() - started

    def _report(self, trainer: Trainer) -> None:
        now, end = self.prunable.num_parameters, self.end_count
        if self.finished:
            trainer.notes["parameters"] = format_count(now)
            trainer.notes["next event"] = "none, target reached"
            return
        following = self._pace.next_step(trainer.step + 1, now, self.num_events)
        trainer.notes["parameters"] = f"{format_count(now)} → {format_count(end)}"
        trainer.notes["next event"] = f"step {following}"

    def state_dict(self) -> dict[str, Any]:
        return {
            "physical": self.prunable.physical.to_json(self.source),
            "alive": self.prunable.alive.to_json(self.source),
            "num_events": self.num_events,
            "chooser": self._strategy.state_dict(),
            "milestones": [name for name, _ in self.milestones],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The model was already rebuilt at the physical shapes (``physical_structure``)."""
        assert physical_structure(state) == self.prunable.physical
        self.prunable.restore(Structure.from_json(state["alive"]))
        self.num_events = int(state["num_events"])
        self.milestones = [item for item in self.milestones if item[0] in state["milestones"]]
        self._strategy.load_state_dict(state["chooser"])

    def tensors(self) -> dict[str, Tensor]:
        if self._scores is None:
            return {}
        named = {f"attn.{i}": t for i, t in enumerate(self._scores.attn)}
        named |= {f"ffn.{i}": t for i, t in enumerate(self._scores.ffn)} | {"stem": self._scores.stem}
        named |= {f"kv.{i}": t for i, t in enumerate(self._scores.kv)}
        return named | {f"blocks.{i}": t for i, t in enumerate(self._scores.blocks)}

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        layers = range(self.prunable.anatomy.num_layers)
        attn, ffn = [tensors[f"attn.{i}"] for i in layers], [tensors[f"ffn.{i}"] for i in layers]
        kv, blocks = ([tensors[f"{part}.{i}"] for i in layers if f"{part}.{i}" in tensors] for part in ("kv", "blocks"))
        self._scores = Scores(self.prunable.physical, attn, ffn, tensors["stem"], kv, blocks)


class AttachedPruner:
    """A pruner in another loop: what the pruner reads of a loop, and the two calls that it needs.

    Pruned groups are zero and remain so; the shapes change only in ``compact``.
    """

    def __init__(
        self,
        pruner: Pruner,
        optimizer: torch.optim.Optimizer,
        num_steps: int,
        ledger: Path,
        state: Mapping[str, Any] | None = None,
        *,
        overwrite: bool = False,
    ) -> None:
        self.pruner = pruner
        self.optimizer = optimizer
        self.num_steps = num_steps
        self.step = 0
        """Steps done."""
        self.tokens = 0
        """Tokens seen, as counted by the caller."""
        self.extra_metrics: dict[str, Any] = {}
        """Parameters and number of events after the last step."""
        self.extra_times: dict[str, float] = {}
        self.notes: dict[str, str] = {}
        """For the progress line: parameters, and the step of the next event."""
        self.fused_loss = False
        self.batches = None
        self._path = ledger
        self._checked_optimizer = False
        if state is not None:
            self._load(state)
        elif ledger.is_file() and ledger.stat().st_size:
            if not overwrite:
                raise UserError(
                    f"ledger {ledger}: holds the events of another run: continue that one from its state, name another "
                    "file, or pass overwrite=True"
                )
            truncate_to(ledger, 0)
        pruner.on_start(cast(Any, self))

    @property
    def model(self) -> Any:
        """The model that is trained; another one after ``compact``."""
        return self.pruner.prunable.model

    @property
    def num_parameters(self) -> int:
        """Parameters that are not pruned."""
        return self.pruner.prunable.num_parameters

    @property
    def finished(self) -> bool:
        """Whether the target is reached."""
        return self.pruner.finished

    def after_backward(self) -> None:
        """Call once per step, when its gradients are complete, before they are clipped.

        A step whose gradients are not finite prunes nothing, unless it is the last.
        """
        loop, parameters = cast(Any, self), self.pruner.prunable.parameters
        self.pruner.edit_gradients(loop)
        if not self.pruner.scores_step(self.step + 1):
            return
        gradients = [parameters[row.name].grad for row in self.pruner.scored_rows]
        assert all(gradient is not None for gradient in gradients), "call after_backward() after loss.backward()"
        norms = torch._foreach_norm([gradient for gradient in gradients if gradient is not None])
        if bool(torch.stack(norms).isfinite().all()):
            self.pruner.after_backward(loop)

    def after_step(self, num_tokens: int = 0) -> None:
        """Call after ``optimizer.step()``; ``num_tokens`` of the step are counted for the ledger."""
        self.step += 1
        self.tokens += num_tokens
        self.extra_metrics.clear()
        self.extra_times.clear()
        if not self._checked_optimizer:
            _check_moments(self.optimizer)
            self._checked_optimizer = True
        self.pruner.after_step(cast(Any, self))

    def compact(self) -> Any:
        """Rebuild the model at the shapes that are left and return it, with the same optimizer; only between steps.

        The optimizer holds the new parameters and their moments afterwards, so schedulers of it remain valid.
        """
        prunable, optimizer = self.pruner.prunable, self.optimizer
        names = {id(parameter): name for name, parameter in prunable.parameters.items()}
        held = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]

        def rebuild(model: nn.Module) -> torch.optim.Optimizer:
            fresh = prunable.parameters
            for group, own in zip(optimizer.param_groups, held, strict=True):
                group["params"] = [fresh[name] for name in own if name in fresh]
            if isinstance(optimizer, Muon):
                optimizer.parts = layer_matrices(model)
            return optimizer

        self.pruner.rebuild = rebuild
        self.pruner.compact(cast(Any, self), prunable.alive)
        return self.model

    def replace_model(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """After a compaction: nothing to do, the model is the prunable's."""
        assert model is self.model and optimizer is self.optimizer

    def state_dict(self) -> dict[str, Any]:
        """State as JSON, to be saved with the weights and the optimizer of the same step."""
        length = synced_length(self._path) if self._path.is_file() else 0
        tensors = {name: [str(t.dtype).removeprefix("torch."), t.tolist()] for name, t in self.pruner.tensors().items()}
        own = {"step": self.step, "tokens": self.tokens, "ledger_bytes": length}
        return own | {"pruner": self.pruner.state_dict(), "tensors": tensors}

    def _load(self, state: Mapping[str, Any]) -> None:
        prunable = self.pruner.prunable
        if physical_structure(state["pruner"]) != prunable.physical:
            raise UserError("state: was saved with a compacted model: attach to the model that compact() returned")
        self.step, self.tokens = int(state["step"]), int(state["tokens"])
        if self._path != Path(os.devnull):
            truncate_to(self._path, int(state["ledger_bytes"]))
        self.pruner.load_state_dict(dict(state["pruner"]))
        if saved := state["tensors"]:
            tensors = {name: torch.tensor(t, dtype=getattr(torch, dtype)) for name, (dtype, t) in saved.items()}
            self.pruner.load_tensors(tensors)

    def close(self) -> None:
        """Close the ledger; a later event opens it again."""
        self.pruner.on_end(cast(Any, self))


def own_loop_config(settings: Mapping[str, Any]) -> PretrainPruneConfig:
    """The settings of a pruner in another loop; refuses what only our own loop supports."""
    for name in ("compact_threshold", "compact_multiple", "compact_wait", "milestones", "enabled"):
        if name in settings:
            raise UserError(f"{name}: is for dwindle's own loop: leave it out, and call compact() or save() yourself")
    if not settings.get("target"):
        raise UserError('target: give the final size, such as target="60%"')
    config = from_dict(PretrainPruneConfig, {**settings, "compact_threshold": 1.0})
    if config.method == "sheared":
        raise UserError(f"method: {config.method} runs in dwindle's own loop: use dwindle pretrain, or another method")
    config.smoothing = config.effective_smoothing(config.warmup_steps or 0)
    return config


def _refuse_model(model: nn.Module) -> None:
    if num_processes() > 1:
        raise UserError("attach: your own loop is pruned in one process only; several run with dwindle pretrain")
    if frozen := [name for name, parameter in model.named_parameters() if not parameter.requires_grad]:
        raise UserError(f"model: {frozen[0]} is frozen, but pruning needs the gradients of all weights: unfreeze it")


def _check_moments(optimizer: torch.optim.Optimizer) -> None:
    """State that is not zeroed with its weights would let them grow back."""
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.numel() > 1 and key not in (*MOMENTS, ALIVE_SIZES):
                raise UserError(
                    f"optimizer: {type(optimizer).__name__} keeps {key!r} for each weight, which cannot be pruned with "
                    f"it (shape {tuple(parameter.shape)}): use torch.optim.AdamW"
                )


def _no_rebuild(*_: Any) -> torch.optim.Optimizer:
    raise AssertionError("a loop that is not ours compacts through AttachedPruner.compact")


def physical_structure(state: Mapping[str, Any]) -> Structure:
    """The physical structure of the model that a pruner's state was saved with."""
    return Structure.from_json(state["physical"])
