"""``torch.compile`` for decoder layers, with at most three graphs whatever the sizes of the layers.

A graph belongs to a *kind* of layer: the same modules and the same tensor shapes. Where layers differ in FFN channels
or heads, the axes that differ have symbolic sizes, so that such layers are of one kind; the other axes stay numbers,
which makes faster kernels. What remains different code is a kind of its own: a layer without attention or FFN, one,
several or irregular numbers of query heads per key/value head, and a single key/value head (to a compiler the size 1 is
special).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

MAX_GRAPHS = 3
"""Graphs of one model. Layers of rarer kinds are not compiled, nor is validation of a model of several kinds."""
_MOST_KINDS = 64
_GRAPHS_PER_KIND = 8
"""Variants of one kind: training, validation, a teacher's frozen weights, another size of micro-batches, and so on."""
_compiled: set[Hashable] = set()
"""Kinds of layers that may have graphs."""

Axes = Mapping[str, frozenset[int]]
"""Parameter name within a layer → axes whose sizes are symbolic."""
Forward = Callable[..., Any]


def compile_blocks(model: nn.Module, *, mode: str | None = None) -> None:
    """Compile the forward pass of every decoder layer; layers of one kind share one graph.

    ``forward`` is compiled, not the module call, because the hooks by which FSDP2 gathers weights must stay outside the
    graph. ``fullgraph`` makes a model that cannot be compiled an error instead of a slow run; so does dynamo's limit on
    graphs, which is raised to the need of a run that is rebuilt many times. Earlier graphs (of a teacher, of the loss)
    are kept until there are too many. Graphs of symbolic sizes are not kept: they are optimised for the sizes that came
    first, and a resumed run has to compute with the same ones.
    """
    layers: Sequence[nn.Module] = list(model.model.layers)  # type: ignore[union-attr, arg-type]
    axes = unequal_axes(layers)
    kinds = {masked: [_kind(layer, axes, masked=masked) for layer in layers] for masked in (False, True)}
    if len(_compiled.union(kinds[False])) > _MOST_KINDS or (axes and _compiled.intersection(kinds[False])):
        forget_graphs()
    _compiled.update(kinds[False])
    dynamo: Any = torch._dynamo.config
    dynamo.recompile_limit = max(dynamo.recompile_limit, _GRAPHS_PER_KIND * _MOST_KINDS)
    dynamo.accumulated_recompile_limit = max(dynamo.accumulated_recompile_limit, 2 * _GRAPHS_PER_KIND * _MOST_KINDS)
    if axes:  # weights are inputs of a graph like any other
        dynamo.force_parameter_static_shapes = dynamo.force_nn_module_property_static_shapes = False
    most = {masked: dict(Counter(found).most_common(MAX_GRAPHS)) for masked, found in kinds.items()}
    for number, layer in enumerate(layers):
        chosen = {masked: kinds[masked][number] in common for masked, common in most.items()}
        if any(chosen.values()):
            _Block(layer, axes, chosen, {masked: len(common) for masked, common in most.items()}, mode)


def forget_graphs() -> None:
    """Drop all compiled graphs of this process."""
    torch.compiler.reset()
    _compiled.clear()


def unequal_axes(layers: Sequence[nn.Module]) -> Axes:
    """The axes in which layers differ; not those of heads in a fused projection, which is split at numbers."""
    shapes: dict[str, set[torch.Size]] = {}
    for layer in layers:
        for name, parameter in layer.named_parameters():
            if not name.startswith("self_attn.") or hasattr(layer.self_attn, "k_proj"):
                shapes.setdefault(name, set()).add(parameter.shape)
    found = {
        name: frozenset(axis for axis, sizes in enumerate(zip(*own, strict=True)) if len(set(sizes)) > 1)
        for name, own in shapes.items()
    }
    return {name: own for name, own in found.items() if own}


