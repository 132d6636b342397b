"""The training loop. It knows nothing of pruning, which is a callback like validation and checkpoints."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor, nn

from dwindle.anatomy.positions import follows_length
from dwindle.core.errors import UserError
from dwindle.core.json_safe import finite
from dwindle.distributed.async_copy import sent
from dwindle.distributed.engines import Engine
from dwindle.distributed.precision import Precision, is_bf16, weights_dtype
from dwindle.training.callbacks import Callback
from dwindle.training.checkpoint import (
    Checkpoint,
    fitting,
    load_model_tensors,
    load_optimizer_tensors,
    optimizer_tensors,
)
from dwindle.training.config import TrainingConfig
from dwindle.training.distill import Teacher
from dwindle.training.graphed import GraphedPasses
from dwindle.training.loss import language_model_loss
from dwindle.training.optim import LRSchedule
from dwindle.training.rng import load_rng, rng_state, rng_tensors
from dwindle.training.stop import StopSignal

Status = Literal["running", "finished", "stopped", "diverged"]


class TrainingDiverged(UserError):
    """Too many consecutive steps had a non-finite loss or gradient; checkpoints from before are kept."""


class Batches(Protocol):
    """The source of token windows; its state is the position in the data."""

    @property
    def num_tokens_per_step(self) -> int:
        """Tokens of one step, over all processes."""

    @property
    def num_predictions(self) -> int:
        """Tokens of the last step from ``next_step`` that contribute to the loss."""

    def next_step(self) -> list[Tensor]:
        """The micro-batches of one step, each int64 ``[sequences, seq_len + 1]`` or rows of ``data.packing``."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class StepStats:
    """One finished step. The loss is the mean cross-entropy per learned token, without z-loss, before the update."""

    loss: float
    grad_norm: float
    lr: float
    num_tokens: int
    skipped: bool
    seconds: float


