"""Removing groups: logically (zero in place) and physically (compact to new shapes).

Zeroing a group's weights and its Adam moments is a fixed point of training, with two things to see to:

- every RMSNorm divides by the living width (``ActiveRMSNorm``);
- under grouped-query attention a dead query head whose key/value head still lives attends uniformly, so its columns
  of ``o`` would receive a gradient although they are zero. ``mask_gradients`` clears those before clipping.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from dwindle.anatomy import Anatomy, Group, Kind, Row, Structure
from dwindle.anatomy.anatomy import lost, places
from dwindle.anatomy.build import build, build_on_meta, config_for, cut
from dwindle.pruning.norm import ActiveRMSNorm
from dwindle.training.shards import gathered, is_sharded, narrowed, release, shaped_like

MOMENTS = ("exp_avg", "exp_avg_sq")


class Prunable:
    """A model under pruning: what it physically holds, and what of that is alive.

    Both structures are in the source's numbering; ``alive`` is always contained in ``physical``.
    """

    def __init__(self, model: nn.Module, anatomy: Anatomy | None = None, physical: Structure | None = None) -> None:
        self.anatomy = anatomy or Anatomy.of(model)
        self._adopt(model, physical or self.anatomy.source)

    def _adopt(self, model: nn.Module, physical: Structure) -> None:
        self.model: Any = model
        self.physical = self.alive = physical
        self.dead = _nothing_dead(physical)
        self._norms = _install_norms(model, self.anatomy)
        self._named: dict[str, nn.Parameter] = {}
        self._idle_columns: list[tuple[nn.Parameter, int, int]] = []

    @property
    def num_parameters(self) -> int:
        """Living parameters."""
        return self.anatomy.count(self.alive).total

    @property
    def dead_share(self) -> float:
        """The part of the physical parameters that does nothing."""
        return 1.0 - self.num_parameters / self.anatomy.count(self.physical).total

    def kill(self, keep: Structure, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Zero everything that is alive now and not in ``keep``: weights, moments and pending gradients."""
        assert self.alive.contains(keep)
        doomed: list[Tensor] = []
        for row, parameter in self._parameters():
            views = list(self.anatomy.spans(row, self.alive, keep, self.physical))
            for tensor in _with_state(parameter, optimizer) if views else ():
                pieces = (narrowed(tensor, axis, start, length) for axis, start, length in views)
                doomed.extend(piece for piece in pieces if piece is not None)
        if doomed:
            with torch.no_grad():
                torch._foreach_zero_(doomed)
        self._bury(keep)

    def restore(self, alive: Structure) -> None:
        """Take note that everything outside ``alive`` is already zero (a checkpoint)."""
        self._bury(alive)

    def prune(self, group: Group, optimizer: torch.optim.Optimizer | None = None) -> None:
        """One event."""
        self.kill(self.alive.without(group), optimizer)

    def mask_gradients(self) -> None:
        """Clear gradients of columns that must stay zero; call after backward, before clipping."""
        for parameter, start, length in self._idle_columns:
            held = None if parameter.grad is None else narrowed(parameter.grad, 1, start, length)
            if held is not None:
                held.zero_()

    @property
    def masks_gradients(self) -> bool:
        """Whether ``mask_gradients`` has anything to clear."""
        return bool(self._idle_columns)

    def compacted(self, keep: Structure | None = None) -> nn.Module:
        """A new plain model (stock modules) of the living parts, or of any structure between alive and physical.

        Of a model that is spread over processes it is made in host memory, tensor by tensor, and all must take part.
        """
        keep = keep or self.alive
        assert self.physical.contains(keep) and keep.contains(self.alive)
        if not any(is_sharded(parameter) for _, parameter in self._parameters()):
            return cut(self.model, self.anatomy, keep, self.physical)
        whole = {row.name: self._cut(row, gathered(p), keep).to("cpu", copy=True) for row, p in self._parameters()}
        smaller = build(config_for(self.model.config, keep), whole)
        smaller.generation_config = self.model.generation_config
        return smaller

    def compact(
        self,
        keep: Structure | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        rebuild: Callable[..., torch.optim.Optimizer] | None = None,
    ) -> torch.optim.Optimizer | None:
        """Rebuild the model at the shapes of ``keep``; the optimizer made by ``rebuild`` gets the sliced moments.

        Each old tensor is released as soon as it is cut, so that two models never exist at the same time. A model
        that is spread over processes is given to ``rebuild`` without storage, with a function that fetches each
        tensor: assigning smaller parameters to an FSDP2 module would silently change nothing.
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
                weights[row.name] = self._cut(row, parameter.detach(), keep)
                state = optimizer.state.pop(parameter, {}) if optimizer is not None else {}
                states[row.name] = {
                    key: self._cut(row, state.pop(key), keep) if key in MOMENTS else state[key] for key in [*state]
                }
                release(parameter)
        fresh = build(config_for(self.model.config, keep), weights)
        fresh.generation_config = self.model.generation_config
        fresh.train(training)
        self._adopt(fresh, keep)
        self._bury(alive)
        self._check_shapes()
        if optimizer is None:
            return None
        assert rebuild is not None, "an optimizer can only move with the model if it can be rebuilt"
        moved = rebuild(fresh)
        for name, parameter in fresh.named_parameters():
            if states[name]:
                moved.state[parameter] = states[name]
        return moved

    def _compact_sharded(
        self, keep: Structure, optimizer: torch.optim.Optimizer, rebuild: Callable[..., torch.optim.Optimizer]
    ) -> torch.optim.Optimizer:
        """Gather, slice and spread again, one tensor at a time: weights layer by layer, then both moments."""
        before, alive, training = self.physical, self.alive, self.model.training
        old = {row.name: parameter for row, parameter in self._parameters()}
        states = {name: optimizer.state.pop(parameter, {}) for name, parameter in old.items()}

        def sliced(name: str, tensor: Tensor) -> Tensor:
            return self.anatomy.slice(self.anatomy[name], gathered(tensor), keep, before)

        def fetch(name: str) -> Tensor:
            whole = sliced(name, old[name])
            release(old[name])
            return whole

        fresh = build_on_meta(config_for(self.model.config, keep))
        fresh.generation_config, fresh.config.dtype = self.model.generation_config, self.model.config.dtype
        self._adopt(fresh, keep)
        moved = rebuild(fresh, fetch)
        self._named = {}
        fresh.train(training)
        self._bury(alive)
        self._check_shapes()
        for name, parameter in fresh.named_parameters():
            state = states.pop(name)
            if state:
                moved.state[parameter] = {
                    key: shaped_like(parameter, sliced(name, state.pop(key))) if key in MOMENTS else state[key]
                    for key in [*state]
                }
        gc.collect()  # the old modules refer to themselves through their hooks
        return moved

    def _check_shapes(self) -> None:
        """The live parameters have the new shapes: a rebuild that changed nothing must not go unnoticed."""
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
        """The live parameters by name, found once for each model: an event must not cost a walk over all modules."""
        if not self._named:
            self._named = dict(self.model.named_parameters())
        return self._named

    def _bury(self, keep: Structure) -> None:
        """Book-keeping of an event: ``keep`` is what is alive from now on."""
        self._mark_dead(keep)
        self.alive = keep
        self._refresh_norms()
        self._refresh_idle_columns()

    def _mark_dead(self, keep: Structure) -> None:
        def mark(flags: Tensor, unit: str, layer: int | None) -> None:
            gone = lost(self.alive.unit(unit, layer), keep.unit(unit, layer))
            flags[places(gone, self.physical.unit(unit, layer))] = True

        mark(self.dead["stem"][0], "hidden", None)
        for layer in range(self.anatomy.num_layers):
            mark(self.dead["attn"][layer], "query", layer)
            mark(self.dead["ffn"][layer], "ffn", layer)

    def rounded(self, multiple: int) -> Structure:
        """The living parts, widths filled up to multiples with dead channels that are still physically there."""
        alive, here = self.alive, self.physical

        def fill(living: tuple[int, ...], present: tuple[int, ...]) -> tuple[int, ...]:
            wanted = min(-(-len(living) // multiple) * multiple, len(present))
            spare = lost(present, living)[: wanted - len(living)]
            return tuple(sorted((*living, *spare)))

        layers = tuple(replace(a, ffn=fill(a.ffn, h.ffn)) for a, h in zip(alive.layers, here.layers, strict=True))
        return Structure(fill(alive.hidden, here.hidden), layers)

    def _refresh_norms(self) -> None:
        for row, norm in self._norms:
            width = float(self.anatomy.shape(row, self.alive)[0])
            if norm.active_width.is_meta:  # the model was built without storage
                norm.active_width = torch.tensor(width, device=norm.weight.device)
            else:
                norm.active_width.fill_(width)

    def refresh(self) -> None:
        """Take note that the model's tensors were replaced (filled, sharded) since this was made."""
        self._named = {}
        self._refresh_norms()
        self._refresh_idle_columns()

    def _refresh_idle_columns(self) -> None:
        parameters = self.parameters
        size = self.anatomy.head_dim
        self._idle_columns = []
        for index, (here, alive) in enumerate(zip(self.physical.layers, self.alive.layers, strict=True)):
            living, living_kv = set(alive.query_heads), set(alive.kv_heads)
            weight = parameters[self.anatomy.output_row(index, "attn").name]
            for place, (query, kv) in enumerate(zip(here.query_heads, here.kv_of_query, strict=True)):
                if query not in living and kv in living_kv:
                    self._idle_columns.append((weight, place * size, size))


