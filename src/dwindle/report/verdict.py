"""The verdict of a run: source, target and result, and what the smaller size costs in held-out loss."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp
from typing import Literal

from dwindle.core.quality import NEEDS_TRAINING
from dwindle.core.sizes import counted, format_count, format_duration
from dwindle.report.run import Run
from dwindle.report.tables import cost_of
from dwindle.report.target import target_count

_MAX_PERPLEXITY_LOSS = 15.0
"""Nats above which a perplexity is only noise."""

Tone = Literal["", "good", "fair", "poor"]


@dataclass(slots=True)
class Tile:
    """One number with its name and a note."""

    label: str
    value: str
    note: str
    tone: Tone = ""


def verdict(run: Run) -> str:
    """The run in one or two sentences: how small it is, and how far above its source."""
    before, after = run.parameters_before, run.parameters_after
    source = run.source_name or "the source"
    if before is None or after is None:
        return f"A run of {source}." if run.source_name else ""
    if after == before:
        size = f"{source} with {format_count(after)} parameters, not pruned."
    else:
        size = (
            f"{source} at {after / before:.1%} of its size: {format_count(after)} of {format_count(before)} parameters"
        )
        trimmed = run.ledger.trimmed
        size += "." if trimmed is None else f", {trimmed.kept:,} of {trimmed.rows:,} tokens."
    return " ".join(part for part in (size, _target_text(run, after), _loss_text(run)) if part)


def _target_text(run: Run, after: float) -> str:
    goal = target_count(run.ledger.source)
    if run.target_missed:
        return f"The target of {run.target} was missed."
    if goal is not None and after > goal and run.status != "finished":
        return f"The target of {format_count(goal)} is not reached yet."
    return ""


def _loss_text(run: Run) -> str:
    source, result = run.source_loss, run.result_loss
    bits = "" if run.quality is None else run.quality.bits()
    if source is None and result is None:
        return f"{_text_names(run)}: {bits}." if bits else ""
    if source is None or result is None:
        return "" if result is None else "The source was not measured on the same text."
    change = result - source
    worse = "better than" if change < 0 else "worse than"
    text = f"{_text_names(run)} it is {abs(change):.2f} nats per token {worse} the source"
    if max(source, result) < _MAX_PERPLEXITY_LOSS:
        text += f" (perplexity {_perplexity(source)} → {_perplexity(result)})"
    if bits:
        text += f"; with their own tokenizers {bits}"
    so_far = " so far" if run.status in ("running", "stopped") else ""
    trained = run.metrics.last("tokens") or any(run.ledger.prunes.tokens)
    advice = "" if trained or change <= NEEDS_TRAINING else " It needs training (dwindle pretrain)."
    return f"{text}{so_far}.{advice}"


def _text_names(run: Run) -> str:
    quality = run.quality
    if quality is None or not quality.text:
        return "On held-out text"
    names = ", ".join(quality.text[:2]) + (" and others" if len(quality.text) > 2 else "")
    return f"On held-out text ({names})" if quality.held_out else f"On the calibration text itself ({names})"


def _perplexity(loss: float) -> str:
    return f"{exp(loss):,.3g}" if exp(loss) < 1000 else f"{exp(loss):,.0f}"


def tiles(run: Run) -> list[Tile]:
    """Source, target, result, their difference, and the training; what is not known is left out."""
    before, after = run.parameters_before, run.parameters_after
    source, result = run.source_loss, run.result_loss
    found = []
    if before is not None and after is not None:
        found.append(Tile("source", format_count(before), _and_loss(run.source_name, source)))
        if (goal := _goal(run)) is not None:
            found.append(goal)
        share = "not pruned" if after == before else f"{after / before:.1%} of the source"
        label = "result" if run.status in ("finished", "pruned", "unpruned") else "so far"
        found.append(Tile(label, format_count(after), _and_loss(share, result)))
    if run.ledger.trimmed is not None:
        found.append(Tile("vocabulary", f"{run.ledger.trimmed.kept:,}", f"of {run.ledger.trimmed.rows:,} tokens"))
    if source is not None and result is not None:
        change = result - source
        tone: Tone = "good" if change <= NEEDS_TRAINING else "fair" if change <= 5 * NEEDS_TRAINING else "poor"
        note = f"nats per token, {source:.2f}\u00a0→\u00a0{result:.2f}"
        found.append(Tile("loss against the source", f"{change:+.2f}", note, tone))
    elif (train := run.metrics.last("loss")) is not None and result is None:
        found.append(Tile("train loss", f"{train:.4f}", "nats per token; no held-out text"))
    elif run.quality is not None and run.quality.source_bits is not None and run.quality.result_bits is not None:
        first, last = round(run.quality.source_bits, 3), round(run.quality.result_bits, 3)
        found.append(Tile("bits per byte", f"{last - first:+.3f}", f"{first:.3f}\u00a0→\u00a0{last:.3f}"))
    if (training := _training(run)) is not None:
        found.append(training)
    return found


def _and_loss(text: str, loss: float | None) -> str:
    return ", ".join(part for part in (text, "" if loss is None else f"loss\u00a0{loss:.2f}") if part)


def _goal(run: Run) -> Tile | None:
    goal = target_count(run.ledger.source)
    if not run.target or (goal is None and "=" not in run.target):
        return None
    if goal is None or run.target == format_count(goal):
        return Tile("target", run.target, "parameters" if goal is not None else "shape")
    return Tile("target", run.target, f"at most {format_count(goal)} parameters")


def _training(run: Run) -> Tile | None:
    tokens, step = run.metrics.last("tokens"), run.metrics.last("step")
    if tokens is None or step is None:
        return None
    note = f"{step:,.0f} steps"
    if (cost := cost_of(run)) is not None:
        devices = "" if cost.num_devices == 1 else f" on {cost.num_devices} devices"
        note += f" in {format_duration(cost.hours * 3600 / cost.num_devices)}{devices}"
    return Tile("tokens of training", format_count(tokens), note)


def removed(run: Run) -> str:
    """What was removed, in how many events; empty for an unpruned model."""
    parts, events = _what_was_removed(run), len(run.ledger.prunes)
    if not parts:
        return ""
    compactions = len(run.ledger.compactions)
    times = "once" if compactions == 1 else f"{compactions} times"
    rebuilt = f"; the model was rebuilt at smaller shapes {times}" if compactions else ""
    return f"Removed: {parts}, in {counted(events, 'prune event')}{rebuilt}."


def _what_was_removed(run: Run) -> str:
    view = run.architecture
    if view is None or not view.layers:
        return ""
    num = len(view.layers)
    heads, ffn = run.ledger.num_gone("attn") / num, run.ledger.num_gone("ffn") / num
    hidden = run.ledger.num_gone("stem")
    parts = []
    if heads:
        parts.append(f"{heads:.3g} of {view.total('attn') / num:.4g} attention heads")
    if ffn:
        parts.append(f"{_rounded(ffn)} of {_rounded(view.total('ffn') / num)} FFN channels")
    alike = len({(la.queries_after, la.ffn_after) for la in view.layers if not la.is_gone}) == 1
    in_each = f"{_and(parts)} in {'each layer' if alike else 'each layer on average'}" if parts else ""
    stem = f"{hidden:,} of {view.hidden_before:,} hidden channels" if hidden else ""
    whole, partly = (sum(len(la.absent) == n for la in view.layers) for n in (2, 1))
    layers = f"{whole} of {num} layers" if whole else ""
    blocks = f"the attention or the FFN of {counted(partly, 'layer')}" if partly else ""
    return _and([part for part in (in_each, stem, layers, blocks) if part])


def _rounded(value: float) -> str:
    return f"{value:,.1f}".removesuffix(".0")


def _and(parts: list[str]) -> str:
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
