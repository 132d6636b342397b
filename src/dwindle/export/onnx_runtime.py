"""Runs an exported ONNX model in onnxruntime, to verify and to time it."""

from __future__ import annotations

import time
from importlib import import_module
from os import PathLike
from typing import Any

import numpy as np
import numpy.typing as npt

from dwindle.core.errors import UserError, first_line, install_hint

NUM_DECODED = 16
TOLERANCE = 1e-4


class OnnxEngine:
    """An inference session that keeps the key/value cache between calls of ``step``."""

    def __init__(self, path: str | PathLike[str], *, threads: int = 1, context: int = 0) -> None:
        try:
            onnxruntime: Any = import_module("onnxruntime")
        except ImportError as error:
            raise UserError(f"ONNX models are run by onnxruntime: {install_hint('onnx')}") from error
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        past = [item for item in self._session.get_inputs() if item.name.startswith("past_key_values.")]
        self._past_shapes = {item.name: (item.shape[1], item.shape[3]) for item in past}
        self._outputs = [item.name for item in self._session.get_outputs()]
        self._cache: dict[str, npt.NDArray[np.float32]] = {}

    def reset(self, batch: int = 1) -> None:
        """Empty the cache."""
        self._cache = {
            name: np.zeros((batch, heads, 0, dim), np.float32) for name, (heads, dim) in self._past_shapes.items()
        }

    def step(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """Logits [batch, new, vocabulary] of ``ids``, which follow the cached tokens."""
        batch, new = ids.shape
        seen = next(iter(self._cache.values())).shape[2]
        feeds: dict[str, Any] = {
            "input_ids": ids,
            "attention_mask": np.ones((batch, seen + new), np.int64),
            "position_ids": np.broadcast_to(np.arange(seen, seen + new, dtype=np.int64), (batch, new)).copy(),
            **self._cache,
        }
        found = dict(zip(self._outputs, self._session.run(None, feeds), strict=True))
        self._cache = {name: found[name.replace("past_key_values", "present")] for name in self._cache}
        logits: npt.NDArray[np.float32] = found["logits"]
        return logits

    def generate(self, ids: list[int], count: int, end: int | None = None) -> list[int]:
        """The greedy continuation, at most ``count`` tokens or up to the token ``end``."""
        self.reset()
        fresh, found = list(ids), list[int]()
        while len(found) < count:
            fresh = [int(self.step(np.asarray([fresh], np.int64))[0, -1].argmax())]
            if fresh[0] == end:
                break
            found += fresh
        return found

    def timed(self, ids: list[int], new_tokens: int) -> tuple[float, float]:
        """Milliseconds for the whole prompt and per generated token."""
        self.reset()
        start = time.perf_counter()
        logits = self.step(np.asarray([ids], np.int64))
        token = int(logits[0, -1].argmax())
        middle = time.perf_counter()
        for _ in range(new_tokens):
            token = int(self.step(np.asarray([[token]], np.int64))[0, -1].argmax())
        end = time.perf_counter()
        return (middle - start) * 1e3, (end - middle) * 1e3 / new_tokens


def verify_onnx(path: Any, model: Any, prompts: list[list[int]], *, threads: int) -> Any:
    """Compare prefill and cached decoding, in a batch of two, with the source model in float32."""
    import torch

    from dwindle.export.verification import Mismatch, Verified, check, logits_of, relative_error

    try:
        engine = OnnxEngine(path, threads=threads)
        worst = 0.0
        for ids in prompts:
            engine.reset(batch=2)
            found = [engine.step(np.asarray([ids, ids[::-1]], np.int64))]
            both = [list(ids), list(ids[::-1])]
            for _ in range(NUM_DECODED):
                for row, sequence in enumerate(both):
                    sequence.append(int(found[-1][row, -1].argmax()))
                found.append(engine.step(np.asarray([sequence[-1:] for sequence in both], np.int64)))
            logits = torch.from_numpy(np.concatenate(found, axis=1))
            worst = max(worst, *(relative_error(logits[row], logits_of(model, both[row])) for row in range(2)))
    except Exception as error:
        if isinstance(error, UserError):
            raise
        reason = first_line(error)
        raise Mismatch(
            f"export: onnxruntime cannot run the exported model ({reason}): the output was removed"
        ) from error
    return check(Verified("onnxruntime", worst, TOLERANCE, "largest relative difference of a logit"))
