"""Evaluates tasks during training: accuracies beside the loss in ``metrics.jsonl``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed.tensor import DTensor

from dwindle.core.errors import UserError
from dwindle.evaluation.evaluate import EvalData, evaluate_model, load_data
from dwindle.training.callbacks import Callback

if TYPE_CHECKING:
    from dwindle.training.config import ValidationConfig
    from dwindle.training.loop import Trainer


def recipe_data(settings: ValidationConfig) -> EvalData:
    """The data sets of ``[validation]``; errors name its keys instead of the options of ``dwindle eval``."""
    try:
        return load_data(settings.tasks, settings.data, limit=settings.limit, option="validation.tasks")
    except UserError as error:
        raise UserError(str(error).replace("--data", "validation.data")) from None


class TaskEvaluator(Callback):
    """Scores tasks every ``every`` steps and after the last one.

    Adds ``tasks/<name>`` (the task's main metric), ``tasks/average`` if all seven commonsense tasks are evaluated, and
    ``tasks/<text>`` (bits per byte). The results depend on the weights only and no random number is drawn: training is
    the same with and without the evaluation, and a resumed run writes the same lines. Under DDP every rank evaluates
    its whole model; a sharded model is refused.
    """

    def __init__(self, data: EvalData, tokenizer: Any, every: int, *, batch: int = 0) -> None:
        assert data.tasks or data.texts or data.generated, "nothing to evaluate"
        self.data = data
        self.tokenizer = tokenizer
        self.every = every
        self.batch = batch

    def on_start(self, trainer: Trainer) -> None:
        if any(isinstance(parameter, DTensor) for parameter in trainer.model.parameters()):
            raise UserError(
                'validation.tasks: a sharded model cannot be evaluated: set training.parallel = "ddp", or '
                "remove the tasks and run dwindle eval on the result"
            )

    def after_step(self, trainer: Trainer) -> None:
        at_end = trainer.step == trainer.num_steps
        if not (at_end or (self.every and trainer.step % self.every == 0)):
            return
        result = evaluate_model(
            trainer.model,
            self.tokenizer,
            self.data,
            batch=self.batch,
            precision=trainer.precision,
            quiet=True,
        )
        scores = {f"tasks/{name}": value for name, value in result.scores().items()}
        scores |= {f"tasks/{text.name}": text.bits_per_byte for text in result.texts}
        if (average := result.average()) is not None:
            scores["tasks/average"] = average
        trainer.extra_metrics |= scores
        trainer.extra_times["tasks"] = result.seconds
        name, value = next(iter(scores.items()))
        note = f"{name.removeprefix('tasks/')} {value:.3f}" if average is None else f"{100 * average:.1f}"
        trainer.notes["tasks"] = note
