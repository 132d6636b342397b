"""Counts what one rank sends and holds: collectives by kind, their bytes, and the peak of its memory.

``Tally`` sees every operation through torch's dispatcher, so it counts real ranks and simulated ones alike.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(slots=True)
class Traffic:
    """What one rank did in one part of a run."""

    collectives: dict[str, int] = field(default_factory=dict)
    """Number by kind: all-gather, reduce-scatter, all-reduce, broadcast, reduce, gather, barrier."""
    bytes_sent: int = 0
    """With ring algorithms, as NCCL and gloo use them; the mean over ranks where they differ."""
    bytes_between_nodes: int = 0
    """The part in groups whose ranks are on more than one machine."""
    peak_bytes: int = 0
    """Largest sum of all tensors that existed at the same time."""

    def plus(self, other: Traffic, times: int = 1) -> Traffic:
        """This and ``times`` the other; the peak is the larger one."""
        collectives = Counter(self.collectives)
        for kind, count in other.collectives.items():
            collectives[kind] += times * count
        return Traffic(
            {kind: count for kind, count in collectives.items() if count},
            self.bytes_sent + times * other.bytes_sent,
            self.bytes_between_nodes + times * other.bytes_between_nodes,
            max(self.peak_bytes, other.peak_bytes),
        )


class _Kind(NamedTuple):
    name: str
    of: str
    """Where its whole tensors are: ``result``, or the argument with the larger ones."""
    sent: Callable[[int, int], float]
    """Bytes that a rank sends, from those of the whole tensors and the number of ranks."""


def _gathering(size: int, ranks: int) -> float:
    return size * (ranks - 1) / ranks


_ALL_GATHER = ("all-gather", _gathering)
_REDUCE_SCATTER = ("reduce-scatter", _gathering)
_ALL_REDUCE = ("all-reduce", lambda size, ranks: 2 * size * (ranks - 1) / ranks)
_KINDS = {
    name: _Kind(kind, of, sent)
    for name, of, (kind, sent) in (
        ("c10d::_allgather_base_", "0", _ALL_GATHER),
        ("c10d::allgather_", "0", _ALL_GATHER),
        ("c10d::allgather_into_tensor_coalesced_", "0", _ALL_GATHER),
        ("_c10d_functional::all_gather_into_tensor", "result", _ALL_GATHER),
        ("_c10d_functional::all_gather_into_tensor_coalesced", "result", _ALL_GATHER),
        ("c10d::_reduce_scatter_base_", "1", _REDUCE_SCATTER),
        ("c10d::reduce_scatter_", "1", _REDUCE_SCATTER),
        ("_c10d_functional::reduce_scatter_tensor", "0", _REDUCE_SCATTER),
        ("c10d::allreduce_", "0", _ALL_REDUCE),
        ("_c10d_functional::all_reduce", "0", _ALL_REDUCE),
        ("_c10d_functional::all_reduce_", "0", _ALL_REDUCE),
        ("c10d::broadcast_", "0", ("broadcast", _gathering)),
        ("_c10d_functional::broadcast", "0", ("broadcast", _gathering)),
        ("c10d::reduce_", "0", ("reduce", _gathering)),
        ("c10d::gather_", "1", ("gather", _gathering)),
        ("c10d::barrier", "none", ("barrier", lambda size, ranks: 0.0)),
    )
}
_SENDS_NOTHING = ("_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd")


class Tally(TorchDispatchMode):
    """While entered, counts collectives and the bytes of all new tensors."""

    def __init__(self, ranks_per_node: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ranks_per_node = ranks_per_node
        self._counted = Traffic()
        self._sizes: dict[int, tuple[object, int]] = {}
        self.held_bytes = 0
        """All tensors that exist now and were made while this was entered."""

    def lap(self) -> Traffic:
        """What was counted since the last call."""
        counted = self._counted
        self._counted = Traffic(peak_bytes=self.held_bytes)
        return counted

    def __enter__(self) -> Tally:
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:  # how FSDP2 frees gathered weights
            result = resize(storage, size)
            self._hold(storage)
            return result

        self._resize = resize
        torch.UntypedStorage.resize_ = resized  # type: ignore[assignment,method-assign]
        return cast(Tally, super().__enter__())  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch.distributed.tensor import DTensor

        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it becomes operations on local tensors, which come back here
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional") and func.name() not in _SENDS_NOTHING:
            self._count(func, args, result)
        if not func.is_view and not _asks_for_shapes():
            for tensor in (leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)):
                if tensor.device.type != "meta":  # a model before it is materialized takes no memory
                    self._hold(tensor.untyped_storage())
        return result

    def _count(self, func: Any, args: Any, result: Any) -> None:
        from torch.distributed._tools.fake_collectives import CollectiveOp

        kind = _KINDS[func.name()]
        whole = result if kind.of == "result" else () if kind.of == "none" else args[int(kind.of)]
        size = sum(t.numel() * t.element_size() for t in tree_leaves(whole) if isinstance(t, Tensor))
        group = CollectiveOp.get_process_group(func, args)
        sent, counted = round(kind.sent(size, group.size())), self._counted
        counted.collectives[kind.name] = counted.collectives.get(kind.name, 0) + 1
        counted.bytes_sent += sent
        ranks = dist.get_process_group_ranks(group)
        if self._ranks_per_node and len({rank // self._ranks_per_node for rank in ranks}) > 1:
            counted.bytes_between_nodes += sent

    def _hold(self, storage: torch.UntypedStorage) -> None:
        """Note a new storage, or the new size of a known one; it is forgotten when torch frees it."""
        key, size = storage._cdata, storage.nbytes()
        reference, before = self._sizes.get(key) or (weakref.ref(storage, lambda _: self._forget(key)), 0)
        self._sizes[key] = (reference, size)
        self.held_bytes += size - before
        self._counted.peak_bytes = max(self._counted.peak_bytes, self.held_bytes)

    def _forget(self, key: int) -> None:
        self.held_bytes -= self._sizes.pop(key)[1]


def _asks_for_shapes() -> bool:
    """Whether DTensor derives the shape of a result, for which it creates whole tensors without storage."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename.endswith("_sharding_prop.py"):
            return True
        frame = frame.f_back
    return False
