"""Thins series to fewer points that draw the same line."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dwindle.report.logs import Floats


def thin(y: Floats, num_points: int) -> NDArray[np.int64]:
    """Indices of about ``num_points`` values: the first, the last, and the extremes of equal buckets.

    Unlike taking every n-th value, this keeps a single spike in a hundred thousand steps visible.
    """
    if len(y) <= num_points:
        return np.arange(len(y))
    num_buckets = max(num_points // 2 - 1, 1)
    size = -(-len(y) // num_buckets)
    padded = np.full(num_buckets * size, np.nan)
    padded[: len(y)] = y
    buckets = padded.reshape(num_buckets, size)
    filled = ~np.isnan(buckets).all(axis=1)
    starts = (np.arange(num_buckets) * size)[filled]
    low = starts + np.nanargmin(buckets[filled], axis=1)
    high = starts + np.nanargmax(buckets[filled], axis=1)
    return np.unique(np.concatenate([[0, len(y) - 1], low, high]))


def thin_steps(y: Floats, num_points: int) -> NDArray[np.int64]:
    """The same for step functions: indices of changes, then thinned."""
    if len(y) == 0:
        return np.arange(0)
    changes = np.concatenate([[0], 1 + np.flatnonzero(np.diff(y)), [len(y) - 1]])
    changes = np.unique(changes)
    kept: NDArray[np.int64] = changes[thin(y[changes], num_points)]
    return kept


def moving_mean(y: Floats, window: int) -> Floats:
    """Mean over a centred window, truncated at both ends."""
    if window <= 1 or len(y) == 0:
        return y
    sums = np.concatenate([[0.0], np.cumsum(y)])
    places = np.arange(len(y))
    first = np.maximum(places - window // 2, 0)
    last = np.minimum(places + (window + 1) // 2, len(y))
    mean: Floats = (sums[last] - sums[first]) / (last - first)
    return mean


def rounded(values: Floats, digits: int = 5) -> list[float | int]:
    """Short numbers for JSON: integers where exact, otherwise ``digits`` significant digits."""
    result: list[float | int] = []
    for value in values.tolist():
        result.append(int(value) if value == int(value) else float(f"{value:.{digits}g}"))
    return result
