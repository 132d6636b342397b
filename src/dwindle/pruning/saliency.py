"""Saliency of groups: element scores of the output projections, summed over each group.

Shapes: O hidden rows of an output projection, I its input columns, H heads, N FFN channels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cache
from itertools import takewhile
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dwindle.anatomy.anatomy import Row, places
from dwindle.anatomy.family import Family
from dwindle.anatomy.structure import BLOCKS, KINDS, Group, Kind, Structure
from dwindle.distributed.async_copy import Fetched
from dwindle.distributed.shards import local, row_range, same_everywhere
from dwindle.pruning.curvature import LayerCurvature
from dwindle.pruning.metrics import Metric, Score, derivative
from dwindle.pruning.strips import Strips
from dwindle.pruning.surgery import Prunable

_TINY = 1e-300
"""Instead of zero, where all groups of a layer have the same saliency."""


@dataclass(slots=True)
class Scores:
    """Sums of element scores for every head, FFN channel and hidden index of ``structure``, on the CPU in float64.

    Pruned parts have an infinite score, so they are never the minimum.
    """

    structure: Structure
    attn: list[Tensor]
    ffn: list[Tensor]
    stem: Tensor
    kv: list[Tensor] = field(default_factory=list)
    """Saliencies of key/value heads with their queries, if not the sum over the queries (metric ``group``)."""
    blocks: list[Tensor] = field(default_factory=list)
    """For each layer those of its attention, its FFN and the whole layer, if blocks are prunable."""

    @classmethod
    def zero(cls, structure: Structure) -> Scores:
        """All zero: for results that depend on sizes or on what a strategy observed itself, or to be filled in."""
        heads = [torch.zeros(len(la.query_heads), dtype=torch.float64) for la in structure.layers]
        channels = [torch.zeros(len(la.ffn), dtype=torch.float64) for la in structure.layers]
        return cls(structure, heads, channels, torch.zeros(len(structure.hidden), dtype=torch.float64))

    @property
    def current(self) -> Scores:
        return self

    def copy(self) -> Scores:
        return self._changed(torch.clone)

    def _changed(self, change: Callable[..., Tensor], *others: Scores) -> Scores:
        """Apply ``change`` to every tensor, together with the tensors in its place in other scores."""

        def each(part: str) -> list[Tensor]:
            return [change(*own) for own in zip(*(getattr(scores, part) for scores in (self, *others)), strict=True)]

        stem = change(self.stem, *(scores.stem for scores in others))
        return Scores(self.structure, each("attn"), each("ffn"), stem, each("kv"), each("blocks"))

    def moments(self, unit: str, layer: int | None, alive: Structure, source: Structure) -> tuple[float, float]:
        """Mean and standard deviation over the source's query heads (FFN channels, hidden channels) of a layer.

        Removed ones count as zero, so both hardly change while the least salient ones are removed.
        """
        values = self.stem if layer is None else (self.attn if unit == "query" else self.ffn)[layer]
        count = max(len(source.unit(unit, layer)), 1)
        values = values[places(alive.unit(unit, layer), self.structure.unit(unit, layer))]
        mean = float(values.sum()) / count
        return mean, max(float(values.square().sum()) / count - mean**2, _TINY) ** 0.5

    def of_kv_head(self, layer: int, kv_head: int, queries: Sequence[float]) -> float:
        """The saliency of a key/value head with all its query heads; ``queries`` are theirs."""
        if not self.kv:
            return sum(queries)
        return float(self.kv[layer][places([kv_head], self.structure.unit("kv", layer))[0]])

    def remove(self, group: Group) -> None:
        """Exclude a group from further choices; only the sums of the block that it is in change."""
        if group.kind == "layer":
            for layer, places_ in enumerate(group.members):
                for place in places_:
                    (self.attn, self.ffn)[place][layer].fill_(float("inf"))
                    self.blocks[layer][[place, 2]] = float("inf")
            return
        if group.kind == "stem":
            self.stem[places(group.members[0], self.structure.hidden)] = float("inf")
            return
        place, unit = (0, "query") if group.kind == "attn" else (1, "ffn")
        for layer, members in enumerate(group.members):
            if members:
                self._exclude(place, layer, places(members, self.structure.unit(unit, layer)))

    def mask(self, pruned: Mapping[Kind, list[Tensor]]) -> Scores:
        """Exclude pruned parts."""
        for place, kind in enumerate(KINDS[:2]):
            for layer, is_pruned in enumerate(pruned[kind]):
                self._exclude(place, layer, is_pruned.numpy())
        self.stem.masked_fill_(pruned["stem"][0], float("inf"))
        return self

    def _exclude(self, place: int, layer: int, where: Any) -> None:
        """Heads (place 0) or channels (1) get an infinite score; sums over blocks lose theirs."""
        values = (self.attn, self.ffn)[place][layer].numpy()
        if self.blocks and not self.kv:
            gone = values[where]
            self.blocks[layer][[place, 2]] -= float(gone[np.isfinite(gone)].sum())
        values[where] = np.inf

    def restricted(self, structure: Structure) -> Scores:
        """The scores of a model that was compacted to ``structure``."""

        def pick(values: list[Tensor], unit: str) -> list[Tensor]:
            layers = range(len(values))
            where = [places(structure.unit(unit, la), self.structure.unit(unit, la)) for la in layers]
            return [value[place] for value, place in zip(values, where, strict=True)]

        stem = self.stem[places(structure.hidden, self.structure.hidden)]
        kv = pick(self.kv, "kv")
        return Scores(structure, pick(self.attn, "query"), pick(self.ffn, "ffn"), stem, kv, self.blocks)

    def smoothed(self, previous: Scores | None, factor: float) -> Scores:
        """``factor``·previous + (1 − factor)·this."""
        if previous is None or factor == 0.0:
            return self
        assert previous.structure == self.structure
        return self._changed(lambda now, before: factor * before + (1 - factor) * now, previous)


def score_model(
    prunable: Prunable,
    gradients: Mapping[str, Tensor],
    fishers: Mapping[str, Tensor],
    metric: Metric,
    *,
    blocks: bool = False,
) -> Scores:
    """Scores of the current model; elements of pruned groups are zero and add nothing to other groups."""
    return begin_scores(prunable, gradients, fishers, metric, blocks=blocks)()


def begin_scores(
    prunable: Prunable,
    gradients: Mapping[str, Tensor],
    fishers: Mapping[str, Tensor] | None,
    metric: Metric,
    *,
    fused: bool = False,
    blocks: bool = False,
    reduced: Mapping[str, tuple[Tensor, Tensor]] | None = None,
) -> Callable[[], Scores]:
    """Start computing ``score_model``; calling the result waits for it.

    Only row and column sums are copied from the device. If weights are sharded by rows, one small all-reduce completes
    the sums, and all processes get the same numbers. The GPU is not idle meanwhile: kernels launched after this call
    run while the groups are chosen on the host.

    ``fishers`` None: the squares of ``gradients``. ``fused``: compile the element scores and their sums into one pass
    over weights and gradients instead of eight, for GPUs; results differ by rounding. ``blocks``: also the saliencies
    of whole blocks and layers. ``reduced``: precomputed row and column sums of all matrices; ``gradients`` then holds
    only those of vectors.
    """
    sums, score_of = _fused_sums() if fused and metric.is_plain else _sums, _score_of_each(metric, prunable)
    columns: dict[str, list[Tensor]] = {"attn": [], "ffn": [], "whole": []}
    rows: list[Tensor] = []
    for kind, table_row, weight, gradient, fisher in _operands(prunable, gradients, fishers):
        score = score_of(table_row)
        row, column = sums(score, weight, gradient, fisher) if reduced is None else reduced[table_row.name]
        rows.append(row)
        columns[kind].append(column)
    heads = torch.cat([*columns["attn"], rows[0].new_zeros(0)]).view(-1, prunable.anatomy.head_dim).sum(1)
    weight = prunable.parameters[prunable.outputs[0][1].name]
    stem = rows[0].new_zeros(weight.shape[0])
    first, held = row_range(weight)
    torch.sum(torch.stack(rows), 0, out=stem[first : first + held])
    wholes = [column.sum()[None] for column in columns["whole"]] if blocks else []
    vectors = block_vectors(prunable) if blocks and metric.squares_sums else []
    wholes += [_derivative(prunable, row, offset, gradients[row.name])[None] for row, offset in vectors]
    flat = torch.cat([heads, *columns["ffn"], stem, *wholes])
    transfer = Fetched(same_everywhere(flat, weight))  # one reduction, one transfer, one sync

    def result() -> Scores:
        everything, count, kv = transfer.result(), prunable.anatomy.num_layers, list[Tensor]()
        lengths = [len(part) for kind in KINDS for part in prunable.pruned[kind]]
        flat, others = everything[: sum(lengths)], everything[sum(lengths) :].tolist()
        signed = torch.split(flat, lengths)
        of_blocks = _of_blocks(prunable, signed, others, vectors) if blocks else []
        if metric.squares_sums:
            kv = [c.square() for c in _kv_sums(prunable.physical, signed[:count])]
            flat, of_blocks = flat.square(), [values.square() for values in of_blocks]
        parts = list(torch.split(flat.masked_fill_(prunable.pruned_flags, float("inf")), lengths))
        return Scores(prunable.physical, parts[:count], parts[count:-1], parts[-1], kv, of_blocks)

    return result


def _score_of_each(metric: Metric, prunable: Prunable) -> Callable[[Row], Score]:
    """The metric's score for this process's rows of each output projection, asked for in their order.

    Random numbers are drawn for the source's tensors, so those of a weight depend neither on shards nor on compactions.
    """
    if not metric.draws:
        return lambda row: metric.score
    anatomy, rows = prunable.anatomy, iter([row for _, row in prunable.anatomy.outputs])

    def of(wanted: Row) -> Score:
        parameter = prunable.parameters[wanted.name]
        held = local(parameter.detach())
        for row in takewhile(lambda row: row is not wanted, rows):  # not in the model any more, or not scored
            metric.score(*[held.new_zeros(row.full_shape)] * 3)
        first, count = row_range(parameter)
        where_O, where_I = (
            anatomy.positions(wanted, axis, prunable.physical, anatomy.source).to(held.device) for axis in (0, 1)
        )
        where_O = where_O[first : first + count]

        def whole(given: Tensor) -> Tensor:
            columns = given.new_zeros(len(given), wanted.full_shape[1]).index_copy(1, where_I, given)
            if len(given) != count:  # a curvature of the inputs, one row for all
                return columns
            return given.new_zeros(wanted.full_shape).index_copy(0, where_O, columns)

        return lambda *given: metric.score(*map(whole, given))[where_O][:, where_I]

    return of


def _of_blocks(
    prunable: Prunable, signed: Sequence[Tensor], others: list[float], vectors: list[tuple[Row, float]]
) -> list[Tensor]:
    """Sums over the attention, the FFN and the whole of every layer; ``others``: other projections, then vectors."""
    count, first = prunable.anatomy.num_layers, len(others) - len(vectors)
    sums = _block_sums(prunable, signed[:count], signed[count:-1], others[:first])
    return _masked_blocks(prunable.anatomy.family, sums, vectors, others[first:])


def _block_sums(
    prunable: Prunable, heads: Sequence[Tensor], channels: Sequence[Tensor], whole: Sequence[float]
) -> list[Tensor]:
    """Sums over the attention, the FFN and the whole of every layer; ``whole``: other projections, in their order."""
    attn, ffn = ([float(values.sum()) for values in sums] for sums in (heads, channels))
    others = [row for kind, row in prunable.outputs if kind == "whole"] if whole else []
    for row, value in zip(others, whole, strict=True):
        (ffn if row.block == "mlp" else attn)[row.layer or 0] += value
    return [torch.tensor([a, b, a + b], dtype=torch.float64) for a, b in zip(attn, ffn, strict=True)]


def rows_with_gradients(prunable: Prunable, metric: Metric | None, *, blocks: bool) -> list[Row]:
    """The tensors whose gradients ``begin_scores`` reads."""
    vectors = block_vectors(prunable) if blocks and metric is not None and "groups" in metric.needs else []
    return [row for _, row in prunable.outputs] + [row for row, _ in vectors]


def block_vectors(prunable: Prunable) -> list[tuple[Row, float]]:
    """(row, offset) of the norms behind blocks and of the output biases: w + offset multiplies or is the output."""
    family, parameters = prunable.anatomy.family, prunable.parameters
    biases = {f"{row.module}.bias" for _, row in prunable.outputs}
    found = list[tuple[Row, float]]()
    for row in prunable.anatomy.rows:
        if row.layer is None or row.block is None or row.name not in parameters:
            continue
        if _is_norm_after(family, row):
            found.append((row, family.gain_offset))
        elif row.name in biases:
            found.append((row, 0.0))
    return found


def _is_norm_after(family: Family, row: Row) -> bool:
    return row.module.rpartition(".")[2] in family.norm_after.values()


def _derivative(prunable: Prunable, row: Row, offset: float, gradient: Tensor) -> Tensor:
    """Σ (w + offset)·g over the rows of this process."""
    weight = local(prunable.parameters[row.name].detach()).double()
    return ((weight + offset) * local(gradient).double()).sum()


def _masked_blocks(
    family: Family, sums: list[Tensor], vectors: list[tuple[Row, float]], values: list[float]
) -> list[Tensor]:
    """The derivatives of the loss by masks on the outputs of blocks; ``sums``: those by masks on the projections.

    A norm behind a block removes the scale of its input, so there the derivative by a mask on the projection is zero.
    The norm's output is masked instead: only its gain counts. Elsewhere output biases are added.
    """
    sums = [total.clone() for total in sums]
    norms = {(row.layer, row.block) for row, _ in vectors if _is_norm_after(family, row)}
    for (row, _), value in zip(vectors, values, strict=True):
        assert row.layer is not None and row.block is not None
        place = BLOCKS.index(row.block)
        if _is_norm_after(family, row):
            sums[row.layer][place] = value
        elif (row.layer, row.block) not in norms:
            sums[row.layer][place] += value
    for total in sums:
        total[2] = total[0] + total[1]
    return sums


def _kv_sums(structure: Structure, heads: Sequence[Tensor]) -> list[Tensor]:
    """Signed sums over the query heads of each key/value head."""
    found = []
    for layer, values in zip(structure.layers, heads, strict=True):
        where = torch.tensor(places(layer.kv_of_query, layer.kv_heads), dtype=torch.long)
        found.append(values.new_zeros(len(layer.kv_heads)).index_add(0, where, values))
    return found


def _sums(score: Score, w_OI: Tensor, g_OI: Tensor, f_OI: Tensor | None) -> tuple[Tensor, Tensor]:
    """Row and column sums of the element scores."""
    element_OI = score(w_OI, g_OI, g_OI.square() if f_OI is None else f_OI)
    return element_OI.sum(-1, dtype=torch.float64), element_OI.sum(-2, dtype=torch.float64)


def group_sums(weight: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Row and column sums of a matrix for the metric ``group``: all that it needs of a gradient, or of several."""
    return _sums(derivative, local(weight), local(gradient), None)