class Trainer:
    """Owns the model, the optimizer and the counters, and calls the callbacks."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        schedule: LRSchedule,
        batches: Batches,
        *,
        config: TrainingConfig,
        num_steps: int,
        device: str = "cpu",
        precision: Precision = "fp32",
        callbacks: Sequence[Callback] = (),
        stop: StopSignal | None = None,
        engine: Engine | None = None,
        teacher: Teacher | None = None,
    ) -> None:
        self.engine = engine or Engine(language_model_loss)
        self.teacher = teacher
        self.schedule = schedule
        self.batches = batches
        self.config = config
        self.num_steps = num_steps
        """Steps of the whole run, skipped ones included."""
        self.device = device
        """Where batches are sent; the model must be there already."""
        self.precision = precision
        self.fused_loss = config.compile and device == "cuda"
        """Whether the loss of a chunk of tokens is compiled: faster on a GPU, with different rounding."""
        self.callbacks = list(callbacks)
        self.stop = stop or StopSignal()
        self._stop_agreed = False
        self.step = 0
        """Steps done. Skipped ones count: they use up data and schedule like any other."""
        self.tokens = 0
        """Tokens seen."""
        self.seq_len = 0
        """Tokens per sequence in the last step."""
        self.last: StepStats | None = None
        """The last step of this process."""
        self.loss: float | None = None
        """Loss of the last step, restored from the checkpoint when a run is resumed."""
        self.bad_steps = 0
        """Steps skipped in the whole run."""
        self.bad_steps_in_a_row = 0
        self.status: Status = "running"
        """Set before ``after_step`` is called; anything but ``running`` means that this step was the last."""
        self.extra_metrics: dict[str, Any] = {}
        """Numbers of the current step for the metrics line; cleared before every step."""
        self.extra_times: dict[str, float] = {}
        """Seconds that the current step spent outside the step itself, such as a compaction; cleared likewise."""
        self.notes: dict[str, str] = {}
        """Texts for the display, kept until replaced."""
        names = [callback.name for callback in self.callbacks]
        assert len(set(names)) == len(names), f"callback names must differ: {names}"
        assert not any(callback.must_be_last for callback in self.callbacks[:-1]), "the checkpointer comes last"
        self.replace_model(model, optimizer)

    def run(self) -> Status:
        """Train to the last step (``finished``) or until a stop is requested (``stopped``)."""
        self.status = "running" if self.step < self.num_steps else "finished"
        try:
            self._call_all("on_start")
            while self.status == "running":
                started = time.perf_counter()
                self.extra_metrics.clear()
                self.extra_times.clear()

                # gradients of the mean loss over all tokens of the step, on all processes
                sums = self.forward_backward(self.batches.next_step())
                self._call_all("edit_gradients")
                grad_norm = self.engine.grad_norm(self.model.parameters())

                # the only synchronisation with the device: loss and gradient norm become numbers
                loss, norm = self._read(sums, grad_norm)
                healthy = math.isfinite(loss) and math.isfinite(norm)

                # callbacks may read the gradients before they are clipped; a step that is not finite is skipped
                if healthy:
                    self._call_all("after_backward")
                lr = self.update(grad_norm, healthy, clip=norm + 1e-6 > 0.999 * self.config.clip > 0)
                self._count(
                    StepStats(
                        loss=loss,
                        grad_norm=norm,
                        lr=lr,
                        num_tokens=self.batches.num_tokens_per_step,
                        skipped=not healthy,
                        seconds=time.perf_counter() - started,
                    )
                )

                # prune, validate, log, save: each is a callback (all processes take part)
                self._call_all("after_step")
        finally:
            self._call_all("on_end")
        self._raise_if_diverged()
        return self.status

    def _raise_if_diverged(self) -> None:
        if self.status == "diverged":
            raise TrainingDiverged(
                f"training.lr: step {self.step} was number {self.bad_steps_in_a_row} in a row with a non-finite loss "
                "or gradient: use a lower rate, or check the data there"
            )

    def forward_backward(self, micro_batches: Sequence[Tensor]) -> Tensor:
        """Gradients of the mean loss over all learned tokens of the step, independent of the micro-batch size.

        Returns the mean cross-entropy (and, with a teacher, the mean divergence) over all processes, then the number of
        processes that received a stop request; on a GPU these are not computed yet.
        """
        engine, num_tokens = self.engine, self.batches.num_predictions
        passes = self._passes if self._graphs is None or self._is_watched else self._graphs
        total: Tensor | None = None
        # one copy for the whole step: another one later would wait until the passes before it are computed
        for number, batch in enumerate(sent(micro_batches, torch.device(self.device)), start=1):
            with engine.micro_step(last=number == len(micro_batches)):
                sums = passes(batch, engine.size / num_tokens)
            total = sums if total is None else total + sums
        assert total is not None, "a step without data"
        self.seq_len = micro_batches[-1].shape[-1] - 1
        means = (total / num_tokens).detach().double()
        stop = torch.full((1,), float(self.stop.requested), device=means.device).double()
        return engine.sum_over_processes(torch.cat([means, stop]))

    def _passes(self, batch: Tensor, scale: float | Tensor) -> Tensor:
        """Add the gradients of one micro-batch; returns its summed cross-entropy (and divergence)."""
        keep_copies = not self.config.activation_checkpointing
        with self.engine.autocast(self.precision, self.device, keep_copies=keep_copies):
            loss = self.engine.loss(
                self.model,
                batch,
                chunk_tokens=self.config.ce_chunk_tokens,
                scale=scale,
                z_loss=self.config.z_loss,
                fused=self.fused_loss,
                bf16_residual=self.config.bf16_residual and is_bf16(self.precision),
                teacher=self.teacher,
            )
        loss.objective.backward()  # type: ignore[no-untyped-call]
        return torch.stack([loss.cross_entropy, *([] if loss.distillation is None else [loss.distillation])])

    @property
    def _is_watched(self) -> bool:
        return any(callback.is_watching for callback in self.callbacks)

    def _read(self, sums: Tensor, grad_norm: Tensor) -> tuple[float, float]:
        """Loss and gradient norm as numbers.

        ``loss`` is the cross-entropy with or without a teacher, so that runs can be compared.
        """
        loss, *distillation, stops, norm = torch.cat([sums, grad_norm.to(sums.dtype).view(1)]).tolist()
        self._stop_agreed = stops > 0
        if distillation:
            self.extra_metrics["distill_loss"] = distillation[0]
        if self.batches.num_predictions != self.batches.num_tokens_per_step:
            self.extra_metrics["learned_tokens"] = self.batches.num_predictions
        return loss, norm

    def update(self, grad_norm: Tensor, healthy: bool, *, clip: bool) -> float:
        """Clip, step and clear the gradients; a step that is not finite only clears them. Returns the learning rate.

        ``clip`` may be False where the factor would be exactly 1, which saves a pass over all gradients.
        """
        lr = self.schedule.apply(self.optimizer, self.step)
        if healthy:
            if clip:
                self.engine.clip(self.model.parameters(), self.config.clip, grad_norm)
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return lr

    def _count(self, stats: StepStats) -> None:
        self.last, self.loss = stats, stats.loss
        self.step += 1
        self.tokens += stats.num_tokens
        self.bad_steps += stats.skipped
        self.bad_steps_in_a_row = self.bad_steps_in_a_row + 1 if stats.skipped else 0
        if self.bad_steps_in_a_row > self.config.max_bad_steps:
            self.status = "diverged"
        elif self.step >= self.num_steps:
            self.status = "finished"
        elif self._stop_agreed if self.engine.size > 1 else self.stop.requested:
            self.status = "stopped"

    def _call_all(self, hook: str) -> None:
        for callback in self.callbacks:
            getattr(callback, hook)(self)

    def replace_model(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Continue with a model of other shapes and the optimizer of its parameters; only between steps."""
        live = {id(p) for p in model.parameters() if p.requires_grad}
        optimised = {id(p) for group in optimizer.param_groups for p in group["params"]}
        assert live == optimised, "the optimizer must hold exactly the model's own parameters"
        assert all(id(p) in live for p in optimizer.state), "optimizer state of a removed parameter"
        expected = weights_dtype(self.precision)
        assert all(p.dtype == expected for p in model.parameters()), f"weights must be {expected}"
        if self.config.activation_checkpointing:
            cast(Any, model).gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
        self.engine.adopt(model)
        self.model = model
        self.optimizer = optimizer
        self._graphs = None
        if self._can_be_graphed():
            self._graphs = GraphedPasses(self._passes, list(model.parameters()), conversations=self.fused_loss)

    def _can_be_graphed(self) -> bool:
        """Whether the passes may be CUDA graphs: on one GPU, if nothing in them waits for it."""
        on_one_gpu = self.device == "cuda" and self.engine.size == 1 and not self.engine.world.is_group
        if not (on_one_gpu and self.config.cuda_graphs) or self.config.activation_checkpointing:
            return False  # checkpointing saves random states
        return not any(map(follows_length, (self.model, *([self.teacher.model] if self.teacher else []))))

    def state_dict(self) -> dict[str, Any]:
        """All state but tensors, as JSON: counters, schedule, position in the data, callbacks, random generators."""
        return {
            "step": self.step,
            "tokens": self.tokens,
            "loss": finite(self.loss),
            "bad_steps": self.bad_steps,
            "bad_steps_in_a_row": self.bad_steps_in_a_row,
            "batches": self.batches.state_dict(),
            "callbacks": {callback.name: callback.state_dict() for callback in self.callbacks},
            "rng": rng_state(),
        }

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Tensor state by group; each group is one file of the checkpoint."""
        groups = {
            "model": dict(self.model.state_dict()),
            "optimizer": optimizer_tensors(self.model, self.optimizer),
            "rng": rng_tensors(),
        }
        own = {f"{c.name}/{name}": tensor for c in self.callbacks for name, tensor in c.tensors().items()}
        return groups | ({"callbacks": own} if own else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of ``state_dict``, except for the random generators, which ``load_checkpoint`` restores last."""
        self.batches.load_state_dict(state["batches"])
        self.step = int(state["step"])
        self.tokens = int(state["tokens"])
        self.loss = state["loss"]
        self.bad_steps = int(state["bad_steps"])
        self.bad_steps_in_a_row = int(state["bad_steps_in_a_row"])
        by_name = {callback.name: callback for callback in self.callbacks}
        for name, own in state["callbacks"].items():
            if name in by_name:
                by_name[name].load_state_dict(own)
            elif own:
                raise UserError(
                    f"checkpoint: holds the state of {name}, which this run does not use: "
                    "resume with the run's own recipe and callbacks"
                )

    def load_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint; the model must already have the checkpoint's shapes."""
        with fitting(checkpoint.path):
            self.load_state_dict(checkpoint.state)
            load_model_tensors(self.model, checkpoint.pieces("model"))
            load_optimizer_tensors(self.model, self.optimizer, checkpoint.pieces("optimizer"))
            own = checkpoint.tensors("callbacks")
            for callback in self.callbacks:
                prefix = f"{callback.name}/"
                mine = {full.removeprefix(prefix): t for full, t in own.items() if full.startswith(prefix)}
                if mine:
                    callback.load_tensors(mine)
            if self.engine.size == 1:  # several processes use no random numbers: the models have no dropout
                load_rng(checkpoint.state["rng"], checkpoint.tensors("rng"))
