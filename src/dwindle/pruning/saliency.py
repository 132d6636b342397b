"""How much the loss would grow if a group left: element scores of the output projections, summed over groups.

Shapes: O hidden rows of an output projection, I its input columns, H heads, N FFN channels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dwindle.anatomy import Group, Kind, Structure
from dwindle.anatomy.anatomy import places
from dwindle.errors import UserError
from dwindle.pruning.surgery import Prunable


@dataclass(frozen=True, slots=True)
class Metric:
    """An element-wise score of weights w, mean gradient g and diagonal Fisher f; a zero weight scores zero."""

    score: Callable[[Tensor, Tensor, Tensor], Tensor]
    needs: frozenset[str] = frozenset()
    """What must be collected for it: of ``gradient`` and ``fisher``; what is not collected is passed as w."""


def taylor(w_OI: Tensor, g_OI: Tensor, f_OI: Tensor) -> Tensor:
    """|w·g − ½·w²·f|: the change of the loss to second order, with the diagonal Fisher as curvature."""
    return (w_OI * g_OI - 0.5 * w_OI.square() * f_OI).abs()


def taylor1(w_OI: Tensor, g_OI: Tensor, f_OI: Tensor) -> Tensor:
    """|w·g|: the first-order term alone."""
    return (w_OI * g_OI).abs()


def magnitude(w_OI: Tensor, g_OI: Tensor, f_OI: Tensor) -> Tensor:
    """w²: a control that needs no data."""
    return w_OI.square()


def _random(seed: int) -> Metric:
    """Uniform: a control that looks at nothing. One seed gives one sequence of draws."""
    generator = torch.Generator().manual_seed(seed)

    def score(w_OI: Tensor, g_OI: Tensor, f_OI: Tensor) -> Tensor:
        drawn = torch.rand(w_OI.shape, generator=generator).to(w_OI)
        return drawn * (w_OI != 0)

    return Metric(score)


_METRICS: dict[str, Callable[[int], Metric]] = {
    "taylor": lambda seed: Metric(taylor, frozenset({"gradient", "fisher"})),
    "taylor1": lambda seed: Metric(taylor1, frozenset({"gradient"})),
    "magnitude": lambda seed: Metric(magnitude),
    "random": _random,
}
METRICS = tuple(_METRICS)


def metric_named(name: str, seed: int = 0) -> Metric:
    """A metric by name; ``seed`` matters to ``random`` only."""
    if name not in _METRICS:
        raise UserError(f"metric {name!r} is unknown: choose one of {', '.join(METRICS)}")
    return _METRICS[name](seed)


@dataclass(slots=True)
class Scores:
    """Sums of element scores, one for each head, channel and hidden index of ``structure``, on the CPU in float64.

    What is dead has an infinite score, so it is never the weakest.
    """

    structure: Structure
    attn: list[Tensor]
    ffn: list[Tensor]
    stem: Tensor

    def mask(self, dead: Mapping[Kind, list[Tensor]]) -> Scores:
        for values, gone in ((self.attn, dead["attn"]), (self.ffn, dead["ffn"]), ([self.stem], dead["stem"])):
            for value, flags in zip(values, gone, strict=True):
                value.masked_fill_(flags, float("inf"))
        return self

    def restricted(self, structure: Structure) -> Scores:
        """The same scores for a model that was compacted to ``structure``."""

        def pick(values: list[Tensor], unit: str) -> list[Tensor]:
            layers = range(len(values))
            where = [places(structure.unit(unit, la), self.structure.unit(unit, la)) for la in layers]
            return [value[place] for value, place in zip(values, where, strict=True)]

        stem = self.stem[places(structure.hidden, self.structure.hidden)]
        return Scores(structure, pick(self.attn, "query"), pick(self.ffn, "ffn"), stem)

    def smoothed(self, previous: Scores | None, factor: float) -> Scores:
        """``factor``·previous + (1 − factor)·this."""
        if previous is None or factor == 0.0:
            return self
        assert previous.structure == self.structure

        def mix(now: list[Tensor], before: list[Tensor]) -> list[Tensor]:
            return [factor * b + (1 - factor) * n for n, b in zip(now, before, strict=True)]

        return Scores(
            self.structure,
            mix(self.attn, previous.attn),
            mix(self.ffn, previous.ffn),
            mix([self.stem], [previous.stem])[0],
        )


def score_model(
    prunable: Prunable, gradients: Mapping[str, Tensor], fishers: Mapping[str, Tensor], metric: Metric
) -> Scores:
    """Scores of the model as it is. Elements of dead groups are zero and add nothing to the living.

    Only row and column sums leave the device that the weights are on.
    """
    columns: dict[str, list[Tensor]] = {"attn": [], "ffn": []}
    rows: list[Tensor] = []
    for kind, element_OI in _elements(prunable, gradients, fishers, metric):
        rows.append(element_OI.sum(1, dtype=torch.float64))
        columns[kind].append(element_OI.sum(0, dtype=torch.float64))
    heads = [c_I.view(-1, prunable.anatomy.head_dim).sum(1) for c_I in columns["attn"]]
    stem = torch.stack(rows).sum(0)
    flat = torch.cat([*heads, *columns["ffn"], stem]).cpu()  # one transfer, one wait
    sums = list(torch.split(flat, [len(t) for t in (*heads, *columns["ffn"], stem)]))
    count = len(heads)
    return Scores(prunable.physical, sums[:count], sums[count:-1], sums[-1]).mask(prunable.dead)


class ElementScores:
    """Frozen element scores of one calibration, re-summed exactly as groups leave (pruning without training).

    ``o`` is kept summed over each head, ``down`` element by element: the size of the FFN outputs, once.
    """

    def __init__(
        self, prunable: Prunable, gradients: Mapping[str, Tensor], fishers: Mapping[str, Tensor], metric: Metric
    ) -> None:
        self.structure = prunable.physical
        self._heads_OH: list[Tensor] = []
        self._channels_ON: list[Tensor] = []
        for kind, element_OI in _elements(prunable, gradients, fishers, metric):
            if kind == "attn":
                self._heads_OH.append(element_OI.view(len(element_OI), -1, prunable.anatomy.head_dim).sum(2).cpu())
            else:
                self._channels_ON.append(element_OI.cpu())
        everything = self._heads_OH + self._channels_ON
        self.scores = Scores(
            self.structure,
            [e.sum(0, dtype=torch.float64) for e in self._heads_OH],
            [e.sum(0, dtype=torch.float64) for e in self._channels_ON],
            torch.stack([e.sum(1, dtype=torch.float64) for e in everything]).sum(0),
        ).mask(prunable.dead)

    def remove(self, group: Group) -> None:
        """Take a group out of the sums of the others."""
        scores = self.scores
        if group.kind == "stem":
            rows = places(group.members[0], self.structure.hidden)
            scores.stem[rows] = float("inf")
            for elements, sums in ((self._heads_OH, scores.attn), (self._channels_ON, scores.ffn)):
                for element, total in zip(elements, sums, strict=True):
                    total -= element[rows].sum(0, dtype=torch.float64)
                    element[rows] = 0
            return
        unit = "query" if group.kind == "attn" else "ffn"
        elements = self._heads_OH if group.kind == "attn" else self._channels_ON
        sums = scores.attn if group.kind == "attn" else scores.ffn
        for layer, members in enumerate(group.members):
            columns = places(members, self.structure.unit(unit, layer))
            scores.stem -= elements[layer][:, columns].sum(1, dtype=torch.float64)
            elements[layer][:, columns] = 0
            sums[layer][columns] = float("inf")


def _elements(
    prunable: Prunable, gradients: Mapping[str, Tensor], fishers: Mapping[str, Tensor], metric: Metric
) -> Iterator[tuple[str, Tensor]]:
    """(attn or ffn, element scores) of the output projections, layer by layer."""
    parameters = dict(prunable.model.named_parameters())
    for layer in range(prunable.anatomy.num_layers):
        for kind in ("attn", "ffn"):
            name = prunable.anatomy.output_row(layer, kind).name
            weight = parameters[name].detach()
            yield kind, metric.score(weight, gradients.get(name, weight), fishers.get(name, weight))
