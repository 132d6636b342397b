"""Prune in another training loop: transformers' ``Trainer`` and TRL's ``SFTTrainer``.

The pruner is the one of ``dwindle pretrain`` (``Pruner.attach``, which plain PyTorch uses without this module); nothing
in transformers is patched. This module comes after all rooms, and none imports it.
"""

from __future__ import annotations

from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from dwindle.core.errors import UserError, install_hint
from dwindle.core.run_directory import LEDGER
from dwindle.export.own_loop import save
from dwindle.pruning.pruner import AttachedPruner, Pruner, own_loop_config

try:
    from accelerate.state import GradientState
    from transformers import TrainerCallback
    from transformers.trainer_callback import ExportableState
except ImportError as error:
    raise UserError(f"dwindle.hf needs transformers' Trainer and accelerate: {install_hint('trainer')}") from error

_IGNORED = -100
"""Labels that transformers leaves out of the loss."""


class PruningCallback(TrainerCallback, ExportableState):  # type: ignore[misc]
    """Prunes the model of a ``Trainer`` while it trains; its settings are the keys of a recipe's [prune] table.

    trainer = Trainer(model, args, train_dataset=data, callbacks=[pruning := PruningCallback(target="60%")])
    trainer.train()
    pruning.save("smaller", tokenizer)

    Pruned groups are zero and remain so; ``save`` and ``compact`` cut them out. The ledger is written to
    ``args.output_dir``, the pruner's state with each checkpoint (``trainer_state.json``). A ledger of an earlier run
    there is replaced only with ``overwrite``.
    """

    def __init__(self, target: str, *, overwrite: bool = False, **settings: Any) -> None:
        self.settings = {"target": target, **settings}
        self.overwrite = overwrite
        own_loop_config(self.settings)  # refuses unknown keys and wrong values before anything is loaded
        self.pruner: AttachedPruner | None = None
        """Pruner of the current or last run."""
        self._first_step = 0
        self._complete: set[str] = set()
        self._tokens: Tensor | int = 0
        self._handles: list[Any] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """The optimizer exists, and a checkpoint has been loaded."""
        model, optimizer = parts["model"], getattr(parts["optimizer"], "optimizer", parts["optimizer"])
        if self.pruner is None or state.global_step:
            _check(args, model)
            self.pruner = self._attach(args, state, model, optimizer)
        elif self.pruner.model is not model:
            raise UserError("model: it is not the one that this PruningCallback prunes: make a new callback for it")
        self.pruner.optimizer = optimizer
        self._first_step = self.pruner.step - state.global_step
        self._listen(model)

    def _attach(self, args: Any, state: Any, model: Any, optimizer: Any) -> AttachedPruner:
        saved = None
        if state.global_step:
            saved = state.stateful_callbacks.get(type(self).__name__, {}).get("attributes", {}).get("saved")
            if not saved:
                raise UserError(
                    f"checkpoint of step {state.global_step}: has no state of a PruningCallback: it was written without"
                    " one; begin again, or leave the callback out"
                )
        config, settings = own_loop_config(self.settings), dict(self.settings)
        if config.warmup_steps is None and not config.keeps_hidden_size:
            settings["warmup_steps"] = args.get_warmup_steps(state.max_steps)
        ledger = Path(args.output_dir) / LEDGER
        about: Any = {"ledger": ledger, "seed": args.seed, "state": saved, "overwrite": self.overwrite}
        return Pruner.attach(model, optimizer, num_steps=state.max_steps, **about, **settings)

    def _listen(self, model: nn.Module) -> None:
        """Gradients are read when the last of them arrives: the Trainer clips them before it calls any callback."""
        assert self.pruner is not None
        self._forget()
        prunable = self.pruner.pruner.prunable
        names = {row.name for row in self.pruner.pruner.scored_rows}
        parameters: dict[str, Any] = dict(prunable.parameters)
        self._handles = [
            parameters[name].register_post_accumulate_grad_hook(partial(self._arrived, name, names)) for name in names
        ]
        self._handles.append(model.register_forward_pre_hook(self._count, with_kwargs=True))

    def _arrived(self, name: str, names: set[str], _: Tensor) -> None:
        assert self.pruner is not None
        self._complete.add(name)
        if self._complete == names:
            self._complete.clear()
            if GradientState().sync_gradients:  # the last backward pass of the step
                self.pruner.after_backward()

    def _count(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Predicted tokens, without a synchronisation."""
        if not model.training:
            return
        labels, shifted, ids = kwargs.get("labels"), kwargs.get("shift_labels"), kwargs.get("input_ids")
        if shifted is None and labels is not None:
            shifted = labels[..., 1:]
        if shifted is not None:
            self._tokens = self._tokens + (shifted != _IGNORED).sum()
        elif ids is not None:
            self._tokens = self._tokens + ids[..., 1:].numel()

    def on_step_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """The weights are updated, and nothing is saved yet."""
        assert self.pruner is not None
        counted = self._tokens
        self._tokens = 0
        self.pruner.after_step(int(counted))
        assert self.pruner.step == self._first_step + state.global_step

    def on_train_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        assert self.pruner is not None
        self._forget()
        self.pruner.close()

    def _forget(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._complete.clear()

    def state(self) -> dict[str, Any]:
        """What the Trainer writes into its checkpoints."""
        saved = None if self.pruner is None else self.pruner.state_dict()
        return {"args": self.settings, "attributes": {"saved": saved}}

    def compact(self, trainer: Any) -> None:
        """Call between two calls of ``trainer.train()``, to continue with a compacted model."""
        pruner = self._pruner()
        model = pruner.compact()
        trainer.model = trainer.model_wrapped = trainer.callback_handler.model = model

    def save(self, out: str | PathLike[str], tokenizer: Any = None, *, overwrite: bool = False) -> Path:
        """Write the compacted model, as ``dwindle pretrain`` does."""
        return save(self._pruner(), out, tokenizer, overwrite=overwrite)

    def _pruner(self) -> AttachedPruner:
        if self.pruner is None:
            raise UserError("PruningCallback: its Trainer has not trained yet: call trainer.train() first")
        return self.pruner


def _check(args: Any, model: Any) -> None:
    """Refuse what would not be exact."""
    if args.world_size > 1 or args.n_gpu > 1:
        raise UserError("PruningCallback: works in one process with one device; several run with dwindle pretrain")
    if args.fp16:
        raise UserError("fp16: its gradients are scaled when they are read: train with bf16=True")
    if args.load_best_model_at_end:
        raise UserError("load_best_model_at_end: would bring pruned weights back: leave it out")
    if args.restore_callback_states_from_checkpoint:
        raise UserError(
            "restore_callback_states_from_checkpoint: would put another callback in the place of yours, whose state is "
            "read from the checkpoint anyway: leave it out"
        )
    if not hasattr(model, "config") or hasattr(model, "peft_config"):
        raise UserError("model: adapters (PEFT) cannot be pruned: train all weights, or merge them first")
