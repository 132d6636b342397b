"""Pruning without training: one-shot, or in rounds with new scores (``dwindle prune``), and replay of a ledger."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import torch
from rich.table import Table
from torch import Tensor

from dwindle.anatomy import KINDS, Anatomy, Kind, ParameterCount, Structure
from dwindle.anatomy.build import cut, is_custom
from dwindle.errors import UserError
from dwindle.export.huggingface import check_output, save_model
from dwindle.progress import Bar
from dwindle.pruning.calibration import Calibration, calibrate
from dwindle.pruning.gram import DEFAULT_DAMPING
from dwindle.pruning.ledger import Event, prune_event, read_ledger, replay_structure, source_event
from dwindle.pruning.saliency import ElementScores, Metric, metric_named
from dwindle.pruning.secondorder import repair
from dwindle.pruning.selection import DEFAULT_MIN_WIDTH, Choice, SelectionOptions, Selector, final_count, rounded_shape
from dwindle.pruning.surgery import Prunable
from dwindle.pruning.target import Shape, Target, parse_target
from dwindle.sources import Loaded, load, load_config
from dwindle.training.data import calibration_windows

DEFAULT_TEXT = "pydoc"
"""Calibration text that every machine has: the prose of CPython's own documentation."""


@dataclass(slots=True)
class Pruned:
    """A smaller model with everything needed to check it: its structure and ledger in the source's numbering."""

    model: Any
    tokenizer: Any
    source: str
    structure: Structure
    source_shape: Shape
    before: ParameterCount
    after: ParameterCount
    ledger: list[Event]

    def __iter__(self) -> Iterator[Any]:
        return iter((self.model, self.tokenizer))

    def summary(self, out: str | PathLike[str]) -> dict[str, Any]:
        """The result in numbers, for ``--json``."""
        return {
            "out": str(out),
            "source": self.source,
            "model_type": self.model.config.model_type,
            "stock": not is_custom(self.model.config),
            "events": sum(event["event"] == "prune" for event in self.ledger),
            "parameters": {"before": self.before.total, "after": self.after.total},
            "non_embedding": {"before": self.before.non_embedding, "after": self.after.non_embedding},
            "shape": asdict(Shape.of(self.structure)),
        }

    def render(self, out: str | PathLike[str]) -> Table:
        """The result as a table."""
        table = Table(title=f"{self.source} → {out}", title_justify="left")
        for column in ("", "parameters", "non-embedding", "hidden", "query heads", "FFN"):
            table.add_column(column, justify="right")
        rows = (("before", self.before, self.source_shape), ("after", self.after, Shape.of(self.structure)))
        for name, count, shape in rows:
            sizes = (shape.hidden, shape.heads, shape.ffn)
            table.add_row(name, f"{count.total:,}", f"{count.non_embedding:,}", *map(str, sizes))
        return table

    def save(self, out: str | PathLike[str], *, overwrite: bool = False) -> Path:
        """Write the model directory."""
        return save_model(
            self.model,
            self.tokenizer,
            out,
            structure=self.structure,
            source=self.source,
            ledger=self.ledger,
            overwrite=overwrite,
        )


def prune(
    source: str | PathLike[str] | Loaded,
    to: str,
    *,
    out: str | PathLike[str] | None = None,
    data: Sequence[str] = (DEFAULT_TEXT,),
    metric: str = "taylor",
    second_order: bool = False,
    groups: Sequence[Kind] = KINDS,
    attention: Literal["cluster", "regular"] = "regular",
    compare: Literal["mean", "sum"] = "mean",
    rounds: int = 1,
    round_to: int | None = None,
    min_heads: int = 1,
    min_ffn: int = DEFAULT_MIN_WIDTH,
    min_hidden: int = DEFAULT_MIN_WIDTH,
    num_sequences: int = 64,
    seq_len: int = 256,
    gram_tokens: int | None = None,
    damping: float = DEFAULT_DAMPING,
    seed: int = 0,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
) -> Pruned:
    """Prune a model to a size after calibration, and write it to ``out`` if given.

    Scores are measured once, or anew in each of ``rounds`` (equal steps of the parameter count) on the model as it is
    by then. Scoring is in float32; the written weights have ``dtype``, by default the one the source is stored in.

    With ``second_order`` the weights that stay are changed so that every layer's output moves least (EfficientLLM-B),
    from the inputs of ``gram_tokens`` calibration tokens (None: all of them); ``damping`` is its ridge.
    """
    options = SelectionOptions(
        groups=tuple(groups),
        attention=attention,
        compare=compare,
        min_heads=min_heads,
        min_ffn=min_ffn,
        min_hidden=min_hidden,
    )
    scoring = metric_named(metric)
    if rounds < 1:
        raise UserError(f"rounds {rounds}: at least one round is needed")
    if round_to is not None and round_to < 1:
        raise UserError(f"round-to {round_to}: give a multiple of at least 1, such as 64")
    if gram_tokens is not None and gram_tokens < 1:
        raise UserError(f"gram-tokens {gram_tokens}: give a number of tokens of at least 1")
    if not 0 <= damping < float("inf"):
        raise UserError(f"damping {damping}: give a share of the mean curvature, such as {DEFAULT_DAMPING}")
    if out is not None:
        check_output(out, overwrite=overwrite)
    anatomy = Anatomy.of(source.model) if isinstance(source, Loaded) else Anatomy.of_config(load_config(source))
    target = parse_target(to, anatomy)
    Selector(anatomy, target, options)  # refuses impossible targets before the weights are read
    loaded = source if isinstance(source, Loaded) else load(source, device=device)
    prunable = Prunable(deepcopy(loaded.model) if loaded is source else loaded.model)
    windows = None
    if scoring.needs or second_order:
        windows = _windows(loaded, data, num_sequences, seq_len, seed)

    job = _Job(prunable, metric, options, target, windows, round_to, seed, second_order, gram_tokens, damping)
    events = job.run(rounds, loaded.source)
    result = Pruned(
        model=prunable.compacted(),
        tokenizer=loaded.tokenizer,
        source=loaded.source,
        structure=prunable.alive,
        source_shape=Shape.of(prunable.anatomy.source),
        before=prunable.anatomy.count(prunable.anatomy.source),
        after=prunable.anatomy.count(prunable.alive),
        ledger=events,
    )
    result.model.to(dtype or stored_dtype(loaded))
    if out is not None:
        result.save(out, overwrite=overwrite)
    return result


