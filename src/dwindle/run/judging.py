"""Measures how good a result is against its source, while it trains (``QualityRecorder``) and without training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dwindle.core.json_safe import finite
from dwindle.core.progress import status
from dwindle.core.quality import Quality, Sample, bits_per_byte, text_names
from dwindle.data.packing import num_predictions
from dwindle.data.tokenizing import token_bytes
from dwindle.distributed.precision import Precision, weights_dtype
from dwindle.distributed.shards import is_sharded
from dwindle.sources.loading import load, load_tokenizer
from dwindle.training.callbacks import Callback, Validator
from dwindle.training.loss import evaluate_loss
from dwindle.training.sampling import as_text, greedy_samples, prompt_tokens

if TYPE_CHECKING:
    from dwindle.run.pretrain import Job
    from dwindle.training.loop import Trainer


class QualityRecorder(Callback):
    """``quality.json`` of a run: losses of ``validator`` and greedy samples, before the first and after the last step.

    It comes after the pruner and the validator, and draws no random numbers. A sharded model gives no samples.
    """

    def __init__(
        self,
        path: Path,
        tokenizer: Any,
        validator: Validator | None,
        texts: Sequence[str],
        whole: Callable[[Tensor], float] | None = None,
    ) -> None:
        """``whole`` measures the untouched source in bits per byte, where it has another tokenizer."""
        self.path, self._whole = path, whole
        self.tokenizer = tokenizer
        self.validator = validator
        windows_NT = None if validator is None else validator.windows_NT
        self.prompts = prompt_tokens(windows_NT, tokenizer)
        self.quality = Quality(
            text=[] if windows_NT is None else text_names(texts),
            tokens=0 if windows_NT is None else num_predictions(windows_NT),
            samples=[Sample(as_text(tokenizer, prompt)) for prompt in self.prompts],
        )

    def on_start(self, trainer: Trainer) -> None:
        if trainer.step == 0 and trainer.num_steps:
            self.quality.add_samples("source", self._continued(trainer))
            if self._whole is not None and self.validator is not None and trainer.engine.is_main:
                windows_NT = self.validator.windows_NT
                self.quality.bytes = num_text_bytes(windows_NT, self.tokenizer)
                self.quality.source_bits = finite(self._whole(windows_NT))

    def after_step(self, trainer: Trainer) -> None:
        finished = trainer.status == "finished"
        if self.validator is not None:
            self.quality.source_loss = finite(self.validator.source)
            self.quality.result_loss = finite(self.validator.last) if finished else None
        if finished and self.quality.bytes and self.quality.result_loss is not None:
            nats = self.quality.result_loss * self.quality.tokens
            self.quality.result_bits = finite(bits_per_byte(nats, self.quality.bytes))
        if finished:
            self.quality.add_samples("result", self._continued(trainer))
        if (finished or trainer.step == 1) and trainer.engine.is_main:
            self.quality.write(self.path)

    def _continued(self, trainer: Trainer) -> list[str]:
        """Measured on the main process; on others the callback only keeps its place in the checkpoint."""
        if not trainer.engine.is_main or any(map(is_sharded, trainer.model.parameters())):
            return []
        return greedy_samples(trainer.model, self.tokenizer, self.prompts)

    def state_dict(self) -> dict[str, Any]:
        return {"quality": self.quality.to_json()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        found = state["quality"]
        self.quality = Quality(**found | {"samples": [Sample(**sample) for sample in found["samples"]]})


def num_text_bytes(windows_NT: Tensor, tokenizer: Any) -> int:
    """Bytes of the text that is predicted in windows of tokens: all but the first token of each."""
    return int(token_bytes(tokenizer)[windows_NT[:, 1:].numpy()].sum())


def whole_source(job: Job) -> Callable[[Tensor], float] | None:
    """Measures the source with all of its tokens, if some are removed; conversations have no text of their own."""
    recipe, start = job.recipe, job.start
    if start.vocabulary is None or recipe.source.random_init or recipe.task.kind == "chat":
        return None
    return lambda windows: source_bits_per_byte(start.source, windows, job.tokenizer, job.device, job.precision)


def source_bits_per_byte(source: str, windows_NT: Tensor, tokenizer: Any, device: str, precision: Precision) -> float:
    """Bits per byte of an untouched source with its own tokenizer, on the text of windows of another tokenizer."""
    model, own = load(source, dtype=weights_dtype(precision), device=device).model, load_tokenizer(source)
    sizes, nats, num_bytes = token_bytes(own), 0.0, 0
    for window in windows_NT.tolist():
        text = tokenizer.decode(window, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        text = text.strip("\N{REPLACEMENT CHARACTER}")  # bytes of characters that the window begins or ends within
        ids = torch.tensor([own(text, add_special_tokens=False).input_ids])
        nats += evaluate_loss(model, ids, precision=precision) * (ids.shape[1] - 1)
        num_bytes += int(sizes[ids[0, 1:].numpy()].sum())
    return bits_per_byte(nats, num_bytes)


class Judge:
    """Measures a source before it is pruned, and the result afterwards, on the same windows and prompts."""

    def __init__(
        self, source: Any, tokenizer: Any, windows_NT: Tensor, texts: Sequence[str], *, held_out: bool
    ) -> None:
        self.tokenizer, self.windows_NT = tokenizer, windows_NT
        self.prompts = prompt_tokens(windows_NT, tokenizer)
        samples = [Sample(as_text(tokenizer, prompt)) for prompt in self.prompts]
        with status("measuring the source"):
            loss = finite(evaluate_loss(source, windows_NT))
            self.quality = Quality(text_names(texts), windows_NT[:, 1:].numel(), held_out, loss, samples=samples)
            self.quality.add_samples("source", greedy_samples(source, tokenizer, self.prompts))

    def judged(self, result: Any) -> Quality:
        """The source's measurements with those of the result."""
        with status("measuring the result"):
            self.quality.result_loss = finite(evaluate_loss(result, self.windows_NT))
            self.quality.add_samples("result", greedy_samples(result, self.tokenizer, self.prompts))
        return self.quality
