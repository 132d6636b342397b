"""A matrix whose single rows and columns are read thousands of times."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


class Strips:
    """A matrix whose single rows and columns are read, in strips of a few rows, each column-major.

    In row-major order every element of a column is on another page, and reading columns dominates selection. The strips
    are built on the matrix's device and kept in host memory.
    """

    ROWS = 8

    def __init__(self, matrix_ON: Tensor) -> None:
        rows, columns = matrix_ON.shape
        matrix_ON = matrix_ON if matrix_ON.element_size() >= 4 else matrix_ON.float()  # numpy has no bfloat16
        strips = torch.zeros(-(-rows // self.ROWS), columns, self.ROWS, dtype=matrix_ON.dtype, device=matrix_ON.device)
        whole, rest = rows // self.ROWS, rows % self.ROWS
        strips[:whole] = matrix_ON[: whole * self.ROWS].reshape(whole, self.ROWS, columns).transpose(1, 2)
        if rest:
            strips[whole, :, :rest] = matrix_ON[whole * self.ROWS :].T
        self._num_rows, self._strips = rows, strips.cpu().numpy()

    def sum_of_rows(self, rows: list[int]) -> Any:
        parts = [self._strips[row // self.ROWS, :, row % self.ROWS] for row in rows]
        return parts[0] if len(parts) == 1 else np.sum(parts, axis=0, dtype=np.float64)

    def sum_of_columns(self, columns: list[int]) -> Any:
        parts = [self._strips[:, column].reshape(-1)[: self._num_rows] for column in columns]
        return parts[0] if len(parts) == 1 else np.sum(parts, axis=0, dtype=np.float64)

    def whole(self) -> Tensor:
        strips = torch.from_numpy(self._strips)
        return strips.transpose(1, 2).reshape(len(strips) * self.ROWS, strips.shape[1])[: self._num_rows]