@dataclass(slots=True)
class _Job:
    """One pruning from source to target, round by round."""

    prunable: Prunable
    metric: str
    options: SelectionOptions
    target: Target
    windows: Tensor | None
    round_to: int | None
    seed: int
    second_order: bool
    gram_tokens: int | None
    damping: float

    def run(self, rounds: int, source: str) -> list[Event]:
        anatomy = self.prunable.anatomy
        start, goal = anatomy.count(anatomy.source).total, final_count(anatomy, self.target)
        settings = {"metric": self.metric, "second_order": self.second_order, "rounds": rounds, "seed": self.seed}
        settings |= asdict(self.options)
        events = [source_event(source, start, settings)]
        for number in range(1, rounds + 1):
            metric = metric_named(self.metric, seed=self.seed * 1000 + number)
            found = calibrate(
                self.prunable,
                self.windows,
                metric,
                second_order=self.second_order,
                gram_tokens=self.gram_tokens,
                damping=self.damping,
            )
            aim = self.target if number == rounds else Target(start - (start - goal) * number // rounds)
            choices = choose_groups(self.prunable, aim, found, metric, self.options)
            if number == rounds and self.round_to is not None and aim.shape is None:
                natural = choices[-1].rest if choices else self.prunable.alive
                shape = rounded_shape(anatomy, natural, self.prunable.alive, aim, self.options, self.round_to)
                again = metric_named(self.metric, seed=self.seed * 1000 + number)
                choices = choose_groups(self.prunable, Target(0, shape), found, again, self.options)
            events += [prune_event(choice, step=number, tokens=0) for choice in choices]
            if choices:
                if found.inputs is not None and self.second_order:
                    repair(self.prunable, choices[-1].rest, found.inputs, damping=self.damping)
                self.prunable.kill(choices[-1].rest)
        return events


def choose_groups(
    prunable: Prunable, aim: Target, found: Calibration, metric: Metric, options: SelectionOptions
) -> list[Choice]:
    """Group after group from the same scores, until the aim."""
    selector = Selector(prunable.anatomy, aim, options)
    elements = ElementScores(prunable, found.gradients, found.fishers, metric)
    alive, choices = prunable.alive, []
    excess = max(prunable.num_parameters - aim.num_parameters, 1)
    with Bar("selecting groups", excess) as bar:
        while (choice := selector.choose(elements.scores, alive)) is not None:
            choices.append(choice)
            elements.remove(choice.group)
            bar.advance(prunable.anatomy.count(alive).total - choice.num_parameters)
            alive = choice.rest
    return choices


def stored_dtype(loaded: Loaded) -> torch.dtype:
    """What the source's files hold; dequantised sources are float32."""
    stored = getattr(load_config(loaded.source), "dtype", None) if loaded.kind == "huggingface" else None
    return stored if isinstance(stored, torch.dtype) else torch.float32


def _windows(loaded: Loaded, data: Sequence[str], num_sequences: int, seq_len: int, seed: int) -> Tensor:
    if loaded.tokenizer is None:
        raise UserError(f"{loaded.source}: no tokenizer was found beside it: there is no way to calibrate on text")
    return calibration_windows(list(data), loaded.tokenizer, num_sequences=num_sequences, seq_len=seq_len, seed=seed)


def replay(source: str | PathLike[str] | Loaded, ledger: str | PathLike[str], at: int | str | None = None) -> Pruned:
    """Rebuild the architecture at any point of a ledger: the source's own weights, cut to the structure there.

    Second-order updates, like training, are not in the ledger: only the written model has those.

    ``at`` is a number of events, a size (``"100M"``: the first point of at most that), or None for the end.
    """
    events = read_ledger(ledger)
    loaded = source if isinstance(source, Loaded) else load(source)
    anatomy = Anatomy.of(loaded.model)
    before = anatomy.count(anatomy.source)
    if events[0]["parameters"] != before.total:
        raise UserError(
            f"ledger {ledger}: it begins at {events[0]['parameters']:,} parameters, {loaded.source} has "
            f"{before.total:,}: give the source that the ledger was written for"
        )
    structure = replay_structure(anatomy.source, events, at)
    model = cut(loaded.model, anatomy, structure, anatomy.source)
    return Pruned(
        model=model,
        tokenizer=loaded.tokenizer,
        source=loaded.source,
        structure=structure,
        source_shape=Shape.of(anatomy.source),
        before=before,
        after=anatomy.count(structure),
        ledger=events,
    )
