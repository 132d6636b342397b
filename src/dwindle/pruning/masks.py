"""Hard-concrete masks that are learned towards a shape (Sheared-LLaMA), and their place in a model.

A mask z of a head, an FFN channel or a hidden channel has one parameter, log α. With β = 2/3, γ = −0.1, ζ = 1.1:

    u ~ U(0, 1)      s = σ((log u − log(1 − u) + log α) / β)      z = min(1, max(0, s·(ζ − γ) + γ))
    P(z ≠ 0) = σ(log α − β·log(−γ/ζ))

ŝ, the mean of P over the masks of one layer and kind (hidden: of the model), is the share that is expected to remain,
s the share of the shape. Masks and weights minimise

    loss + Σ λ₁·(ŝ − s) + λ₂·(ŝ − s)²

while λ₁ and λ₂ of every layer and kind maximise it, by gradient ascent at rate 1. s falls from 1 to the shape's over
the first fifth of the mask phase. log α begins at 5 and follows Adam at a rate that takes it to −5 within that fifth.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import log
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dwindle.anatomy.structure import KINDS, Kind, Structure
from dwindle.distributed.shards import local, several_processes
from dwindle.pruning.saliency import Scores
from dwindle.pruning.surgery import Prunable
from dwindle.pruning.target import Shape

TEMPERATURE, LOW, HIGH = 2 / 3, -0.1, 1.1
START = 5.0
RAMP = 0.2
"""Fraction of the mask phase after which s is the shape's."""
ASCENT = 1.0
_EPSILON = 1e-12
"""Adam's epsilon. Derivatives by log α are tiny where a mask is open; a larger one would stop it there."""
_SHIFT = TEMPERATURE * log(-LOW / HIGH)


def sampled(log_alpha: Tensor, u: Tensor) -> Tensor:
    """z for uniform noise u."""
    return (torch.sigmoid((u.logit() + log_alpha) / TEMPERATURE) * (HIGH - LOW) + LOW).clamp(0, 1)


def settled(log_alpha: Tensor) -> Tensor:
    """z without noise, for measuring."""
    return (torch.sigmoid(log_alpha) * (HIGH - LOW) + LOW).clamp(0, 1)


def open_share(log_alpha: Tensor) -> Tensor:
    """P(z ≠ 0)."""
    return torch.sigmoid(log_alpha - _SHIFT)


def penalty(expected_C: Tensor, aims_C: Tensor, multipliers_2C: Tensor) -> Tensor:
    """Σ λ₁·(ŝ − s) + λ₂·(ŝ − s)² over the constraints."""
    excess_C = expected_C - aims_C
    return (multipliers_2C[0] * excess_C + multipliers_2C[1] * excess_C.square()).sum()


def aim_at(share: float, step: int, num_steps: int) -> float:
    """s in step 1, 2, … of a mask phase."""
    return 1 - (1 - share) * min(1.0, step / (RAMP * num_steps))


@dataclass(frozen=True, slots=True)
class Part:
    """The masks of one kind in one layer (hidden: 0): one constraint."""

    kind: Kind
    layer: int
    size: int
    share: float
    """Share of them that the shape keeps."""


def parts_of(structure: Structure, shape: Shape) -> list[Part]:
    """The parts that the shape makes smaller: where layers differ, each by as much as the smallest."""
    found, now = [], Shape.of(structure)
    for kind, key in zip(KINDS, ("heads", "ffn", "hidden"), strict=True):
        removed, sizes = getattr(now, key) - getattr(shape, key), _sizes(structure, kind)
        found += [Part(kind, n, size, (size - removed) / size) for n, size in enumerate(sizes) if removed and size]
    return found


def _sizes(structure: Structure, kind: Kind) -> list[int]:
    if kind == "stem":
        return [len(structure.hidden)]
    return [len(la.query_heads if kind == "attn" else la.ffn) for la in structure.layers]


