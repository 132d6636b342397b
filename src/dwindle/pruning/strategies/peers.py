"""Other papers' methods, each a score, an allocation over layers and a repair (``methods.py`` lists them)."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import replace
from math import log
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from dwindle.anatomy.anatomy import Anatomy, Row
from dwindle.anatomy.structure import Structure
from dwindle.core.errors import UserError
from dwindle.core.progress import Bar
from dwindle.core.sizes import format_count
from dwindle.pruning import activity
from dwindle.pruning.activity import (
    Activity,
    LayerWalk,
    column_scores,
    norm_rows,
    observe,
    output_rows,
    unit_scores,
)
from dwindle.pruning.calibration import calibrate
from dwindle.pruning.config import PruneConfig
from dwindle.pruning.layouts import Layout, Rounded, check_rounding, layouts, most_kv, round_widths, widest, with_sizes
from dwindle.pruning.metrics import metric_named
from dwindle.pruning.pacing import Pacing
from dwindle.pruning.saliency import Once, Scores
from dwindle.pruning.strategies.base import Choice, GroupScores, check_heads, check_same_heads
from dwindle.pruning.strategies.coupled import CoupledStrategy
from dwindle.pruning.strategies.layer_plan import LayerPlan
from dwindle.pruning.strategies.layerwise import LayerwiseStrategy, Sizes, UniformStrategy
from dwindle.pruning.surgery import Prunable
from dwindle.pruning.target import Shape, Target


class _EqualShares(UniformStrategy):
    """The same share of heads and of channels in every layer that is not spared."""

    def __init__(self, anatomy: Anatomy, target: Target, config: PruneConfig) -> None:
        super().__init__(anatomy, target, config.model_copy(update={"balance": "ratio"}))


class WandaSpStrategy(_EqualShares):
    """Layers in order, one a round: each is scored on inputs that the pruned layers before it compute."""

    def __init__(self, anatomy: Anatomy, target: Target, config: PruneConfig) -> None:
        super().__init__(anatomy, target, config)
        self._layer = 0
        self._walk = LayerWalk()
        self._kept: Sizes = []

    @property
    def num_rounds(self) -> int:
        return self.anatomy.num_layers

    def measure(self, prunable: Prunable, windows: Tensor, bar: Bar | None) -> Scores:
        rows = output_rows(self.anatomy, [self._layer])
        walk = self._walk.to(list(prunable.model.model.layers), self._layer)
        seen = observe(prunable, windows, list(rows.values()), bar, walk)
        scores = {key: activity.wanda_sp(prunable.parameters[row.name], seen[row.name]) for key, row in rows.items()}
        return column_scores(prunable, scores)

    def choose(
        self, scores: GroupScores, alive: Structure, pacing: Pacing, step: int, num_events: int
    ) -> Iterator[Choice]:
        plans = self._plans(scores.current, alive)
        if not self._kept:  # equal shares depend on sizes alone
            self._kept = self._sizes_at(plans, alive, self.target.num_parameters)
        kept = [self._kept[n] if n == self._layer else plan.here for n, plan in enumerate(plans)]
        self._layer += 1
        choices = self._choices(plans, alive, kept)
        if choices:
            self._after_choice(choices[-1].rest)
        return iter(choices)


class FlapStrategy(LayerwiseStrategy):
    """One threshold on the z-scores of all layers' heads and channels; the mean of what is lost becomes a bias."""

    def __init__(self, anatomy: Anatomy, target: Target, config: PruneConfig) -> None:
        if not anatomy.family.output_bias_keys:
            raise UserError("method flap: this family has no biases on o and down for its repair: choose adapt")
        super().__init__(anatomy, target, config)
        self._seen: dict[str, Activity] = {}

    def measure(self, prunable: Prunable, windows: Tensor, bar: Bar | None) -> Scores:
        rows, weights = output_rows(self.anatomy), prunable.parameters
        self._seen = observe(prunable, windows, list(rows.values()), bar)
        scores = {key: activity.flap(weights[row.name], self._seen[row.name], key[1]) for key, row in rows.items()}
        return column_scores(prunable, scores)

    def repair(self, prunable: Prunable, keep: Structure) -> None:
        activity.move_means_to_bias(prunable, keep, self._seen)

    def _sizes_at(self, plans: list[LayerPlan], alive: Structure, goal: int) -> Sizes:
        """The fewest groups, lowest z-scores first, without which at most ``goal`` parameters remain.

        What a group saves is counted, not estimated: under grouped-query attention a head with its keys and values is
        not the 4·head size/3 channels of the paper.
        """
        pairs = [(number, axis) for number in range(len(plans)) for axis in (0, 1)]
        prunable = [plans[n].scores[axis][: plans[n].here[axis] - plans[n].floor[axis]] for n, axis in pairs]
        places = np.repeat(np.arange(len(pairs)), [len(values) for values in prunable])
        places = places[np.lexsort((places, np.concatenate(prunable)))]  # by score, layer and axis

        def kept(removed: int) -> Sizes:
            gone = np.bincount(places[:removed], minlength=len(pairs)).reshape(-1, 2).tolist()
            return [(plan.here[0] - heads, plan.here[1] - ffn) for plan, (heads, ffn) in zip(plans, gone, strict=True)]

        fewest = bisect_left(range(len(places)), -goal, key=lambda n: -self._count(plans, alive, kept(n)))
        return kept(fewest)


