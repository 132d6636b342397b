"""The global mixture against plain searches: single groups, blocks that keep widths round, what is refused."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from dataclasses import replace
from typing import Any

import pytest
import torch
from drawn import drawn_scores

from dwindle.anatomy.anatomy import Anatomy
from dwindle.anatomy.structure import Group, Structure
from dwindle.core.errors import UserError
from dwindle.pruning.config import PruneConfig
from dwindle.pruning.pacing import Ratio, Rounds
from dwindle.pruning.saliency import Scores
from dwindle.pruning.strategies import make_strategy
from dwindle.pruning.strategies.base import Choice
from dwindle.pruning.strategies.global_mixture import GlobalStrategy, check_round_widths
from dwindle.pruning.surgery import Prunable
from dwindle.pruning.target import Target
from tiny import tiny_model

ALL_AT_ONCE = Rounds(0, 0, 1)
"""Until the target, in one step."""


def mixture(**settings: Any) -> PruneConfig:
    return PruneConfig(selection="global", **settings)


def chosen_at_once(
    anatomy: Anatomy, goal: int, config: PruneConfig, scores: Scores, alive: Structure | None = None
) -> list[Choice]:
    """All groups from the same scores."""
    strategy = GlobalStrategy(anatomy, Target(goal), config)
    return list(strategy.choose(scores, alive or anatomy.source, ALL_AT_ONCE, 1, 0))


@pytest.mark.parametrize("compare", ["mean", "sum", "saved", "zscore"])
@pytest.mark.parametrize("attention", ["regular", "cluster"])
def test_global_choice_equals_a_plain_search(attention: str, compare: str) -> None:
    """Every group of every layer is tried, at every event."""
    anatomy = Anatomy.of(tiny_model("llama"))
    source = anatomy.source
    config = mixture(attention=attention, compare=compare, min_ffn=30)
    scores = drawn_scores(source, source, 3)
    strategy, pacing = GlobalStrategy(anatomy, Target(10_000), config), Ratio(30, 1, 0)
    chosen = list(strategy.choose(scores, source, pacing, 1, 5))  # 25 of the 30 are left to do
    assert len(chosen) == 25 and len({choice.group.kind for choice in chosen}) >= 2
    alive = source
    for choice in chosen:
        tried = list(all_groups(alive, attention, min_ffn=30))
        best = min(tried, key=lambda group: value(anatomy, scores, alive, group, compare))
        assert choice.group == best
        assert choice.saliency[best.kind] == pytest.approx(value(anatomy, scores, alive, best, compare))
        alive = alive.without(best)
        assert choice.rest == alive and choice.num_parameters == anatomy.count(alive).total


@pytest.mark.parametrize("compare", ["mean", "sum", "zscore"])
@pytest.mark.parametrize(("multiple", "goal"), [(1, 9_000), (4, 9_000), (16, 12_000)])
def test_global_choice_of_blocks_equals_a_plain_search(multiple: int, goal: int, compare: str) -> None:
    """The least channels of every layer and of the stem, one by one, in blocks; what makes widths round comes first."""
    anatomy = Anatomy.of(tiny_model("llama"))
    source = anatomy.source
    config = mixture(groups=["ffn", "stem"], compare=compare, min_ffn=3, min_hidden=3, round_to=multiple)
    scores = drawn_scores(source, source, 4)
    chosen = chosen_at_once(anatomy, goal, config, scores)
    alive, before = source, 0
    for choice in chosen:
        odd, even = list[Group](), list[Group]()
        for group, width in blocks(alive, scores, multiple):
            if width >= 3:
                (odd if (width + len(sum(group.members, ()))) % multiple else even).append(group)
        least = lambda groups: min(groups, key=lambda group: value(anatomy, scores, alive, group, compare))  # noqa: B023, E731
        before, tried = anatomy.count(alive).total, odd or even
        fitting = [group for group in tried if anatomy.count(alive.without(group)).total >= goal]
        least_salient = [
            least([g for g in tried if g.kind == k]) for k in ("ffn", "stem") if any(g.kind == k for g in tried)
        ]
        if fitting and choice is not chosen[-1]:
            assert choice.group == least([group for group in least_salient if group in fitting])
        assert choice.group in least_salient
        alive = alive.without(choice.group)
        assert choice.rest == alive
    assert {choice.group.kind for choice in chosen} == {"ffn", "stem"}
    assert anatomy.count(alive).total <= goal < before
    assert all(len(la.ffn) % multiple == 0 for la in alive.layers) and len(alive.hidden) % multiple == 0


def blocks(alive: Structure, scores: Scores, multiple: int) -> Any:
    """What could be removed next from each layer and the stem, and the width that remains."""
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
    config = mixture(attention=attention, min_heads=min_heads, groups=["attn", "ffn"])

    def accepted(goal: int) -> bool:
        try:
            return bool(GlobalStrategy(anatomy, Target(goal), config))
        except UserError:
            return False

    full = anatomy.count(anatomy.source).total
    least = bisect_left(range(full), True, key=accepted)
    assert 0 < least < full
    for seed in range(20):
        scores = drawn_scores(anatomy.source, anatomy.source, seed)
        chosen = chosen_at_once(anatomy, least, config, scores)
        assert chosen[-1].num_parameters <= least


def test_nothing_is_removed_twice() -> None:
    """Whatever the scores of what is alive: infinite, or no numbers."""
    anatomy = Anatomy.of(tiny_model("llama"))
    source, config = anatomy.source, mixture(groups=["ffn"], min_ffn=1)
    alive = source.without(Group("ffn", ((0, 1, 2, 3), (), ())))
    for odd in (float("inf"), float("nan")):
        scores = drawn_scores(alive, source, 6)
        scores.ffn[0][10:14] = odd
        chosen = chosen_at_once(anatomy, 14_500, config, scores, alive)
        rests = [alive, *(choice.rest for choice in chosen)]
        assert all(before != after for before, after in itertools.pairwise(rests))


def test_rounded_global_refuses_what_cannot_be() -> None:
    anatomy = Anatomy.of(tiny_model("llama"))
    full = anatomy.count(anatomy.source).total
    check_round_widths(anatomy, Target(full // 2), mixture(round_to=16))
    check_round_widths(anatomy, Target(full), mixture(groups=["attn"], round_to=48))  # nothing to round
    with pytest.raises(UserError, match="round_to 48: no multiple lies between"):
        check_round_widths(anatomy, Target(full // 2), mixture(round_to=48))
    with pytest.raises(UserError, match="no multiple lies between"):
        check_round_widths(anatomy, Target(full // 2), mixture(min_ffn=33, round_to=16))
    layers = tuple(replace(la, ffn=la.ffn[:32]) for la in anatomy.source.layers)
    most = anatomy.count(replace(anatomy.source, layers=layers)).total
    check_round_widths(anatomy, Target(most), mixture(round_to=16))
    prunable = Prunable(tiny_model("llama"))
    prunable.prune(Group("ffn", (tuple(range(6, 40)), (), ())))  # below the floor, but round already: it is kept
    check_round_widths(Anatomy.of(prunable.compacted()), Target(full // 2), mixture(round_to=6))
    with pytest.raises(UserError, match=f"largest model with such widths has {most:,}"):
        check_round_widths(anatomy, Target(most + 1), mixture(round_to=16))


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
        all_of, total = scores.stem, sum(float(scores.stem[member]) for member in group.members[0])
        size = len(group.members[0]) * sum(len(la.query_heads) * 4 + len(la.ffn) for la in alive.layers)
    else:
        values = scores.attn if group.kind == "attn" else scores.ffn
        members = [(n, m) for n, own in enumerate(group.members) for m in own]
        all_of, total = values[members[0][0]], sum(float(values[n][m]) for n, m in members)
        size = len(members) * (4 if group.kind == "attn" else 1) * len(alive.hidden)
    if compare == "saved":
        size = anatomy.count(alive).total - anatomy.count(alive.without(group)).total
    if compare == "zscore":
        mean = total / sum(map(len, group.members))
        return (mean - float(all_of.mean())) / float(all_of.std(correction=0))
    return total / (1 if compare == "sum" else size)


def test_z_scores_are_those_of_the_source_s_groups_with_removed_ones_at_zero() -> None:
    """In a model that is partly pruned and partly compacted."""
    source = Anatomy.of(tiny_model("llama")).source
    compacted = source.without(Group.of_layer("ffn", 0, (0, 1), len(source.layers)))
    scores = drawn_scores(compacted, source, 7)
    gone = Group("ffn", ((2,), (5, 6), *[()] * (len(source.layers) - 2)))
    alive = compacted.without(gone)
    scores.remove(gone)

    def expected(values: torch.Tensor, count: int) -> tuple[float, float]:
        left = [float(value) for value in values if value.isfinite()]
        whole = torch.tensor([*left, *[0.0] * (count - len(left))], dtype=torch.float64)
        return float(whole.mean()), float(whole.std(correction=0))

    for number, layer in enumerate(source.layers):
        found = [scores.moments(unit, number, alive, source) for unit in ("query", "ffn")]
        assert found[0] == pytest.approx(expected(scores.attn[number], len(layer.query_heads)))
        assert found[1] == pytest.approx(expected(scores.ffn[number], len(layer.ffn)))
    assert scores.moments("hidden", None, alive, source) == pytest.approx(expected(scores.stem, len(source.hidden)))


@pytest.mark.parametrize("compare", ["mean", "saved", "zscore"])
def test_a_key_value_head_counts_the_queries_that_it_still_has(compare: str) -> None:
    """With saliencies of their own (metric group), in a model that is not compacted as in one that is."""
    anatomy = Anatomy.of(tiny_model("llama"))
    source = anatomy.source
    alive = source.without(Group.of_layer("attn", 0, (0, 2, 4, 6), len(source.layers)))
    scores = drawn_scores(alive, source, 5)
    scores.kv = [torch.rand(len(layer.kv_heads), dtype=torch.float64) for layer in source.layers]
    config = mixture(compare=compare, groups=["attn"])
    goal = anatomy.count(source).total * 17 // 20
    masked, compacted = (chosen_at_once(anatomy, goal, config, s, alive) for s in (scores, scores.restricted(alive)))
    assert len(masked) > 2 and [one.group for one in masked] == [one.group for one in compacted]
    assert [one.saliency["attn"] for one in masked] == pytest.approx([one.saliency["attn"] for one in compacted])


def test_equal_saliencies_have_a_z_score() -> None:
    anatomy = Anatomy.of(tiny_model("llama"))
    scores, goal = Scores.zero(anatomy.source), anatomy.count(anatomy.source).total * 3 // 4
    chosen = chosen_at_once(anatomy, goal, mixture(compare="zscore"), scores)
    assert chosen and all(math.isfinite(value) for choice in chosen for value in choice.saliency.values())


def test_z_scores_are_refused_where_layers_lose_the_same_or_go_whole() -> None:
    anatomy = Anatomy.of(tiny_model("llama"))
    with pytest.raises(UserError, match=r"compare zscore: .* give selection global"):
        make_strategy(anatomy, Target(10_000), PruneConfig(selection="coupled", compare="zscore"))
    with pytest.raises(UserError, match=r"compare: zscore .* remove layer from groups"):
        mixture(compare="zscore", groups=["ffn", "layer"])


def test_global_lands_on_the_target() -> None:
    anatomy = Anatomy.of(tiny_model("llama"))
    scores = drawn_scores(anatomy.source, anatomy.source, 5)
    for goal in (6000, 9001, 12345):
        chosen = chosen_at_once(anatomy, goal, mixture(), scores)
        channel = 3 * len(chosen[-1].rest.hidden)
        assert goal - channel - 2 < chosen[-1].num_parameters <= goal  # mlp biases make a channel two larger


def test_rounds_land_on_their_counts() -> None:
    anatomy = Anatomy.of(tiny_model("llama"))
    pacing = Rounds(anatomy.count(anatomy.source).total, 9_000, 3)
    strategy, alive = GlobalStrategy(anatomy, Target(9_000), mixture()), anatomy.source
    for number in (1, 2, 3):
        alive = list(strategy.choose(drawn_scores(alive, anatomy.source, number), alive, pacing, number, 0))[-1].rest
        assert pacing.planned(number) - 3 * 32 - 2 < anatomy.count(alive).total <= pacing.planned(number)
    assert strategy.is_finished(alive, anatomy.count(alive).total)
