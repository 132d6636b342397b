"""Pruning without training: one-shot, or in rounds with new scores (``dwindle prune``), and replay of a ledger."""

from __future__ import annotations

import os
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
from dwindle.core.errors import UserError
from dwindle.core.progress import Bar, track
from dwindle.core.sizes import check_sequences, format_count
from dwindle.data import calibration_windows
from dwindle.export.huggingface import check_output, save_model
from dwindle.pruning.calibration import Calibration, calibrate
from dwindle.pruning.event_bounds import check_rounds, coupled_events, global_events
from dwindle.pruning.gram import DEFAULT_DAMPING
from dwindle.pruning.importance import Distance
from dwindle.pruning.ledger import Event, ledger_until, prune_event, read_ledger, replay_structure, source_event
from dwindle.pruning.saliency import ElementScores, Metric, metric_named, score_model
from dwindle.pruning.second_order import repair
from dwindle.pruning.strategies.adapt import ADAPT_KINDS, DEFAULT_AMPLITUDE, AllocationOptions, Allocator
from dwindle.pruning.strategies.coupled import (
    DEFAULT_MIN_WIDTH,
    Choice,
    SelectionOptions,
    Selector,
    check_rounding,
    final_count,
    rounded_shape,
    rounding_floors,
)
from dwindle.pruning.strategies.global_selection import GlobalSelector, check_round_widths
from dwindle.pruning.strategies.layer_plan import Balance
from dwindle.pruning.surgery import Prunable
from dwindle.pruning.target import Shape, Sizes, Target, is_share, parse_target, sizes_of, sizes_text
from dwindle.run.adaptive import ADAPT_ITERATIONS, ADAPT_METRIC, ADAPT_SEQ_LEN, ADAPT_SEQUENCES, AdaptJob
from dwindle.sources import Loaded, load, load_config, needed_tokenizer

DEFAULT_TEXT = "pydoc"
"""Calibration text that every machine has: the prose of CPython's own documentation."""


