"""Runs an ExecuTorch program in its Python runtime, to verify and to time it."""

from __future__ import annotations

import time
from importlib import import_module
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from dwindle.core.errors import first_line
from dwindle.export.executorch_program import import_executorch

NUM_DECODED = 8
TOLERANCE = {"f32": 1e-4, "int8": 2e-2}
"""Relative to the largest logit; XNNPACK rounds activations to 8 bits as torch does, sometimes to the other side."""


class ExecutorchEngine:
    """A loaded program; ``step`` continues after the tokens of earlier calls."""

    def __init__(self, path: str | PathLike[str], *, threads: int = 1, context: int = 0) -> None:
        import_executorch()
        torch.set_num_threads(threads)
        runtime: Any = import_module("executorch.runtime").Runtime.get()
        self._program = runtime.load_program(str(path))
        self._method = self._program.load_method("forward")
        self._seen = 0

    def reset(self) -> None:
        """Begin again; what the cache holds is overwritten before it is read."""
        self._seen = 0

    def step(self, ids: list[int]) -> Tensor:
        """Logits [new, vocabulary] of ``ids``, which follow those of earlier calls."""
        positions = torch.arange(self._seen, self._seen + len(ids))
        self._seen += len(ids)
        logits: Tensor = self._method.execute([torch.tensor([ids]), positions])[0][0].clone()
        return logits

    def timed(self, ids: list[int], new_tokens: int) -> tuple[float, float]:
        """Milliseconds for the whole prompt and per generated token."""
        self.reset()
        start = time.perf_counter()
        token = int(self.step(ids)[-1].argmax())
        middle = time.perf_counter()
        for _ in range(new_tokens):
            token = int(self.step([token])[-1].argmax())
        end = time.perf_counter()
        return (middle - start) * 1e3, (end - middle) * 1e3 / new_tokens


def verify_executorch(path: Any, reference: Any, prompts: list[list[int]], *, type_: str, threads: int) -> Any:
    """Compare prefill and cached decoding with the same (quantised) model in torch."""
    from dwindle.export.verification import Mismatch, Verified, check, logits_of, relative_error

    try:
        engine = ExecutorchEngine(path, threads=threads)
        worst = 0.0
        for ids in prompts:
            engine.reset()
            found, whole = [engine.step(ids)], list(ids)
            for _ in range(NUM_DECODED):
                whole.append(int(found[-1][-1].argmax()))
                found.append(engine.step(whole[-1:]))
            worst = max(worst, relative_error(torch.cat(found), logits_of(reference, whole)))
    except Exception as error:
        raise Mismatch(
            f"export: ExecuTorch cannot run the exported program ({first_line(error)}): the output was removed"
        ) from error
    return check(Verified("ExecuTorch", worst, TOLERANCE[type_], "largest relative difference of a logit"))