class LlmPrunerStrategy(_EqualShares):
    """Second-order Taylor scores of every matrix that a group touches; the first and the last layers are spared."""

    FIRST: ClassVar[int] = 4
    LAST: ClassVar[int] = 2
    OF: ClassVar[int] = 32

    def __init__(self, anatomy: Anatomy, target: Target, config: PruneConfig) -> None:
        layers = anatomy.num_layers  # fewer layers than the paper's 32: the same share of them
        first, last = (min(n, round(layers * n / self.OF)) for n in (self.FIRST, self.LAST))
        self.spared = frozenset([*range(first), *range(layers - last, layers)])
        super().__init__(anatomy, target, config)

    def measure(self, prunable: Prunable, windows: Tensor, bar: Bar | None) -> Scores:
        metric = metric_named("taylor")
        rows = [row for row in self.anatomy.rows if row.layer is not None and len(row.axes) == 2]
        names = {row.name for row in rows}
        found = calibrate(prunable, windows, metric, self.config, names=names, bar=bar)
        weights = {name: prunable.parameters[name].detach() for name in names}
        gradients, fishers = Once(found.gradients), Once(found.fishers)
        del found
        elements = {n: metric.score(w, gradients.get(n), fishers.get(n)) for n, w in weights.items()}
        return coupled_scores(prunable, rows, elements)


def coupled_scores(prunable: Prunable, rows: list[Row], elements: dict[str, Tensor]) -> Scores:
    """Sums of element scores over all rows and columns of every head and channel, in all of a layer's matrices.

    The score of a key/value head includes its queries.
    """
    anatomy, structure = prunable.anatomy, prunable.physical
    sums = {
        (unit, layer): torch.zeros(len(structure.unit(unit, layer)), dtype=torch.float64)
        for layer in range(anatomy.num_layers)
        for unit in ("query", "kv", "ffn")
    }
    for row in rows:
        assert row.layer is not None
        for axis, units in enumerate(row.axes):
            if units[0] not in ("query", "kv", "ffn"):
                continue
            along = elements[row.name].sum(1 - axis, dtype=torch.float64).cpu()
            parts = torch.split(along, [anatomy.width(unit, row.layer, structure) for unit in units])
            for unit, part in zip(units, parts, strict=True):
                sums[unit, row.layer] += part.view(-1, anatomy.stretch(unit)).sum(1)
    layers = range(anatomy.num_layers)
    heads, channels = [sums["query", n] for n in layers], [sums["ffn", n] for n in layers]
    kv = []
    for number, layer in enumerate(structure.layers):
        places = torch.tensor([layer.kv_heads.index(one) for one in layer.kv_of_query], dtype=torch.long)
        kv.append(sums["kv", number].index_add(0, places, heads[number]))
    stem = torch.zeros(len(structure.hidden), dtype=torch.float64)
    return Scores(structure, heads, channels, stem, kv).mask(prunable.pruned)


class OneShapeStrategy(CoupledStrategy):
    """Prunes all layers to one shape, which is known from the start."""

    uses_elements = False

    def __init__(self, anatomy: Anatomy, target: Target, config: PruneConfig) -> None:
        end = uniform_shape(anatomy, target, config)
        super().__init__(anatomy, target, config)
        self._aim_at(end)


class MinitronStrategy(OneShapeStrategy):
    """The least active heads, channels and hidden channels."""

    def measure(self, prunable: Prunable, windows: Tensor, bar: Bar | None) -> Scores:
        rows, norms = output_rows(self.anatomy), norm_rows(self.anatomy)
        seen = observe(prunable, windows, [*rows.values(), *norms], bar)
        units = {key: activity.minitron(seen[row.name]) for key, row in rows.items()}
        stem = torch.stack([activity.minitron(seen[row.name]).cpu() for row in norms]).sum(0)
        return unit_scores(prunable, units, stem)


