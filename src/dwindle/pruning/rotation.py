"""SliceGPT with one shared rotation: the residual stream in its principal directions, of which the first are kept.

An RMSNorm without gain commutes with a rotation Q: norm(x Q) = norm(x) Q. So once every gain is folded into the
matrices that read the norm (which unties the head from the embedding), the whole residual stream can be rotated: what
writes into it is multiplied by Q, what reads it by Qᵀ. Keeping the first k of m columns of Q then removes the
directions with the least energy, and the result is an ordinary model of a smaller hidden size.

A norm of k channels divides by k where the source divided by m. Writing the residual stream in units of √(k/m) undoes
that exactly, its epsilon included: the result equals the source with its residual stream projected onto the kept
directions.

Shapes: N tokens, m hidden size (D), k kept directions (K), V vocabulary, O and I outputs and inputs of a projection.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dwindle.anatomy.anatomy import Anatomy, ParameterCount, Row
from dwindle.anatomy.build import build, config_for, stock_form
from dwindle.anatomy.family import Family
from dwindle.anatomy.positions import warn_beyond_positions
from dwindle.anatomy.structure import Structure
from dwindle.core.errors import UserError
from dwindle.core.progress import Bar
from dwindle.core.sizes import format_count
from dwindle.pruning.config import PruneConfig
from dwindle.pruning.gram import accumulate_gram
from dwindle.pruning.ledger import Event
from dwindle.pruning.target import Shape, Target

Role = Literal["other", "norm", "embedding", "head", "reader", "writer"]
"""What a tensor does with the residual stream."""
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_PASS_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class Sliced:
    """A model of ``structure.hidden`` rotated channels; the layers are the source's."""

    model: nn.Module
    structure: Structure
    count: ParameterCount
    event: Event


def check_rotatable(anatomy: Anatomy) -> None:
    """Refuse families whose norms do not commute with a rotation, or whose channels are more than directions."""
    family = anatomy.family
    reason = ""
    if "stem" not in family.groups:
        reason = "this family keeps its hidden size"
    elif family.norm_after:
        reason = f"{next(iter(family.norm_after.values()))} stands after its block, and its gain cannot be folded"
    else:
        rows = (row for row in anatomy.rows if _role(row) == "reader" and norm_of(family, row) is None)
        if (row := next(rows, None)) is not None:
            reason = f"{row.name} reads the residual stream without a norm"
        elif (odd := next((row for row in anatomy.rows if _mixes(row)), None)) is not None:
            reason = f"{odd.name} works on single hidden channels"
    if reason:
        raise UserError(f"method slicegpt: {reason}, so the residual stream cannot be rotated: choose another method")


def _role(row: Row) -> Role:
    if not any("hidden" in units for units in row.axes):
        return "other"
    if row.is_embedding:
        return "head" if row.name == HEAD else "embedding"
    if row.axes == (("hidden",),):
        return "norm" if row.is_norm else "writer"
    return "writer" if row.axes[0] == ("hidden",) else "reader"


def _mixes(row: Row) -> bool:
    """Whether hidden channels occur elsewhere than as outputs of a writer or inputs of a reader."""
    return sum("hidden" in units for units in row.axes) > 1 or any(
        "hidden" in units and units != ("hidden",) for units in row.axes
    )


def norm_of(family: Family, row: Row) -> str | None:
    """The name, below its layer, of the norm whose output a projection of the layer reads."""
    block = row.name.split(".")[3] if row.layer is not None else ""
    return family.norm_before.get(block)


def sliced_count(anatomy: Anatomy, hidden: int) -> ParameterCount:
    """Exact parameters with that many rotated channels, with an untied head."""
    count = anatomy.count(_sliced(anatomy, hidden))
    head = 0 if any(row.name == HEAD for row in anatomy.rows) else anatomy[EMBEDDING].full_shape[0] * hidden
    return ParameterCount(count.total + head, count.embedding + head)


