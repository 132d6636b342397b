"""The figures of a run as data, drawn by the report page and by ``dwindle plot``."""

from __future__ import annotations

from typing import Any

import numpy as np

from dwindle.core.figure import Figure, Mark, Panel, Rug, Series, Unit
from dwindle.core.run_directory import METRICS
from dwindle.report.clock import running_clock
from dwindle.report.logs import KINDS, Floats
from dwindle.report.run import Run
from dwindle.report.target import target_count
from dwindle.report.thinning import moving_mean, rounded, thin, thin_steps

MAX_POINTS = 1600
SMOOTH_POINTS = 600
SMOOTH_SHARE = 80
"""A moving mean spans this fraction (1/n) of its series."""
MAX_TICKS = 1200
MAX_MARKS = 60
MAX_TASKS = 8

NAMES = {"attn": "attention heads", "ffn": "FFN channels", "stem": "hidden channels", "layer": "whole blocks"}
COLOURS = {"attn": "attn", "ffn": "ffn", "stem": "stem", "layer": "size"}


def build_figures(run: Run) -> list[Figure]:
    """All figures that the run has data for."""
    figures = [
        _loss(run),
        _tasks(run),
        _saliency(run),
        _share(run),
        _layers(run),
        _throughput(run),
        _optimizer(run),
    ]
    return [figure for figure in figures if figure is not None and any(p.series for p in figure.panels)]


def line(name: str, color: str, x: Floats, y: Floats, *, points: int = MAX_POINTS, style: Any = "line") -> Series:
    """A series, thinned to about ``points`` points that draw the same line."""
    drawn = np.isfinite(x) & np.isfinite(y)
    x, y = x[drawn], y[drawn]
    kept = thin_steps(y, points) if style == "step" else thin(y, points)
    return Series(name, color, rounded(x[kept], 12), rounded(y[kept]), style)


def _smoothed(name: str, color: str, x: Floats, y: Floats) -> list[Series]:
    """Every value faintly and a moving mean on top; a short series is drawn as is."""
    window = len(y) // SMOOTH_SHARE
    if window <= 1:
        return [line(name, color, x, y)]
    mean = line(f"{name} (mean of {window:,})", color, x, moving_mean(y, window), points=SMOOTH_POINTS)
    return [line(f"{name} (each)", color, x, y, style="faint"), mean]


# Pruning (the paper's Fig. 7) ------------------------------------------------------------------------------


def _event_axis(run: Run) -> tuple[Floats, str]:
    """Tokens at each event; for pruning without training the heads and channels removed up to it, over all layers."""
    tokens = np.array(run.ledger.prunes.tokens)
    if len(tokens) and tokens.max() > 0:
        return tokens, "tokens"
    return np.cumsum(np.array(run.ledger.prunes.sizes)), "groups removed"


def _saliency(run: Run) -> Figure | None:
    x, label = _event_axis(run)
    series = []
    for kind, values in zip(KINDS, run.ledger.prunes.saliency, strict=True):
        y = np.array(values)
        usable = np.isfinite(y) & (y > 0)
        if usable.any():
            series += _smoothed(NAMES[kind], COLOURS[kind], x[usable], y[usable])
    series.sort(key=lambda one: one.style != "faint")  # means are drawn over single events
    if not series:
        return None
    metric = run.ledger.option("metric")
    scored = f"Score: {metric}. " if isinstance(metric, str) else ""
    rule = "At each event the least salient group of every type is compared, and the lowest is removed."
    if run.ledger.allocations:
        rule = "Scores of the removed groups, by type; each layer removes its own least salient groups."
    return Figure(
        "saliency",
        "Saliency by type",
        scored + rule,
        label,
        "count",
        [Panel("mean score per weight", "scientific", series, log=True)],
    )


def _share(run: Run) -> Figure | None:
    prunes, view = run.ledger.prunes, run.architecture
    if not len(prunes) or view is None:
        return None
    x, label = _event_axis(run)
    kinds, sizes = np.array(prunes.kinds), np.array(prunes.sizes)
    # the curve is flat after the last event: show a little of it
    end = min(max([x[-1], *run.metrics.tokens[-1:]]), 1.25 * x[-1]) if label == "tokens" else x[-1]
    series = []
    removed = [(place, kind) for place, kind in enumerate(KINDS) if run.ledger.num_gone(kind)]
    for place, kind in removed:
        own = np.cumsum(np.where(kinds == place, sizes, 0.0)) * 100 / max(view.total(kind), 1)
        xs = np.concatenate([[0.0], x, [end]])
        series.append(line(NAMES[kind], COLOURS[kind], xs, np.concatenate([[0.0], own, own[-1:]]), style="step"))
    panel = Panel("removed", "percent", series, zero=True)
    caption = "Share of the source's heads and channels that was removed, over all layers."
    if kept := [NAMES[kind] for kind in ("attn", "ffn", "stem") if not run.ledger.num_gone(kind)]:
        caption += f" All {' and '.join(kept)} are kept."
    return Figure("share", "Pruned share of each type", caption, label, "count", [panel])


