"""Numbers and sizes as people write them: ``64k``; ``100M``, ``60%``, ``hidden=512,heads=8``, ``90MB@q8_0``."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal

from dwindle.core.errors import UserError

SHAPE_KEYS = ("hidden", "heads", "ffn", "layers")

MAX_COUNT = 10**18
"""Parameters or tokens; a larger number is a typing mistake."""
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
_WHOLE = r"[0-9]{1,3}(?:,[0-9]{3})+|[0-9][0-9_]*"  # a comma separates thousands, it is not a decimal point
_COUNT = re.compile(rf"((?:{_WHOLE})(?:\.[0-9]+)?|\.[0-9]+)\s*([kmbgt]?)", re.IGNORECASE)
_FILE = re.compile(
    r"(?P<number>\d{1,15}\.?\d{0,9}|\.\d{1,9})\s*(?P<unit>[kmg]?)b\s*@\s*(?P<type>\w{1,20})", re.IGNORECASE
)
_SHARE = re.compile(r"(?P<percent>\d+\.?\d*|\.\d+)\s*%\s*(?P<nonemb>nonemb)?|(?P<fraction>\d*\.\d+|\d+\.)")


def parse_count(text: str | int | float, name: str = "value") -> int:
    """A whole number from ``"100M"``, ``"64k"``, ``"1_000"`` or a plain number; decimal units (k = 1000)."""
    if isinstance(text, int) and abs(text) > MAX_COUNT:
        raise UserError(f"{name}: is above {MAX_COUNT:.0e}: give a smaller number")
    match = _COUNT.fullmatch(str(text).strip())
    if match is None:
        raise UserError(f"{name}: {text!r:.60} is not a number such as 100M, 64k or 1500000")
    digits, unit = match.groups()
    value = float(digits.replace("_", "").replace(",", "")) * _UNITS[unit.lower()]
    if value > MAX_COUNT:
        raise UserError(f"{name}: {str(text).strip():.40} is above {MAX_COUNT:.0e}: give a smaller number")
    return round(value)


@dataclass(frozen=True, slots=True)
class Size:
    """A model's size: a number of parameters (``count``), a share of the source's, or its widths (``shape``)."""

    kind: Literal["count", "share", "nonemb share", "shape", "file"]
    value: float = 0.0
    """Parameters, or the share of them that is kept (``nonemb share``: not counting the embeddings), or bytes."""
    shape: dict[str, int] = field(default_factory=dict)
    """The given sizes, by ``SHAPE_KEYS``."""
    file_type: str = ""
    """For a file size: the type that ``export`` writes, such as ``q8_0``."""

    @property
    def block(self) -> int:
        """The multiple that keeps rows in whole blocks: 32 in a quantized file, else 1."""
        return 32 if self.kind == "file" and self.file_type not in ("f32", "f16", "bf16") else 1


def parse_size(text: str, key: str) -> Size:
    """A size from ``100M``, ``0.6``, ``60%``, ``50%nonemb``, ``hidden=512,heads=8,ffn=1280`` or ``90MB@q8_0``.

    The one grammar of ``--to``, ``prune.target`` and milestones; ``key`` is the option or key that errors name.
    """
    text = text.strip()
    if "@" in text:
        return _parse_file(text, key)
    if "=" in text:
        return Size("shape", shape=_parse_shape(text, key))
    match = _SHARE.fullmatch(text)
    if match is None:
        try:
            count = parse_count(text, key)
        except UserError:
            forms = "100M, 0.6, 60%, 50%nonemb, hidden=512,heads=8,ffn=1280 or 90MB@q8_0"
            raise UserError(f"{key}: {text!r:.60} is not a size such as {forms}") from None
        if count <= 0:
            raise UserError(f"{key}: {text!r} must be above 0")
        return Size("count", count)
    share = float(match["fraction"]) if match["fraction"] else float(match["percent"]) / 100
    if not 0 < share < 1:
        raise UserError(f"{key}: {text!r:.60} must be above 0 and below 100%: it is the share that is kept")
    return Size("nonemb share" if match["nonemb"] else "share", share)


def _parse_file(text: str, key: str) -> Size:
    """The size of a file and its type; units are decimal: 1 MB is 1,000,000 bytes."""
    match = _FILE.fullmatch(text)
    if match is None:
        raise UserError(f"{key}: {text!r:.60} is not a file's size and type such as 90MB@q8_0 or 1.2GB@bf16")
    num_bytes = float(match["number"]) * {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}[match["unit"].lower()]
    if not 1 <= num_bytes <= MAX_COUNT:
        raise UserError(f"{key}: {text!r:.60} must be above 0 and no larger than any disk")
    return Size("file", int(num_bytes), file_type=match["type"].lower())


def _parse_shape(text: str, key: str) -> dict[str, int]:
    shape: dict[str, int] = {}
    for part in text.split(","):
        name, _, number = (piece.strip() for piece in part.partition("="))
        if name not in SHAPE_KEYS or not re.fullmatch(r"[0-9]{1,12}", number) or int(number) == 0:
            raise UserError(
                f"{key}: {part.strip()!r:.60} is not part of a shape such as hidden=512,heads=8,ffn=1280,layers=24"
                + (f": {name} must be at least 1" if name in SHAPE_KEYS and number.strip("0") == "" else "")
            )
        if name in shape:
            raise UserError(f"{key}: {text!r} gives {name} twice")
        shape[name] = int(number)
    return shape


def at_least(least: int, **values: int | None) -> None:
    """Refuse a number that is too small, by the name of its argument: ``at_least(2, seq_len=seq_len)``."""
    for name, value in values.items():
        if value is not None and value < least:
            raise UserError(f"{name}: {value} must be at least {least}")


def format_count(value: int | float) -> str:
    """Three significant digits with a unit: 134515008 becomes ``135M``."""
    for unit, scale in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if abs(value) >= scale:
            return f"{_three_digits(value / scale)}{unit}"
    return f"{value:.0f}"


def counted(number: int, noun: str) -> str:
    """``1 layer``, ``1,024 layers``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _three_digits(value: float) -> str:
    """Three significant digits; ``.3g`` alone writes 1000 as 1e+03."""
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:.0f}"


def format_range(values: Collection[int]) -> str:
    """``12``, or ``8 to 12`` if the values differ."""
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def format_bytes(value: int | float) -> str:
    """Decimal units: ``269 MB``."""
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if abs(value) >= scale:
            return f"{_three_digits(value / scale)} {unit}"
    return f"{value:.0f} B"


def format_duration(seconds: float) -> str:
    """The two largest units: ``0.5 s``, ``45 s``, ``12 min``, ``3 h 20 min``, ``2 d 4 h``."""
    if 0 < seconds < 1:
        return f"{seconds:.2g} s"
    seconds = round(seconds)
    if seconds < 100:
        return f"{seconds} s"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    days, hours = divmod(hours + (minutes >= 30), 24)
    return f"{days} d {hours} h" if hours else f"{days} d"
