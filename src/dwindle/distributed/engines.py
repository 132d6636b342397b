"""Engines: how one step is computed by one process, by DDP replicas or by FSDP2 shards, behind one interface.

Each process gets its own slice of the sequences of a step. Losses are scaled by ``processes / tokens of the step``, so
that the mean over processes, which DDP and FSDP2 compute, is the mean over all tokens, as in one process.

Shapes: B sequences, T tokens each, N windows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from inspect import signature
from typing import Any, Literal, Protocol, Self, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from dwindle.anatomy.build import build, build_on_meta, restore_buffers
from dwindle.core.errors import UserError
from dwindle.data.packing import num_predictions
from dwindle.distributed.lazy_weights import Fetch
from dwindle.distributed.precision import Precision, autocast_for, is_bf16
from dwindle.distributed.sharded_safetensors import piece_name
from dwindle.distributed.shards import gathered, idle, is_sharded, local, total_norm
from dwindle.distributed.world import World

Parallel = Literal["auto", "none", "ddp", "fsdp", "hsdp"]
Root = TypeVar("Root", bound=nn.Module)
Files = dict[str, dict[str, Tensor]]
"""File name → tensors by name."""

_DDP_BELOW = 1_000_000_000
"""``auto`` replicates models with fewer parameters than this, and shards larger ones."""


class Loss(Protocol):
    """The fields of a loss that an engine reads; a NamedTuple."""

    @property
    def objective(self) -> Tensor: ...

    @property
    def cross_entropy(self) -> Tensor: ...

    @property
    def distillation(self) -> Tensor | None: ...

    def _replace(self, *, cross_entropy: Tensor = ..., distillation: Tensor | None = ...) -> Self: ...


LossFunction = Callable[..., Loss]
"""``loss(model, batch, chunk_tokens=…, …)``, such as ``training.loss.language_model_loss``."""


def choose_parallel(world: World, wanted: Parallel, num_parameters: int) -> Parallel:
    """``training.parallel`` for this world; ``auto`` is DDP for small models, else FSDP, or HSDP over several nodes.

    One process that was launched as a group and asks for FSDP gets one shard.
    """
    if world.size == 1:
        return "fsdp" if wanted == "fsdp" and world.is_group else "none"
    if wanted == "none":
        raise UserError('training.parallel: "none" is for one process: choose auto, ddp, fsdp or hsdp')
    if wanted == "auto":
        sharded: Parallel = "hsdp" if world.num_nodes > 1 else "fsdp"
        return "ddp" if num_parameters < _DDP_BELOW else sharded
    if wanted == "hsdp" and world.num_nodes < 2:
        raise UserError("training.parallel: hsdp replicates over nodes and there is only one: use fsdp")
    return wanted


def num_shards(world: World, parallel: Parallel) -> int:
    """Number of devices over which one copy of the model is sharded."""
    return {"fsdp": world.size, "hsdp": world.local_size}.get(parallel, 1)


def choose_engine(world: World, parallel: Parallel, loss: LossFunction, *, device: str, precision: Precision) -> Engine:
    """The engine for the result of ``choose_parallel``."""
    if parallel == "none":
        return Engine(loss)
    if parallel == "ddp":
        return ReplicatedEngine(loss, world)
    return ShardedEngine(loss, world, device=device, precision=precision, replicate=parallel == "hsdp")


class Engine:
    """One process, and the interface of all engines."""

    _forward_is_collective = False

    def __init__(self, loss: LossFunction, world: World | None = None) -> None:
        self.loss_function = loss
        self.world = world or World()

    @property
    def rank(self) -> int:
        return self.world.rank

    @property
    def size(self) -> int:
        return self.world.size

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and prints."""
        return self.world.is_main

    def build(self, config: Any, dtype: torch.dtype, whole: Callable[[], nn.Module]) -> nn.Module:
        """The model of ``config``: ``whole()`` here; on the meta device where ``materialize`` will shard it."""
        return whole()

    def materialize(self, model: nn.Module, fetch: Fetch | None) -> None:
        """Load and shard the weights of a model on the meta device, which is then trained."""

    def materialize_frozen(self, root: nn.Module, fetch: Fetch) -> None:
        """The same for a model without training, such as a teacher; ``root.model`` is the model."""

    def adopt(self, model: nn.Module) -> None:
        """Prepare for steps on this model, at the start and after each compaction."""

    def gather(self, model: nn.Module) -> nn.Module:
        """The model with whole weights, to save it; every process must call this."""
        return model

    def files(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> Files:
        """The checkpoint files that this process writes, from the tensors of each group."""
        return {f"{group}.safetensors": dict(named) for group, named in tensors.items()} if self.is_main else {}

    def autocast(
        self, precision: Precision, device: str, *, keep_copies: bool = True
    ) -> AbstractContextManager[object]:
        """Around the forward pass; see ``autocast_for``."""
        return autocast_for(precision, device, keep_copies=keep_copies)

    def micro_step(self, *, last: bool) -> AbstractContextManager[object]:
        """Around the passes of one micro-batch; replicas reduce their gradients in the last one only."""
        return nullcontext()

    def loss(self, model: nn.Module, batch: Tensor, **options: Any) -> Loss:
        """The loss of this process's sequences."""
        return self.loss_function(model, batch, **options)

    def sum_over_processes(self, values: Tensor) -> Tensor:
        """``values`` summed over all processes, in place."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def grad_norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """The 2-norm of all gradients."""
        return get_total_norm([p.grad for p in parameters if p.grad is not None])

    def clip(self, parameters: Iterable[nn.Parameter], max_norm: float, norm: Tensor) -> None:
        """Scale the gradients, whose norm is ``norm``, to at most ``max_norm``."""
        clip_grads_with_norm_(parameters, max_norm, norm)

    @torch.no_grad()
    def evaluate(
        self, model: nn.Module, windows_NT: Tensor, *, batch: int, chunk_tokens: int, precision: Precision
    ) -> float:
        """Mean nats per learned token over held-out windows.

        Each process evaluates a slice of the windows; where weights are gathered, all make the same number of passes.
        """
        assert windows_NT.ndim in (2, 3) and windows_NT.shape[0] > 0 and windows_NT.shape[-1] > 1
        total, device = windows_NT.shape[0], local(next(model.parameters())).device
        mine = windows_NT[total * self.rank // self.size : total * (self.rank + 1) // self.size]
        largest_slice = -(-total // self.size)
        sums = torch.zeros((), dtype=torch.float64, device=device)
        was_training = model.training
        model.eval()
        try:
            for start in range(0, largest_slice, batch):
                some = mine[start : start + batch].to(device)
                if not len(some) and not self._forward_is_collective:
                    break
                with self.autocast(precision, device.type):
                    sums += self.loss(model, some, chunk_tokens=chunk_tokens).cross_entropy
        finally:
            model.train(was_training)
        self._after_evaluation()
        return float(self.sum_over_processes(sums)) / num_predictions(windows_NT)

    def _after_evaluation(self) -> None:
        """Undo the side effects of forward passes that no backward pass followed."""


class LossModule(nn.Module):
    """The loss as a forward pass, the head included: DDP and FSDP2 hook into the calls of modules."""

    def __init__(self, model: nn.Module, loss: LossFunction) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, batch: Tensor, options: dict[str, Any]) -> Loss:
        return self.loss(self.model, batch, **options)


class _WrappedEngine(Engine):
    """Common to DDP and FSDP2: the loss is a call of the wrapped module ``_root``."""

    _root: Any = None

    def loss(self, model: nn.Module, batch: Tensor, **options: Any) -> Loss:
        """A process without a sequence in this micro-batch runs a dummy sequence with weight 0, to join collectives."""
        assert self._root is not None, "the engine has not been given a model"
        if batch.shape[0]:
            return cast(Loss, self._root(batch, options))
        with idle(model):
            loss: Loss = self._root(batch.new_ones(1, *batch.shape[1:]), options | {"scale": 0.0})
        distillation = None if loss.distillation is None else loss.distillation * 0
        return loss._replace(cross_entropy=loss.cross_entropy * 0, distillation=distillation)


class ReplicatedEngine(_WrappedEngine):
    """DDP: every process holds the whole model, and gradients are averaged."""

    def adopt(self, model: nn.Module) -> None:
        from torch.nn.parallel import DistributedDataParallel

        known = signature(DistributedDataParallel).parameters
        sync = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"  # until torch 2.12
        options: dict[str, Any] = {sync: False, "gradient_as_bucket_view": True}
        self._root = DistributedDataParallel(LossModule(model, self.loss_function), **options)

    def micro_step(self, *, last: bool) -> AbstractContextManager[object]:
        return nullcontext() if last else cast(AbstractContextManager[object], self._root.no_sync())

    def loss(self, model: nn.Module, batch: Tensor, **options: Any) -> Loss:
        if not torch.is_grad_enabled():  # no gradients to reduce, so the wrapper is not needed
            return self.loss_function(model, batch, **options)
        return super().loss(model, batch, **options)


class ShardedEngine(_WrappedEngine):
    """FSDP2: weights, gradients and moments are sharded over all processes; HSDP shards them inside each node."""

    _forward_is_collective = True

    def __init__(self, loss: LossFunction, world: World, *, device: str, precision: Precision, replicate: bool) -> None:
        super().__init__(loss, world)
        from torch.distributed.device_mesh import init_device_mesh

        self.device = device
        self._bf16 = is_bf16(precision)
        self.replicate = replicate
        shape, names = ((world.size,), ("shard",))
        if replicate:
            shape, names = (world.num_nodes, world.local_size), ("replicate", "shard")  # type: ignore[assignment]
        self.mesh = init_device_mesh(device, shape, mesh_dim_names=names)

    def build(self, config: Any, dtype: torch.dtype, whole: Callable[[], nn.Module]) -> nn.Module:
        model = build_on_meta(config)
        cast(Any, model).config.dtype = dtype
        return model

    def materialize(self, model: nn.Module, fetch: Fetch | None) -> None:
        assert fetch is not None, "a sharded model is filled tensor by tensor"
        self._root = self._shard(LossModule(model, self.loss_function), fetch)

    def materialize_frozen(self, root: nn.Module, fetch: Fetch) -> None:
        """The root group (embeddings, final norm) stays gathered, because only a backward pass reshards it."""
        self._shard(root, fetch)

    def _shard(self, root: Root, fetch: Fetch) -> Root:
        """Fill ``root.model``, which is on the meta device, one layer at a time, and keep this process's rows of it.

        ``fetch`` returns a whole tensor by name and is called in the same order on every process. Embeddings (tied or
        not) and the final norm form one FSDP group, because the loss uses them together.
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
        restore_buffers(inner, self.device)
        fully_shard(root, mesh=self.mesh, mp_policy=policy)
        return root

    def _fill(self, module: nn.Module, prefix: str, fetch: Fetch) -> None:
        for name, parameter in list(module.named_parameters()):
            if parameter.is_meta:
                whole = fetch(prefix + name).to(self.device)
                assert whole.shape == parameter.shape, f"{prefix + name}: {tuple(whole.shape)}"
                owner, _, leaf = name.rpartition(".")
                setattr(module.get_submodule(owner), leaf, nn.Parameter(whole))

    def adopt(self, model: nn.Module) -> None:
        assert self._root is not None and self._root.model is model, "the model was not sharded by this engine"
        assert not any(t.is_meta for t in [*model.parameters(), *model.buffers()]), "tensors without values"

    def gather(self, model: nn.Module) -> nn.Module:
        """A copy in host memory, gathered tensor by tensor."""
        tensors = {name: gathered(p).to("cpu", copy=True) for name, p in model.named_parameters()}
        return build(model.config, tensors, model)

    def files(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> Files:
        """Each process of the first replica writes its rows of sharded tensors; the main process everything else."""
        rank, count = int(self.mesh.get_local_rank("shard")), int(self.mesh.size(self.mesh.ndim - 1))
        in_first_replica = not self.replicate or int(self.mesh.get_local_rank("replicate")) == 0
        files: Files = {}
        for group, named in tensors.items():
            any_sharded = any(is_sharded(tensor) for tensor in named.values())
            mine = {
                name: local(tensor)
                for name, tensor in named.items()
                if (in_first_replica if is_sharded(tensor) else self.is_main)
            }
            if mine:
                files[piece_name(group, rank, count) if any_sharded else f"{group}.safetensors"] = mine
        return files

    def autocast(
        self, precision: Precision, device: str, *, keep_copies: bool = True
    ) -> AbstractContextManager[object]:
        """Nothing to do in bf16: FSDP2 gathers the weights as bf16."""
        return nullcontext() if self._bf16 else super().autocast(precision, device, keep_copies=keep_copies)

    @contextmanager
    def micro_step(self, *, last: bool) -> Iterator[None]:
        """Every micro-batch reduces its gradients to this process's rows, or each process would keep whole ones."""
        self._root.set_requires_all_reduce(last)  # of HSDP, between nodes
        yield

    def grad_norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        return total_norm([p.grad for p in parameters if p.grad is not None], get_total_norm)

    def clip(self, parameters: Iterable[nn.Parameter], max_norm: float, norm: Tensor) -> None:
        held = []
        for parameter in parameters:
            if parameter.grad is not None:
                held.append(nn.Parameter(local(parameter), requires_grad=False))
                held[-1].grad = local(parameter.grad)
        clip_grads_with_norm_(held, max_norm, norm)

    def _after_evaluation(self) -> None:
        self._root.reshard()
