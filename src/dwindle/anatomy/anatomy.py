"""A family's table applied to one model: each tensor, the units along its axes, shapes and parameter counts.

Zeroing, slicing, counting, moving optimizer moments and exporting all iterate over ``Anatomy.rows``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dwindle.anatomy.configuration_dwindle import queries_per_kv
from dwindle.anatomy.family import Family
from dwindle.anatomy.refusals import LAYER_PREFIX, family_for, split_name
from dwindle.anatomy.structure import BLOCKS, Block, Layer, Structure, head_dim_of, lost
from dwindle.core.errors import UserError, first_line
from dwindle.core.limits import MAX_CHANNELS

_NOT_COMPUTED = ("final_logit_softcapping", "attn_logit_softcapping", "use_bidirectional_attention")

FIXED = ("vocab", "dim")
"""Units that are never pruned."""

_SIZES = {"hidden": 0, "query": 1, "head": 1, "kv": 2, "ffn": 3}
"""The place of each unit's size in a polynomial."""
_Terms = list[tuple[tuple[int, ...], int]]
"""A polynomial of sizes: the places of the factors of each term, and its coefficient."""

Removed = Mapping[tuple[str, int | None], list[int]]
"""Positions that are removed, by unit and layer (None: hidden); ``attn`` and ``mlp`` are whole blocks of a layer."""


@dataclass(frozen=True, slots=True)
class Row:
    """One tensor. ``axes[i]`` lists the units concatenated along axis i, such as ``("query", "kv", "kv")``."""

    name: str
    layer: int | None
    axes: tuple[tuple[str, ...], ...]
    full_shape: tuple[int, ...]
    block: Block | None = None
    """The block of its layer; None outside the layers, and where it belongs to none."""

    def is_in(self, structure: Structure) -> bool:
        """Whether a model with this structure has the tensor."""
        return self.block is None or self.layer is None or self.block not in structure.layers[self.layer].absent

    @property
    def is_embedding(self) -> bool:
        return ("vocab",) in self.axes

    @property
    def is_norm(self) -> bool:
        """Whether this is an RMSNorm gain whose width can shrink; per-head norms have a fixed size."""
        return self.name.endswith("norm.weight") and self.axes != (("dim",),)

    @property
    def module(self) -> str:
        return self.name.rpartition(".")[0]


@dataclass(frozen=True, slots=True)
class ParameterCount:
    """Exact number of parameters; tied tensors count once."""

    total: int
    embedding: int

    @property
    def non_embedding(self) -> int:
        return self.total - self.embedding