def sliced_size(anatomy: Anatomy, target: Target, config: PruneConfig) -> int:
    """The most rotated channels that fit the target, in multiples of ``round_to``; raises if too few do."""
    full = Shape.of(anatomy.source)
    if target.file is not None:
        raise UserError("target: method slicegpt lands on a number of parameters: give a size such as 60%")
    if target.shape is not None:
        if replace(target.shape, hidden=full.hidden) != full:
            raise UserError("target: slicegpt changes the hidden size alone: give hidden=…, or a size such as 60%")
        return _exact_size(anatomy, target.shape.hidden, config)
    step = config.round_to
    sizes = [n for n in range(step, full.hidden + 1, step) if n >= config.min_hidden]
    fitting = [n for n in sizes if sliced_count(anatomy, n).total <= target.num_parameters]
    if not fitting:
        least = sliced_count(anatomy, sizes[0]).total if sizes else sliced_count(anatomy, full.hidden).total
        raise UserError(
            f"target {format_count(target.num_parameters)} is below the smallest model that slicegpt reaches, "
            f"{least:,} parameters with a head of its own (min_hidden {config.min_hidden}, round_to {step}): choose a "
            "larger target or lower these"
        )
    return fitting[-1]


def _exact_size(anatomy: Anatomy, hidden: int, config: PruneConfig) -> int:
    """A hidden size that was given; raises if other settings exclude it, or if nothing would become smaller."""
    if hidden < config.min_hidden:
        raise UserError(f"target hidden={hidden}: is below min_hidden {config.min_hidden}: choose more, or lower it")
    if hidden % config.round_to:
        raise UserError(
            f"target hidden={hidden}: is not a multiple of round_to {config.round_to}: leave one of them out"
        )
    before, after = anatomy.count(anatomy.source).total, sliced_count(anatomy, hidden).total
    if after >= before:
        raise UserError(
            f"target hidden={hidden}: with a head of its own the result has {after:,} parameters, not fewer than the "
            f"source's {before:,}: choose a smaller size"
        )
    return hidden


def slice_model(model: Any, target: Target, config: PruneConfig, windows_BT: Tensor) -> Sliced:
    """Rotate a model to the principal directions of its residual stream on this text, and keep those that fit."""
    anatomy = Anatomy.of(model)
    check_rotatable(anatomy)
    size = sliced_size(anatomy, target, config)
    energy_D, basis_DD = principal_directions(stream_moment(model, anatomy, windows_BT))
    structure, count = _sliced(anatomy, size), sliced_count(anatomy, size)
    event = {
        "event": "rotate",
        "step": 1,
        "tokens": 0,
        "hidden": size,
        "of": len(anatomy.source.hidden),
        "energy": float(energy_D[:size].sum() / energy_D.sum()),
        "head": "untied" if count.total > anatomy.count(structure).total else "own",
        "parameters": count.total,
    }
    return Sliced(rotated(model, anatomy, basis_DD[:, :size]), structure, count, event)


