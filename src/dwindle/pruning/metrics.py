"""Saliency metrics of single weights, by name: the built-in ones and registered ones.

A metric is looked up in the registry, then among the installed entry points of the group ``dwindle.metrics``. A package
is imported only if a metric of that name is requested and not yet registered.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal, TypeVar, overload

import torch
from torch import Tensor

from dwindle.core.errors import UserError

Score = Callable[[Tensor, Tensor, Tensor], Tensor]
Curvature = Literal["diagonal", "inverse"]
Function = TypeVar("Function", bound=Callable[..., Any])

GROUP = "dwindle.metrics"
"""Group of the entry points."""
NEEDS = ("gradient", "fisher", "inputs")
"""What a registered metric can need; ``groups`` (signed sums per sequence) is reserved for built-in metrics."""


@dataclass(frozen=True, slots=True)
class Metric:
    """An element-wise score of weights w, mean gradient g and diagonal curvature f; a zero weight scores zero."""

    score: Score
    needs: frozenset[str] = frozenset()
    """What must be collected: any of ``gradient``, ``fisher``, ``inputs`` (then f comes from ``LayerCurvature``) and
    ``groups``; w is passed in place of what is not collected."""
    curvature: Curvature | None = None
    """Layer-wise metrics: f from the diagonal of H = E[x xᵀ], or from that of (H + λI)⁻¹."""
    squares_sums: bool = False
    """Whether a group's saliency is the square of its signed sum, averaged over sequences or steps, instead of the sum
    of element scores."""
    is_plain: bool = True
    """Whether the score is pure arithmetic, which can be compiled (no random numbers, no checks)."""
    draws: bool = False
    """Whether the score draws random numbers, so that those of a weight depend on the weights before it."""


@dataclass(frozen=True, slots=True)
class _Entry:
    make: Callable[[int], Metric]
    """Makes the metric from a seed."""
    origin: str
    """Module and name of the function: registering the same one again is allowed."""


_METRICS: dict[str, _Entry] = {}


@overload
def register_metric(
    name: str,
    score: Function,
    *,
    needs: Iterable[str] = (),
    curvature: Curvature | None = None,
    plain: bool = False,
    seeded: bool = False,
) -> Function: ...


@overload
def register_metric(
    name: str,
    score: None = None,
    *,
    needs: Iterable[str] = (),
    curvature: Curvature | None = None,
    plain: bool = False,
    seeded: bool = False,
) -> Callable[[Function], Function]: ...


def register_metric(
    name: str,
    score: Any = None,
    *,
    needs: Iterable[str] = (),
    curvature: Curvature | None = None,
    plain: bool = False,
    seeded: bool = False,
) -> Any:
    """Register ``score(w, g, f)`` as the metric ``name``; without ``score``, return a decorator.

    ``score`` gets an output projection's weights w and, if ``needs`` names them, the gradient g (``gradient``) and f:
    the mean squared gradient (``fisher``), or a curvature of the layer's inputs (``inputs``; ``curvature`` is
    ``diagonal``, their mean square, or ``inverse``). The others are None. It returns a score for each weight; groups
    with the lowest sums are pruned first.

    The result is checked, and zero weights score zero. ``plain`` promises pure arithmetic with finite results that are
    zero for zero weights: such a score is not checked, may be compiled, and gets placeholders for what it does not
    need. ``seeded``: ``score(seed)`` is called before every scoring and returns the function, which may draw random
    numbers for matrices of the source's shapes.
    """
    if score is None:
        return lambda function: register_metric(
            name, function, needs=needs, curvature=curvature, plain=plain, seeded=seeded
        )
    wanted = frozenset([needs] if isinstance(needs, str) else needs)
    _check_registration(name, score, wanted, curvature)
    if "inputs" in wanted:
        curvature = curvature or "diagonal"

    def make(seed: int) -> Metric:
        function = score(seed) if seeded else score
        scored = function if plain else _checked(name, function, wanted)
        return Metric(scored, wanted, curvature, is_plain=plain, draws=seeded)

    entry = _Entry(make, f"{getattr(score, '__module__', '')}.{getattr(score, '__qualname__', repr(score))}")
    if name in METRICS or (name in _METRICS and _METRICS[name].origin != entry.origin):
        kind = "built in" if name in METRICS else f"registered already, by {_METRICS[name].origin}"
        raise UserError(f"metric {name!r}: is {kind}: choose another name")
    _METRICS[name] = entry
    return score


def _check_registration(name: str, score: Any, needs: frozenset[str], curvature: str | None) -> None:
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_.-]+", name):
        raise UserError(f"metric {name!r}: a name is made of letters, digits, dots, - and _")
    if not callable(score):
        raise UserError(f"metric {name!r}: score must be a function of w, g and f, not {type(score).__name__}")
    if unknown := sorted(map(repr, needs.difference(NEEDS))):
        raise UserError(f"metric {name!r}: needs {', '.join(unknown)}: choose of {', '.join(NEEDS)}")
    if {"fisher", "inputs"} <= needs:
        raise UserError(f"metric {name!r}: needs fisher and inputs, and f can be only one of them: choose one")
    if curvature not in (None, "diagonal", "inverse"):
        raise UserError(f"metric {name!r}: curvature {curvature!r}: choose diagonal or inverse")
    if curvature is not None and "inputs" not in needs:
        raise UserError(f"metric {name!r}: curvature {curvature!r} is one of the inputs: add inputs to needs")


def _checked(name: str, score: Callable[..., Any], needs: frozenset[str]) -> Score:
    """Wraps a score: passes only what it needs, and checks the shape and values of its result."""

    def checked(w_OI: Tensor, g_OI: Tensor, f_OI: Tensor) -> Tensor:
        given = (w_OI, g_OI, f_OI)
        versions = [tensor._version for tensor in given]
        g = g_OI if "gradient" in needs else None
        f = f_OI if needs & {"fisher", "inputs"} else None
        found = score(w_OI, g, f)
        if [tensor._version for tensor in given] != versions:
            raise UserError(f"metric {name!r}: changes what it is given: write w * g, not w.mul_(g)")
        if not isinstance(found, Tensor) or found.shape != w_OI.shape:
            got = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            raise UserError(f"metric {name!r}: must return a score for each weight, {tuple(w_OI.shape)}, not {got}")
        if not torch.isfinite(found).all():
            raise UserError(f"metric {name!r}: a score is not finite: look for divisions by zero, roots and logarithms")
        return found.to(torch.promote_types(found.dtype, w_OI.dtype)).masked_fill(w_OI == 0, 0)

    return checked


def taylor(w_OI: Tensor, g_OI: Tensor, f_OI: Tensor) -> Tensor:
    """|w·g − ½·w²·f|: the change of the loss to second order, with the diagonal Fisher as curvature."""
    return torch.mul(w_OI, f_OI).mul_(-0.5).add_(g_OI).mul_(w_OI).abs_()  # one temporary, not four


def taylor1(w_OI: Tensor, g_OI: Tensor, f_OI: Tensor) -> Tensor:
    """|w·g|: the first-order term only."""
    return (w_OI * g_OI).abs()


def derivative(w_OI: Tensor, g_OI: Tensor, f_OI: Tensor) -> Tensor:
    """w·g: its sum c over a group is the derivative of the loss by a mask on the group; E[c²] is the group's Fisher."""
    return w_OI * g_OI


