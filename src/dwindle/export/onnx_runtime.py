"""Runs an exported ONNX model in onnxruntime, to verify and to time it; without torch."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from os import PathLike
from typing import Any

import numpy as np
import numpy.typing as npt

from dwindle.core.errors import UserError, install_hint
from dwindle.export.process import CachedEngine


class OnnxEngine(CachedEngine):
    """An inference session with its key/value cache."""

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

    def reset(self, padding: Sequence[int] = (0,)) -> None:
        rows, self._padding_B1 = len(padding), np.array(padding, np.int64)[:, None]
        self._cache = {
            name: np.zeros((rows, heads, 0, dim), np.float32) for name, (heads, dim) in self._past_shapes.items()
        }

    def step(self, rows: Any) -> npt.NDArray[np.float32]:
        ids = np.asarray(rows, np.int64)
        seen = next(iter(self._cache.values())).shape[2]
        positions_BT = np.arange(seen + ids.shape[1], dtype=np.int64) - self._padding_B1
        feeds: dict[str, Any] = {
            "input_ids": ids,
            "attention_mask": (positions_BT >= 0).astype(np.int64),
            "position_ids": positions_BT[:, seen:].clip(0),
            **self._cache,
        }
        found = dict(zip(self._outputs, self._session.run(None, feeds), strict=True))
        self._cache = {name: found[name.replace("past_key_values", "present")] for name in self._cache}
        logits: npt.NDArray[np.float32] = found["logits"]
        return logits
