"""``torch.compile`` for decoder layers, and a bound on the number of compiled graphs."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import nn

_MOST_LAYERS = 64
_GRAPHS_PER_LAYER = 8
"""Variants of one layer: training, validation, the forward pass of a teacher, smaller last batches, and so on."""
_compiled: set[Hashable] = set()
"""Kinds of layers that may have graphs."""


def compile_blocks(model: nn.Module, *, mode: str | None = None) -> None:
    """Compile the forward pass of every decoder layer; layers of equal shapes share one graph.

    ``forward`` is compiled, not the module call, because the hooks by which FSDP2 gathers weights must stay outside the
    graph. ``fullgraph`` makes a model that cannot be compiled an error instead of a slow run; so does dynamo's limit on
    graphs, which is raised to the need of a model whose layers all differ. Earlier graphs (of a teacher, of the loss)
    are kept until there are too many.
    """
    layers: Any = model.model.layers  # type: ignore[union-attr]
    most = max(len(layers), _MOST_LAYERS)
    kinds = {_kind(layer) for layer in layers}
    if len(_compiled | kinds) > most:
        forget_graphs()
    _compiled.update(kinds)
    dynamo: Any = torch._dynamo.config
    dynamo.recompile_limit = max(dynamo.recompile_limit, _GRAPHS_PER_LAYER * most)
    dynamo.accumulated_recompile_limit = max(dynamo.accumulated_recompile_limit, 2 * _GRAPHS_PER_LAYER * most)
    for layer in layers:
        layer.forward = torch.compile(layer.forward, fullgraph=True, dynamic=False, mode=mode)


def forget_graphs() -> None:
    """Drop all compiled graphs of this process."""
    torch.compiler.reset()
    _compiled.clear()


def _kind(layer: nn.Module) -> Hashable:
    """Layers of one kind share graphs: the same modules, tensor shapes and query heads per key/value head."""
    modules = tuple((name, type(module)) for name, module in layer.named_modules())
    groups = tuple(getattr(getattr(layer, "self_attn", None), "queries_per_kv", ()))
    return modules, tuple(tuple(tensor.shape) for tensor in layer.parameters()), groups
