"""A model's layers and parameter counts, and the parameters of one group of each type (``dwindle inspect``)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import groupby
from os import PathLike
from typing import Any

from rich.console import Group as Stack
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from dwindle.anatomy.anatomy import Anatomy
from dwindle.anatomy.build import is_custom
from dwindle.anatomy.structure import Group, Structure
from dwindle.core.notebook import Shown
from dwindle.core.sizes import format_count
from dwindle.core.terminal import right, titled
from dwindle.export.card_structure import mistral_note
from dwindle.quantization.compressed_tensors import METHOD
from dwindle.sources.aliases import alias_of
from dwindle.sources.loading import load_config, model_in

PARTS = ("embedding", "attention", "ffn", "norms")


@dataclass(slots=True)
class Inspection(Shown):
    """A model's sizes, from its configuration alone."""

    source: str
    origin: str | None
    """What an alias stands for, such as an instruct model dequantized from 4 bits; None if the source is a path."""
    model_type: str
    stock: bool
    """Whether plain transformers loads it."""
    quantization: str | None
    """Quantization method of its weights, such as ``compressed-tensors`` or ``gptq``; None if not quantized."""
    hidden: int
    head_dim: int
    vocab: int
    tied: bool
    layers: list[dict[str, int]]
    """For each layer: query_heads, kv_heads, ffn, parameters."""
    parameters: dict[str, int]
    """total, embedding, non_embedding, and by part."""
    groups: dict[str, int]
    """Parameters removed with one group of each type."""

    def render(self) -> RenderableType:
        """Tables for a terminal."""
        note = mistral_note(self.model_type, self.hidden, max(layer["query_heads"] for layer in self.layers))
        origin = f"{self.source} is {self.origin}" if self.origin else ""
        notes = [Text(text) for text in (origin, note) if text]
        return Stack(self._sizes(), *notes, self._parts(), self._groups())

    def _sizes(self) -> Stack:
        sizes = right("layers", "hidden", "query heads", "key/value heads", "head size", "FFN", "parameters each")
        table = Table(*sizes)
        for first, last in self._runs():
            layer = self.layers[first]
            name = f"{first}" if first == last else f"{first}-{last}"
            own = (layer["query_heads"], layer["kv_heads"], self.head_dim, layer["ffn"])
            table.add_row(name, str(self.hidden), *map(str, own), f"{layer['parameters']:,}")
        return titled(f"{self.source}: {self.model_type}, {self._kind()}", table)

    def _kind(self) -> str:
        if self.quantization is None:
            return "stock transformers" if self.stock else "needs its modelling file"
        if self.quantization == METHOD:
            needed = "" if self.stock else ", with its modelling file"
            return f"quantized weights ({METHOD}): transformers and vLLM load them{needed}"
        return f"{self.quantization} quantized weights, which dwindle cannot load"

    def _runs(self) -> list[tuple[int, int]]:
        """First and last index of every stretch of equal layers."""
        runs = [list(run) for _, run in groupby(range(len(self.layers)), key=self.layers.__getitem__)]
        return [(run[0], run[-1]) for run in runs]

    def _parts(self) -> Table:
        table = Table("part", *right("parameters", "share"), title="parameters", title_justify="left")
        total = self.parameters["total"]
        for part in (*PARTS, "non_embedding", "total"):
            label = {"embedding": f"embedding (vocabulary {self.vocab:,}, {'tied' if self.tied else 'untied'})"}
            name = label.get(part, part.replace("_", "-"))
            table.add_row(name, f"{self.parameters[part]:,}", f"{self.parameters[part] / total:.1%}")
        return table

    def _groups(self) -> Table:
        names = {
            "attn": "attn: one query head in every layer",
            "attn_kv": "attn: one key/value head with its queries in every layer",
            "ffn": "ffn: one channel in every layer",
            "stem": "stem: one hidden channel everywhere",
            "layer": "layer: the last layer",
        }
        table = Table("group", *right("parameters", "share"), title="parameters of one group", title_justify="left")
        for key, size in self.groups.items():
            count = format_count(size) if size < 1000 else f"{format_count(size)} ({size:,})"
            table.add_row(names[key], count, f"{size / self.parameters['total']:.2%}")
        return table


def inspect(source: str | PathLike[str]) -> Inspection:
    """Count a model's parameters from its configuration, without loading weights; a run stands for its final model."""
    source = model_in(source)
    config = load_config(source)
    anatomy = Anatomy.of_config(config)
    structure = anatomy.source
    count = anatomy.count(structure)
    by_part = dict.fromkeys(PARTS, 0)
    for row in anatomy.rows:
        units = {unit for axis in row.axes for unit in axis}
        part = "embedding" if "vocab" in units else "ffn" if "ffn" in units else "attention"
        if row.name.endswith("norm.weight"):
            part = "norms"
        by_part[part] += math.prod(row.full_shape)
    layers = [
        {"query_heads": len(la.query_heads), "kv_heads": len(la.kv_heads), "ffn": len(la.ffn), "parameters": size}
        for la, size in zip(structure.layers, anatomy.layer_counts(structure), strict=True)
    ]
    totals = {"total": count.total, "embedding": count.embedding, "non_embedding": count.non_embedding}
    return Inspection(
        source=source,
        origin=None if (alias := alias_of(source)) is None else alias.origin,
        model_type=config.model_type,
        stock=not is_custom(config),
        quantization=_quantization(config),
        hidden=len(structure.hidden),
        head_dim=anatomy.head_dim,
        vocab=config.vocab_size,
        tied=bool(config.tie_word_embeddings),
        layers=layers,
        parameters=totals | by_part,
        groups=_group_sizes(anatomy, structure),
    )


def _quantization(config: Any) -> str | None:
    """The method named in config.json; transformers gives it as a dictionary or as an object."""
    found = getattr(config, "quantization_config", None)
    if not found:
        return None
    named = found if isinstance(found, dict) else found.to_dict()
    return str(named.get("quant_method", "unknown"))


def _group_sizes(anatomy: Anatomy, structure: Structure) -> dict[str, int]:
    def parameters_of(group: Group) -> int:
        return anatomy.count(structure).total - anatomy.count(structure.without(group)).total

    last_kv = [la.queries_of(la.kv_heads[-1]) if la.kv_heads else () for la in structure.layers]
    groups = {"attn": Group("attn", tuple(la.query_heads[-1:] for la in structure.layers))}
    if any(len(queries) > 1 for queries in last_kv):
        groups["attn_kv"] = Group("attn", tuple(last_kv))
    groups["ffn"] = Group("ffn", tuple(la.ffn[-1:] for la in structure.layers))
    groups["stem"] = Group("stem", (structure.hidden[-1:],))
    groups["layer"] = Group.of_layer("layer", len(structure.layers) - 1, (0, 1), len(structure.layers))
    return {name: parameters_of(group) for name, group in groups.items() if group.kind in anatomy.family.groups}