@cache
def _fused_sums() -> Callable[[Score, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]:
    """One graph for projections of all sizes; compiled on first use, because importing the compiler takes a second."""
    return torch.compile(_sums, dynamic=True)


class ElementScores:
    """Element scores of one calibration; removals are subtracted from the sums exactly (pruning without training).

    Scores of ``o`` are stored per row and head, those of ``down`` per element: a copy the size of all ``down``. They
    are not modified: the sums of what is removed are infinite, whatever is subtracted.
    """

    def __init__(
        self,
        prunable: Prunable,
        gradients: Mapping[str, Tensor],
        fishers: Mapping[str, Tensor],
        metric: Metric,
        *,
        blocks: bool = False,
    ) -> None:
        self.structure, self._prunable, self._with_blocks = prunable.physical, prunable, blocks
        layers, hidden = prunable.anatomy.num_layers, len(self.structure.hidden)
        nothing = Strips(torch.zeros(hidden, 0))
        self._heads, self._channels = [nothing] * layers, [nothing] * layers
        self._whole_OI: list[Tensor] = []
        """Elements of the other output projections: they count for hidden channels only. Removed ones are zero."""
        heads, channels = ([torch.zeros(0, dtype=torch.float64)] * layers for _ in range(2))
        stem = [torch.zeros(hidden, dtype=torch.float64) for _ in range(2 * layers)]
        for _, row, weight, gradient, fisher in _operands(prunable, gradients, fishers):
            assert row.layer is not None and fisher is not None
            element_OI = metric.score(weight, gradient, fisher)
            if row.axes[1] == ("query",):
                element_OI = element_OI.view(len(element_OI), -1, prunable.anatomy.head_dim).sum(2)
                stem[row.layer], heads[row.layer] = _row_and_column_sums(element_OI)
                self._heads[row.layer] = Strips(element_OI)
            elif row.axes[1] == ("ffn",):
                stem[layers + row.layer], channels[row.layer] = _row_and_column_sums(element_OI)
                self._channels[row.layer] = Strips(element_OI)
            else:
                is_square = row.axes[1] == ("hidden",)  # these columns are removed with the rows
                self._whole_OI.append((element_OI if is_square else element_OI.sum(1, keepdim=True)).cpu())
        stem += [e.sum(1, dtype=torch.float64) for e in self._whole_OI]
        self.current = Scores(self.structure, heads, channels, torch.stack(stem).sum(0)).mask(prunable.pruned)
        self._sum_blocks()

    def _sum_blocks(self) -> None:
        """Recomputed from the sums of what is left."""
        if self._with_blocks:
            heads, channels = (
                [t.masked_fill(t.isinf(), 0.0) for t in v] for v in (self.current.attn, self.current.ffn)
            )
            whole = [float(e.sum(dtype=torch.float64)) for e in self._whole_OI]
            self.current.blocks = _block_sums(self._prunable, heads, channels, whole)

    def copy(self) -> ElementScores:
        other = copy(self)
        other.current = self.current.copy()
        other._whole_OI = [e.clone() for e in self._whole_OI]
        return other

    def remove(self, group: Group) -> None:
        """Exclude a group and subtract its elements from the sums of other groups."""
        if group.kind == "layer":
            self._remove_blocks(group)
        elif group.kind == "stem":
            self._remove_hidden(places(group.members[0], self.structure.hidden))
        else:
            self._remove_columns(group)
        self._sum_blocks()

    def _remove_hidden(self, rows: list[int]) -> None:
        scores = self.current
        for whole in self._whole_OI:
            if whole.shape[1] == len(self.structure.hidden):
                scores.stem -= whole[:, rows].sum(1, dtype=torch.float64)
                whole[:, rows] = 0
            whole[rows] = 0
        scores.stem[rows] = float("inf")
        for elements, sums in ((self._heads, scores.attn), (self._channels, scores.ffn)):
            for element, total in zip(elements, sums, strict=True):
                np.subtract(values := total.numpy(), element.sum_of_rows(rows), out=values)

    def _remove_columns(self, group: Group) -> None:
        scores, stem = self.current, self.current.stem.numpy()
        elements, sums, unit = (
            (self._heads, scores.attn, "query") if group.kind == "attn" else (self._channels, scores.ffn, "ffn")
        )
        for layer, members in enumerate(group.members):
            if not members:
                continue
            columns = places(members, self.structure.unit(unit, layer))
            np.subtract(stem, elements[layer].sum_of_columns(columns), out=stem)
            sums[layer].numpy()[columns] = np.inf

    def _remove_blocks(self, group: Group) -> None:
        scores = self.current
        others = [row for kind, row in self._prunable.outputs if kind == "whole"]
        for row, element in zip(others, self._whole_OI, strict=True):
            if _is_gone(row, group):
                scores.stem -= element.sum(1, dtype=torch.float64)
                element.zero_()
        for layer, members in enumerate(group.members):
            for place in members:
                elements, sums = ((self._heads, scores.attn), (self._channels, scores.ffn))[place]
                left = elements[layer].whole().masked_fill(sums[layer].isinf(), 0)
                scores.stem -= left.sum(1, dtype=torch.float64)
        scores.remove(group)


def _row_and_column_sums(element_OI: Tensor) -> tuple[Tensor, Tensor]:
    """The scores, copied to host memory."""
    return element_OI.sum(1, dtype=torch.float64).cpu(), element_OI.sum(0, dtype=torch.float64).cpu()


def _is_gone(row: Row, group: Group) -> bool:
    return row.layer is not None and any(BLOCKS[place] == row.block for place in group.members[row.layer])


def _operands(
    prunable: Prunable, gradients: Mapping[str, Tensor], fishers: Mapping[str, Tensor] | None
) -> Iterator[tuple[str, Row, Tensor, Tensor, Tensor | None]]:
    """(kind, row, w, g, f) of every output projection; w replaces what was not collected.

    Layer-wise metrics skip projections whose columns belong to no group of the layer: their inputs are not recorded.
    """
    for kind, row in prunable.outputs:
        if kind == "whole" and isinstance(fishers, LayerCurvature):
            continue
        weight = local(prunable.parameters[row.name].detach())
        fisher = None if fishers is None else local(fishers.get(row.name, weight))
        yield kind, row, weight, local(gradients.get(row.name, weight)), fisher


class Once(dict[str, Tensor]):
    """Tensors that are read once and then freed."""

    def get(self, name: str, default: Any = None) -> Any:
        return self.pop(name, default)