class Anatomy:
    """The table of one model at the source's sizes; it remains valid after pruning and compaction."""

    def __init__(self, family: Family, config: Any, shapes: Mapping[str, tuple[int, ...]]) -> None:
        for key in _NOT_COMPUTED:
            if getattr(config, key, None):
                raise UserError(f"config.json sets {key}, which dwindle's loss and masks do not compute: unset it")
        self.family, self.config = family, config
        self.head_dim: int = head_dim_of(config)
        self.num_layers: int = config.num_hidden_layers
        self.rows = tuple(self._rows(shapes))
        self._by_name = {row.name: row for row in self.rows}
        self._rows_of = {
            layer: [row for row in self.rows if row.layer == layer] for layer in (None, *range(self.num_layers))
        }
        self.source = self._source(config)
        tables = {layer: tuple((r.axes, r.full_shape) for r in rows) for layer, rows in self._rows_of.items()}
        distinct = list(dict.fromkeys(tables.values()))
        self._table_of = {layer: distinct.index(table) for layer, table in tables.items()}
        self._terms: dict[tuple[int, tuple[Block, ...]], tuple[_Terms, _Terms]] = {}
        self._block_kinds = [
            {block: tuple(split_name(r.name)[1] for r in self._rows_of[n] if r.block == block) for block in BLOCKS}
            for n in range(self.num_layers)
        ]
        self.outputs = tuple(self._output_rows())
        self._whole = [row for kind, row in self.outputs if kind == "whole"]
        self._outputs_of = [[row for _, row in self.outputs if row.layer == n] for n in range(self.num_layers)]
        self._output_of = {(row.layer, kind): row for kind, row in self.outputs}
        for row in self.rows:
            if self.shape(row, self.source) != row.full_shape:
                raise UserError(
                    f"tensor {row.name} has shape {row.full_shape}, the configuration says "
                    f"{self.shape(row, self.source)}: the weights and config.json do not belong together"
                )

    @classmethod
    def of(cls, model: nn.Module) -> Anatomy:
        """From a model; only names and shapes are read."""
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        config: Any = model.config
        return cls(family_for(config, shapes), config, shapes)

    @classmethod
    def of_config(cls, config: Any) -> Anatomy:
        """From a configuration, without weights: the model is built on the meta device."""
        from dwindle.anatomy.build import build_on_meta

        try:
            return cls.of(build_on_meta(config))
        except UserError:
            raise
        except Exception as error:  # whatever transformers raises for values that it does not check
            where = f"source {config.name_or_path}: " if config.name_or_path else ""
            if str(error).startswith("Unrecognized configuration class"):
                raise UserError(f"{where}{config.model_type!r} is not a causal model: {first_line(error)}") from error
            reason = f"{error.args[0]!r} is unknown" if isinstance(error, KeyError) else first_line(error)
            raise UserError(f"{where}no {config.model_type} model has this configuration: {reason}") from error

    def with_vocabulary(self, size: int) -> Anatomy:
        """The table of the same model with another number of tokens."""
        shapes = {
            row.name: tuple(
                size if units == ("vocab",) else n for units, n in zip(row.axes, row.full_shape, strict=True)
            )
            for row in self.rows
        }
        return Anatomy(self.family, self.config, shapes)

    @property
    def num_embeddings(self) -> int:
        """Rows of the embedding."""
        embedding = next(row for row in self.rows if row.is_embedding)
        return embedding.full_shape[embedding.axes.index(("vocab",))]

    def __getitem__(self, name: str) -> Row:
        return self._by_name[name]

    def _rows(self, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[Row]:
        for name, shape in shapes.items():
            in_layer, key = split_name(name)
            table = self.family.layer if in_layer else self.family.stem
            layer = int(name.removeprefix(LAYER_PREFIX).partition(".")[0]) if in_layer else None
            axes = tuple(tuple(axis.split("+")) for axis in table[key].split())
            if len(axes) != len(shape):
                raise UserError(f'row {key} = "{table[key]}" names {len(axes)} axes, tensor {name} has {len(shape)}')
            yield Row(name, layer, axes, shape, self.family.blocks[key.partition(".")[0]] if in_layer else None)

    def _source(self, config: Any) -> Structure:
        """The full structure, numbered from zero: FFN channels from the tensors, heads from the configuration.

        A layer without a ``query`` axis (a convolution, say) has no heads; a block without tensors is absent.
        """
        absent: list[tuple[Block, ...]] = [()] * self.num_layers
        ffn, kv_of_query = [0] * self.num_layers, [list[int]() for _ in range(self.num_layers)]
        for number, per_kv in enumerate(queries_per_kv(config)):
            axes = [pair for row in self._rows_of[number] for pair in zip(row.axes, row.full_shape, strict=True)]
            ffn[number] = next((size // len(units) for units, size in axes if {*units} == {"ffn"}), 0)
            if any("query" in units for units, _ in axes):
                kv_of_query[number] = [kv for kv, queries in enumerate(per_kv) for _ in range(queries)]
            has = {row.block for row in self._rows_of[number]}
            absent[number] = () if None in has else tuple(block for block in BLOCKS if block not in has)
        if sum(ffn) > MAX_CHANNELS:
            raise UserError(f"{sum(ffn):,} FFN channels are more than any model has")
        return Structure.full(hidden=config.hidden_size, ffn=ffn, kv_of_query=kv_of_query, absent=absent)

    def _output_rows(self) -> Iterator[tuple[str, Row]]:
        """(kind, row) of every projection into the residual stream, layer by layer.

        The kind is ``attn`` or ``ffn``, or ``whole`` where no columns belong to a group of the layer.
        """
        kinds = {"query": "attn", "ffn": "ffn"}
        order = ("attn", "whole", "ffn")
        for layer in range(self.num_layers):
            found = [
                (kinds.get(row.axes[1][0], "whole"), row)
                for row in self._rows_of[layer]
                if len(row.axes) == 2 and row.axes[0] == ("hidden",)
            ]
            yield from sorted(found, key=lambda pair: order.index(pair[0]))

    def width(self, unit: str, layer: int | None, structure: Structure) -> int:
        """Number of entries of one unit of an axis in ``structure``; not for vocab and dim, which never change."""
        return len(structure.unit(unit, layer)) * self.stretch(unit)

    def stretch(self, unit: str) -> int:
        """Number of consecutive entries per index of a unit: the head size for heads, else 1."""
        return self.head_dim if unit in ("query", "kv") else 1

    def shape(self, row: Row, structure: Structure) -> tuple[int, ...]:
        """The shape of a tensor in a model with this structure; zeros if its block is absent there."""
        if not row.is_in(structure):
            return (0,) * len(row.axes)
        return tuple(
            full if axis[0] in FIXED else sum(self.width(unit, row.layer, structure) for unit in axis)
            for axis, full in zip(row.axes, row.full_shape, strict=True)
        )

    def count(self, structure: Structure) -> ParameterCount:
        """Exact number of parameters, from the table alone; tied tensors count once."""
        hidden = len(structure.hidden)
        every, embedding = self._polynomials(None, ())
        total = _value(every, (hidden, 0, 0, 0))
        for number, layer in enumerate(structure.layers):
            total += self.count_layer(number, hidden, layer)
        return ParameterCount(total, _value(embedding, (hidden, 0, 0, 0)))

    def layer_counts(self, structure: Structure) -> list[int]:
        """Exact number of parameters of every decoder layer."""
        return [self.count_layer(n, len(structure.hidden), layer) for n, layer in enumerate(structure.layers)]

    def count_layer(self, number: int, hidden: int, layer: Layer) -> int:
        """Exact number of parameters of one decoder layer of these sizes."""
        sizes = hidden, len(layer.query_heads), len(layer.kv_heads), len(layer.ffn)
        return _value(self._polynomials(number, layer.absent)[0], sizes)

    def _polynomials(self, layer: int | None, absent: tuple[Block, ...]) -> tuple[_Terms, _Terms]:
        """(all, embedding) parameters of one layer, or of the tensors outside the layers, as polynomials of its sizes.

        Selection counts thousands of structures: the table is read once for each kind of layer.
        """
        key = self._table_of[layer], absent
        if key not in self._terms:
            rows = [row for row in self._rows_of[layer] if row.block is None or row.block not in absent]
            embeddings = [row for row in rows if row.is_embedding]
            self._terms[key] = self._sum_of_products(rows), self._sum_of_products(embeddings)
        return self._terms[key]

    def _sum_of_products(self, rows: Iterable[Row]) -> _Terms:
        """The number of elements of these tensors: for each the product of its axes, which are sums over units."""
        terms: Counter[tuple[int, ...]] = Counter()
        for row in rows:
            product: Counter[tuple[int, ...]] = Counter({(): 1})
            for axis, full in zip(row.axes, row.full_shape, strict=True):
                units = [((), full)] if axis[0] in FIXED else [((_SIZES[unit],), self.stretch(unit)) for unit in axis]
                longer: Counter[tuple[int, ...]] = Counter()
                for term, factor in product.items():
                    for size, stretch in units:
                        longer[tuple(sorted(term + size))] += factor * stretch
                product = longer
            terms.update(product)
        return list(terms.items())

    def positions(self, row: Row, axis: int, keep: Structure, within: Structure) -> Tensor:
        """Positions of the kept entries of one axis in a tensor with structure ``within``."""
        units = row.axes[axis]
        if units[0] in FIXED:
            return torch.arange(row.full_shape[axis])
        pieces, offset = [], 0
        for unit in units:
            where = _find(keep.unit(unit, row.layer), within.unit(unit, row.layer))
            stretch = self.stretch(unit)
            pieces.append((where[:, None] * stretch + torch.arange(stretch)).flatten() + offset)
            offset += self.width(unit, row.layer, within)
        return torch.cat(pieces)

    def removed(self, before: Structure, after: Structure, within: Structure) -> Removed:
        """For every unit of a layer (hidden: of all layers) that shrinks: the removed positions in ``within``.

        Computed once per event for all tensors.
        """
        units: list[tuple[str, int | None]] = [("hidden", None)]
        found: dict[tuple[str, int | None], list[int]] = {}
        for number, (had, has) in enumerate(zip(before.layers, after.layers, strict=True)):
            if had is not has:
                units += [(unit, number) for unit in ("query", "kv", "ffn")]
                for block in {*has.absent} - {*had.absent}:
                    found[block, number] = []
        for unit, layer in units:
            gone = lost(before.unit(unit, layer), after.unit(unit, layer))
            if gone:
                found[unit, layer] = places(gone, within.unit(unit, layer))
        return found

    def spans(self, row: Row, removed: Removed, within: Structure) -> Iterator[tuple[int, int, int]]:
        """(axis, start, length) of the removed parts of a tensor with structure ``within``; adjacent ones merged."""
        if row.block is not None and (row.block, row.layer) in removed:
            yield 0, 0, self.shape(row, within)[0]
            return
        for axis, units in enumerate(row.axes):
            offset = 0
            for unit in units:
                if unit in FIXED:
                    break
                stretch, key = self.stretch(unit), "query" if unit == "head" else unit
                for first, count in _runs(removed.get((key, None if unit == "hidden" else row.layer), [])):
                    yield axis, offset + first * stretch, count * stretch
                if len(units) > 1:
                    offset += self.width(unit, row.layer, within)

    def slice(self, row: Row, tensor: Tensor, keep: Structure, within: Structure) -> Tensor:
        """The tensor of a model with structure ``keep``, sliced out of one with structure ``within``."""
        for axis in range(len(row.axes)):
            where = self.positions(row, axis, keep, within)
            if len(where) != tensor.shape[axis]:
                tensor = tensor.index_select(axis, where.to(tensor.device))
        return tensor

    def num_output_columns(self, structure: Structure) -> int:
        """Input columns of all projections into the residual stream: the elements that a hidden channel has there."""
        layers = sum(len(layer.query_heads) * self.head_dim + len(layer.ffn) for layer in structure.layers)
        return layers + sum(self.shape(row, structure)[1] for row in self._whole)

    def layer_columns(self, number: int, blocks: Collection[Block], structure: Structure) -> int:
        """Input columns of the projections of a layer's blocks into the residual stream."""
        return sum(self.shape(row, structure)[1] for row in self._outputs_of[number] if row.block in blocks)

    def name_in(self, row: Row, structure: Structure) -> str:
        """The tensor's name in a model with this structure: removed layers are not counted."""
        if row.layer is None or len(structure.places) == self.num_layers:
            return row.name
        rest = row.name.removeprefix(LAYER_PREFIX).partition(".")[2]
        return f"{LAYER_PREFIX}{structure.places[row.layer]}.{rest}"

    def rows_in(self, structure: Structure) -> dict[str, Row]:
        """The tensors of a model with this structure, by their names there."""
        return {self.name_in(row, structure): row for row in self.rows if row.is_in(structure)}

    def has_every_kind(self, structure: Structure) -> bool:
        """Whether an attention block of every kind (a convolution, say, is another kind) and an FFN are left."""
        return not any(left == 0 for left in self._left(structure).values())

    def removable_blocks(self, structure: Structure) -> list[tuple[int, tuple[int, ...]]]:
        """(layer, places in ``BLOCKS``) of all groups of kind ``layer``: whole layers, and attention blocks and FFNs.

        A block in the place of attention (a convolution) is removed only with its layer.
        """
        left, found = self._left(structure), list[tuple[int, tuple[int, ...]]]()
        for number, layer in enumerate(structure.layers):
            for places_ in ((0,), (1,), (0, 1)):
                blocks = [BLOCKS[place] for place in places_]
                rest = layer.without_blocks(blocks)
                alone = places_ == (0,) and not rest.is_gone
                if any(block in layer.absent for block in blocks) or (alone and not layer.query_heads):
                    continue
                loses = [key for key in self._counted(number, layer) if key not in self._counted(number, rest)]
                if all(left[key] > 1 for key in loses):
                    found.append((number, places_))
        return found

    def removable_wholes(self, structure: Structure) -> list[int]:
        """Layers whose remaining blocks may all be removed next."""
        found = self.removable_blocks(structure)
        return [n for n, ps in found if structure.layers[n].without_blocks(BLOCKS[place] for place in ps).is_gone]

    def removable_layers(self, structure: Structure) -> list[int]:
        """Layers that may be removed whole, one after the other, from the last to the first."""
        found = list[int]()
        for number in reversed(self.removable_wholes(structure)):
            layers = list(structure.layers)
            layers[number] = layers[number].without_blocks(BLOCKS)
            rest = Structure(structure.hidden, tuple(layers))
            if self.has_every_kind(rest):
                structure = rest
                found.append(number)
        return found

    def _left(self, structure: Structure) -> Counter[Any]:
        """How many blocks of every kind there are; 0 for kinds that were lost."""
        counts: Counter[Any] = Counter(
            {key: 0 for n, la in enumerate(self.source.layers) for key in self._counted(n, la)}
        )
        for number, layer in enumerate(structure.layers):
            counts.update(self._counted(number, layer))
        return counts

    def _counted(self, number: int, layer: Layer) -> tuple[Any, ...]:
        """What a layer counts as: its kind of attention block (by its tensors), an FFN."""
        return tuple(self._block_kinds[number][block] for block in BLOCKS if block not in layer.absent)

    def output_row(self, layer: int, kind: str) -> Row:
        """The output projection of a layer: ``o`` for heads, ``down`` for FFN channels."""
        return self._output_of[layer, kind]


def cut(
    model: nn.Module,
    anatomy: Anatomy,
    keep: Structure,
    within: Structure,
    release: Callable[[nn.Parameter], None] | None = None,
) -> nn.Module:
    """A new model with the structure ``keep``, its tensors sliced out of a model that has the structure ``within``.

    ``release`` frees each old tensor once it is sliced; the old model is unusable afterwards.
    """
    from dwindle.anatomy.build import build, config_for, stock_form

    rows, tensors = anatomy.rows_in(within), dict[str, Tensor]()
    for name, parameter in model.named_parameters():
        row, whole = rows[name], parameter.detach()
        if row.is_in(keep):
            part = anatomy.slice(row, whole, keep, within)
            tensors[anatomy.name_in(row, keep)] = whole.clone() if part is whole and release is None else part
        if release is not None:
            release(parameter)
    return stock_form(build(config_for(anatomy.config, keep), tensors, model), keep)


def _value(terms: _Terms, sizes: tuple[int, int, int, int]) -> int:
    """A polynomial of (hidden, query heads, key/value heads, FFN channels)."""
    total = 0
    for places_, factor in terms:
        for place in places_:
            factor *= sizes[place]
        total += factor
    return total


def places(indices: Iterable[int], present: tuple[int, ...]) -> list[int]:
    """Position of each index in a sorted tuple."""
    return [bisect_left(present, index) for index in indices]


def _runs(places: list[int]) -> Iterator[tuple[int, int]]:
    """(first, count) of each run of consecutive positions; the input is sorted."""
    start = 0
    for number in range(1, len(places) + 1):
        if number == len(places) or places[number] != places[number - 1] + 1:
            yield places[start], number - start
            start = number


def _find(kept: tuple[int, ...], present: tuple[int, ...]) -> Tensor:
    haystack, needles = torch.tensor(present, dtype=torch.long), torch.tensor(kept, dtype=torch.long)
    where = torch.searchsorted(haystack, needles)
    assert torch.equal(haystack[where.clamp(max=len(present) - 1)], needles), "indices are not in the model"
    return where