@dataclass(slots=True, repr=False)
class Pruned:
    """A smaller model with everything needed to check it: its structure and ledger in the source's numbering."""

    model: Any
    tokenizer: Any
    source: str
    structure: Structure
    source_sizes: Sizes
    before: ParameterCount
    after: ParameterCount
    ledger: list[Event]
    inputs: tuple[str, ...] = ()
    """What was read besides the source: ``save`` replaces neither."""

    def __iter__(self) -> Iterator[Any]:
        return iter((self.model, self.tokenizer))

    def __repr__(self) -> str:
        """One line: the fields hold whole models, and every index that was kept."""
        before, after = (format_count(count.total) for count in (self.before, self.after))
        sizes, events = sizes_text(sizes_of(self.structure)), sum(event["event"] == "prune" for event in self.ledger)
        return f"<Pruned {self.source}: {before} → {after} parameters, {sizes}, {events:,} events>"

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
            "shape": sizes_of(self.structure),
            "layers": [
                {"query_heads": len(la.query_heads), "kv_heads": len(la.kv_heads), "ffn": len(la.ffn)}
                for la in self.structure.layers
            ],
        }

    def render(self, out: str | PathLike[str]) -> Table:
        """The result as a table."""
        table = Table(title=f"{self.source} → {out}", title_justify="left")
        for column in ("", "parameters", "non-embedding", "hidden", "query heads", "FFN"):
            table.add_column(column, justify="right")
        rows = (("before", self.before, self.source_sizes), ("after", self.after, sizes_of(self.structure)))
        for name, count, sizes in rows:
            spans = (sizes_text({"": size}).strip() for size in sizes.values())
            table.add_row(name, f"{count.total:,}", f"{count.non_embedding:,}", *spans)
        return table

    def save(self, out: str | PathLike[str], *, overwrite: bool = False) -> Path:
        """Write the model directory."""
        check_output(out, overwrite=overwrite, sources=[self.source, *self.inputs])
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
    text_field: str = "text",
    method: Literal["efficientllm", "adapt", "uniform"] = "efficientllm",
    selection: Literal["coupled", "global"] = "coupled",
    metric: str | None = None,
    second_order: bool = False,
    groups: Sequence[Kind] | None = None,
    attention: Literal["cluster", "regular"] = "regular",
    compare: Literal["mean", "sum"] = "mean",
    rounds: int | None = None,
    amplitude: float = DEFAULT_AMPLITUDE,
    distance: Distance = "cosine",
    balance: Balance = "score",
    round_to: int | None = None,
    min_heads: int = 1,
    min_ffn: int = DEFAULT_MIN_WIDTH,
    min_hidden: int = DEFAULT_MIN_WIDTH,
    num_sequences: int | None = None,
    seq_len: int | None = None,
    gram_tokens: int | None = None,
    damping: float = DEFAULT_DAMPING,
    seed: int = 0,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
) -> Pruned:
    """Prune a model to a size after calibration, and write it to ``out`` if given.

    ``efficientllm`` removes minimal groups, the same in every layer or (``selection="global"``) the weakest anywhere;
    ``adapt`` gives every layer its own sizes by its importance (Adapt-Pruner, with ``amplitude`` and ``distance``);
    ``uniform`` takes the same share of every layer (LLM-Pruner); in both ``balance`` says what leaves inside a layer.
    What is None depends on the method: ``DEFAULTS``.

    Scores are measured once, or anew in each of ``rounds`` (equal steps of the parameter count) on the model as it is
    by then. Scoring is in float32; the written weights have ``dtype``, by default the one the source is stored in.

    With ``second_order`` the weights that stay are changed so that every layer's output moves least (EfficientLLM-B),
    from the inputs of ``gram_tokens`` calibration tokens (None: all of them); ``damping`` is its ridge.
    """
    if method not in DEFAULTS:
        raise UserError(f"method {method!r}: choose {', '.join(DEFAULTS)}")
    usual = DEFAULTS[method]
    settings = _Settings(
        method=method,
        selection=selection,
        metric=usual.metric if metric is None else metric,
        second_order=second_order,
        rounds=usual.rounds if rounds is None else rounds,
        amplitude=amplitude,
        distance=distance,
        balance=balance,
        round_to=round_to,
        gram_tokens=gram_tokens,
        damping=damping,
        seed=seed,
    )
    options = SelectionOptions(
        groups=usual.groups if groups is None else tuple(groups),
        attention=attention,
        compare=compare,
        min_heads=min_heads,
        min_ffn=min_ffn,
        min_hidden=min_hidden,
    )
    settings.check()
    count = usual.num_sequences if num_sequences is None else num_sequences
    length = usual.seq_len if seq_len is None else seq_len
    check_sequences(count, length)
    if out is not None:
        read = source.source if isinstance(source, Loaded) else source
        check_output(out, overwrite=overwrite, sources=[read, *data])
    anatomy = Anatomy.of(source.model) if isinstance(source, Loaded) else Anatomy.of_config(load_config(source))
    target = parse_target(to, anatomy)
    _check_even(to, target, anatomy.source)
    settings.check_target(anatomy, target, options)  # refuses impossible targets before the weights are read
    loaded = source if isinstance(source, Loaded) else load(source, device=device)
    prunable = Prunable(deepcopy(loaded.model) if loaded is source else loaded.model)
    windows = _windows(loaded, data, text_field, count, length, seed) if settings.needs_text else None
    events = settings.job(prunable, options, target, windows).run(settings.rounds, loaded.source)
    _check_reached(to, target, prunable)
    result = _result(loaded, prunable, events)
    result.model.to(dtype or stored_dtype(loaded))
    if out is not None:
        result.save(out, overwrite=overwrite)
    return result


def _check_reached(to: str, target: Target, prunable: Prunable) -> None:
    """A result that is not what was asked for is never handed out."""
    if target.shape is not None and Shape.of(prunable.alive) != target.shape:
        raise UserError(
            f"--to {to}: the sizes reached are {sizes_text(sizes_of(prunable.alive))}: use one round, or other sizes"
        )
    if target.shape is None and prunable.num_parameters > target.num_parameters:
        raise UserError(
            f"--to {to}: with these floors and groups nothing more can leave at "
            f"{prunable.num_parameters:,} parameters: choose a larger target, lower floors or attention cluster"
        )


def _check_even(to: str, target: Target, source: Structure) -> None:
    """A group leaves all layers at once, so that layers of different sizes cannot end in one."""
    if target.shape is None:
        return
    now, least = sizes_of(source), asdict(Shape.of(source))
    for key, wanted in asdict(target.shape).items():
        if wanted != least[key] and isinstance(now[key], list):
            raise UserError(
                f"--to {to}: the source's layers have {sizes_text({key: now[key]})}: give a size such as 60%"
            )


def _result(loaded: Loaded, prunable: Prunable, events: list[Event]) -> Pruned:
    anatomy = prunable.anatomy
    return Pruned(
        model=prunable.compacted(),
        tokenizer=loaded.tokenizer,
        source=loaded.source,
        structure=prunable.alive,
        source_sizes=sizes_of(anatomy.source),
        before=anatomy.count(anatomy.source),
        after=anatomy.count(prunable.alive),
        ledger=events,
    )


