"""Several processes: joining the group that torchrun describes, and the engines for DDP, FSDP2 and HSDP.

Every process sees its own slice of each step's sequences. Losses are scaled by ``processes / tokens of the step``,
so that the average which DDP and FSDP2 form over processes is the mean over all tokens, as in one process.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from inspect import signature
from typing import Any, Literal, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from dwindle.core.errors import UserError
from dwindle.distributed.engine import Engine
from dwindle.distributed.shards import gathered, idle, local, total_norm
from dwindle.training.loss import Precision, TokenLoss, autocast_for, language_model_loss

Parallel = Literal["auto", "none", "ddp", "fsdp", "hsdp"]
T = TypeVar("T")
Root = TypeVar("Root", bound=nn.Module)

_TIMEOUT = timedelta(minutes=10)
"""How long a collective may wait; a process that died is noticed sooner, by its launcher or its connections."""
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_DDP_BELOW = 1_000_000_000
"""Parameters up to which every process holds the whole model."""


@dataclass(frozen=True, slots=True)
class World:
    """Who this process is among all; the default is one process alone."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    store: Any = None

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def num_nodes(self) -> int:
        return self.size // self.local_size

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()

    def broadcast(self, tensor: Tensor | None) -> Tensor:
        """The main process's tensor, on every process; its shape and type go before it as numbers."""
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        about = torch.zeros(10, dtype=torch.int64)
        if tensor is not None:
            about[: tensor.ndim + 2] = torch.tensor([_DTYPES.index(tensor.dtype), tensor.ndim, *tensor.shape])
        about = about.to(device)
        dist.broadcast(about, src=0)
        kind, ndim, *shape = about.tolist()
        if tensor is None:
            tensor = torch.empty(shape[:ndim], dtype=_DTYPES[kind])
        sent = tensor.to(device).contiguous()
        dist.broadcast(sent, src=0)
        return sent

    def main_first(self, name: str, task: Callable[[], T]) -> T:
        """Run on the main process, then on the others: they find the files that it wrote.

        Waiting is patient (tokenizing may take hours), and a mistake that the main process reports is not repeated.
        """
        if self.size == 1:
            return task()
        key = f"dwindle/{name}"
        if self.is_main:
            try:
                result = task()
            except BaseException:
                self.store.set(key, "failed")
                raise
            self.store.set(key, "done")
            return result
        try:
            while not self.store.check([key]):
                time.sleep(0.05)
            done = self.store.get(key) == b"done"
        except dist.DistError:  # the main process holds the store, and has ended
            done = False
        if not done:
            raise SystemExit(2)
        return task()


def launched_by_torchrun() -> bool:
    """Whether the environment describes a group of processes."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


@contextmanager
def joined(device: str) -> Iterator[World]:
    """The group of processes that the environment describes (torchrun, ``--nproc``), or this process alone."""
    if not launched_by_torchrun() or int(os.environ["WORLD_SIZE"]) == 1:
        yield World()
        return
    world = _join(device)
    try:
        yield world
    except UserError as error:
        raise error if world.is_main else UserError(f"process {world.rank}: {error}") from error
    dist.destroy_process_group()  # not after an error: others may be waiting in a collective


def _join(device: str) -> World:
    from torch._C._distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    size = int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    if device == "cuda":
        if local_rank >= torch.cuda.device_count():
            raise UserError(
                f"--nproc: {local_size} processes on this machine, which has {torch.cuda.device_count()} GPUs: "
                "start one process per GPU"
            )
        torch.cuda.set_device(local_rank)
    store, rank, size = next(iter(rendezvous("env://", timeout=_TIMEOUT)))
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        store=PrefixStore("collectives", store),
        rank=rank,
        world_size=size,
        timeout=_TIMEOUT,
        device_id=torch.device("cuda", local_rank) if device == "cuda" else None,
    )
    return World(rank, size, local_rank, local_size, PrefixStore("dwindle", store))


def choose_parallel(world: World, wanted: Parallel, num_parameters: int) -> Parallel:
    """``training.parallel`` for this world; ``auto`` is DDP for small models, else FSDP, with replicas over nodes."""
    if world.size == 1:
        return "none"
    if wanted == "none":
        raise UserError('training.parallel: "none" is for one process: choose auto, ddp, fsdp or hsdp')
    if wanted == "auto":
        sharded: Parallel = "hsdp" if world.num_nodes > 1 else "fsdp"
        return "ddp" if num_parameters < _DDP_BELOW else sharded
    if wanted == "hsdp" and world.num_nodes < 2:
        raise UserError("training.parallel: hsdp replicates over nodes and there is only one: use fsdp")
    return wanted


def num_shards(world: World, parallel: Parallel) -> int:
    """Devices over which one copy of the model is spread."""
    return {"fsdp": world.size, "hsdp": world.local_size}.get(parallel, 1)


def choose_engine(world: World, parallel: Parallel, *, device: str, precision: Precision) -> Engine:
    """The engine for what ``choose_parallel`` chose."""
    if parallel == "none":
        return Engine()
    if parallel == "ddp":
        return ReplicatedEngine(world)
    return ShardedEngine(world, device=device, precision=precision, replicate=parallel == "hsdp")


class LossModule(nn.Module):
    """The loss as a forward pass: DDP and FSDP2 act on the calls of a module, and the head is used by the loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens_BT: Tensor, options: dict[str, Any]) -> TokenLoss:
        return language_model_loss(self.model, tokens_BT, **options)


