"""Exact padding that turns a pruned model into a stock one: repeated key/value heads, zero heads, zero channels.

A query head with zero weights and zero output columns adds nothing, nor does a zero FFN channel; a key/value head may
be repeated. A zero hidden channel changes only the divisor of RMSNorm, which the gain and epsilon compensate: with m of
m' channels alive, ``gain·√(m/m')`` and ``epsilon·m/m'`` give the same result. Norms of queries and keys have the same
epsilon, so what they read is multiplied by ``√(m/m')``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from dwindle.anatomy.anatomy import Anatomy, Row
from dwindle.anatomy.build import build, build_on_meta, config_for, has_stock_config, stock_form
from dwindle.anatomy.family import CUSTOM_PREFIX
from dwindle.anatomy.structure import Block, Structure
from dwindle.core.errors import UserError
from dwindle.core.sizes import counted

NOTHING = -1
"""Index of a position that is filled with zeros."""
_FILLED_WIDTH = 32
"""FFN channels of a block of zeros: the fewest that every type of GGUF stores."""

Blocks = frozenset[tuple[int, Block]]
"""Blocks by layer."""


@dataclass(frozen=True, slots=True)
class PaddedLayer:
    """For each position of a padded layer the head or channel of the present layer, or ``NOTHING``."""

    query: tuple[int, ...]
    kv: tuple[int, ...]
    ffn: tuple[int, ...]

    @property
    def queries_per_kv(self) -> int:
        return len(self.query) // len(self.kv)


@dataclass(frozen=True, slots=True)
class Resized:
    """The padded model and what the padding costs."""

    model: Any
    parameters_before: int
    parameters_after: int
    kv_per_token_before: int
    kv_per_token_after: int
    """Values in the key/value cache per token, over all layers."""
    steps: tuple[str, ...] = ()
    """What was done, as text."""

    @property
    def changed(self) -> bool:
        return self.parameters_after != self.parameters_before

    def cost(self) -> dict[str, int]:
        return {
            "parameters_before": self.parameters_before,
            "parameters_after": self.parameters_after,
            "kv_per_token_before": self.kv_per_token_before,
            "kv_per_token_after": self.kv_per_token_after,
        }

    def describe(self) -> str:
        """One line: what was done and what it cost."""
        more = self.parameters_after / self.parameters_before - 1
        cache = self.kv_per_token_after / self.kv_per_token_before - 1
        done = " and ".join(self.steps)
        return (
            f"{done}: parameters {self.parameters_before:,} → {self.parameters_after:,} ({more:+.1%}), "
            f"KV cache per token {self.kv_per_token_before:,} → {self.kv_per_token_after:,} values ({cache:+.1%})"
        )


def resize(
    model: Any,
    *,
    uniform: bool,
    round_to: int = 1,
    min_hidden: int = 1,
    equal_queries: bool = False,
    fills: Blocks = frozenset(),
) -> Resized:
    """The same function at sizes that stock attention supports.

    ``uniform`` gives every layer the same sizes (a stock transformers model); otherwise each layer is made regular on
    its own (llama.cpp's ``deci``). ``round_to`` pads hidden and FFN widths to a multiple, ``min_hidden`` sets the least
    hidden width, ``equal_queries`` gives all layers one number of query heads. The number of
    queries per key/value head is the one that gives the smallest model: 1 only repeats key/value heads, the largest
    group of a layer only pads queries, and values between do both. ``fills`` are absent blocks to be filled with zeros
    in layers that stay unequal; ``uniform`` fills all.
    """
    anatomy = Anatomy.of(model)
    before = anatomy.source
    if uniform:
        fills = frozenset((number, block) for number, layer in enumerate(before.layers) for block in layer.absent)
    plans = _plans(before, uniform=uniform, round_to=round_to, equal_queries=equal_queries, fills=fills)
    after = Structure.full(
        hidden=math.ceil(max(len(before.hidden), min_hidden) / round_to) * round_to,
        ffn=[len(plan.ffn) for plan in plans],
        kv_of_query=[[place // plan.queries_per_kv for place in range(len(plan.query))] for plan in plans],
        absent=[tuple(b for b in la.absent if (number, b) not in fills) for number, la in enumerate(before.layers)],
    )
    if uniform:
        after = _accepted(model.config, after, anatomy.head_dim, round_to)
    hidden = _padded(len(after.hidden), 1, present=len(before.hidden))
    sizes = (anatomy.count(before).total, anatomy.count(after).total)
    kv = tuple(2 * anatomy.head_dim * sum(len(la.kv_heads) for la in s.layers) for s in (before, after))
    if after == before:
        return Resized(model, sizes[0], sizes[0], kv[0], kv[0])
    _refuse_wide_norms(anatomy, before, plans)
    _refuse_inner_norms(anatomy, len(after.hidden))
    larger = _enlarged(model, anatomy, plans, hidden, after)
    count = sum(parameter.numel() for parameter in larger.parameters())  # with blocks that the table does not have
    steps = _steps(before, plans, hidden, round_to, fills)
    return Resized(larger, sizes[0], count, kv[0], kv[1], steps)


def _accepted(config: Any, after: Structure, head_dim: int, round_to: int) -> Structure:
    """The structure, its hidden size padded to the next one that the family's stock configuration accepts."""
    width, heads = len(after.hidden), max(len(after.with_heads.query_heads), 1)
    of_heads, of_dims = math.lcm(heads, round_to), math.lcm(heads * head_dim, round_to)
    for hidden in (width, -(-width // of_heads) * of_heads, -(-width // of_dims) * of_dims):
        wider = replace(after, hidden=tuple(range(hidden)))
        if has_stock_config(config, wider):
            return wider
    raise UserError(
        f"--stock: transformers accepts no {config.model_type.removeprefix(CUSTOM_PREFIX)} of hidden size {width} with "
        f"{heads} heads of size {head_dim}: export without --stock, or prune FFN channels only"
    )


def _steps(
    before: Structure, plans: Sequence[PaddedLayer], hidden: tuple[int, ...], round_to: int, fills: Blocks
) -> tuple[str, ...]:
    """Steps as text: added heads or equalized layers are "made stock", everything else is padding."""
    pairs = list(zip(plans, before.layers, strict=True))
    numbered = [(number, *pair) for number, pair in enumerate(pairs)]
    heads = any(
        (number, "attn") not in fills and (len(p.query) != len(la.query_heads) or len(p.kv) != len(la.kv_heads))
        for number, p, la in numbered
    )
    equal = len({len(p.ffn) for p in plans}) == 1 < len({len(la.ffn) for la in before.layers if la.ffn})
    wider = len(hidden) > len(before.hidden) or any(
        (number, "mlp") not in fills and len(p.ffn) > len(la.ffn) for number, p, la in numbered
    )
    padded = f"padded to multiples of {round_to}" if round_to > 1 else "padded to a multiple of the heads"
    only_equal = equal and round_to == 1 and len(hidden) == len(before.hidden)
    filled = [f"{counted(len(fills), 'removed block')} filled with zeros"] if fills else []
    return (*filled, *(["made stock"] if heads or equal else []), *([padded] if wider and not only_equal else []))


def _enlarged(
    model: Any, anatomy: Anatomy, plans: Sequence[PaddedLayer], hidden: tuple[int, ...], after: Structure
) -> nn.Module:
    share, family = len(anatomy.source.hidden) / len(hidden), anatomy.family
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        row = anatomy[name]
        tensor = _spread(row, parameter.detach(), anatomy, plans, hidden)
        is_gain = row.is_norm and row.axes == (("hidden",),)
        is_normed = family.head_norms and row.module.endswith((".q_proj", ".k_proj"))
        if share != 1 and (is_gain or is_normed):
            offset = family.gain_offset if is_gain else 0.0
            tensor = ((tensor.double() + offset) * math.sqrt(share) - offset).to(tensor.dtype)
        tensors[name] = tensor
    config = config_for(model.config, after)
    for name, parameter in build_on_meta(config).named_parameters():
        if name not in tensors:  # of a removed block, which zeros compute
            tensors[name] = torch.zeros(parameter.shape, dtype=tensor.dtype, device=tensor.device)
    name = "norm_eps" if hasattr(config, "norm_eps") else "rms_norm_eps"
    setattr(config, name, getattr(model.config, name) * share)
    return stock_form(build(config, tensors, model), after)


def _plans(
    structure: Structure, *, uniform: bool, round_to: int, equal_queries: bool, fills: Blocks
) -> list[PaddedLayer]:
    counts = [layer.queries_per_kv for layer in structure.layers]
    widths = [len(layer.ffn) for layer in structure.layers]
    if equal_queries:
        sizes = _with_equal_queries(counts)
    elif not uniform:
        sizes = [(1, 1) if (n, "attn") in fills else _smallest([layer]) for n, layer in enumerate(counts)]
        widths = [_FILLED_WIDTH if (number, "mlp") in fills else width for number, width in enumerate(widths)]
    else:
        sizes = [_smallest([layer for layer in counts if layer])] * len(counts)
        widths = [max(widths)] * len(widths)
    return [
        _layer_plan(
            layer,
            per_kv,
            kv_heads,
            _padded(width, round_to, present=len(la.ffn)),
            adds_heads=(number, "attn") in fills,
        )
        for number, (layer, (per_kv, kv_heads), width, la) in enumerate(
            zip(counts, sizes, widths, structure.layers, strict=True)
        )
    ]


def _smallest(layers: Sequence[tuple[int, ...]]) -> tuple[int, int]:
    """(queries per key/value head, key/value heads) that fit all of these layers with the fewest weights."""
    if not any(layers):
        return 1, 0

    def size(per_kv: int) -> tuple[int, int, int]:
        kv_heads = max(sum(math.ceil(n / per_kv) for n in layer) for layer in layers)
        return kv_heads * (per_kv + 1), kv_heads, per_kv

    _, kv_heads, per_kv = min(size(per_kv) for per_kv in range(1, max(map(max, layers)) + 1))
    return per_kv, kv_heads


def _with_equal_queries(layers: Sequence[tuple[int, ...]]) -> list[tuple[int, int]]:
    """The same for layers that all have one number of query heads."""
    most = max(map(sum, layers))

    def sizes(queries: int) -> list[tuple[int, int]]:
        groups = [per_kv for per_kv in range(1, queries + 1) if queries % per_kv == 0]
        return [
            next(
                (per_kv, queries // per_kv)
                for per_kv in reversed(groups)
                if sum(math.ceil(n / per_kv) for n in layer) <= queries // per_kv
            )
            for layer in layers
        ]

    found = (sizes(queries) for queries in range(most, 2 * most + 1))
    return min(found, key=lambda plan: sum((per_kv + 1) * kv_heads for per_kv, kv_heads in plan))


def _layer_plan(
    counts: tuple[int, ...], per_kv: int, kv_heads: int, ffn: tuple[int, ...], *, adds_heads: bool = False
) -> PaddedLayer:
    query: list[int] = []
    kv: list[int] = []
    first = 0
    for head, count in enumerate(counts):
        for start in range(first, first + count, per_kv):
            members = range(start, min(start + per_kv, first + count))
            query += [*members, *[NOTHING] * (per_kv - len(members))]
            kv.append(head)
        first += count
    missing = kv_heads - len(kv) if counts or adds_heads else 0  # a convolution gets none
    return PaddedLayer((*query, *[NOTHING] * (missing * per_kv)), (*kv, *[NOTHING] * missing), ffn)


def _padded(width: int, round_to: int, *, present: int) -> tuple[int, ...]:
    total = math.ceil(width / round_to) * round_to
    return (*range(present), *[NOTHING] * (total - present))


def _spread(
    row: Row, tensor: Tensor, anatomy: Anatomy, plans: Sequence[PaddedLayer], hidden: tuple[int, ...]
) -> Tensor:
    """The tensor with every axis rearranged by the plans; ``NOTHING`` becomes zero."""
    for axis, units in enumerate(row.axes):
        where = [*_places(units, row.layer, anatomy, plans, hidden)]
        if not where:
            continue
        index = torch.tensor(where)
        empty = (index == NOTHING).nonzero().flatten()
        tensor = tensor.index_select(axis, index.clamp(min=0).to(tensor.device))
        tensor = tensor.index_fill(axis, empty.to(tensor.device), 0)
    return tensor.clone() if tensor.data_ptr() else tensor


def _places(
    units: tuple[str, ...], layer: int | None, anatomy: Anatomy, plans: Sequence[PaddedLayer], hidden: tuple[int, ...]
) -> Iterator[int]:
    offset = 0
    for unit in units:
        if unit not in ("hidden", "query", "head", "kv", "ffn"):
            return
        chosen = hidden
        if unit != "hidden":
            chosen = getattr(plans[_known(layer)], "query" if unit == "head" else unit)
        stretch = anatomy.stretch(unit)
        for place in chosen:
            yield from (
                [NOTHING] * stretch
                if place == NOTHING
                else range(offset + place * stretch, offset + (place + 1) * stretch)
            )
        offset += anatomy.width(unit, layer, anatomy.source)


def _known(layer: int | None) -> int:
    assert layer is not None
    return layer


def _refuse_inner_norms(anatomy: Anatomy, hidden: int) -> None:
    """Raise if a wider hidden size would change the epsilon of norms inside blocks that are kept whole (Qwen 3.5)."""
    inner = any(row.name.endswith("norm.weight") and row.axes == (("dim",),) for row in anatomy.rows)
    if inner and "attn" not in anatomy.family.groups and hidden > len(anatomy.source.hidden):
        raise UserError(
            f"--round: hidden size {len(anatomy.source.hidden)} cannot be padded to {hidden} in this family, whose "
            "blocks have norms of their own: prune it with --round-to instead"
        )


def _refuse_wide_norms(anatomy: Anatomy, before: Structure, plans: Sequence[PaddedLayer]) -> None:
    """Raise if added heads would enter a norm over all heads (OLMo 2)."""
    wide = any(row.is_norm and row.axes[0][0] in ("query", "kv") for row in anatomy.rows)
    same = all(
        len(p.query) == len(la.query_heads) and len(p.kv) == len(la.kv_heads)
        for p, la in zip(plans, before.layers, strict=True)
        if "attn" not in la.absent
    )
    if wide and not same:
        raise UserError(
            "--stock: this family applies one norm over all heads, so adding heads would change the model: prune it "
            "with --attention regular"
        )
