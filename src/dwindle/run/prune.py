"""``dwindle prune`` and ``dwindle.replay``: pruning a model after calibration, and rebuilding any point of a ledger."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from rich.console import Group
from rich.table import Table
from torch import Tensor

from dwindle.anatomy.anatomy import Anatomy, ParameterCount, cut
from dwindle.anatomy.build import is_custom, with_output_bias
from dwindle.anatomy.structure import Structure
from dwindle.core.config import takes
from dwindle.core.errors import UserError
from dwindle.core.notebook import Shown
from dwindle.core.progress import status
from dwindle.core.quality import Quality, from_to
from dwindle.core.sizes import format_bytes, format_count
from dwindle.core.terminal import right, titled
from dwindle.data.pydoc_text import DEFAULT_TEXT
from dwindle.data.text_windows import calibration_windows
from dwindle.export.gguf_size import FileSize
from dwindle.export.huggingface import About, check_output, save_model, try_save
from dwindle.pruning.config import PostTrainingConfig
from dwindle.pruning.ledger import (
    Event,
    ledger_until,
    read_ledger,
    replay_structure,
    source_event,
    verified_structure,
    vocabulary_in,
)
from dwindle.pruning.methods import METHODS
from dwindle.pruning.rotation import slice_model
from dwindle.pruning.rounds import check_prunable, needs_text, prune_in_rounds
from dwindle.pruning.surgery import Prunable
from dwindle.pruning.target import (
    FileSizes,
    Sizes,
    Target,
    is_share,
    parse_target,
    sizes_of,
    sizes_text,
)
from dwindle.run.judging import Judge
from dwindle.run.start import Start, file_sizes, trimmed
from dwindle.sources.loading import Loaded, load, load_config, needed_tokenizer

_MEASURED_TOKENS = 4096
"""Tokens on which source and result are measured: enough to see a few hundredths, cheap beside the calibration."""


@dataclass(slots=True, repr=False)
class Pruned(Shown):
    """A smaller model with everything needed to check it: its structure and ledger in the source's numbering."""

    model: Any
    tokenizer: Any
    source: str
    structure: Structure
    source_sizes: Sizes
    before: ParameterCount
    after: ParameterCount
    ledger: list[Event]
    quality: Quality | None = None
    """Loss and samples of source and result; None if they were not measured."""
    inputs: tuple[str, ...] = ()
    """What was read besides the source: ``save`` overwrites neither."""

    def __iter__(self) -> Iterator[Any]:
        return iter((self.model, self.tokenizer))

    def __repr__(self) -> str:
        """One line: the fields hold whole models."""
        before, after = (format_count(count.total) for count in (self.before, self.after))
        sizes, events = sizes_text(sizes_of(self.structure)), sum(event["event"] == "prune" for event in self.ledger)
        return f"<Pruned {self.source}: {before} → {after} parameters, {sizes}, {events:,} events>"

    def to_json(self) -> dict[str, Any]:
        """The result in numbers, without the model."""
        return {
            "source": self.source,
            "model_type": self.model.config.model_type,
            "stock": not is_custom(self.model.config),
            "events": sum(event["event"] == "prune" for event in self.ledger),
            "parameters": {"before": self.before.total, "after": self.after.total},
            "non_embedding": {"before": self.before.non_embedding, "after": self.after.non_embedding},
            "shape": sizes_of(self.structure),
            "layers": [
                {"query_heads": len(la.query_heads), "kv_heads": len(la.kv_heads), "ffn": len(la.ffn)}
                for la in self.structure.present
            ],
            "quality": None if self.quality is None else self.quality.to_json(),
        }

    def render(self, out: str | PathLike[str] | None = None) -> Group:
        """The result as a table, then loss and samples."""
        title = self.source if out is None else f"{self.source} → {out}"
        after: Sizes = sizes_of(self.structure)
        before = self.source_sizes | ({"layers": len(self.structure.layers)} if "layers" in after else {})
        columns = ("", "parameters", "non-embedding", "hidden", "query heads", "FFN", "layers")
        table = Table(*right(*columns[: 3 + len(after)]))
        for name, count, sizes in (("before", self.before, before), ("after", self.after, after)):
            spans = (sizes_text({"": size}).strip() for size in sizes.values())
            table.add_row(name, f"{count.total:,}", f"{count.non_embedding:,}", *spans)
        return Group(titled(title, table), *self.verdict())

    def verdict(self) -> list[str]:
        """Loss and samples of source and result, line by line; empty if they were not measured."""
        found = self.quality
        if found is None or found.change is None:
            return []
        advice = "needs training" if found.needs_training else "usable as it is"
        loss = f"loss {from_to(found.source_loss, found.result_loss)}: {advice}"
        return [f"{loss}; measured on {found.measured_on()}", *found.sample_lines()]

    def save(self, out: str | PathLike[str], *, overwrite: bool = False) -> Path:
        """Write the model directory."""
        check_output(out, overwrite=overwrite, sources=[self.source, *self.inputs])
        about = About(structure=self.structure, source=self.source, ledger=self.ledger, quality=self.quality)
        with status(f"writing {os.fspath(out)}"):
            return save_model(self.model, self.tokenizer, out, overwrite=overwrite, **about)


