"""Parameters of every layer before and after, and layer importance (as in the Adapt-Pruner paper)."""

from __future__ import annotations

from dwindle.core.figure import Figure, Panel, Series
from dwindle.report.run import Run


def layer_figure(run: Run) -> Figure | None:
    """The figure; None if all layers are alike, or before a structure with parameter counts has been written."""
    counts = [] if run.architecture is None else run.architecture.parameters
    if len(set(counts)) < 2:
        return None
    numbers: list[float | int] = list(range(len(counts)))
    before = Series("before", "train", numbers, [b for b, _ in counts], "dots")
    after = Series("after", "size", numbers, [a for _, a in counts], "dots")
    panels = [Panel("parameters", "count", [before, after], zero=True)]
    caption = "Parameters of every decoder layer, before and after pruning."
    if (importance := _importance(run, len(counts))) is not None:
        panels.append(importance)
        caption += " Importance: the layer's change of the residual stream (negative cosine similarity, or a distance)."
    return Figure("layers", "Layer by layer", caption, "layer", "count", panels)


def _importance(run: Run, num_layers: int) -> Panel | None:
    """First and last importance; None for methods that do not measure it."""
    found = [values for values in run.ledger.allocations if len(values) == num_layers]
    if not found:
        return None
    named = {"first iteration": (found[0], "train"), "last iteration": (found[-1], "stem")}
    series = []
    for name, (values, color) in named.items():
        known = [(place, value) for place, value in enumerate(values) if value == value]  # not of layers that are gone
        series.append(Series(name, color, [place for place, _ in known], [value for _, value in known], "dots"))
    return Panel("importance", "number", series if len(found) > 1 else series[:1])