class Masks:
    """log α of every mask with its optimizer, and the multipliers of every constraint; always in host memory."""

    def __init__(self, parts: Sequence[Part], num_steps: int) -> None:
        self.parts, self.num_steps = list(parts), num_steps
        self.log_alpha = nn.Parameter(torch.full((sum(part.size for part in parts),), START))
        self.multipliers_2C = torch.zeros(2, len(parts))
        rate = min(1.0, 2 * START / (RAMP * num_steps))
        self._optimizer = torch.optim.Adam([self.log_alpha], lr=rate, betas=(0.9, 0.95), eps=_EPSILON)
        moments = {name: torch.zeros_like(self.log_alpha.detach()) for name in ("exp_avg", "exp_avg_sq")}
        self._optimizer.state[self.log_alpha] = {"step": torch.zeros(()), **moments}

    def split(self, flat: Tensor) -> list[Tensor]:
        """A vector over all masks, part by part."""
        return list(torch.split(flat, [part.size for part in self.parts]))

    def noise(self, seed: int) -> Tensor:
        """u of one step, the same on every process."""
        return torch.rand(len(self.log_alpha), generator=torch.Generator().manual_seed(seed)).clamp(1e-6, 1 - 1e-6)

    def expected(self, log_alpha: Tensor) -> Tensor:
        """ŝ of every part."""
        return torch.stack([open_share(part).mean() for part in self.split(log_alpha)])

    def aims(self, step: int) -> Tensor:
        return torch.tensor([aim_at(part.share, step, self.num_steps) for part in self.parts])

    def learn(self, gradients: Sequence[Tensor], u: Tensor, step: int) -> Tensor:
        """One step of log α and of the multipliers, from the loss's derivatives by the z of u; returns ŝ before it."""
        multipliers_2C = self.multipliers_2C.detach().requires_grad_()
        with torch.enable_grad():
            expected_C = self.expected(self.log_alpha)
            by_loss = (sampled(self.log_alpha, u) * torch.cat(list(gradients))).sum()
            objective = by_loss + penalty(expected_C, self.aims(step), multipliers_2C)
            self.log_alpha.grad, up_2C = torch.autograd.grad(objective, (self.log_alpha, multipliers_2C))
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.multipliers_2C += ASCENT * up_2C
        return expected_C.detach()

    def scores(self, structure: Structure) -> Scores:
        """log α as saliencies; 0 where nothing is masked."""
        scores = Scores.zero(structure)
        for part, own in zip(self.parts, self.split(self.log_alpha.detach().double()), strict=True):
            if part.kind == "stem":
                scores.stem = own
            else:
                (scores.attn if part.kind == "attn" else scores.ffn)[part.layer] = own
        return scores

    def tensors(self) -> dict[str, Tensor]:
        own = {"log_alpha": self.log_alpha.detach(), "multipliers": self.multipliers_2C}
        return own | {f"adam_{name}": value for name, value in self._optimizer.state[self.log_alpha].items()}

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        for name, own in self.tensors().items():
            assert own.shape == tensors[name].shape, f"{name}: {tuple(tensors[name].shape)}"
            own.copy_(tensors[name])


class MaskedModel:
    """Multiplies what heads, channels and hidden channels carry by their masks, in the forward passes of a model.

    Heads and channels are masked as inputs of ``o`` and ``down``, hidden channels in everything that is written into
    the residual stream; the norms then divide by the number of masks that are not zero. The hooks read a plain
    attribute of their module, so they also work in compiled layers, if they are there before the first pass. There are
    no masks before the first ``sample``.
    """

    def __init__(self, prunable: Prunable, masks: Masks) -> None:
        self.masks, self._prunable = masks, prunable
        self.trained = self.measured = self._shown = list[Tensor]()
        model = prunable.model
        self._device = local(next(iter(prunable.parameters.values()))).device
        self._sites = list(_sites(prunable, masks.parts))
        self._handles: list[RemovableHandle] = [model.model.register_forward_pre_hook(self._before)]
        for module in {id(module): module for _, module, _ in self._sites}.values():
            module.mask_in, module.mask_out = None, None
            self._handles.append(module.register_forward_pre_hook(_mask_input))
            self._handles.append(module.register_forward_hook(_mask_output))

    def sample(self, seed: int) -> None:
        """New masks for the next step, and those for measuring."""
        masks, log_alpha = self.masks, self.masks.log_alpha.detach()
        self.u = masks.noise(seed)
        both = torch.stack([sampled(log_alpha, self.u), settled(log_alpha)]).to(self._device)
        self.trained = [z.clone().requires_grad_() for z in masks.split(both[0])]
        self.measured = masks.split(both[1])
        self._shown = []

    def gradients(self) -> list[Tensor]:
        """The loss's derivatives by the masks of this step, over all processes (of which each has a mean)."""
        own = torch.cat([torch.zeros_like(z) if z.grad is None else z.grad for z in self.trained])
        if several_processes():
            dist.all_reduce(own)
            dist.broadcast(own, src=0)  # the same bits everywhere, whatever the reduction did
            own /= dist.get_world_size()
        return self.masks.split(own.cpu())

    def remove(self) -> None:
        """Compute without masks from now on."""
        for handle in self._handles:
            handle.remove()
        for _, module, _ in self._sites:
            module.mask_in = module.mask_out = None

    def _before(self, backbone: nn.Module, args: tuple[Any, ...]) -> None:
        wanted = self.trained if backbone.training else self.measured
        if wanted is self._shown:
            return
        self._shown = wanted
        for place, module, name in self._sites:
            setattr(module, name, wanted[place])
        for place, part in enumerate(self.masks.parts):
            if part.kind == "stem":
                self._prunable.set_stream_width(wanted[place].detach().count_nonzero())


def _sites(prunable: Prunable, parts: Sequence[Part]) -> Iterator[tuple[int, Any, str]]:
    """(part, module, attribute) of every place where a mask acts."""
    anatomy, model = prunable.anatomy, prunable.model
    for place, part in enumerate(parts):
        if part.kind == "stem":
            yield place, model.get_input_embeddings(), "mask_out"
            for _, row in anatomy.outputs:
                module = model.get_submodule(row.module)
                yield place, module, "mask_out"
                if row.axes[1] == ("hidden",):  # a convolution's channels are removed with the hidden ones
                    yield place, module, "mask_in"
        else:
            yield place, model.get_submodule(anatomy.output_row(part.layer, part.kind).module), "mask_in"


def _mask_input(module: Any, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    mask = module.mask_in
    if mask is None:
        return None
    x, times = args[0], args[0].shape[-1] // mask.shape[0]  # a head has several columns
    return (x * mask.to(x.dtype)[:, None].expand(-1, times).reshape(-1), *args[1:])


def _mask_output(module: Any, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
    return None if module.mask_out is None else output * module.mask_out.to(output.dtype)
