"""The global selection against plain searches: single groups, blocks that keep widths round, what is refused."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from dataclasses import replace
from typing import Any

import pytest
from drawn import drawn_scores

from dwindle.anatomy import Anatomy, Group, Structure
from dwindle.core.errors import UserError
from dwindle.pruning.saliency import Scores
from dwindle.pruning.strategies.coupled import SelectionOptions
from dwindle.pruning.strategies.global_selection import GlobalSelector, check_round_widths
from dwindle.pruning.surgery import Prunable
from dwindle.pruning.target import Target
from tiny import tiny_model


@pytest.mark.parametrize("compare", ["mean", "sum"])
@pytest.mark.parametrize("attention", ["regular", "cluster"])
def test_global_choice_equals_a_plain_search(attention: str, compare: str) -> None:
    """Every group of every layer is tried, at every event."""
    anatomy = Anatomy.of(tiny_model("llama"))
    source = anatomy.source
    options = SelectionOptions(attention=attention, compare=compare, min_ffn=30)  # type: ignore[arg-type]
    scores = drawn_scores(source, source, 3)
    chosen = GlobalSelector(anatomy, Target(10_000), options).choose_while(scores, source, lambda _, n: n < 25)
    assert len(chosen) == 25 and len({choice.group.kind for choice in chosen}) >= 2
    alive = source
    for choice in chosen:
        tried = list(all_groups(alive, attention, min_ffn=30))
        best = min(tried, key=lambda group: value(anatomy, scores, alive, group, compare))
        assert choice.group == best
        assert choice.saliency[best.kind] == pytest.approx(value(anatomy, scores, alive, best, compare))
        alive = alive.without(best)
        assert choice.rest == alive and choice.num_parameters == anatomy.count(alive).total


@pytest.mark.parametrize("compare", ["mean", "sum"])
@pytest.mark.parametrize(("multiple", "goal"), [(1, 9_000), (4, 9_000), (16, 12_000)])
def test_global_choice_of_blocks_equals_a_plain_search(multiple: int, goal: int, compare: str) -> None:
    """The least channels of every layer and of the stem, one by one, in blocks; what makes widths round is first."""
    anatomy = Anatomy.of(tiny_model("llama"))
    source = anatomy.source
    options = SelectionOptions(groups=("ffn", "stem"), compare=compare, min_ffn=3, min_hidden=3)  # type: ignore[arg-type]
    scores = drawn_scores(source, source, 4)
    chosen = GlobalSelector(anatomy, Target(goal), options, multiple).choose_while(scores, source, lambda *_: True)
    alive, before = source, 0
    for choice in chosen:
        odd, even = list[Group](), list[Group]()
        for group, width in blocks(alive, scores, multiple):
            if width >= 3:
                (odd if (width + len(sum(group.members, ()))) % multiple else even).append(group)
        least = lambda groups: min(groups, key=lambda group: value(anatomy, scores, alive, group, compare))  # noqa: B023, E731
        before, tried = anatomy.count(alive).total, odd or even
        fitting = [group for group in tried if anatomy.count(alive.without(group)).total >= goal]
        weakest = [least([g for g in tried if g.kind == k]) for k in ("ffn", "stem") if any(g.kind == k for g in tried)]
        if fitting and choice is not chosen[-1]:
            assert choice.group == least([group for group in weakest if group in fitting])
        assert choice.group in weakest
        alive = alive.without(choice.group)
        assert choice.rest == alive
    assert multiple == 16 or {choice.group.kind for choice in chosen} == {"ffn", "stem"}
    assert anatomy.count(alive).total <= goal < before
    assert all(len(la.ffn) % multiple == 0 for la in alive.layers) and len(alive.hidden) % multiple == 0


def blocks(alive: Structure, scores: Scores, multiple: int) -> Any:
    """What could leave each layer and the stem next, and the width that it leaves."""
    places = [("stem", 0, alive.hidden, scores.stem)]
    places += [("ffn", n, la.ffn, scores.ffn[n]) for n, la in enumerate(alive.layers)]
    for kind, n, channels, values in places:
        size = len(channels) % multiple or multiple
        members = tuple(sorted(sorted(channels, key=lambda c: float(values[c]))[:size]))
        around = [()] * (1 if kind == "stem" else len(alive.layers))
        yield Group(kind, (*around[:n], members, *around[n + 1 :])), len(channels) - size  # type: ignore[arg-type]


@pytest.mark.parametrize(("attention", "min_heads"), [("cluster", 2), ("cluster", 1), ("regular", 3), ("regular", 5)])
def test_what_the_global_selection_accepts_it_reaches(attention: Any, min_heads: int) -> None:
    """The least accepted target, from a source of unequal layers, whatever the scores are."""
    prunable = Prunable(tiny_model("llama"))
    prunable.prune(Group("attn", ((0, 1, 2, 3, 4, 5), (), ())))
    anatomy = Anatomy.of(prunable.compacted())
    options = SelectionOptions(attention=attention, min_heads=min_heads, groups=("attn", "ffn"))

    def accepted(goal: int) -> bool:
        try:
            return bool(GlobalSelector(anatomy, Target(goal), options))
        except UserError:
            return False

    full = anatomy.count(anatomy.source).total
    least = bisect_left(range(full), True, key=accepted)
    assert 0 < least < full
    for seed in range(20):
        scores = drawn_scores(anatomy.source, anatomy.source, seed)
        chosen = GlobalSelector(anatomy, Target(least), options).choose_while(scores, anatomy.source, lambda *_: True)
        assert chosen[-1].num_parameters <= least


def test_the_dead_never_leave_again() -> None:
    """Whatever the scores of the living: infinite, or no numbers."""
    anatomy = Anatomy.of(tiny_model("llama"))
    source, options = anatomy.source, SelectionOptions(groups=("ffn",), min_ffn=1)
    alive = source.without(Group("ffn", ((0, 1, 2, 3), (), ())))
    for odd in (float("inf"), float("nan")):
        scores = drawn_scores(alive, source, 6)
        scores.ffn[0][10:14] = odd
        chosen = GlobalSelector(anatomy, Target(14_500), options).choose_while(scores, alive, lambda *_: True)
        rests = [alive, *(choice.rest for choice in chosen)]
        assert all(before != after for before, after in itertools.pairwise(rests))


def test_rounded_global_refuses_what_cannot_be() -> None:
    anatomy = Anatomy.of(tiny_model("llama"))
    full = anatomy.count(anatomy.source).total
    check_round_widths(anatomy, Target(full // 2), SelectionOptions(), 16)
    check_round_widths(anatomy, Target(full), SelectionOptions(groups=("attn",)), 48)  # nothing to round
    with pytest.raises(UserError, match="round_to 48: no such multiple"):
        check_round_widths(anatomy, Target(full // 2), SelectionOptions(), 48)
    with pytest.raises(UserError, match="no such multiple"):
        check_round_widths(anatomy, Target(full // 2), SelectionOptions(min_ffn=33), 16)
    layers = tuple(replace(la, ffn=la.ffn[:32]) for la in anatomy.source.layers)
    most = anatomy.count(replace(anatomy.source, layers=layers)).total
    check_round_widths(anatomy, Target(most), SelectionOptions(), 16)
    prunable = Prunable(tiny_model("llama"))
    prunable.prune(Group("ffn", (tuple(range(6, 40)), (), ())))  # below the floor, but round already: it stays
    check_round_widths(Anatomy.of(prunable.compacted()), Target(full // 2), SelectionOptions(), 6)
    with pytest.raises(UserError, match=f"largest model with such widths has {most:,}"):
        check_round_widths(anatomy, Target(most + 1), SelectionOptions(), 16)


def all_groups(alive: Structure, attention: str, min_ffn: int) -> Any:
    empty = [()] * len(alive.layers)
    place = lambda kind, n, members: Group(kind, (*empty[:n], members, *empty[n + 1 :]))  # noqa: E731
    yield from (Group("stem", ((index,),)) for index in alive.hidden)
    for n, layer in enumerate(alive.layers):
        if len(layer.ffn) > min_ffn:
            yield from (place("ffn", n, (channel,)) for channel in layer.ffn)
        if attention == "cluster":
            ways = [(q,) for q in layer.query_heads]
        else:
            ways = [layer.queries_of(kv) for kv in layer.kv_heads]
            singles = [layer.queries_of(kv) for kv in layer.kv_heads]
            if len(singles[0]) == 2:  # the tiny models have two queries on each key/value head
                ways += [(a, *rest) for a in singles[0] for rest in product_of(singles[1:])]
        yield from (place("attn", n, tuple(way)) for way in ways if len(way) < len(layer.query_heads))


def product_of(parts: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    return [(first, *rest) for first in parts[0] for rest in product_of(parts[1:])] if parts else [()]


def value(anatomy: Anatomy, scores: Scores, alive: Structure, group: Group, compare: str) -> float:
    if group.kind == "stem":
        total = sum(float(scores.stem[member]) for member in group.members[0])
        size = len(group.members[0]) * sum(len(la.query_heads) * 4 + len(la.ffn) for la in alive.layers)
    else:
        values = scores.attn if group.kind == "attn" else scores.ffn
        members = [(n, m) for n, own in enumerate(group.members) for m in own]
        total = sum(float(values[n][m]) for n, m in members)
        size = len(members) * (4 if group.kind == "attn" else 1) * len(alive.hidden)
    return total / (size if compare == "mean" else 1)


def test_global_lands_on_the_target() -> None:
    anatomy = Anatomy.of(tiny_model("llama"))
    scores = drawn_scores(anatomy.source, anatomy.source, 5)
    for goal in (6000, 9001, 12345):
        chosen = GlobalSelector(anatomy, Target(goal), SelectionOptions()).choose_while(
            scores, anatomy.source, lambda *_: True
        )
        channel = 3 * len(chosen[-1].rest.hidden)
        assert goal - channel - 2 < chosen[-1].num_parameters <= goal  # mlp biases make a channel two larger