@dataclass(frozen=True, slots=True)
class MethodDefaults:
    """What a method uses where nothing else is said."""

    metric: str
    groups: tuple[Kind, ...]
    rounds: int
    num_sequences: int
    seq_len: int


DEFAULTS = {
    "efficientllm": MethodDefaults("taylor", KINDS, 1, 64, 256),
    "adapt": MethodDefaults(ADAPT_METRIC, ADAPT_KINDS, ADAPT_ITERATIONS, ADAPT_SEQUENCES, ADAPT_SEQ_LEN),
    "uniform": MethodDefaults(ADAPT_METRIC, ADAPT_KINDS, 1, ADAPT_SEQUENCES, ADAPT_SEQ_LEN),
}


@dataclass(kw_only=True, slots=True)
class _Settings:
    """How, as opposed to what and how far."""

    method: Literal["efficientllm", "adapt", "uniform"]
    selection: Literal["coupled", "global"]
    metric: str
    second_order: bool
    rounds: int
    amplitude: float
    distance: Distance
    balance: Balance
    round_to: int | None
    gram_tokens: int | None
    damping: float
    seed: int

    @property
    def needs_text(self) -> bool:
        return bool(metric_named(self.metric).needs) or self.second_order or self.method == "adapt"

    @property
    def allocation(self) -> AllocationOptions:
        return AllocationOptions(amplitude=self.amplitude, distance=self.distance, balance=self.balance)

    def check(self) -> None:
        metric_named(self.metric)
        usual, given = AllocationOptions(), self.allocation
        if self.method != "adapt" and (given.amplitude, given.distance) != (usual.amplitude, usual.distance):
            raise UserError(f"amplitude, distance: belong to the method adapt, not {self.method}: remove them")
        if self.method == "efficientllm" and given.balance != usual.balance:
            raise UserError("balance: belongs to the methods adapt and uniform: remove it")
        if self.selection not in ("coupled", "global"):
            raise UserError(f"selection {self.selection!r}: choose coupled or global")
        if self.rounds < 1:
            raise UserError(f"rounds {self.rounds}: at least one round is needed")
        if self.round_to is not None and self.round_to < 1:
            raise UserError(f"round_to {self.round_to}: give a multiple of at least 1, such as 64")
        if self.gram_tokens is not None and self.gram_tokens < 1:
            raise UserError(f"gram_tokens {self.gram_tokens}: give a number of tokens of at least 1")
        if not 0 <= self.damping < float("inf"):
            raise UserError(f"damping {self.damping}: give a share of the mean curvature, such as {DEFAULT_DAMPING}")
        if self.selection == "global" and self.method != "efficientllm":
            raise UserError(f"selection global: belongs to the method efficientllm, not {self.method}")
        if self.round_to is not None and self.method != "efficientllm":
            raise UserError(f"round_to {self.round_to}: {self.method} cannot round: use `dwindle export --round`")

    def check_target(self, anatomy: Anatomy, target: Target, options: SelectionOptions) -> None:
        if self.method != "efficientllm":
            if options.compare != "mean":
                raise UserError(f"compare {options.compare}: the method {self.method} always compares means: remove it")
            Allocator(anatomy, target, options, self.allocation)
        elif self.selection == "global":
            check_round_widths(anatomy, target, options, self.round_to or 1)
            GlobalSelector(anatomy, target, options, self.round_to or 1)
        else:
            check_rounding(anatomy, target, options, self.round_to or 1)
            Selector(anatomy, target, options)
        if self.rounds > ADAPT_ITERATIONS:  # counting what may leave takes seconds for the largest models
            coupled = self.method == "efficientllm" and self.selection == "coupled"
            events = (coupled_events if coupled else global_events)(anatomy, target, options, self.round_to or 1)
            check_rounds(self.rounds, events, ADAPT_ITERATIONS)

    def job(
        self, prunable: Prunable, options: SelectionOptions, target: Target, windows: Tensor | None
    ) -> _Job | AdaptJob:
        if self.method == "efficientllm":
            return _Job(prunable, self, options, target, windows)
        return AdaptJob(
            prunable,
            Allocator(prunable.anatomy, target, options, self.allocation),
            self.method,
            self.metric,
            target.num_parameters,
            windows,
            self.seed,
            self.second_order,
            self.gram_tokens,
            self.damping,
        )


