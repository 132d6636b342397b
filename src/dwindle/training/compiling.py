"""``torch.compile`` for decoder layers, with at most three graphs whatever the sizes of the layers.

A graph belongs to a *kind* of layer: the same modules and the same tensor shapes. Where layers differ in FFN channels
or heads, the axes that differ have symbolic sizes, so that such layers are of one kind; the other axes stay numbers,
which makes faster kernels. Layers whose code differs are separate kinds: a layer without attention or FFN, a single
query or key/value head (to a compiler the size 1 is special), and without an attention mask several query heads for
every key/value head, beside one or irregular numbers of them.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

MAX_GRAPHS = 3
"""Graphs of one model. Layers of rarer kinds are not compiled, nor is validation of a model of several kinds or of
symbolic heads, whose graphs take the compiler longest. A frozen teacher of one kind is compiled, symbolic or not."""
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
    gathers = _gathers(layers, axes)
    kinds = {
        masked: [_kind(layer, axes, masked, own[masked]) for layer, own in zip(layers, gathers, strict=True)]
        for masked in (False, True)
    }
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
            number_of = {masked: len(common) for masked, common in most.items()}
            _Block(layer, axes, gathers[number], chosen, number_of, mode)


def forget_graphs() -> None:
    """Drop all compiled graphs of this process."""
    torch.compiler.reset()
    _compiled.clear()


def unequal_axes(layers: Sequence[nn.Module]) -> Axes:
    """The axes in which layers differ, except those of heads in a fused projection, which is split at fixed sizes."""
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


def _kind(layer: nn.Module, axes: Axes, masked: bool, gathers: bool) -> Hashable:
    """Layers of one kind share graphs."""
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
    return modules, tuple(shapes), (gathers, 0 if gathers else per_kv if masked else per_kv > 1)


def _symbolic_heads(axes: Axes) -> bool:
    return any(name.startswith("self_attn.") for name in axes)


class _Block:
    """The forward pass of one decoder layer: compiled if its kind is common, else eager."""

    def __init__(
        self,
        layer: nn.Module,
        axes: Axes,
        gathers: Mapping[bool, bool],
        chosen: Mapping[bool, bool],
        kinds: Mapping[bool, int],
        mode: str | None,
    ) -> None:
        """``gathers``, ``chosen`` (is compiled) and ``kinds`` (their number) are keyed by whether there is a mask."""
        self._layer, self._axes, self._gathers, self._chosen, self._kinds = layer, axes, gathers, chosen, kinds
        self._plain: Forward = layer.forward
        self._compiled: Forward = torch.compile(layer.forward, fullgraph=True, dynamic=False, mode=mode)
        self._is_marked = not axes
        self._only_trains = False
        layer.forward = self

    def __call__(self, hidden_BTD: Tensor, *args: Any, **kwargs: Any) -> Any:
        masked = (args[0] if args else kwargs.get("attention_mask")) is not None
        training, kinds = torch.is_grad_enabled(), self._kinds[masked]
        if not self._is_marked:
            self._mark_weights()
        if not self._chosen[masked] or not (training or (2 * kinds <= MAX_GRAPHS and not self._only_trains)):
            return self._plain(hidden_BTD, *args, **kwargs)
        if kinds > 1 or not training:  # batches of all sizes share a graph; a training step has at most two
            _mark_batch(hidden_BTD, *args, *kwargs.values())
        if not _symbolic_heads(self._axes):
            return self._compiled(hidden_BTD, *args, **kwargs)
        with _shared_heads(self._layer, masked, self._gathers[masked], hidden_BTD.device):
            return self._compiled(hidden_BTD, *args, **kwargs)

    def _mark_weights(self) -> None:
        """Called at the first forward pass: before it, FSDP2 replaces the parameters and a teacher is frozen."""
        self._only_trains = _symbolic_heads(self._axes) and any(p.requires_grad for p in self._layer.parameters())
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


def _gathers(layers: Sequence[nn.Module], axes: Axes) -> list[dict[bool, bool]]:
    """Whether a layer repeats keys and values by a 0/1 matrix, which is data: for every layer, without and with a mask.

    Layers with irregular groups do; without a mask also those with one query head per key/value head, if there are
    irregular ones. With a mask transformers repeats them in every layer, a number of times, which is code: all layers
    gather instead, if the numbers differ.
    """
    per_kv = [_per_kv(layer) for layer in layers]
    if not _symbolic_heads(axes):
        return [{False: False, True: False} for _ in layers]
    differ = len(set(per_kv) - {None}) > 1
    return [{False: n == 0 or (n == 1 and 0 in per_kv), True: n == 0 or (n is not None and differ)} for n in per_kv]


def _per_kv(layer: nn.Module) -> int | None:
    """Query heads of each key/value head, 0 if they are irregular; None for attention that is not ours."""
    attention: Any = getattr(layer, "self_attn", None)
    config = getattr(attention, "config", None)
    if config is None or "_is_irregular" not in vars(config):
        return None
    return 0 if hasattr(attention, "queries_per_kv") else int(attention.num_key_value_groups)


@contextmanager
def _shared_heads(layer: Any, masked: bool, gathers: bool, device: torch.device) -> Iterator[None]:
    """Give the graph shapes that suit layers with other numbers of heads.

    Without a mask, sdpa only asks whether there are several query heads per key/value head, and reads their number from
    the shapes.
    """
    attention: Any = getattr(layer, "self_attn", None)
    repeats = getattr(attention, "num_key_value_groups", 0) > 1
    if gathers:
        matrix = _gather_matrix(attention, device)
        with _replaced(attention, queries_per_kv=matrix), _replaced(attention.config, _is_irregular=True):
            yield
    elif repeats and not masked and attention.config._attn_implementation == "sdpa":
        with _replaced(attention, num_key_value_groups=2):
            yield
    else:
        yield


@contextmanager
def _replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Replace attributes within the context."""
    own = vars(owner)
    before = {name: own[name] for name in values if name in own}
    own.update(values)
    try:
        yield
    finally:
        own.update(before)
        for name in values.keys() - before.keys():
            del own[name]


def _gather_matrix(attention: Any, device: torch.device) -> Tensor:
    """[query heads, key/value heads], one where the query head reads the key/value head; computed once."""
    own = vars(attention)
    if "_gather_matrix" not in own:
        groups = own.get("queries_per_kv") or [attention.num_key_value_groups] * attention.config.num_key_value_heads
        if "plain" not in own:  # what attention functions are given after the gather, as in modeling_dwindle
            own["plain"] = plain = copy.copy(attention)
            plain.num_key_value_groups, plain.config = 1, vars(attention.config)["_whole"]
        matrix = torch.eye(len(groups), device=device).repeat_interleave(torch.tensor(groups, device=device), dim=0)
        torch._dynamo.maybe_mark_dynamic(matrix, 0)
        torch._dynamo.maybe_mark_dynamic(matrix, 1)
        own["_gather_matrix"] = matrix
    found: Tensor = own["_gather_matrix"]
    return found
