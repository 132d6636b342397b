"""Removal of groups: logical (zeroed in place) and physical (compacted to smaller shapes).

A group whose weights and Adam moments are zero remains zero under training, provided that

- every RMSNorm divides by the number of alive channels (``ActiveRMSNorm``);
- ``mask_gradients`` is called before clipping: under grouped-query attention a pruned query head whose key/value head
  is alive attends uniformly, so its columns of ``o`` would receive a gradient although they are zero. The same holds
  for the biases that a removed block would add.

A block or layer is removed by zeroing all of its tensors, norms included: its output is then zero, and so is the
RMSNorm of it in families that have one there; no gradient but that of a bias reaches it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dwindle.anatomy.anatomy import Anatomy, Removed, Row, cut
from dwindle.anatomy.build import build, build_on_meta, config_for, stock_form
from dwindle.anatomy.structure import BLOCKS, KIND_OF, Group, Kind, Structure
from dwindle.core.errors import UserError
from dwindle.distributed.async_copy import sent
from dwindle.distributed.shards import fill_zero, gathered, is_sharded, local, narrowed, release, shaped_like
from dwindle.pruning.norm import ActiveRMSNorm
from dwindle.training.muon import ALIVE_SIZES, MOMENTUM, alive_sizes

MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", MOMENTUM)
"""State of AdamW (also with ``amsgrad``), SGD and Muon that has the shape of its weights."""


_MANY_SPANS = 32
"""More parts of one tensor are zeroed by their positions, not each by itself."""


class Prunable:
    """A model during pruning: the structure of its tensors (``physical``) and the part that is not pruned (``alive``).

    Both structures use the source's indices; ``physical`` always contains ``alive``.
    """

    def __init__(self, model: nn.Module, anatomy: Anatomy | None = None, physical: Structure | None = None) -> None:
        self.anatomy = anatomy or Anatomy.of(model)
        self._adopt(model, physical or self.anatomy.source)

    def _adopt(self, model: nn.Module, physical: Structure) -> None:
        self.model: Any = model
        self.physical = self.alive = physical
        self._count = self.anatomy.count(physical).total
        self.pruned_flags, self.pruned = _nothing_pruned(physical)
        self.outputs = [(kind, row) for kind, row in self.anatomy.outputs if row.is_in(physical)]
        self._norms = _install_norms(model, self.anatomy, physical)
        self._norm_widths: list[float] = []
        self._named: dict[str, nn.Parameter] = {}
        self._idle_columns: dict[int, Tensor] = {}
        self._idle_rows: list[Row] = []

    @property
    def num_parameters(self) -> int:
        """Number of alive parameters."""
        return self._count

    @property
    def pruned_share(self) -> float:
        """Fraction of the physical parameters that is pruned."""
        return 1.0 - self.num_parameters / self.anatomy.count(self.physical).total

    def prune_to(self, keep: Structure, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Zero in place everything alive that is not in ``keep``: weights, optimizer moments and pending gradients."""
        assert self.alive.contains(keep)
        removed = self.anatomy.removed(self.alive, keep, self.physical)
        pieces: list[Tensor] = []
        with torch.no_grad():
            for row, parameter in self._parameters():
                views = list(self.anatomy.spans(row, removed, self.physical))
                places = _by_axis(views, parameter.device) if len(views) > _MANY_SPANS else {}
                for tensor in _with_state(parameter, optimizer) if views else ():
                    for axis, index in places.items():
                        fill_zero(tensor, axis, index)
                    narrow = (narrowed(tensor, *view) for view in ([] if places else views))
                    pieces.extend(piece for piece in narrow if piece is not None)
                state = optimizer.state.get(parameter, {}) if views and optimizer is not None else {}
                if ALIVE_SIZES in state:
                    state[ALIVE_SIZES] = alive_sizes(self.anatomy, row, keep)
            _zero(pieces)
        self._mark_pruned(keep, removed)

    def restore(self, alive: Structure) -> None:
        """Record that everything outside ``alive`` is already zero, as in a loaded checkpoint."""
        self._mark_pruned(alive, self.anatomy.removed(self.alive, alive, self.physical))

    def prune(self, group: Group, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Remove one group: one event."""
        self.prune_to(self.alive.without(group), optimizer)

    def mask_gradients(self, gradients: Mapping[str, Tensor] | None = None) -> None:
        """Clear the gradients of pruned columns that would get one; call after backward, before clipping.

        ``gradients``: these, by tensor name, instead of those of the parameters.
        """

        def of(name: str) -> Tensor | None:
            return self.parameters[name].grad if gradients is None else gradients.get(name)

        for layer, columns in self._idle_columns.items():
            if (gradient := of(self.anatomy.output_row(layer, "attn").name)) is not None:
                local(gradient).index_fill_(1, columns, 0.0)
        for row in self._idle_rows:
            if (gradient := of(row.name)) is not None:
                local(gradient).zero_()

    def compacted(self, keep: Structure | None = None, *, last: bool = False) -> nn.Module:
        """A new model with stock modules: the alive parts, or any structure between alive and physical.

        ``last``: this one is not used again, so each of its tensors is released as soon as it is sliced.

        For a sharded model it is built in host memory, tensor by tensor, and every process must call this.
        """
        keep = keep or self.alive
        assert self.physical.contains(keep) and keep.contains(self.alive)
        if not any(is_sharded(parameter) for _, parameter in self._parameters()):
            return cut(self.model, self.anatomy, keep, self.physical, release if last else None)
        whole: dict[str, Tensor] = {}
        for row, parameter in self._parameters():
            tensor = gathered(parameter)  # by all processes, also what is not kept
            if row.is_in(keep):
                whole[self.anatomy.name_in(row, keep)] = self._cut(row, tensor, keep).to("cpu", copy=True)
        return stock_form(build(config_for(self.anatomy.config, keep), whole, self.model), keep)

    def compact(
        self,
        keep: Structure | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        rebuild: Callable[..., torch.optim.Optimizer] | None = None,
    ) -> torch.optim.Optimizer | None:
        """Rebuild the model at the shapes of ``keep``; the optimizer made by ``rebuild`` gets the sliced moments.

        Each old tensor is released as soon as it is sliced, so that two models never exist at the same time. For a
        sharded model, ``rebuild`` gets the new model without storage and a function that fetches each tensor, because
        assigning smaller parameters to an FSDP2 module silently changes nothing.
        """
        keep, alive, training = keep or self.alive, self.alive, self.model.training
        assert self.physical.contains(keep) and keep.contains(alive)
        if any(is_sharded(parameter) for _, parameter in self._parameters()):
            assert optimizer is not None and rebuild is not None, "a sharded model is rebuilt with its optimizer"
            return self._compact_sharded(keep, optimizer, rebuild)
        weights: dict[str, Tensor] = {}
        states: dict[str, dict[str, Any]] = {}
        with torch.no_grad():
            for row, parameter in self._parameters():
                state = optimizer.state.pop(parameter, {}) if optimizer is not None else {}
                if row.is_in(keep):
                    name = self.anatomy.name_in(row, keep)
                    weights[name] = self._cut(row, parameter.detach(), keep)
                    states[name] = {
                        key: self._cut(row, state.pop(key), keep) if key in MOMENTS else state[key] for key in [*state]
                    }
                release(parameter)
        fresh = build(config_for(self.anatomy.config, keep), weights, self.model)
        fresh.train(training)
        self._adopt(fresh, keep)
        self.restore(alive)
        self._check_shapes()
        if optimizer is None:
            return None
        assert rebuild is not None, "compacting a model with its optimizer needs rebuild"
        moved = rebuild(fresh)
        for name, parameter in fresh.named_parameters():
            if states[name]:
                moved.state[parameter] = states[name]
        return moved

    def _compact_sharded(
        self, keep: Structure, optimizer: torch.optim.Optimizer, rebuild: Callable[..., torch.optim.Optimizer]
    ) -> torch.optim.Optimizer:
        """Gather, slice and shard again, one tensor at a time: weights layer by layer, then the moments."""
        before, alive, training = self.physical, self.alive, self.model.training
        old = {row.name: parameter for row, parameter in self._parameters()}
        states = {name: optimizer.state.pop(parameter, {}) for name, parameter in old.items()}
        rows = self.anatomy.rows_in(keep)  # by the names in the new model

        def sliced(row: Row, tensor: Tensor) -> Tensor:
            return self.anatomy.slice(row, gathered(tensor), keep, before)

        def fetch(name: str) -> Tensor:
            parameter = old[rows[name].name]
            whole = sliced(rows[name], parameter)
            release(parameter)
            return whole

        fresh = build_on_meta(config_for(self.anatomy.config, keep))
        fresh.generation_config, fresh.config.dtype = self.model.generation_config, self.model.config.dtype
        self._adopt(fresh, keep)
        moved = rebuild(fresh, fetch)
        self._named = {}
        fresh.train(training)
        self.restore(alive)
        self._check_shapes()
        for name, parameter in fresh.named_parameters():
            state = states.pop(rows[name].name)
            if state:
                moved.state[parameter] = {
                    key: shaped_like(parameter, sliced(rows[name], state.pop(key))) if key in MOMENTS else state[key]
                    for key in [*state]
                }
        gc.collect()  # the old modules refer to themselves through their hooks
        return moved

    def _check_shapes(self) -> None:
        """Assert the new shapes: a rebuild that silently changed nothing must fail."""
        for row, parameter in self._parameters():
            wanted = self.anatomy.shape(row, self.physical)
            assert tuple(parameter.shape) == wanted, f"{row.name}: {tuple(parameter.shape)}, not {wanted}"

    def _cut(self, row: Row, tensor: Tensor, keep: Structure) -> Tensor:
        return self.anatomy.slice(row, tensor, keep, self.physical)

    def _parameters(self) -> Iterator[tuple[Row, nn.Parameter]]:
        for name, parameter in self.parameters.items():
            yield self.anatomy[name], parameter

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """The current parameters by their names in the source, cached: walking all modules at every event is slow."""
        if not self._named:
            rows = self.anatomy.rows_in(self.physical)
            self._named = {rows[name].name: parameter for name, parameter in self.model.named_parameters()}
        return self._named

    def _mark_pruned(self, keep: Structure, removed: Removed) -> None:
        """Update the flags, the count, the norms and the gradient masks: from now on ``keep`` is alive."""
        for (unit, layer), where in removed.items():
            if unit in KIND_OF:
                self.pruned[KIND_OF[unit]][layer or 0][where] = True
        self.alive = keep
        self._count = self.anatomy.count(keep).total
        self._refresh_norms()
        self._refresh_idle_columns({layer for unit, layer in removed if unit == "query" and layer is not None})
        if any(unit in BLOCKS for unit, _ in removed):
            self._refresh_idle_rows()

    def _refresh_norms(self) -> None:
        """Update all norm widths at once; most events change none."""
        widths = [float(self.anatomy.shape(row, self.alive)[0]) or 1.0 for row, _ in self._norms]  # 0 in removed blocks
        if widths == self._norm_widths:
            return
        self._norm_widths = widths
        buffers: list[Tensor] = []
        for (_, norm), width in zip(self._norms, widths, strict=True):
            if norm.active_width.is_meta:  # the model was built without storage
                norm.active_width = torch.tensor(width, device=norm.weight.device)
            buffers.append(norm.active_width)
        torch._foreach_zero_(buffers)
        torch._foreach_add_(buffers, widths)

    def set_stream_width(self, width: Tensor) -> None:
        """Let the norms of the residual stream divide by this, while masks that are being learned decide its width.

        The next ``prune_to`` or ``refresh`` sets it to what is alive again.
        """
        self._norm_widths = []
        for row, norm in self._norms:
            if row.axes == (("hidden",),):
                norm.active_width.copy_(width)

    def refresh(self) -> None:
        """Update what depends on the model's tensors after they were replaced (loaded, sharded)."""
        self._named = {}
        self._norm_widths = []
        self._refresh_norms()
        self._refresh_idle_columns(range(self.anatomy.num_layers))
        self._refresh_idle_rows()

    def _refresh_idle_rows(self) -> None:
        """Update the biases of removed blocks, which would add to the residual stream."""
        rows = [self.anatomy[name] for name in self.parameters]
        self._idle_rows = [row for row in rows if row.axes == (("hidden",),) and not row.is_in(self.alive)]

    def _refresh_idle_columns(self, layers: Iterable[int]) -> None:
        """Update the columns that ``mask_gradients`` clears, on the device because every step uses them."""
        found: dict[int, Tensor] = {}
        stretch = torch.arange(self.anatomy.head_dim)
        for index in layers:
            here, alive = self.physical.layers[index], self.alive.layers[index]
            alive_queries, alive_kv = set(alive.query_heads), set(alive.kv_heads)
            pairs = enumerate(zip(here.query_heads, here.kv_of_query, strict=True))
            idle = [place for place, (query, kv) in pairs if query not in alive_queries and kv in alive_kv]
            self._idle_columns.pop(index, None)
            if idle:
                found[index] = (torch.tensor(idle)[:, None] * self.anatomy.head_dim + stretch).flatten()
        if found:
            device = next(iter(self.parameters.values())).device
            self._idle_columns |= zip(found, sent(list(found.values()), device), strict=True)


def _nothing_pruned(structure: Structure) -> tuple[Tensor, dict[Kind, list[Tensor]]]:
    """Flags for every physical head, FFN channel and hidden index: whether it is pruned. All are False here.

    The first result is one tensor (heads of all layers, FFN channels of all layers, hidden), the second its views.
    """
    heads, ffn = [len(la.query_heads) for la in structure.layers], [len(la.ffn) for la in structure.layers]
    lengths = [*heads, *ffn, len(structure.hidden)]
    flags = torch.zeros(sum(lengths), dtype=torch.bool)
    parts = list(torch.split(flags, lengths))
    return flags, {"attn": parts[: len(heads)], "ffn": parts[len(heads) : -1], "stem": parts[-1:]}


def _by_axis(spans: list[tuple[int, int, int]], device: torch.device) -> dict[int, Tensor]:
    """The positions of (axis, start, length) spans, by axis: thousands of spans are zeroed in one operation each."""
    found: dict[int, Tensor] = {}
    for axis in {axis for axis, _, _ in spans}:
        starts, lengths = (torch.tensor([span[part] for span in spans if span[0] == axis]) for part in (1, 2))
        before = lengths.cumsum(0) - lengths
        index = (starts - before).repeat_interleave(lengths) + torch.arange(int(lengths.sum()))
        found[axis] = index.to(device)
    return found


def _zero(pieces: list[Tensor]) -> None:
    """Zero in place: contiguous rows share one kernel; strided columns need one each and would slow the rows down.

    So would rows of another dtype.
    """
    batches: dict[tuple[bool, torch.dtype], list[Tensor]] = {}
    for piece in sorted(pieces, key=Tensor.is_contiguous, reverse=True):
        batches.setdefault((piece.is_contiguous(), piece.dtype), []).append(piece)
    for batch in batches.values():
        torch._foreach_zero_(batch)


def _with_state(parameter: nn.Parameter, optimizer: torch.optim.Optimizer | None) -> Iterator[Tensor]:
    yield parameter
    if parameter.grad is not None:
        yield parameter.grad
    state = optimizer.state.get(parameter, {}) if optimizer is not None else {}
    yield from (state[key] for key in MOMENTS if key in state)


def _install_norms(model: nn.Module, anatomy: Anatomy, physical: Structure) -> list[tuple[Row, ActiveRMSNorm]]:
    installed = []
    for full_name, row in anatomy.rows_in(physical).items():
        if not row.is_norm or (row.axes == (("hidden",),) and "stem" not in anatomy.family.groups):
            continue
        module = full_name.rpartition(".")[0]
        parent = model.get_submodule(module.rpartition(".")[0])
        name = module.rpartition(".")[2]
        norm: Any = getattr(parent, name)
        if isinstance(norm, nn.LayerNorm):
            raise UserError(f"{row.module} is a LayerNorm, which subtracts the mean: leave stem out of its groups")
        if not isinstance(norm, ActiveRMSNorm):
            family = anatomy.family
            norm = ActiveRMSNorm(norm, gain_in_float32=family.gain_in_float32, gain_offset=family.gain_offset)
            setattr(parent, name, norm)
        installed.append((row, norm))
    return installed
