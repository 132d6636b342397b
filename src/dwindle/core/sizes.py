"""Numbers as people write them: ``100M``, ``64k``, ``1.5B``."""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection
from typing import Any

from dwindle.core.errors import UserError

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
_WHOLE = r"[0-9]{1,3}(?:,[0-9]{3})+|[0-9][0-9_]*"  # a comma stands before three digits, never for a point
_COUNT = re.compile(rf"((?:{_WHOLE})(?:\.[0-9]+)?|\.[0-9]+)\s*([kmbgt]?)", re.IGNORECASE)


def parse_count(text: str | int | float, name: str = "value") -> int:
    """A whole number from ``"100M"``, ``"64k"``, ``"1_000"`` or a plain number; decimal units (k = 1000)."""
    match = _COUNT.fullmatch(str(text).strip())
    if match is None:
        raise UserError(f"{name}: {text!r} is not a number such as 100M, 64k or 1500000")
    digits, unit = match.groups()
    return round(float(digits.replace("_", "").replace(",", "")) * _UNITS[unit.lower()])


def at_least(least: int, **values: int) -> None:
    """Refuse a number that is too small, under the name of its argument: ``at_least(2, seq_len=seq_len)``."""
    for name, value in values.items():
        if value < least:
            raise UserError(f"{name} {value}: give at least {least}")


def check_sequences(num_sequences: int, seq_len: int) -> None:
    """Calibration text; in a sequence of one token there is nothing to predict."""
    at_least(1, num_sequences=num_sequences)
    at_least(2, seq_len=seq_len)


class SizeWarning(UserWarning):
    """A size that can be meant, but seldom is."""


def beyond_positions(seq_len: int, config: Any, name: str = "seq_len") -> str:
    """What to say of sequences longer than a model knows; nothing of others.

    Rotations go on, so it can be meant; but the model never saw such positions, and the work grows with the square.
    """
    positions = getattr(config, "max_position_embeddings", None)
    if positions is None or seq_len <= positions:
        return ""
    return f"{name}: {seq_len:,} is more than the {positions:,} positions that the source was made for"


def warn_beyond_positions(seq_len: int, config: Any) -> None:
    """The same as a warning, for work that begins at once."""
    if told := beyond_positions(seq_len, config):
        warnings.warn(told, SizeWarning, stacklevel=2)


def format_count(value: int | float) -> str:
    """Three significant digits with a unit: 134515008 becomes ``135M``."""
    for unit, scale in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if abs(value) >= scale:
            return f"{value / scale:.3g}{unit}" if abs(value) < 999.5 * scale else f"{value / scale:.0f}{unit}"
    return f"{value:.0f}"


def format_range(values: Collection[int]) -> str:
    """``12``, or ``8 to 12`` if the values differ."""
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def format_bytes(value: int | float) -> str:
    """Decimal units, as disks and downloads are sold: ``269 MB``."""
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if abs(value) >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value:.0f} B"
