"""Sizes that pruning can reach: head layouts, round widths, and the parameter counts that follow from sizes alone."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from math import log
from typing import Literal

import numpy as np

from dwindle.anatomy.anatomy import Anatomy
from dwindle.anatomy.structure import BLOCKS, Layer, Structure
from dwindle.core.errors import UserError
from dwindle.pruning.config import PruneConfig
from dwindle.pruning.target import Shape, Target

KvCount = Callable[[Layer, int], int]
"""How many key/value heads a layer keeps with so many of its query heads."""


def smallest(source: Structure, floor: Shape) -> Structure:
    """A structure at the floors, by index (for counting)."""
    layers = tuple(
        Layer(la.query_heads[: floor.heads], la.kv_of_query[: floor.heads], la.ffn[: floor.ffn], la.absent)
        for la in source.layers
    )
    return Structure(source.hidden[: floor.hidden], layers)


def shallower(
    anatomy: Anatomy, structure: Structure, num_layers: int, without: Literal["last", "largest", "smallest"] = "last"
) -> Structure:
    """A structure with so many layers, for counting: the last removable layers are gone (the largest, the smallest)."""
    if num_layers >= len(structure.places) or not num_layers:
        return structure
    found, counts = anatomy.removable_layers(structure), anatomy.layer_counts(structure)
    if without != "last":
        found.sort(key=counts.__getitem__, reverse=without == "largest")
    gone = found[: len(structure.places) - num_layers]
    layers = enumerate(structure.layers)
    return Structure(structure.hidden, tuple(la.without_blocks(BLOCKS) if n in gone else la for n, la in layers))


def fewest_layers(anatomy: Anatomy, structure: Structure) -> int:
    """The number of layers left when no other may be removed whole."""
    return len(structure.places) - len(anatomy.removable_layers(structure))


def final_count(anatomy: Anatomy, target: Target) -> int:
    """Parameters at a target; for an exact shape, the fewest while key/value heads or the layers are not known."""
    shape, source = target.shape, anatomy.source
    if shape is None:
        return target.num_parameters
    changed, widest = shape.changed(source), max(len(layer.ffn) for layer in source.layers)
    shape = shape if "ffn" in changed else replace(shape, ffn=widest)
    if "heads" not in changed:
        shape = replace(shape, heads=max(len(layer.query_heads) for layer in source.layers))
    return anatomy.count(smallest(shallower(anatomy, source, shape.layers, "largest"), shape)).total


def largest_count(anatomy: Anatomy, target: Target, config: PruneConfig) -> int:
    """The most parameters that a result can have: an exact shape may not determine the key/value heads."""
    shape = target.shape
    if shape is None:
        return target.num_parameters
    found = layouts_of(anatomy.source, config.for_family(anatomy.family), shape.heads)
    start = shallower(anatomy, anatomy.source, shape.layers, "smallest")
    own, changed = Shape.of(start), shape.changed(anatomy.source)
    shape = Shape(**{key: size if key in changed else getattr(own, key) for key, size in asdict(shape).items()})
    return max(anatomy.count(with_sizes(start, shape, la.kv_count(most_kv))).total for la in found)


@dataclass(frozen=True, slots=True)
class Layout:
    """A number of query and key/value heads that every layer can be pruned to."""

    heads: int
    kv_heads: int | None
    """None: not determined by the number of query heads (cluster attention), or not pruned."""
    num_events: int
    """Events from the source to this layout."""

    def follows(self, other: Layout) -> bool:
        """Whether one event leads from ``other`` to this layout."""
        if self.kv_heads is None or other.kv_heads is None:
            return self.heads == other.heads - 1
        kv, per_kv = other.kv_heads, other.heads // other.kv_heads
        return (self.heads, self.kv_heads) in ((per_kv * (kv - 1), kv - 1), ((per_kv - 1) * kv, kv))

    def kv_count(self, otherwise: KvCount) -> KvCount:
        known = self.kv_heads
        return otherwise if known is None else lambda layer, heads: known


def layouts(structure: Structure, config: PruneConfig) -> list[Layout]:
    """The present layout and all that can be reached from it."""
    heads = Shape.of(structure).heads
    if "attn" not in config.effective_groups or not heads:
        return [Layout(heads, None, 0)]
    least = min(config.min_heads, heads)
    if config.attention == "cluster":
        return [Layout(n, None, heads - n) for n in range(heads, least - 1, -1)]
    layer = structure.with_heads
    kv, per_kv = len(layer.kv_heads), layer.queries_per_kv[0]
    pairs = ((a, b) for a in range(kv, 0, -1) for b in range(per_kv, 0, -1))
    return [Layout(a * b, a, kv - a + per_kv - b) for a, b in pairs if a * b >= least]


def layouts_of(structure: Structure, config: PruneConfig, heads: int) -> list[Layout]:
    """The layouts with exactly so many query heads, regardless of the floor."""
    return [
        layout for layout in layouts(structure, config.model_copy(update={"min_heads": heads})) if layout.heads == heads
    ]


def most_kv(layer: Layer, heads: int) -> int:
    """Key/value heads if the kept queries read as many different ones as possible."""
    return min(len(layer.kv_heads), heads)


def fewest_kv(layer: Layer, heads: int) -> int:
    """Key/value heads if the kept queries read as few as possible."""
    held = np.cumsum(sorted(layer.queries_per_kv, reverse=True))
    return int(np.searchsorted(held, heads)) + 1


def with_sizes(structure: Structure, shape: Shape, kv_count: KvCount) -> Structure:
    """A structure of these sizes, for counting: every layer is pruned by as much as the smallest one must be.

    It has all layers of the given one (``shallower``).
    """
    now, layers = Shape.of(structure), list[Layer]()
    for layer in structure.layers:
        heads = len(layer.query_heads) - now.heads + shape.heads if layer.query_heads else 0
        kv = kv_count(layer, heads) if heads else 0
        kv_of_query = tuple(query * kv // heads for query in range(heads))
        ffn = layer.ffn[: len(layer.ffn) - now.ffn + shape.ffn] if layer.ffn else ()
        layers.append(Layer(layer.query_heads[:heads], kv_of_query, ffn, layer.absent))
    return Structure(structure.hidden[: shape.hidden], tuple(layers))


@dataclass(frozen=True, slots=True)
class Rounded:
    """A shape with round widths, and the number of key/value heads with which it fits (None: any)."""

    shape: Shape
    kv_heads: int | None


def rounded_shape(
    anatomy: Anatomy, natural: Structure, alive: Structure, target: Target, config: PruneConfig
) -> Rounded:
    """The shape nearest to an unrounded result (``natural``) whose widths are multiples and that fits the target.

    It is reachable from ``alive``. Widths of kinds that are not prunable are unchanged. Nearest: smallest change of the
    log sizes; more distant hidden sizes, and other numbers of heads, are tried only where nothing else fits.
    """
    multiple, own, every = config.round_to, Shape.of(natural), layouts(alive, config)
    kv_heads = len(natural.with_heads.kv_heads)
    same = [layout for layout in every if layout.heads == own.heads and layout.kv_heads in (None, kv_heads)]
    hiddens, widths = round_widths(Shape.of(alive), config)
    down = own.hidden // multiple * multiple
    near = [hidden for hidden in hiddens if hidden in (down, down + multiple)] or hiddens

    def distance(found: Rounded) -> float:
        new = found.shape
        heads = abs(log(new.heads / own.heads)) if own.heads else 0.0
        return abs(log(new.hidden / own.hidden)) + abs(log(new.ffn / own.ffn)) + heads

    for heads, wide in ((same, near), (same, hiddens), (every, hiddens)):
        fits: list[Rounded] = []
        for layout in heads:
            for hidden in wide:
                ffn = widest(anatomy, alive, target, layout, hidden, widths)
                if ffn is not None:
                    fits.append(Rounded(Shape(hidden, layout.heads, ffn, own.layers), layout.kv_heads))
        if fits:
            return min(fits, key=distance)
    raise UserError(f"round_to {multiple}: no multiple fits the target: choose a smaller one")


def round_widths(most: Shape, config: PruneConfig) -> tuple[list[int], list[int]]:
    """The hidden sizes and the FFN widths to choose from, ascending."""
    multiple, groups = config.round_to, config.effective_groups
    hiddens = [n for n in range(multiple, most.hidden + 1, multiple) if n >= config.min_hidden]
    widths = [n for n in range(multiple, most.ffn + 1, multiple) if n >= config.min_ffn]
    return hiddens if "stem" in groups else [most.hidden], widths if "ffn" in groups else [most.ffn]


def widest(
    anatomy: Anatomy, alive: Structure, target: Target, layout: Layout, hidden: int, widths: list[int]
) -> int | None:
    """The largest FFN width with which these sizes fit, whichever key/value heads are kept."""

    def count(ffn: int) -> int:
        shape = Shape(hidden, layout.heads, ffn, len(alive.places))
        return anatomy.count(with_sizes(alive, shape, layout.kv_count(most_kv))).total

    fitting = bisect_right(widths, target.num_parameters, key=count)
    return widths[fitting - 1] if fitting else None


def check_rounding(anatomy: Anatomy, target: Target, config: PruneConfig) -> None:
    """Raise if no result with such multiples fits the target, whatever the saliencies."""
    multiple = config.round_to
    if multiple <= 1 or target.shape is not None:
        return
    source, fix = anatomy.source, "choose a smaller multiple, or 1 for exact sizes"
    if "ffn" in config.effective_groups and widths_differ(source, multiple):
        other = "selection global" if config.method == "efficientllm" else "1 for exact sizes"
        raise UserError(f"round_to {multiple}: the source's layers have different FFN widths: choose {other}")
    most = Shape.of(source)
    hiddens, widths = round_widths(most, config)
    if not hiddens or not widths:
        raise UserError(
            f"round_to {multiple}: no multiple lies between the minimum sizes ({config.min_hidden} hidden, "
            f"{config.min_ffn} FFN channels) and the source's {most.hidden} and {most.ffn}: {fix}"
        )
    least = min(
        anatomy.count(with_sizes(source, replace(most, hidden=hiddens[0], heads=layout.heads, ffn=widths[0]), kv)).total
        for layout in layouts(source, config)
        for kv in [layout.kv_count(most_kv)]
    )
    if least > target.num_parameters:
        raise UserError(
            f"round_to {multiple}: the smallest model with such widths has {least:,} parameters, the target "
            f"is {target.num_parameters:,}: {fix}, or a larger target"
        )


def widths_differ(source: Structure, multiple: int) -> bool:
    """Whether the FFN widths cannot all be such multiples if every layer loses the same."""
    return len({len(layer.ffn) % multiple for layer in source.layers if layer.ffn}) > 1


def rounding_floors(config: PruneConfig) -> PruneConfig:
    """The config with minimum sizes rounded up to multiples, so that these are always reachable."""
    multiple = config.round_to
    hidden, ffn = (-(-least // multiple) * multiple for least in (config.min_hidden, config.min_ffn))
    return config.model_copy(update={"min_hidden": hidden, "min_ffn": ffn})


def splits(heads: int, kv: int, per_kv: int) -> bool:
    """Whether so many query heads can be shared evenly by at most ``kv`` key/value heads of at most ``per_kv``."""
    return any(heads % k == 0 and heads // k <= per_kv for k in range(1, kv + 1))
