"""PyTorch with a key/value cache, behind the same interface as the other runtimes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch
from torch import nn


class TorchEngine:
    """A model by path (in the child process of ``process.py``) or one already in memory."""

    def __init__(self, model: Any, *, threads: int = 1, context: int = 0) -> None:
        if isinstance(model, str):
            from dwindle.sources.loading import load

            model = load(model).model
        self._model = model
        self._one_layer = one_layer(model)
        self._threads = threads

    def timed(self, ids: list[int], new_tokens: int) -> tuple[float, float]:
        """Milliseconds for the whole prompt and per generated token."""
        return self._time(self._model, ids, new_tokens)

    def timed_one_layer(self, ids: list[int], new_tokens: int) -> tuple[float, float]:
        """The same for the model with its first layer only."""
        return self._time(self._one_layer, ids, new_tokens)

    @torch.inference_mode()
    def _time(self, model: Any, ids: list[int], new_tokens: int) -> tuple[float, float]:
        device = next(model.parameters()).device
        with _threads(self._threads):
            batch = torch.tensor([ids], device=device)
            start = _now(device)
            out = model(input_ids=batch, use_cache=True, logits_to_keep=1)
            token = out.logits[:, -1:].argmax(-1)
            middle = _now(device)
            for _ in range(new_tokens):
                out = model(input_ids=token, past_key_values=out.past_key_values, use_cache=True)
                token = out.logits[:, -1:].argmax(-1)
            end = _now(device)
        return (middle - start) * 1e3, (end - middle) * 1e3 / new_tokens


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def one_layer(model: Any) -> Any:
    """The model with its first layer only; the weights are shared with the original."""
    shorter = copy(model)
    shorter._modules = dict(model._modules)
    backbone = copy(model.model)
    backbone._modules = dict(model.model._modules)
    backbone.layers = nn.ModuleList(list(model.model.layers)[:1])
    shorter._modules["model"] = backbone
    config = copy(model.config)
    config.__dict__["num_hidden_layers"] = 1
    if getattr(config, "layer_types", None):
        config.__dict__["layer_types"] = list(config.layer_types)[:1]
    shorter.config = backbone.config = config
    return shorter