@dataclass(slots=True)
class _Job:
    """One pruning from source to target by minimal groups, round by round."""

    prunable: Prunable
    settings: _Settings
    options: SelectionOptions
    target: Target
    windows: Tensor | None

    def run(self, rounds: int, source: str) -> list[Event]:
        anatomy, how = self.prunable.anatomy, self.settings
        about = {"metric": how.metric, "second_order": how.second_order, "rounds": rounds, "seed": how.seed}
        about |= {"selection": how.selection} | asdict(self.options)
        events = [source_event(source, anatomy, about)]
        numbers = range(1, rounds + 1)
        for number in track(numbers, "rounds", rounds) if rounds > 1 else numbers:
            found = calibrate(
                self.prunable,
                self.windows,
                self._metric(number),
                groups=self.options.groups,
                second_order=how.second_order,
                gram_tokens=how.gram_tokens,
                damping=how.damping,
            )
            choices = self._round(number, rounds, found)
            events += [prune_event(choice, step=number, tokens=0) for choice in choices]
            if choices:
                if found.inputs is not None and how.second_order:
                    repair(self.prunable, choices[-1].rest, found.inputs, damping=how.damping)
                self.prunable.kill(choices[-1].rest)
        return events

    def _round(self, number: int, rounds: int, found: Calibration) -> list[Choice]:
        """What leaves in a round. The floors of the end hold in all rounds: what has left does not come back."""
        anatomy, target, multiple = self.prunable.anatomy, self.target, self.settings.round_to
        if target.shape is not None:
            multiple = None
        if number < rounds:
            start, goal = anatomy.count(anatomy.source).total, final_count(anatomy, target)
            aim = Target(start - (start - goal) * number // rounds, target.shape)
            return self._choices(aim, found, number, rounding_floors(self.options, multiple or 1))
        choices = self._choices(target, found, number)
        if multiple is None or self.settings.selection == "global":
            return choices
        natural, alive = choices[-1].rest if choices else self.prunable.alive, self.prunable.alive
        end = rounded_shape(anatomy, natural, alive, target, self.options, multiple)
        return self._choices(Target(0, end.shape), found, number, kv_heads=end.kv_heads)

    def _metric(self, number: int) -> Metric:
        return metric_named(self.settings.metric, seed=self.settings.seed * 1000 + number)

    def _choices(
        self,
        aim: Target,
        found: Calibration,
        number: int,
        options: SelectionOptions | None = None,
        kv_heads: int | None = None,
    ) -> list[Choice]:
        metric, options = self._metric(number), options or self.options
        if self.settings.selection == "coupled":
            return choose_groups(self.prunable, aim, found, metric, options, kv_heads)
        scores = score_model(self.prunable, found.gradients, found.fishers, metric)
        selector = GlobalSelector(self.prunable.anatomy, aim, options, self.settings.round_to or 1)
        return selector.choose_while(scores, self.prunable.alive, lambda *_: True)


def choose_groups(
    prunable: Prunable,
    aim: Target,
    found: Calibration,
    metric: Metric,
    options: SelectionOptions,
    kv_heads: int | None = None,
) -> list[Choice]:
    """Group after group from the same scores, until the aim."""
    selector = Selector(prunable.anatomy, aim, options, kv_heads)
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


def _windows(
    loaded: Loaded, data: Sequence[str], text_field: str, num_sequences: int, seq_len: int, seed: int
) -> Tensor:
    tokenizer = needed_tokenizer(loaded.tokenizer, loaded.source)
    return calibration_windows(
        data, tokenizer, num_sequences=num_sequences, seq_len=seq_len, seed=seed, text_field=text_field
    )


def replay(source: str | PathLike[str] | Loaded, ledger: str | PathLike[str], at: int | str | None = None) -> Pruned:
    """Rebuild the architecture at any point of a ledger: the source's own weights, cut to the structure there.

    Second-order updates, like training, are not in the ledger: only the written model has those. The result's own
    ledger ends at that point, and says, as the card of ``save`` does, that it is a replay.

    ``at`` is a number of events, a size (``"100M"``, ``"80%"``, ``"50%nonemb"``: the first point of at most that), or
    None for the end.
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
    if isinstance(at, str) and is_share(at):  # of the source, as in --to and milestones
        at = str(parse_target(at, anatomy, "at").num_parameters)
    events = ledger_until(events, at)
    structure = replay_structure(anatomy.source, events)
    model = cut(loaded.model, anatomy, structure, anatomy.source)
    return Pruned(
        model=model,
        tokenizer=loaded.tokenizer,
        source=loaded.source,
        structure=structure,
        source_sizes=sizes_of(anatomy.source),
        before=before,
        after=anatomy.count(structure),
        ledger=[events[0] | {"replayed": True}, *events[1:]],
        inputs=(os.fspath(ledger),),
    )
