"""Runs an ExecuTorch program in its Python runtime, to verify and to time it."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from os import PathLike
from typing import Any

import torch

from dwindle.export.executorch_program import import_executorch
from dwindle.export.process import CachedEngine

TOLERANCE = {"f32": 1e-4, "int8": 2e-2}
"""Relative to the largest logit; XNNPACK rounds activations to 8 bits as torch does, sometimes to the other side."""


class ExecutorchEngine(CachedEngine):
    """A loaded program, which takes one row."""

    def __init__(self, path: str | PathLike[str], *, threads: int = 1, context: int = 0) -> None:
        import_executorch()
        torch.set_num_threads(threads)
        runtime: Any = import_module("executorch.runtime").Runtime.get()
        self._program = runtime.load_program(str(path))
        self._method = self._program.load_method("forward")
        self._seen = 0

    def reset(self, padding: Sequence[int] = (0,)) -> None:
        """Begin again; what the cache holds is overwritten before it is read."""
        self._seen = 0

    def step(self, rows: Any) -> Any:
        ids = torch.as_tensor(rows)
        positions = torch.arange(self._seen, self._seen + ids.shape[1])
        self._seen += len(positions)
        return self._method.execute([ids, positions])[0].clone().numpy()


def verify_executorch(path: Any, reference: Any, prompts: list[list[int]], *, type_: str, threads: int) -> Any:
    """Compare with the same (quantised) model in torch."""
    from dwindle.export.verification import verify_cached

    rows, tolerance = [[ids] for ids in prompts], TOLERANCE[type_]
    return verify_cached("ExecuTorch", lambda: ExecutorchEngine(path, threads=threads), reference, rows, tolerance)