def _nothing_dead(structure: Structure) -> dict[Kind, list[Tensor]]:
    """For every head, channel and hidden index that is physically there: whether it is dead."""
    return {
        "attn": [torch.zeros(len(la.query_heads), dtype=torch.bool) for la in structure.layers],
        "ffn": [torch.zeros(len(la.ffn), dtype=torch.bool) for la in structure.layers],
        "stem": [torch.zeros(len(structure.hidden), dtype=torch.bool)],
    }


def _with_state(parameter: nn.Parameter, optimizer: torch.optim.Optimizer | None) -> Iterator[Tensor]:
    yield parameter
    if parameter.grad is not None:
        yield parameter.grad
    state = optimizer.state.get(parameter, {}) if optimizer is not None else {}
    yield from (state[key] for key in MOMENTS if key in state)


def _install_norms(model: nn.Module, anatomy: Anatomy) -> list[tuple[Row, ActiveRMSNorm]]:
    installed = []
    for row in anatomy.rows:
        if not row.is_norm:
            continue
        parent = model.get_submodule(row.module.rpartition(".")[0])
        name = row.module.rpartition(".")[2]
        norm: Any = getattr(parent, name)
        if not isinstance(norm, ActiveRMSNorm):
            norm = ActiveRMSNorm(norm, gain_in_float32=anatomy.family.gain_in_float32)
            setattr(parent, name, norm)
        installed.append((row, norm))
    return installed
