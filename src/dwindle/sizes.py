"""Numbers as people write them: ``100M``, ``64k``, ``1.5B``."""

from __future__ import annotations

import re

from dwindle.errors import UserError

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


def format_count(value: int | float) -> str:
    """Three significant digits with a unit: 134515008 becomes ``135M``."""
    for unit, scale in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if abs(value) >= scale:
            return f"{value / scale:.3g}{unit}" if abs(value) < 999.5 * scale else f"{value / scale:.0f}{unit}"
    return f"{value:.0f}"


def format_bytes(value: int | float) -> str:
    """Decimal units, as disks and downloads are sold: ``269 MB``."""
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if abs(value) >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value:.0f} B"