@takes(PostTrainingConfig)
def prune(
    source: str | PathLike[str] | Loaded,
    to: str,
    *,
    config: PostTrainingConfig,
    out: str | PathLike[str] | None = None,
    data: Sequence[str] = (DEFAULT_TEXT,),
    text_field: str = "text",
    device: str = "auto",
    dtype: torch.dtype | None = None,
    measure: bool = True,
    overwrite: bool = False,
) -> Pruned:
    """Prune a model to a size after calibration, and write it to ``out`` if given.

    Keyword arguments are the fields of ``PostTrainingConfig`` (``dwindle prune --help`` explains each): method,
    selection, metric, groups, rounds, second_order and so on.

    Saliencies are measured once, or again in each of ``rounds`` (equal decrements of the parameter count). Scoring is
    in float32; the written weights have ``dtype``, by default the one the source is stored in. ``measure`` compares
    source and result on text of ``data`` that is held out of the calibration.
    """
    if out is not None:
        read = source.source if isinstance(source, Loaded) else source
        check_output(out, overwrite=overwrite, sources=[read, *data])
    anatomy = Anatomy.of(source.model) if isinstance(source, Loaded) else Anatomy.of_config(load_config(source))
    target = parse_target(to, anatomy, files=_files(source, to))
    if (multiple := config.multiple_for(to, "--to")) != config.round_to:
        config = config.model_copy(update={"round_to": multiple})
    check_prunable(anatomy, target, config)
    loaded = source if isinstance(source, Loaded) else load(source, device=device)
    if out is not None:
        first = source_event(loaded.source, anatomy, {})
        about = About(structure=anatomy.source, source=loaded.source, ledger=[first])
        try_save(loaded.model, loaded.tokenizer, out, overwrite=overwrite, **about)
    measure = measure and loaded.tokenizer is not None
    windows, held_out = _windows(loaded, data, text_field, config) if measure or needs_text(config) else (None, None)
    judge = _judge(loaded, windows, held_out, data) if measure else None
    if config.method == "slicegpt":
        assert windows is not None
        result = _rotated(loaded, target, config, windows)
    else:
        own = replace(loaded, model=deepcopy(loaded.model)) if loaded is source else loaded
        result = _pruned(own, target, config, windows if needs_text(config) else None, to)
    result.quality = None if judge is None else judge.judged(result.model)
    result.model.to(dtype or stored_dtype(loaded))
    if out is not None:
        result.save(out, overwrite=overwrite)
    return result


def _files(source: str | PathLike[str] | Loaded, to: str) -> FileSizes:
    if isinstance(source, Loaded):
        return lambda type_: FileSize(source.model.config, source.tokenizer, type_, f"--to {to}")
    return file_sizes(Start(os.fspath(source)), f"--to {to}")


def _check_reached(to: str, target: Target, prunable: Prunable) -> None:
    """A result that misses the target is an error, never returned."""
    if target.shape is not None and not target.shape.is_reached(prunable.alive, prunable.anatomy.source):
        raise UserError(
            f"--to {to}: the sizes reached are {sizes_text(sizes_of(prunable.alive))}: use one round, or other sizes"
        )
    if target.file is not None:
        if (reached := target.file.bytes_of(prunable.alive)) > target.file.max_bytes:
            raise UserError(
                f"--to {to}: with these minimum sizes and groups nothing more is prunable at {format_bytes(reached)}: "
                "choose more, lower minimum sizes or attention cluster"
            )
        return
    if target.shape is None and prunable.num_parameters > target.num_parameters:
        raise UserError(
            f"--to {to}: with these minimum sizes and groups nothing more is prunable at {prunable.num_parameters:,} "
            "parameters: choose a larger target, lower minimum sizes or attention cluster"
        )