def _layers(run: Run) -> Figure | None:
    """Parameters and importance of every layer; None if all are alike, or the result is not written yet."""
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


# Training ---------------------------------------------------------------------------------------------------


def _loss(run: Run) -> Figure | None:
    metrics, tokens = run.metrics, run.metrics.tokens
    loss, valid = metrics.column("loss"), metrics.column("valid_loss")
    losses = _smoothed("train", "train", tokens[loss.rows], loss.values) if len(loss) else []
    taught = metrics.column("distill_loss")
    if len(valid):
        losses.append(line("validation", "valid", tokens[valid.rows], valid.values, style="dots"))
    if losses and (source := source_line(run)) is not None:
        losses.append(source)
    panels = [Panel("loss, nats per token", "number", losses, top=_calm_top(loss.values), height=1.5)]
    if (sizes := _parameters(run)) is not None:
        panels.append(sizes)
    if not losses:
        return None
    if len(taught):  # its own axis: it is far below the loss
        distance = _smoothed("distillation", "stem", tokens[taught.rows], taught.values)
        panels.append(Panel("distillation, nats per token", "number", distance, zero=True, height=0.8))
    marks = "Ticks mark prune events, dashed lines compactions, which rebuild the model without its pruned parts."
    caption = marks if len(run.ledger.prunes) else ""
    if len(taught):
        caption += " Distillation: KL divergence from the teacher."
    if run.source_loss is not None:
        caption = f"Source: the untouched model's validation loss, {run.source_loss:.3f}. {caption}"
    return Figure(
        "loss",
        "Loss and size",
        caption,
        "tokens",
        "count",
        panels,
        _compactions(run, {}),
        _rugs(run),
        wide=True,
    )


def source_line(run: Run, name: str = "source", color: str = "source") -> Series | None:
    """The held-out loss of the source, over all tokens of the run; None if it was not measured."""
    tokens = run.metrics.tokens
    if run.source_loss is None or not len(tokens):
        return None
    return Series(name, color, rounded(tokens[[0, -1]], 12), [round(run.source_loss, 5)] * 2, "target")


def _calm_top(values: Floats) -> float | None:
    """An upper axis limit that ignores a few spikes; they are cut off in the figure, not in the data."""
    if len(values) < 50:
        return None
    low, high, most = values.min(), np.quantile(values, 0.995), values.max()
    roof = float(high + 0.35 * (high - low))
    return roof if most > high + 2 * (high - low) else None


def size_steps(run: Run) -> tuple[Floats, Floats] | None:
    """(tokens, parameters), from the ledger's prune events up to the last token in the metrics."""
    prunes, before = run.ledger.prunes, run.parameters_before
    tokens = run.metrics.tokens
    column = run.metrics.column("parameters")
    if len(prunes):
        x, left = np.array(prunes.tokens), np.array(prunes.parameters)
        if before is not None:
            x, left = np.concatenate([[0.0], x]), np.concatenate([[before], left])
        if len(tokens) and tokens[-1] > x[-1]:
            x, left = np.append(x, tokens[-1]), np.append(left, left[-1])
        return x, left
    return (tokens[column.rows], column.values) if len(column) else None


def _parameters(run: Run) -> Panel | None:
    steps = size_steps(run)
    if steps is None:
        return None
    series = [line("parameters", "size", *steps, style="step")]
    goal = target_count(run.ledger.source)
    if goal is not None:
        series.append(Series("target", "size", [0, series[0].x[-1]], [goal, goal], "target"))
    return Panel("parameters", "count", series, zero=True)


def _compactions(run: Run, pauses_s: dict[int, float], places: dict[int, float] | None = None) -> list[Mark]:
    marks = []
    for compaction in run.ledger.compactions[-MAX_MARKS:]:
        x = compaction.tokens if places is None else places.get(compaction.step)
        if x is not None:
            pause = f", {pauses_s[compaction.step]:.2g} s" if compaction.step in pauses_s else ""
            marks.append(Mark(float(x), f"compacted to {compaction.text}{pause}"))
    return marks


def _rugs(run: Run) -> list[Rug]:
    prunes = run.ledger.prunes
    tokens, kinds = np.array(prunes.tokens), np.array(prunes.kinds)
    rugs = []
    for place, kind in enumerate(KINDS):
        own = np.unique(tokens[kinds == place])
        if len(own):
            kept = own[np.unique(np.linspace(0, len(own) - 1, min(len(own), MAX_TICKS)).astype(int))]
            rugs.append(Rug(NAMES[kind], COLOURS[kind], rounded(kept, 12)))
    return rugs