class SharedEngine(Engine):
    """What DDP and FSDP2 have in common."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.rank, self.size = world.rank, world.size
        self._root: Any = None

    def num_tokens(self, micro_batches: Sequence[Tensor], batches: Any) -> int:
        return int(batches.tokens_per_step)

    def loss(self, model: nn.Module, tokens_BT: Tensor, **options: Any) -> TokenLoss:
        """A process without a sequence in this micro-batch takes part with one that does not count."""
        assert self._root is not None, "the engine has not been given a model"
        if tokens_BT.shape[0]:
            return cast(TokenLoss, self._root(tokens_BT, options))
        with idle(model):
            loss = self._root(tokens_BT.new_zeros(1, tokens_BT.shape[1]), options | {"scale": 0.0})
        taught = None if loss.distillation is None else loss.distillation * 0
        return TokenLoss(loss.objective, loss.cross_entropy * 0, taught)

    def share(self, sums: Tensor, stop: bool) -> Tensor:
        everything = super().share(sums, stop)
        dist.all_reduce(everything)
        return everything

    def barrier(self) -> None:
        self.world.barrier()

    @torch.no_grad()
    def evaluate(
        self, model: nn.Module, windows_NT: Tensor, *, batch: int, chunk_tokens: int, precision: Precision
    ) -> float:
        """Each process takes a share of the windows, and all make the same number of passes."""
        total, device = windows_NT.shape[0], local(next(model.parameters())).device
        first, end = total * self.rank // self.size, total * (self.rank + 1) // self.size
        mine = windows_NT[first:end]
        largest_share = -(-total // self.size)
        passes = -(-largest_share // batch)
        sums = torch.zeros((), dtype=torch.float64, device=device)
        was_training = model.training
        model.eval()
        for number in range(passes):
            tokens = mine[number * batch : (number + 1) * batch].to(device)
            with self.autocast(precision, device.type):
                sums += self.loss(model, tokens, chunk_tokens=chunk_tokens).cross_entropy
        model.train(was_training)
        self.after_evaluation()
        dist.all_reduce(sums)
        return float(sums) / (total * (windows_NT.shape[1] - 1))

    def after_evaluation(self) -> None:
        """Undo what forward passes without a backward pass leave behind."""


class ReplicatedEngine(SharedEngine):
    """DDP: every process holds the whole model and the gradients are averaged."""

    def adopt(self, model: nn.Module) -> None:
        from torch.nn.parallel import DistributedDataParallel

        known = signature(DistributedDataParallel).parameters
        sync = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"  # until torch 2.12
        options: dict[str, Any] = {sync: False, "gradient_as_bucket_view": True}
        self._root = DistributedDataParallel(LossModule(model), **options)

    def micro_step(self, *, last: bool) -> AbstractContextManager[object]:
        return nullcontext() if last else cast(AbstractContextManager[object], self._root.no_sync())

    def loss(self, model: nn.Module, tokens_BT: Tensor, **options: Any) -> TokenLoss:
        if not torch.is_grad_enabled():  # nothing to average, so the passes need not match
            if tokens_BT.shape[0]:
                return language_model_loss(model, tokens_BT, **options)
            nothing = torch.zeros((), device=tokens_BT.device)
            return TokenLoss(nothing, nothing)
        return super().loss(model, tokens_BT, **options)


class ShardedEngine(SharedEngine):
    """FSDP2: weights, gradients and moments are spread over processes; HSDP spreads them inside each node."""

    def __init__(self, world: World, *, device: str, precision: Precision, replicate: bool) -> None:
        super().__init__(world)
        from torch.distributed.device_mesh import init_device_mesh

        self.device = device
        self._bf16 = precision == "bf16"
        self.replicate = replicate
        shape, names = ((world.size,), ("shard",))
        if replicate:
            shape, names = (world.num_nodes, world.local_size), ("replicate", "shard")  # type: ignore[assignment]
        self.mesh = init_device_mesh(device, shape, mesh_dim_names=names)

    @property
    def shard_rank(self) -> int:
        return int(self.mesh.get_local_rank("shard"))

    @property
    def num_shards(self) -> int:
        return int(self.mesh.size(self.mesh.ndim - 1))

    @property
    def holds_first_replica(self) -> bool:
        """Whether this process writes its shards to checkpoints."""
        return not self.replicate or int(self.mesh.get_local_rank("replicate")) == 0

    def shard(self, model: nn.Module, fetch: Callable[[str], Tensor]) -> None:
        """Fill and shard the model to train (see ``shard_root``)."""
        self._root = self.shard_root(LossModule(model), fetch)

    def shard_root(self, root: Root, fetch: Callable[[str], Tensor]) -> Root:
        """Fill a model that has no storage yet, one layer at a time, and keep this process's rows of each.

        ``root`` is what will be called, around the model. ``fetch`` gives a whole tensor by name, and is called in the
        same order everywhere. Embeddings (tied or not) and the final norm are one group: the loss uses them together.
        A frozen teacher is sharded likewise; that group of it stays gathered, because only a backward pass frees it.
        """
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy()
        if self._bf16:
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        inner: Any = root.model
        for index, layer in enumerate(inner.model.layers):
            self._fill(layer, f"model.layers.{index}.", fetch)
            fully_shard(layer, mesh=self.mesh, mp_policy=policy)
        self._fill(inner, "", fetch)
        inner.tie_weights()
        backbone = inner.model
        backbone.rotary_emb = type(backbone.rotary_emb)(config=inner.config).to(self.device)
        fully_shard(root, mesh=self.mesh, mp_policy=policy)
        return root

    def _fill(self, module: nn.Module, prefix: str, fetch: Callable[[str], Tensor]) -> None:
        for name, parameter in list(module.named_parameters()):
            if parameter.is_meta:
                whole = fetch(prefix + name).to(self.device)
                assert whole.shape == parameter.shape, f"{prefix + name}: {tuple(whole.shape)}"
                owner, _, leaf = name.rpartition(".")
                setattr(module.get_submodule(owner), leaf, nn.Parameter(whole))

    def adopt(self, model: nn.Module) -> None:
        assert self._root is not None and self._root.model is model, "the model was not sharded by this engine"
        assert not any(t.is_meta for t in [*model.parameters(), *model.buffers()]), "tensors without values"

    def autocast(self, precision: Precision, device: str) -> AbstractContextManager[object]:
        """The gathered weights are bf16 already."""
        return nullcontext() if self._bf16 else autocast_for(precision, device)

    @contextmanager
    def micro_step(self, *, last: bool) -> Iterator[None]:
        self._root.set_requires_gradient_sync(last)
        yield

    def grad_norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        return total_norm([p.grad for p in parameters if p.grad is not None], get_total_norm)

    def clip(self, parameters: Iterable[nn.Parameter], largest: float, norm: Tensor) -> None:
        held = []
        for parameter in parameters:
            if parameter.grad is not None:
                held.append(nn.Parameter(local(parameter), requires_grad=False))
                held[-1].grad = local(parameter.grad)
        clip_grads_with_norm_(held, largest, norm)

    def after_evaluation(self) -> None:
        self._root.reshard()

    def whole(self, parameters: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """All tensors, whole, in the memory of the main process (empty elsewhere)."""
        found = {}
        for name, tensor in parameters:
            full = gathered(tensor)
            if self.is_main:
                found[name] = full.to("cpu", copy=True)
        return found
