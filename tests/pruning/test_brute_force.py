"""Selection against slow, simple selectors: a loop over every group, a whole structure and a whole count for each."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
from drawn import drawn_scores

from dwindle.anatomy.anatomy import Anatomy
from dwindle.anatomy.structure import Group, Structure
from dwindle.pruning import surgery
from dwindle.pruning.config import PostTrainingConfig, PruneConfig
from dwindle.pruning.metrics import metric_named
from dwindle.pruning.pacing import Rounds
from dwindle.pruning.saliency import ElementScores, Scores
from dwindle.pruning.strategies import make_strategy
from dwindle.pruning.surgery import Prunable
from dwindle.pruning.target import Target
from tiny import random_group, tiny_model

Found = list[tuple[Group, int]]
ALL = Rounds(0, 0, 1)


def counted(anatomy: Anatomy, structure: Structure) -> int:
    return sum(prod(anatomy.shape(row, structure)) for row in anatomy.rows)


def of_layer(kind: Any, number: int, members: tuple[int, ...], layers: int) -> Group:
    return Group(kind, tuple(members if n == number else () for n in range(layers)))


def scores_of(anatomy: Anatomy, seed: int, ties: bool) -> Scores:
    scores = drawn_scores(anatomy.source, anatomy.source, seed)
    if ties:
        for values in (*scores.attn, *scores.ffn, scores.stem):
            values.mul_(4).ceil_()
    return scores


def best_of(anatomy: Anatomy, alive: Structure, goal: int, options: list[tuple[float, Group]]) -> tuple[Group, int]:
    """The least salient that stays at or above the goal; else the one that goes below it by least."""
    left = [(value, group, counted(anatomy, alive.without(group))) for value, group in options]
    fitting = [one for one in left if one[2] >= goal]
    _, group, count = min(fitting, key=lambda one: one[0]) if fitting else max(left, key=lambda one: one[2])
    return group, count


def divided(anatomy: Anatomy, alive: Structure, group: Group, total: float, elements: int, compare: str) -> float:
    saved = counted(anatomy, alive) - counted(anatomy, alive.without(group))
    return total / {"mean": elements, "sum": 1, "saved": saved}[compare]


def coupled_by_force(anatomy: Anatomy, scores: Any, goal: int, compare: str) -> Found:
    alive, found, layers = anatomy.source, Found(), range(anatomy.num_layers)
    while counted(anatomy, alive) > goal:
        now, hidden = scores.current, len(alive.hidden)
        heads = [min(la.query_heads, key=now.attn[n].tolist().__getitem__) for n, la in enumerate(alive.layers)]
        channels = [min(la.ffn, key=now.ffn[n].tolist().__getitem__) for n, la in enumerate(alive.layers)]
        index = min(alive.hidden, key=now.stem.tolist().__getitem__)
        columns = sum(len(la.query_heads) * anatomy.head_dim + len(la.ffn) for la in alive.layers)
        options = list[tuple[Group, float, int]]()
        if len(alive.layers[0].query_heads) > 1:
            total = sum(float(now.attn[n][heads[n]]) for n in layers)
            options.append((Group("attn", tuple((q,) for q in heads)), total, len(heads) * anatomy.head_dim * hidden))
        if len(alive.layers[0].ffn) > 8:
            total = sum(float(now.ffn[n][channels[n]]) for n in layers)
            options.append((Group("ffn", tuple((c,) for c in channels)), total, len(channels) * hidden))
        if hidden > 8:
            options.append((Group("stem", ((index,),)), float(now.stem[index]), columns))
        values = [(divided(anatomy, alive, *option, compare), option[0]) for option in options]
        found.append(best_of(anatomy, alive, goal, values))
        alive = alive.without(found[-1][0])
        scores.remove(found[-1][0])
    return found


def global_by_force(anatomy: Anatomy, scores: Scores, goal: int, compare: str) -> Found:
    alive, found, layers = anatomy.source, Found(), anatomy.num_layers
    while counted(anatomy, alive) > goal:
        hidden = len(alive.hidden)
        columns = sum(len(la.query_heads) * anatomy.head_dim + len(la.ffn) for la in alive.layers)
        options: dict[str, list[tuple[float, Group]]] = {"attn": [], "ffn": [], "stem": []}
        for n, layer in enumerate(alive.layers):
            for query in layer.query_heads if len(layer.query_heads) > 1 else ():
                group, total = of_layer("attn", n, (query,), layers), float(scores.attn[n][query])
                value = divided(anatomy, alive, group, total, anatomy.head_dim * hidden, compare)
                options["attn"].append((value, group))
            for channel in layer.ffn if len(layer.ffn) > 8 else ():
                group, total = of_layer("ffn", n, (channel,), layers), float(scores.ffn[n][channel])
                options["ffn"].append((divided(anatomy, alive, group, total, hidden, compare), group))
        for index in alive.hidden if hidden > 8 else ():
            group = Group("stem", ((index,),))
            value = divided(anatomy, alive, group, float(scores.stem[index]), columns, compare)
            options["stem"].append((value, group))
        least = [min(of, key=lambda one: one[0]) for of in options.values() if of]
        found.append(best_of(anatomy, alive, goal, least))
        alive = alive.without(found[-1][0])
    return found


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("compare", ["mean", "sum", "saved"])
@pytest.mark.parametrize("selection", ["coupled", "global"])
def test_the_same_groups_in_the_same_order(selection: Any, compare: Any, ties: bool) -> None:
    anatomy = Anatomy.of(tiny_model("llama", intermediate_size=20, hidden_size=16, num_attention_heads=4))
    goal = int(0.6 * counted(anatomy, anatomy.source))
    config = PruneConfig(selection=selection, compare=compare, attention="cluster")
    by_force = coupled_by_force if selection == "coupled" else global_by_force
    scores = scores_of(anatomy, 5, ties)
    expected = by_force(anatomy, scores.copy(), goal, compare)
    chosen = list(make_strategy(anatomy, Target(goal), config).choose(scores, anatomy.source, ALL, 1, 0))
    assert [(choice.group, choice.num_parameters) for choice in chosen] == expected
    alive = anatomy.source
    for choice in chosen:
        alive = alive.without(choice.group)
        assert choice.rest == alive
    assert chosen[0].rest == anatomy.source.without(chosen[0].group)  # also back again


@pytest.mark.parametrize("seed", [1, 6])
def test_heads_save_less_after_a_hidden_channel_is_removed(seed: int) -> None:
    """All heads are compared by what they save now: of one layer, which lost a head, and of the others."""
    sizes = {"intermediate_size": 12, "hidden_size": 24, "num_attention_heads": 8, "num_key_value_heads": 8}
    anatomy = Anatomy.of(tiny_model("llama", **sizes, head_dim=4))
    goal = int(0.35 * counted(anatomy, anatomy.source))
    config = PruneConfig(selection="global", compare="saved", attention="cluster")
    scores = scores_of(anatomy, seed, ties=False)
    for values in scores.attn:
        values.mul_(6)
    expected = global_by_force(anatomy, scores.copy(), goal, "saved")
    chosen = list(make_strategy(anatomy, Target(goal), config).choose(scores, anatomy.source, ALL, 1, 0))
    assert {choice.group.kind for choice in chosen} == {"attn", "ffn", "stem"}
    assert [(choice.group, choice.num_parameters) for choice in chosen] == expected


class Elements:
    """Sums over matrices in which removed rows and columns are zero, made anew after every removal."""

    def __init__(self, prunable: Prunable) -> None:
        self.anatomy, self.alive = prunable.anatomy, prunable.alive
        names = [row.name for _, row in prunable.outputs]
        self.weights = {name: prunable.parameters[name].detach().square() for name in names}

    @property
    def current(self) -> Scores:
        source, layers = self.anatomy.source, range(self.anatomy.num_layers)
        o, down = ([self.weights[self.anatomy.output_row(n, kind).name] for n in layers] for kind in ("attn", "ffn"))
        heads = [e.sum(0).view(-1, self.anatomy.head_dim).sum(1) for e in o]
        return Scores(source, heads, [e.sum(0) for e in down], sum(e.sum(1) for e in (*o, *down)))  # type: ignore[arg-type]

    def remove(self, group: Group) -> None:
        self.alive = self.alive.without(group)
        for name, weight in self.weights.items():
            row, dead = self.anatomy[name], torch.ones_like(weight, dtype=torch.bool)
            rows, columns = (self.anatomy.positions(row, axis, self.alive, self.anatomy.source) for axis in (0, 1))
            dead[rows[:, None], columns] = False
            weight[dead] = 0


def test_elements_of_removed_groups_count_no_more() -> None:
    prunable = Prunable(tiny_model("llama", intermediate_size=24, hidden_size=20, num_attention_heads=4, head_dim=4))
    anatomy = prunable.anatomy
    goal = int(0.5 * counted(anatomy, anatomy.source))
    expected = coupled_by_force(anatomy, Elements(prunable), goal, "mean")
    scores = ElementScores(prunable, {}, {}, metric_named("magnitude"))
    before = scores.copy()
    strategy = make_strategy(anatomy, Target(goal), PruneConfig(attention="cluster"))
    for own in (scores, before):  # a copy is not changed with what it was made from
        chosen = list(strategy.choose(own, anatomy.source, ALL, 1, 0))
        assert [(choice.group, choice.num_parameters) for choice in chosen] == expected
    assert {group.kind for group, _ in expected} == {"attn", "ffn", "stem"}


@pytest.mark.parametrize("ties", [False, True])
def test_one_threshold_for_all_layers(ties: bool) -> None:
    """FLAP: the least salient group of any layer, one after the other, until the count is reached."""
    anatomy = Anatomy.of(tiny_model("llama"))
    scores, source = scores_of(anatomy, 3, ties), anatomy.source
    goal = int(0.7 * counted(anatomy, source))
    options = list[tuple[float, int, int, tuple[int, ...]]]()
    for n, layer in enumerate(source.layers):
        for kv in layer.kv_heads:
            queries = layer.queries_of(kv)
            total = sum(float(scores.attn[n][q]) for q in queries) / len(queries) / anatomy.head_dim
            options.append((total, n, 0, queries))
        options += [(float(scores.ffn[n][c]), n, 1, (c,)) for c in layer.ffn]
    alive = source
    for _, n, axis, members in sorted(options, key=lambda one: one[:3]):
        if counted(anatomy, alive) <= goal:
            break
        if (len(alive.layers[n].kv_heads) <= 1, len(alive.layers[n].ffn) <= 8)[axis]:
            continue
        alive = alive.without(of_layer("ffn" if axis else "attn", n, members, anatomy.num_layers))
    strategy = make_strategy(anatomy, Target(goal), PostTrainingConfig(method="flap"))
    assert list(strategy.choose(scores, source, ALL, 1, 0))[-1].rest == alive


@pytest.mark.parametrize("family", ["llama", "phi3", "gemma3_text", "lfm2", "qwen3_5_text"])
def test_counts_and_removals_of_many_groups(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A polynomial of sizes counts what shapes do; all groups at once leave what one after the other does."""
    model = tiny_model(family)
    prunable, other = Prunable(model), Prunable(tiny_model(family))
    anatomy, groups = prunable.anatomy, list[Group]()
    alive = anatomy.source
    for number in range(18):
        kinds = [kind for kind in ("ffn", "stem", "attn") if kind in anatomy.family.groups]
        kind = kinds[number % len(kinds)]
        if kind == "attn" and number > 2:
            continue
        groups.append(random_group(kind, alive, number))
        alive = alive.without(groups[-1])
        assert anatomy.count(alive).total == counted(anatomy, alive) == anatomy.count(alive.sized()).total
    assert anatomy.source.without_all(groups) == alive
    other.prune_to(alive)
    monkeypatch.setattr(surgery, "_MANY_SPANS", 0)
    prunable.prune_to(alive)
    for name, parameter in prunable.parameters.items():
        assert torch.equal(parameter, other.parameters[name]), name
