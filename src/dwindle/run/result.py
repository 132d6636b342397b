"""How a run ended."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dwindle.core.notebook import Shown
from dwindle.core.quality import Quality
from dwindle.core.run_directory import RunDirectory
from dwindle.recipe.recipe import Recipe


@dataclass(slots=True)
class RunResult(Shown):
    """How a run ended; ``model`` is None while it can still be resumed."""

    run: Path
    recipe: Recipe = field(repr=False)
    """As it was trained, with what was chosen for the machine."""
    status: str
    step: int
    tokens: int
    parameters: int
    loss: float | None
    valid_loss: float | None
    model: Path | None
    target_reached: bool
    skipped_steps: int = 0
    """Steps whose loss or gradient was not finite."""
    quality: Quality | None = None
    """Loss and samples of the source and, of a finished run, of its result."""
    signal: int | None = None
    """The signal that stopped it, if any."""

    def render(self) -> str:
        """How it ended and how good it is, line by line."""
        if self.status == "stopped":
            return f"stopped after step {self.step:,}; continue with: {RunDirectory(self.run).resume_command}"
        measured = (("loss", self.loss), ("validation", self.valid_loss))
        parts = [f"{self.parameters:,} parameters", f"{self.tokens:,} tokens"]
        parts += [f"{name} {value:.4f}" for name, value in measured if value is not None]
        lines = [f"finished: {', '.join(parts)}", f"model: {self.model}"]
        if self.quality is not None and self.quality.losses():
            started = "random start" if self.recipe.source.random_init else "source"
            losses = self.quality.losses().replace("source", started, 1)
            lines.append(f"validation: {losses} on {self.quality.measured_on()}")
        return "\n".join([*lines, *(self.quality.sample_lines() if self.quality is not None else [])])

    def to_json(self) -> dict[str, Any]:
        """All but the recipe, which the run directory holds."""
        found = asdict(self) | {"run": str(self.run), "model": None if self.model is None else str(self.model)}
        del found["recipe"]
        return found