def _optimizer(run: Run) -> Figure | None:
    metrics, tokens = run.metrics, run.metrics.tokens
    rate, norm = metrics.column("lr"), metrics.column("grad_norm")
    panels = []
    if len(rate):
        rates = line("learning rate", "train", tokens[rate.rows], rate.values, points=SMOOTH_POINTS)
        panels.append(Panel("learning rate", "scientific", [rates], zero=True))
    positive = norm.values > 0
    if positive.any():
        norms = _smoothed("gradient norm", "valid", tokens[norm.rows][positive], norm.values[positive])
        panels.append(Panel("gradient norm", "number", norms, log=True))
    skipped = metrics.column("skipped")
    missed = tokens[skipped.rows][skipped.values > 0]
    note = f" {len(missed):,} steps were skipped (gradient not finite)." if len(missed) else ""
    rugs = [Rug("skipped steps", "warn", rounded(missed[:MAX_TICKS], 12))] if len(missed) else []
    if not panels:
        return None
    caption = f"Gradient norm before clipping.{note}"
    return Figure("optimizer", "Learning rate and gradient", caption, "tokens", "count", panels, [], rugs)


def _tasks(run: Run) -> Figure | None:
    """Other metrics that callbacks wrote during training, such as task accuracies."""
    metrics, tokens = run.metrics, run.metrics.tokens
    known = {"step", "tokens", "loss", "grad_norm", "lr", "skipped", "parameters", "events", "valid_loss"}
    known |= {"flops_per_token", "distill_loss", "source_valid_loss", "learned_tokens"}
    names = [n for n in metrics.names if n not in known and not n.startswith(("time.", "compacted."))]
    shares, others = Panel("accuracy", "percent", []), Panel("other metrics", "number", [])
    for place, name in enumerate(names[:MAX_TASKS]):
        column = metrics.column(name)
        is_share = name.startswith("tasks/") and column.values.min() >= 0 and column.values.max() <= 1
        panel, scale = (shares, 100) if is_share else (others, 1)
        x, y = tokens[column.rows], column.values * scale
        panel.series.append(line(name.removeprefix("tasks/"), f"task{place}", x, y, style="dots"))
    panels = [panel for panel in (shares, others) if panel.series]
    left = len(names) - MAX_TASKS
    caption = "Scores of the model on its way." + (f" {left} more in {METRICS}." if left > 0 else "")
    return (
        Figure("tasks", "Evaluation during training", caption, "tokens", "count", panels, wide=True) if panels else None
    )


# Speed ------------------------------------------------------------------------------------------------------


def _throughput(run: Run) -> Figure | None:
    metrics = run.metrics
    speed, clock = metrics.column("time.tokens_per_s"), running_clock(metrics)
    if clock is None or not len(speed):
        return None
    x = clock.seconds[speed.rows]
    panels = [_speed_panel("tokens per second", "count", x, speed.values)]
    if len(use := metrics.column("time.mfu")):
        panels.append(_speed_panel("utilisation", "percent", clock.seconds[use.rows], use.values * 100))
        about = "Utilisation: model FLOP/s relative to the device's peak."
    elif len(flops := metrics.column("flops_per_token")) == len(speed):
        unit, scale = _flops_unit(flops.values * speed.values)
        panels.append(_speed_panel(f"model {unit}", "number", x, flops.values * speed.values / scale))
        about = f"{unit} of the model in memory: pruned groups count until a compaction."
    else:
        about = ""
    pauses = metrics.column("time.compaction")
    steps = metrics.steps
    pauses_s = {int(steps[row]): float(value) for row, value in zip(pauses.rows, pauses.values, strict=True)}
    places = dict(zip(steps.astype(int).tolist(), clock.seconds.tolist(), strict=True))
    marks = _compactions(run, pauses_s, places) + [Mark(x, "stopped and resumed", "stop") for x in clock.stops[:50]]
    stops = " Red lines mark stops and resumes; the time between them is not counted." if clock.stops else ""
    return Figure(
        "throughput",
        "Speed",
        f"{'Dashed lines mark compactions.' if run.ledger.compactions else ''}{stops} {about}".strip(),
        "running time",
        "seconds",
        panels,
        marks,
    )


def _speed_panel(label: str, unit: Unit, x: Floats, y: Floats) -> Panel:
    return Panel(label, unit, _smoothed(label, "speed", x, y), zero=True, top=_calm_top(y))


def _flops_unit(flops: Floats) -> tuple[str, float]:
    """The unit in which the usual speed has one to three digits."""
    units = (("PFLOP/s", 1e15), ("TFLOP/s", 1e12), ("GFLOP/s", 1e9))
    usual = float(np.median(flops))
    return next(((name, scale) for name, scale in units if usual >= scale), ("MFLOP/s", 1e6))