def _pruned(loaded: Loaded, target: Target, config: PostTrainingConfig, windows: Tensor | None, to: str) -> Pruned:
    """Prunes the loaded model in place."""
    source = Anatomy.of(loaded.model)
    with_bias = METHODS[config.method].output_bias
    prunable = Prunable(with_output_bias(loaded.model, source.source) if with_bias else loaded.model)
    events = prune_in_rounds(prunable, target, config, windows, loaded.source)
    _check_reached(to, target, prunable)
    anatomy = prunable.anatomy
    return Pruned(
        model=prunable.compacted(last=True),
        tokenizer=loaded.tokenizer,
        source=loaded.source,
        structure=prunable.alive,
        source_sizes=sizes_of(anatomy.source),
        before=source.count(source.source),
        after=anatomy.count(prunable.alive),
        ledger=events,
    )


def _rotated(loaded: Loaded, target: Target, config: PostTrainingConfig, windows: Tensor) -> Pruned:
    anatomy = Anatomy.of(loaded.model)
    sliced = slice_model(loaded.model, target, config, windows)
    return Pruned(
        model=sliced.model,
        tokenizer=loaded.tokenizer,
        source=loaded.source,
        structure=sliced.structure,
        source_sizes=sizes_of(anatomy.source),
        before=anatomy.count(anatomy.source),
        after=sliced.count,
        ledger=[source_event(loaded.source, anatomy, config.record()), sliced.event],
    )


def stored_dtype(loaded: Loaded) -> torch.dtype:
    """The dtype of the source's files; dequantised sources are float32."""
    stored = getattr(load_config(loaded.source), "dtype", None) if loaded.kind == "huggingface" else None
    return stored if isinstance(stored, torch.dtype) else torch.float32


def _windows(loaded: Loaded, data: Sequence[str], text_field: str, config: PostTrainingConfig) -> tuple[Tensor, Tensor]:
    """Windows for calibration and for measurement."""
    with status("reading the calibration text"):
        return calibration_windows(
            data,
            needed_tokenizer(loaded.tokenizer, loaded.source),
            num_sequences=config.num_sequences,
            seq_len=config.num_tokens_per_sequence,
            seed=config.seed,
            num_held_out=max(1, _MEASURED_TOKENS // config.num_tokens_per_sequence),
            text_field=text_field,
        )


def _judge(loaded: Loaded, windows: Tensor | None, held_out: Tensor | None, data: Sequence[str]) -> Judge:
    """Measures on the calibration windows if the text is too short to hold any of it out."""
    assert windows is not None and held_out is not None
    few = windows[: max(1, _MEASURED_TOKENS // windows.shape[1])]
    measured = held_out if len(held_out) else few
    return Judge(loaded.model, loaded.tokenizer, measured, data, held_out=len(held_out) > 0)


def replay(source: str | PathLike[str] | Loaded, ledger: str | PathLike[str], at: int | str | None = None) -> Pruned:
    """Rebuild the architecture at any point of a ledger: the source's own weights, cut to the structure there.

    Second-order updates and FLAP's biases, like training, are not in the ledger: only the written model has those. The
    result's own ledger ends at that point, and says, as the card of ``save`` does, that it is a replay.

    ``at`` is a number of events (0: the source, cut to the tokens that the run kept), a size (``"100M"``, ``"80%"``,
    ``"50%nonemb"``: the first point of at most that), or None for the end.
    """
    events = read_ledger(ledger)
    if any(event.get("event") == "rotate" for event in events):
        raise UserError(
            f"ledger {ledger}: slicegpt rotated this model, which no indices can repeat: use the written model, or "
            "prune the source again"
        )
    loaded = source if isinstance(source, Loaded) else load(source)
    anatomy, whole = Anatomy.of(loaded.model), loaded.model
    options = events[0].get("options")
    if isinstance(options, dict) and any(one.output_bias and options.get("method") == n for n, one in METHODS.items()):
        whole = with_output_bias(whole, anatomy.source)
        anatomy = Anatomy.of(whole)
    before = anatomy.count(anatomy.source)
    if (begins := events[0].get("parameters")) != before.total:
        raise UserError(
            f"ledger {ledger}: it begins at {begins!r:.30} parameters, {loaded.source} has {before.total:,}: give the "
            "source that the ledger was written for"
        )
    verified_structure(anatomy, events, os.fspath(ledger))
    vocabulary = vocabulary_in(events, os.fspath(ledger))
    fewer = None if vocabulary is None else trimmed(replace(loaded, model=whole), vocabulary)
    if isinstance(at, str) and is_share(at):  # of the source, cut to its tokens, as in --to and milestones
        at = str(parse_target(at, anatomy if fewer is None else Anatomy.of(fewer.model), "at").num_parameters)
    events = ledger_until(events, at)
    if fewer is not None and vocabulary_in(events, os.fspath(ledger)) is not None:
        loaded, whole, anatomy = fewer, fewer.model, Anatomy.of(fewer.model)
    structure = replay_structure(anatomy.source, events)
    model = cut(whole, anatomy, structure, anatomy.source)
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
