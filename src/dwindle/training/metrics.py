"""Metrics of a run: one JSON line per step."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import ref

from torch import nn

from dwindle.anatomy.anatomy import Anatomy
from dwindle.core.jsonl import JsonLinesFile
from dwindle.distributed.precision import is_bf16
from dwindle.training.callbacks import Callback
from dwindle.training.flops import flops_per_token, peak_flops
from dwindle.training.lora import has_adapters

if TYPE_CHECKING:
    from dwindle.training.loop import Trainer


class MetricsWriter(Callback):
    """``metrics.jsonl``: one line per step, with the ``extra_metrics`` of the callbacks before this one.

    Everything that depends on the clock is under ``time``, so that the rest of two runs can be compared; ``running`` is
    seconds since this process ``began``. FLOPs are those of the model in memory: pruned groups are still computed
    until a compaction removes them.
    """

    def __init__(self, path: Path) -> None:
        self._lines = JsonLinesFile(path)
        self._model: Callable[[], object] = lambda: None
        self._anatomy: Anatomy | None = None

    def on_start(self, trainer: Trainer) -> None:
        self._began, self._began_s = time.time(), time.perf_counter()
        self._track(trainer.model)

    def _track(self, model: nn.Module) -> None:
        """Note the model of the next step; a weak reference, so that compaction can free the old one."""
        if self._model() is not model:
            self._model = ref(model)
            self._anatomy = Anatomy.of_config(model.config) if has_adapters(model) else Anatomy.of(model)

    def after_step(self, trainer: Trainer) -> None:
        last, anatomy = trainer.last, self._anatomy
        assert last is not None and anatomy is not None
        tokens_per_s = last.num_tokens / max(last.seconds, 1e-9)
        flops = flops_per_token(anatomy, anatomy.source, trainer.seq_len)
        self._track(trainer.model)  # it may have been compacted after this step
        peak = peak_flops(trainer.device) if is_bf16(trainer.precision) else None
        utilisation = {} if peak is None else {"mfu": flops * tokens_per_s / (peak * trainer.engine.size)}
        self._lines.append(
            {
                "step": trainer.step,
                "tokens": trainer.tokens,
                "loss": last.loss,
                "grad_norm": last.grad_norm,
                "lr": last.lr,
                "skipped": last.skipped,
                "flops_per_token": flops,
                **trainer.extra_metrics,
                "time": {
                    "tokens_per_s": tokens_per_s,
                    "seconds": last.seconds,
                    **utilisation,
                    "began": self._began,
                    "running": time.perf_counter() - self._began_s,
                    "devices": trainer.engine.size,
                    **trainer.extra_times,
                },
            }
        )

    def on_end(self, trainer: Trainer) -> None:
        self._lines.close()
