"""How good a result is against its source: held-out loss and greedy samples, as ``quality.json`` holds them.

A run writes it after its first step (the source alone) and at its end; model directories hold a copy.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError

from dwindle.core.errors import UserError
from dwindle.core.files import write_text_atomic
from dwindle.core.reading import MAX_JSON_BYTES, read_limited
from dwindle.core.terminal import plain

NEEDS_TRAINING = 0.1
"""Nats per token that a result may be above its source before training is advised."""

_SHOWN = 200
"""Characters of a prompt that a terminal shows."""
_AS_WRITTEN = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
"""For reading: files may be edited."""


def bits_per_byte(nats: float, num_bytes: int) -> float:
    """Bits per byte from the nats of a whole text: comparable between tokenizers, as nats per token are not."""
    return nats / num_bytes / math.log(2)


def from_to(source: float | None, result: float | None) -> str:
    """``2.713 → 2.974 (+0.261)``, the difference being that of the rounded values; empty if either is not measured."""
    if source is None or result is None:
        return ""
    return f"{source:.3f} → {result:.3f} ({round(result, 3) - round(source, 3):+.3f})"


@dataclass(slots=True)
class Sample:
    """The greedy continuations of one prompt."""

    __pydantic_config__ = _AS_WRITTEN

    prompt: str
    source: str | None = None
    result: str | None = None
    """None while the run trains."""


@dataclass(slots=True)
class Quality:
    """Loss (nats per token) and samples of a result and of its untouched source; None is not measured."""

    __pydantic_config__ = _AS_WRITTEN

    text: list[str] = field(default_factory=list)
    """Names of the texts that the losses are measured on; empty if there are none."""
    tokens: int = 0
    """Tokens of them that were predicted."""
    held_out: bool = True
    """False if the text was too short to hold any of it out of the calibration."""
    source_loss: float | None = None
    result_loss: float | None = None
    samples: list[Sample] = field(default_factory=list)
    bytes: int = 0
    """Bytes of the text that the bits are measured on; 0 if they are not."""
    source_bits: float | None = None
    """Bits per byte of the untouched source with its own tokenizer, if the result has another one."""
    result_bits: float | None = None

    @property
    def change(self) -> float | None:
        """Nats per token above the source; negative is better than the source."""
        if self.source_loss is None or self.result_loss is None:
            return None
        return self.result_loss - self.source_loss

    @property
    def needs_training(self) -> bool:
        return self.change is not None and self.change > NEEDS_TRAINING

    def losses(self) -> str:
        """``source 2.713 → 2.974 (+0.261)``; empty if either is not measured."""
        loss = from_to(self.source_loss, self.result_loss)
        return "; ".join(filter(None, (f"source {loss}", self.bits()))) if loss else ""

    def bits(self) -> str:
        """``bits per byte 0.912 → 0.921 (+0.009)``; empty unless the tokenizers differ."""
        bits = from_to(self.source_bits, self.result_bits)
        return f"bits per byte {bits}" if bits else ""

    def measured_on(self, unit: Literal["tokens", "bytes"] = "tokens") -> str:
        """``4,080 held-out tokens of pydoc``."""
        kind = f"held-out {unit}" if self.held_out else f"{unit} (too few to hold any out)"
        return f"{getattr(self, unit):,} {kind} of {', '.join(self.text)}"

    def add_samples(self, which: Literal["source", "result"], texts: Sequence[str]) -> None:
        """The continuations of one model; of a sharded model there are none."""
        for sample, text in zip(self.samples, texts, strict=False):
            setattr(sample, which, text)

    def sample_lines(self) -> list[str]:
        """The samples for a terminal: the prompt, then both continuations, each on one line."""
        lines = []
        for sample in self.samples:
            prompt = one_line(sample.prompt)  # of a conversation it can be a page; what is continued is its end
            lines.append(f"greedy: {prompt if len(prompt) <= _SHOWN else f'… {prompt[-_SHOWN:]}'} …")
            for name, text in (("source", sample.source), ("result", sample.result)):
                if text is not None:
                    lines.append(f"  {name}: {one_line(text)}")
        return lines

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def write(self, path: Path) -> None:
        write_text_atomic(path, json.dumps(self.to_json(), ensure_ascii=False, indent=1) + "\n")


def read_quality(path: Path) -> Quality | None:
    """The content of a ``quality.json``; None if there is none, it was edited, or it is of another version."""
    try:
        return TypeAdapter(Quality).validate_json(read_limited(path, MAX_JSON_BYTES))
    except (UserError, ValidationError):
        return None


def one_line(text: str) -> str:
    """Text of a model or of a file as one printable line."""
    return plain(" ".join(text.split()))


def text_names(paths: Sequence[str]) -> list[str]:
    """Texts without their folders, because cards are published."""
    return [Path(path).name or path for path in paths]