def _check_uniform(anatomy: Anatomy, target: Target, config: PruneConfig) -> None:
    """Refuse a target that a method cannot reach: it keeps all layers, and all key/value groups."""
    check_heads(anatomy, config)
    check_rounding(anatomy, target, config)
    shape, heads = target.shape, Shape.of(anatomy.source).heads
    if "attn" in config.effective_groups and (shape is None or shape.heads != heads):
        check_same_heads(anatomy, config)
    if shape is None:
        return
    if shape.layers != len(anatomy.source.places):
        raise UserError(f"target layers={shape.layers}: {config.method} keeps all layers: give hidden, heads or ffn")
    kv, per_kv = _kv_groups(anatomy)
    if per_kv > 1 and shape.heads % kv and shape.heads != heads:
        wanted = [kv * n for n in range(1, per_kv + 1)]
        raise UserError(
            f"target heads={shape.heads}: {config.method} keeps all {kv} key/value heads: choose one of {wanted}"
        )


def _kv_groups(anatomy: Anatomy) -> tuple[int, int]:
    """(Key/value heads, queries of each at most)."""
    layer = anatomy.source.with_heads
    return len(layer.kv_heads), max(layer.queries_per_kv, default=1)


def uniform_shape(anatomy: Anatomy, target: Target, config: PruneConfig) -> Rounded:
    """The target's shape, or the one within one group of its count with the most equal shares of hidden size, heads and
    FFN; raises if there is none.

    Query heads are removed inside key/value groups, which stay; without such groups, heads with their keys and values.
    """
    _check_uniform(anatomy, target, config)
    kv, per_kv = _kv_groups(anatomy)
    if target.shape is not None:
        return Rounded(target.shape, kv if per_kv > 1 else None)
    source, (hiddens, widths) = Shape.of(anatomy.source), round_widths(Shape.of(anatomy.source), config)
    own = [one for one in layouts(anatomy.source, config) if per_kv == 1 or one.kv_heads in (None, kv)]
    fits = [found for one in own for found in _most_equal(anatomy, target, one, hiddens, widths)]
    if not fits:
        least = [Rounded(Shape(hiddens[0], one.heads, widths[0], source.layers), one.kv_heads) for one in own]
        raise UserError(
            f"target {format_count(target.num_parameters)} is below the smallest model that method {config.method} can "
            f"reach, {min(_count(anatomy, one) for one in least):,} parameters at these minimum sizes: choose a larger "
            "target"
        )

    def inequality(found: Rounded) -> tuple[float, int]:
        shape = found.shape
        pairs = ((shape.hidden, source.hidden), (shape.heads, source.heads), (shape.ffn, source.ffn))
        shares = [log(now / full) for now, full in pairs if full]
        return max(shares) - min(shares), -shape.heads

    return min([one for one in fits if _is_near(anatomy, target, one, config)] or fits, key=inequality)


def _count(anatomy: Anatomy, found: Rounded) -> int:
    kv = Layout(found.shape.heads, found.kv_heads, 0).kv_count(most_kv)
    return anatomy.count(with_sizes(anatomy.source, found.shape, kv)).total


def _is_near(anatomy: Anatomy, target: Target, found: Rounded, config: PruneConfig) -> bool:
    """Whether the target is less than one group of the smallest pruned kind away."""
    shape, step, groups = found.shape, config.round_to, config.effective_groups
    smaller = replace(shape, hidden=shape.hidden - step) if "stem" in groups else replace(shape, heads=shape.heads - 1)
    if "ffn" in groups:
        smaller = replace(shape, ffn=shape.ffn - step)
    count = _count(anatomy, found)
    return target.num_parameters - count < count - _count(anatomy, replace(found, shape=smaller))


def _most_equal(
    anatomy: Anatomy, target: Target, layout: Layout, hiddens: list[int], widths: list[int]
) -> Iterator[Rounded]:
    """The largest shapes with this layout whose hidden size and FFN have about the same share."""
    full = Shape.of(anatomy.source)

    def count(hidden: int) -> int:
        place = bisect_left(widths, hidden * full.ffn / full.hidden)
        shape = Shape(hidden, layout.heads, widths[min(place, len(widths) - 1)], full.layers)
        return anatomy.count(with_sizes(anatomy.source, shape, layout.kv_count(most_kv))).total

    place = bisect_right(hiddens, target.num_parameters, key=count)
    for hidden in hiddens[max(place - 1, 0) : place + 1]:
        ffn = widest(anatomy, anatomy.source, target, layout, hidden, widths)
        if ffn is not None:
            yield Rounded(Shape(hidden, layout.heads, ffn, full.layers), layout.kv_heads)