def stream_moment(model: Any, anatomy: Anatomy, windows_BT: Tensor) -> Tensor:
    """E[x xᵀ] in fp64, x the residual stream as every norm sees and scales it (without gain); all norms count alike.

    Scaled because the residual stream grows with depth: otherwise the last layers and a few huge tokens dominate.
    """
    warn_beyond_positions(windows_BT.shape[1], model.config)
    norms = [model.get_submodule(row.module) for row in anatomy.rows if _role(row) == "norm"]
    device, hidden = next(model.parameters()).device, len(anatomy.source.hidden)
    moment_DD, seen = torch.zeros(hidden, hidden, dtype=torch.float64, device=device), 0

    def collect(norm: Any, args: tuple[Any, ...]) -> None:
        nonlocal seen
        x_ND = _scaled(args[0].flatten(0, -2), norm)
        part = torch.zeros(hidden, hidden, dtype=x_ND.dtype, device=device)
        moment_DD.add_(accumulate_gram(part, x_ND))
        seen += len(x_ND)

    with ExitStack() as hooks, torch.no_grad(), Bar("calibrating", len(windows_BT)) as bar:
        for norm in norms:
            hooks.enter_context(norm.register_forward_pre_hook(collect))
        for batch in torch.split(windows_BT, max(1, _PASS_TOKENS // windows_BT.shape[1])):
            model.model(input_ids=batch.to(device), use_cache=False)
            bar.advance(len(batch))
    if not bool(moment_DD.isfinite().all()):
        raise UserError("calibration: the residual stream is not finite: the source's weights or the data are broken")
    return moment_DD / seen


def _scaled(x_ND: Tensor, norm: Any) -> Tensor:
    if isinstance(norm, nn.LayerNorm):
        raise UserError("method slicegpt: a LayerNorm subtracts the mean, so the residual stream cannot be rotated")
    epsilon = norm.eps if hasattr(norm, "eps") else norm.variance_epsilon
    x_ND = x_ND.to(torch.promote_types(x_ND.dtype, torch.float32))
    return x_ND * torch.rsqrt(x_ND.square().mean(-1, keepdim=True) + epsilon)


def principal_directions(moment_DD: Tensor) -> tuple[Tensor, Tensor]:
    """(energies in descending order, their directions as columns); the largest entry of a direction is positive."""
    energy_D, basis_DD = torch.linalg.eigh(moment_DD.double())
    basis_DD = basis_DD.flip(1)
    largest = basis_DD.gather(0, basis_DD.abs().argmax(0, keepdim=True))
    return energy_D.flip(0).clamp(min=0), basis_DD * largest.sign()


@torch.no_grad()
def rotated(model: Any, anatomy: Anatomy, basis_DK: Tensor) -> nn.Module:
    """The model with its residual stream in these (orthonormal) directions, all gains one and an untied head."""
    hidden, kept = basis_DK.shape
    unit = (kept / hidden) ** 0.5
    parameters: dict[str, nn.Parameter] = dict(model.named_parameters())
    write_DK, read_DK, offset = basis_DK * unit, basis_DK / unit, anatomy.family.gain_offset

    def in_fp64(name: str) -> Tensor:
        return parameters[name].detach().to(write_DK.device, write_DK.dtype)

    final = next(row.name for row in anatomy.rows if row.layer is None and _role(row) == "norm")
    turn: dict[Role, Callable[[Row], Tensor]] = {
        "other": lambda row: parameters[row.name].detach(),
        "norm": lambda row: torch.full((kept,), 1 - offset),
        "embedding": lambda row: in_fp64(row.name) @ write_DK,
        "head": lambda row: (in_fp64(row.name) * (offset + in_fp64(final))) @ read_DK,
        "reader": lambda row: (in_fp64(row.name) * (offset + in_fp64(_gain(anatomy, row)))) @ read_DK,
        "writer": lambda row: write_DK.T @ in_fp64(row.name),
    }
    tensors = {row.name: turn[_role(row)](row).to(parameters[row.name], copy=True) for row in anatomy.rows}
    if HEAD not in tensors:
        head_VK = (in_fp64(EMBEDDING) * (offset + in_fp64(final))) @ read_DK
        tensors[HEAD] = head_VK.to(tensors[EMBEDDING].dtype)
    structure = _sliced(anatomy, kept)
    config = config_for(model.config, structure, changed={"tie_word_embeddings": False})
    return stock_form(build(config, tensors, model), structure)


def _gain(anatomy: Anatomy, row: Row) -> str:
    return f"model.layers.{row.layer}.{norm_of(anatomy.family, row)}.weight"


def _sliced(anatomy: Anatomy, hidden: int) -> Structure:
    return Structure(anatomy.source.hidden[:hidden], anatomy.source.layers)