def _kind(layer: nn.Module, axes: Axes, *, masked: bool) -> Hashable:
    """Layers of one kind share graphs. With an attention mask they also need equal groups of query heads."""
    modules = tuple((name, type(module)) for name, module in layer.named_modules())
    attention: Any = getattr(layer, "self_attn", None)
    shapes = []
    for name, parameter in layer.named_parameters():
        symbolic = axes.get(name, frozenset())
        ones = [1, getattr(attention, "head_dim", 1)] if name.startswith("self_attn.") else [1]
        sizes = enumerate(parameter.shape)
        shapes.append(tuple(None if axis in symbolic and size not in ones else size for axis, size in sizes))
    groups: Any = getattr(attention, "queries_per_kv", None)
    if not _symbolic_heads(axes):
        return modules, tuple(shapes), tuple(groups or ()), getattr(attention, "num_key_value_groups", None)
    per_kv = getattr(attention, "num_key_value_groups", 0)
    return modules, tuple(shapes), bool(groups), per_kv if masked else per_kv > 1


def _symbolic_heads(axes: Axes) -> bool:
    return any(name.startswith("self_attn.") for name in axes)


class _Block:
    """The forward pass of one decoder layer: compiled where it is of a common kind, else as it was."""

    def __init__(
        self, layer: nn.Module, axes: Axes, chosen: Mapping[bool, bool], kinds: Mapping[bool, int], mode: str | None
    ) -> None:
        self._layer, self._axes, self._chosen, self._kinds = layer, axes, chosen, kinds
        self._plain: Forward = layer.forward
        self._compiled: Forward = torch.compile(layer.forward, fullgraph=True, dynamic=False, mode=mode)
        self._is_marked = not axes
        layer.forward = self

    def __call__(self, hidden_BTD: Tensor, *args: Any, **kwargs: Any) -> Any:
        masked = (args[0] if args else kwargs.get("attention_mask")) is not None
        training, kinds = torch.is_grad_enabled(), self._kinds[masked]
        if not self._chosen[masked] or not (training or 2 * kinds <= MAX_GRAPHS):
            return self._plain(hidden_BTD, *args, **kwargs)
        if not self._is_marked:
            self._mark_weights()
        if kinds > 1 or not training:  # batches of all sizes share a graph; a training step has at most two
            _mark_batch(hidden_BTD, *args, *kwargs.values())
        if not _symbolic_heads(self._axes):
            return self._compiled(hidden_BTD, *args, **kwargs)
        with _shared_heads(self._layer, masked, hidden_BTD.device):
            return self._compiled(hidden_BTD, *args, **kwargs)

    def _mark_weights(self) -> None:
        """At the first call, because FSDP2 replaces the parameters."""
        for name, parameter in self._layer.named_parameters():
            for axis in self._axes.get(name, ()):
                torch._dynamo.maybe_mark_dynamic(parameter, axis)
        self._is_marked = True


def _mark_batch(hidden_BTD: Tensor, *others: Any) -> None:
    """Give the number of sequences a symbolic size, in masks and positions as well."""
    tensors = [hidden_BTD, *_tensors(others)]
    for tensor in tensors:
        if tensor.ndim > 1 and tensor.shape[0] == len(hidden_BTD) > 1:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple):
            yield from _tensors(value)


@contextmanager
def _shared_heads(layer: Any, masked: bool, device: torch.device) -> Iterator[None]:
    """Show the graph what layers with other numbers of heads have in common.

    Without a mask, sdpa only asks whether there are several query heads per key/value head, and reads their number from
    the shapes. Irregular groups become a 0/1 matrix, which is data.
    """
    attention: Any = getattr(layer, "self_attn", None)
    groups, per_kv = getattr(attention, "queries_per_kv", None), getattr(attention, "num_key_value_groups", 0)
    if groups:
        attention.queries_per_kv = _gather_matrix(attention, groups, device)
    elif per_kv > 1 and not masked and attention.config._attn_implementation == "sdpa":
        attention.num_key_value_groups = 2
    try:
        yield
    finally:
        if groups:
            attention.queries_per_kv = groups
        elif per_kv > 1:
            attention.num_key_value_groups = per_kv


def _gather_matrix(attention: Any, groups: Sequence[int], device: torch.device) -> Tensor:
    """[query heads, key/value heads], one where the query head reads the key/value head; made once."""
    found: Tensor | None = vars(attention).get("_gather_matrix")
    if found is None:
        found = torch.eye(len(groups), device=device).repeat_interleave(torch.tensor(groups, device=device), dim=0)
        torch._dynamo.maybe_mark_dynamic(found, 0)
        torch._dynamo.maybe_mark_dynamic(found, 1)
        vars(attention)["_gather_matrix"] = found
    return found
