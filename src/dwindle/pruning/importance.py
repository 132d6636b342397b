"""How much each decoder layer changes the residual stream: the layer importance of Adapt-Pruner.

Shapes: B sequences, T tokens, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dwindle.distributed.shards import is_idle, local, several_processes
from dwindle.pruning.config import Distance

_CHANGE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    # a layer that only rescales the residual stream (the next norm undoes that) changes nothing
    "cosine": lambda before_ND, after_ND: -torch.cosine_similarity(before_ND, after_ND, dim=-1),
    "euclidean": lambda before_ND, after_ND: (after_ND - before_ND).square().sum(dim=-1).sqrt(),
    "manhattan": lambda before_ND, after_ND: (after_ND - before_ND).abs().sum(dim=-1),
}


def normalised(importance: Sequence[float]) -> list[float]:
    """Mean 0 and largest absolute value 1; all zero if the layers do not differ."""
    mean = sum(importance) / len(importance)
    centred = [value - mean for value in importance]
    most = max(map(abs, centred))
    return [value / most if most > 0 else 0.0 for value in centred]


class LayerWatch:
    """Compares the input and the output of every decoder layer while open, over all tokens of all processes.

    The hooks are on the layers as modules, outside what is compiled (``compile_blocks`` compiles their forward
    passes), so opening and closing costs no new graph.
    """

    def __init__(self, distance: Distance) -> None:
        self._change = _CHANGE[distance]
        self._in_training = False
        self._is_open = False
        self._counts = True
        self._model: Any = None
        self._handles: list[RemovableHandle] = []
        self._sums: list[Tensor] = []
        self._tokens: list[int] = []
        self._device = torch.device("cpu")

    def attach(self, model: Any) -> None:
        """Watch this model only."""
        if self._model is model:
            return
        self.detach()
        self._model = model
        backbone: nn.Module = model.model
        self._handles = [backbone.register_forward_pre_hook(self._before)]
        self._device = local(next(model.parameters())).device
        for number, layer in enumerate(model.model.layers):
            hook = self._hook(number)
            self._handles.append(layer.register_forward_hook(hook, with_kwargs=True))

    def detach(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._model = [], None

    def open(self) -> None:
        """Measure from the next forward pass on; in a model in training mode, passes in evaluation mode are not
        counted."""
        assert self._model is not None, "attach a model first"
        self._is_open, self._in_training = True, self._model.training
        layers = len(self._handles) - 1
        self._sums = [torch.zeros((), dtype=torch.float64, device=self._device) for _ in range(layers)]
        self._tokens = [0] * layers

    def close(self) -> list[float]:
        """The mean over the tokens since ``open``, one number for each layer, equal on all processes."""
        assert self._is_open and self._tokens, "nothing was watched"
        self._is_open = False
        counts = torch.tensor(self._tokens, dtype=torch.float64).to(self._device)
        both = torch.stack([torch.stack(self._sums), counts])
        if several_processes():
            dist.all_reduce(both)
            dist.broadcast(both, src=0)  # the same bits everywhere, whatever the reduction did
        totals, tokens = both.cpu()
        assert bool((tokens > 0).all()), "no forward pass since the watch was opened"
        return [float(value) for value in totals / tokens]

    def _before(self, backbone: nn.Module, args: tuple[Any, ...]) -> None:
        self._counts = self._is_open and (backbone.training or not self._in_training) and not is_idle(backbone)

    def _hook(self, number: int) -> Callable[..., None]:
        @torch.no_grad()
        def listen(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if not self._counts:
                return
            before: Tensor = args[0] if args else kwargs["hidden_states"]
            after: Tensor = output[0] if isinstance(output, tuple) else output
            wide = torch.promote_types(before.dtype, torch.float32)
            before_ND, after_ND = before.flatten(0, -2).to(wide), after.flatten(0, -2).to(wide)
            self._sums[number] += self._change(before_ND, after_ND).sum(dtype=torch.float64)
            self._tokens[number] += len(before_ND)

        return listen