def obd(w_OI: Tensor, g_OI: Tensor, f_OI: Tensor) -> Tensor:
    """½·w²·f: the second-order term only (Optimal Brain Damage)."""
    return 0.5 * w_OI.square() * f_OI


def layer_error(w_OI: Tensor, g_OI: Tensor, f_OI: Tensor) -> Tensor:
    """w²·f: the change of the layer's own output, for which no gradient is needed (Wanda, OBC)."""
    return w_OI.square() * f_OI


def magnitude(w_OI: Tensor, g_OI: Tensor, f_OI: Tensor) -> Tensor:
    """w²: a control that needs no data."""
    return w_OI.square()


def random(seed: int) -> Callable[..., Tensor]:
    """Uniform random scores: a control. One seed gives one sequence of draws."""
    generator = torch.Generator().manual_seed(seed)

    def score(w_OI: Tensor, g_OI: None, f_OI: None) -> Tensor:
        return torch.rand(w_OI.shape, generator=generator).to(w_OI)

    return score


METRICS: tuple[str, ...] = ()
register_metric("taylor", taylor, needs=("gradient", "fisher"), plain=True)
register_metric("taylor1", taylor1, needs=("gradient",), plain=True)
register_metric("obd", obd, needs=("fisher",), plain=True)
_METRICS["group"] = _Entry(
    lambda seed: Metric(derivative, frozenset({"groups"}), squares_sums=True), f"{__name__}.derivative"
)
register_metric("wanda", layer_error, needs=("inputs",), curvature="diagonal", plain=True)
register_metric("obc", layer_error, needs=("inputs",), curvature="inverse", plain=True)
register_metric("magnitude", magnitude, plain=True)
register_metric("random", random, seeded=True)
METRICS = tuple(_METRICS)
"""The built-in metrics; their names cannot be registered again."""


def metric_named(name: str, seed: int = 0) -> Metric:
    """A metric by name; only seeded metrics use ``seed``."""
    check_metric(name)
    return _METRICS[name].make(seed)


def check_metric(name: str, where: str = "metric ") -> None:
    """Raise if a name is neither registered nor an entry point of an installed package."""
    if name in _METRICS:
        return
    offers = [point for point in entry_points(group=GROUP) if point.name == name]
    if not offers:
        raise UserError(
            f"{where}{name!r} is unknown: choose one of {', '.join(known_metrics())}; one of your own must be "
            f"registered before with dwindle.register_metric, or its package installed (docs/extending.md)"
        )
    _load(name, offers, where)


def known_metrics() -> list[str]:
    """Names of all metrics: built-in, registered, then those of installed packages."""
    return list(dict.fromkeys([*_METRICS, *sorted(point.name for point in entry_points(group=GROUP))]))


def _load(name: str, offers: list[EntryPoint], where: str) -> None:
    """Import the package that provides a metric, which registers it."""
    packages = [point.dist.name if point.dist is not None else point.value for point in offers]
    if len(offers) > 1:
        raise UserError(f"{where}{name!r}: is offered by several packages ({', '.join(packages)}): remove all but one")
    try:
        offers[0].load()
    except Exception as error:
        raise UserError(f"{where}{name!r}: the package {packages[0]} cannot be loaded: {error!r}") from error
    if name not in _METRICS:
        raise UserError(
            f"{where}{name!r}: the package {packages[0]} offers it and does not register it: "
            f"{offers[0].module} must call dwindle.register_metric({name!r}, …)"
        )
