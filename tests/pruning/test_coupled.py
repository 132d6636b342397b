"""The chosen groups equal a plain search, targets are met exactly, floors and groupings hold."""

from __future__ import annotations

import itertools
import json
from bisect import bisect_left
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from dwindle.anatomy.anatomy import Anatomy
from dwindle.anatomy.structure import KINDS, Group, Layer, Structure
from dwindle.core.errors import UserError
from dwindle.pruning.config import PostTrainingConfig, PruneConfig
from dwindle.pruning.layouts import check_rounding, rounded_shape
from dwindle.pruning.pacing import Ratio, Rounds
from dwindle.pruning.saliency import Scores
from dwindle.pruning.strategies import make_strategy
from dwindle.pruning.strategies.base import Choice, Trail
from dwindle.pruning.strategies.coupled import CoupledStrategy, Selector
from dwindle.pruning.strategies.global_mixture import GlobalStrategy
from dwindle.pruning.surgery import Prunable
from dwindle.pruning.target import Shape, Target, parse_target
from tiny import shrunk, tiny_model


@pytest.fixture(scope="module")
def anatomy() -> Anatomy:
    return Anatomy.of(tiny_model("llama"))


def random_scores(structure: Structure, seed: int = 0) -> Scores:
    generator = torch.Generator().manual_seed(seed)

    def draw(count: int) -> torch.Tensor:
        return torch.rand(count, generator=generator, dtype=torch.float64)

    return Scores(
        structure,
        [draw(len(la.query_heads)) for la in structure.layers],
        [draw(len(la.ffn)) for la in structure.layers],
        draw(len(structure.hidden)),
    )


def run(anatomy: Anatomy, target: Target, **options: Any) -> list[Structure]:
    """All structures on the way; new scores are drawn for each event."""
    selector = Selector(anatomy, target, PruneConfig(**options))
    alive, passed, seed = anatomy.source, [], 0
    while True:
        scores = random_scores(anatomy.source, seed)
        mask_gone(scores, alive)
        choice = next_choice(selector, scores, alive)
        if choice is None:
            return passed
        assert choice.num_parameters == anatomy.count(choice.rest).total
        alive, seed = choice.rest, seed + 1
        passed.append(alive)


def next_choice(selector: Selector, scores: Scores, alive: Structure) -> Choice | None:
    found = selector.step(scores, alive.sized(), selector.anatomy.count(alive).total)
    return None if found is None else Trail(alive).choice(found[0].group, found[1], found[0].num_parameters)


def mask_gone(scores: Scores, alive: Structure) -> None:
    removed = lambda full, kept: [i for i in full if i not in kept]  # noqa: E731
    scores.stem[removed(scores.structure.hidden, alive.hidden)] = float("inf")
    for number, (full, kept) in enumerate(zip(scores.structure.layers, alive.layers, strict=True)):
        scores.attn[number][removed(full.query_heads, kept.query_heads)] = float("inf")
        scores.ffn[number][removed(full.ffn, kept.ffn)] = float("inf")


@pytest.mark.parametrize("compare", ["mean", "sum"])
def test_choice_equals_a_plain_search(anatomy: Anatomy, compare: str) -> None:
    scores = random_scores(anatomy.source)
    config = PruneConfig(attention="cluster", compare=compare)
    choice = next_choice(Selector(anatomy, Target(5000), config), scores, anatomy.source)
    heads = [min(range(8), key=lambda h, s=s: s[h]) for s in scores.attn]
    channels = [min(range(40), key=lambda c, s=s: s[c]) for s in scores.ffn]
    hidden = min(range(32), key=lambda i: scores.stem[i])
    sums = {
        "attn": sum(float(s[h]) for s, h in zip(scores.attn, heads, strict=True)),
        "ffn": sum(float(s[c]) for s, c in zip(scores.ffn, channels, strict=True)),
        "stem": float(scores.stem[hidden]),
    }
    elements = {"attn": 3 * 32 * 4, "ffn": 3 * 32, "stem": 3 * (32 + 40)}
    expected = {kind: sums[kind] / (elements[kind] if compare == "mean" else 1) for kind in KINDS}
    assert choice is not None
    assert choice.saliency == pytest.approx(expected)
    assert choice.group.kind == min(expected, key=expected.__getitem__)
    members = {"attn": [[h] for h in heads], "ffn": [[c] for c in channels], "stem": [[hidden]]}
    assert [list(m) for m in choice.group.members] == members[choice.group.kind]


@pytest.mark.parametrize("attention", ["cluster", "regular"])
def test_lands_under_the_target_by_less_than_the_smallest_group(anatomy: Anatomy, attention: str) -> None:
    smallest_group = 3 * 3 * 32 + 3 * 2  # an FFN channel with its two biases in each of 3 layers
    for target in (20_000, 15_001, 12_345, 9_000):
        passed = run(anatomy, Target(target), attention=attention)
        left = anatomy.count(passed[-1]).total
        assert target - smallest_group < left <= target
        assert len({(len(la.query_heads), len(la.ffn)) for la in passed[-1].layers}) == 1


def test_regular_attention_stays_stock_at_every_event(anatomy: Anatomy) -> None:
    passed = run(anatomy, Target(7_000), attention="regular", min_hidden=24)
    assert all(structure.is_uniform for structure in passed)
    assert len({len(structure.layers[0].query_heads) for structure in passed}) > 3


def test_cluster_attention_keeps_each_query_with_its_key_value_head(anatomy: Anatomy) -> None:
    passed = run(anatomy, Target(7_000), attention="cluster", min_hidden=24)
    for layer in passed[-1].layers:
        assert layer.kv_of_query == tuple(q // 2 for q in layer.query_heads)
    assert not all(structure.is_uniform for structure in passed)


@pytest.mark.parametrize("shape", ["hidden=20,heads=4,ffn=17", "heads=3", "hidden=8,heads=1,ffn=8", "ffn=39"])
@pytest.mark.parametrize("attention", ["cluster", "regular"])
def test_exact_shapes(anatomy: Anatomy, shape: str, attention: str) -> None:
    target = parse_target(shape, anatomy)
    end = run(anatomy, target, attention=attention)[-1]
    assert Shape.of(end) == target.shape
    assert len({(len(la.query_heads), len(la.ffn)) for la in end.layers}) == 1


def test_targets_are_read(anatomy: Anatomy) -> None:
    count = anatomy.count(anatomy.source)
    assert parse_target("20k", anatomy).num_parameters == 20_000
    assert parse_target("0.6", anatomy).num_parameters == int(0.6 * count.total)
    assert parse_target("60%", anatomy).num_parameters == int(0.6 * count.total)
    assert parse_target("50%nonemb", anatomy).num_parameters == int(count.embedding + 0.5 * count.non_embedding)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("900M", "choose a target below it"),
        ("100%", "--to: '100%' must be above 0 and below 100%: it is the share that is kept"),
        ("1.0", "must be above 0 and below 100%"),
        ("80%noemb", "is not a size such as 100M, 0.6, 60%, 50%nonemb, hidden=512,heads=8,ffn=1280 or 90MB@q8_0"),
        ("many", "--to: 'many' is not a size"),
        ("hidden=99", "between 1 and the source's 32"),
        ("width=3", "'width=3' is not part of a shape"),
        ("hidden=32", "the source's own sizes"),
    ],
)
def test_bad_targets(anatomy: Anatomy, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_target(text, anatomy)


def test_impossible_selections(anatomy: Anatomy) -> None:
    with pytest.raises(UserError, match="below the smallest reachable model"):
        Selector(anatomy, Target(500), PruneConfig())
    with pytest.raises(UserError, match="below the smallest reachable model"):
        Selector(anatomy, Target(9_000), PruneConfig(groups=["attn"]))
    with pytest.raises(UserError, match=r"heads can be \[1, 2, 3, 4, 6, 8\]"):
        Selector(anatomy, parse_target("heads=5", anatomy), PruneConfig())
    with pytest.raises(UserError, match="needs the group stem"):
        Selector(anatomy, parse_target("hidden=16", anatomy), PruneConfig(groups=["ffn"]))
    with pytest.raises(
        UserError, match=r'^groups\.0: expected one of "attn", "ffn", "stem", "layer", got "everything"$'
    ):
        PruneConfig(groups=["everything"])


def test_heads_of_layers_that_differ_are_not_removed_together() -> None:
    """The layer with the fewest would end without attention; what else is equal in all layers is still pruned."""
    anatomy = Anatomy.of(shrunk("llama", "unequal")[0])
    assert len({len(layer.kv_heads) for layer in anatomy.source.layers}) > 1
    half = Target(anatomy.count(anatomy.source).total // 2)
    refused = (
        "^selection coupled: the source's layers already have different heads: choose global, attention cluster or"
    )
    with pytest.raises(UserError, match=refused):
        CoupledStrategy(anatomy, half, PruneConfig())
    with pytest.raises(UserError, match="--to heads=2: the source's layers have heads 6 to 8: give"):
        parse_target("heads=2", anatomy)
    for kept in (PruneConfig(groups=["ffn", "stem"]), PruneConfig(attention="cluster")):
        CoupledStrategy(anatomy, half, kept)
    CoupledStrategy(anatomy, parse_target("hidden=20", anatomy), PruneConfig())


def test_without_a_selection_layers_with_different_heads_are_a_mixture() -> None:
    anatomy = Anatomy.of(shrunk("llama", "unequal")[0])
    half = Target(anatomy.count(anatomy.source).total // 2)
    found = make_strategy(anatomy, half, PostTrainingConfig())
    assert found.config.record()["selection"] == "global"
    with pytest.raises(UserError, match=r"^selection coupled: the source's layers already have different heads"):
        make_strategy(anatomy, half, PostTrainingConfig(selection="coupled"))
    for coupled in (PostTrainingConfig(groups=["ffn", "stem"]), PostTrainingConfig(attention="cluster")):
        assert make_strategy(anatomy, half, coupled).config.record()["selection"] == "coupled"
    equal = Anatomy.of(tiny_model("llama"))
    target = Target(equal.count(equal.source).total // 2)
    assert make_strategy(equal, target, PostTrainingConfig()).config.record()["selection"] == "coupled"


def test_the_smallest_regular_model_is_one_that_exists() -> None:
    """At least 5 of 5 × 3 heads: 5 × 1 or 2 × 3. Five heads with two key/value heads would be irregular."""
    anatomy = Anatomy.of_config(
        LlamaConfig(
            hidden_size=60, intermediate_size=20, num_hidden_layers=1, num_attention_heads=15, num_key_value_heads=5
        )
    )
    config = PruneConfig(groups=["attn"], min_heads=5)
    full = anatomy.count(anatomy.source).total
    least = full - 2 * 4 * 60 * (15 + 5) + 2 * 4 * 60 * (6 + 2)
    Selector(anatomy, Target(least), config)
    with pytest.raises(UserError, match=f"smallest reachable model, {least:,} parameters"):
        Selector(anatomy, Target(least - 1), config)


def test_the_smallest_cluster_model_is_one_that_any_scores_reach(anatomy: Anatomy) -> None:
    """The two heads that are kept may read two key/value heads."""
    config = PruneConfig(groups=["attn"], attention="cluster", min_heads=2)

    def accepted(goal: int) -> bool:
        try:
            return bool(CoupledStrategy(anatomy, Target(goal), config))
        except UserError:
            return False

    full = anatomy.count(anatomy.source).total
    least = bisect_left(range(full), True, key=accepted)
    for seed in range(10):
        scores = random_scores(anatomy.source, seed)
        chosen = list(
            CoupledStrategy(anatomy, Target(least), config).choose(scores, anatomy.source, Rounds(0, 0, 1), 1, 0)
        )
        assert chosen[-1].num_parameters <= least < full


@pytest.mark.parametrize("target", [12_000, 18_000])
def test_rounded_shapes_fit_and_are_multiples(anatomy: Anatomy, target: int) -> None:
    natural = run(anatomy, Target(target))[-1]
    shape = rounded_shape(anatomy, natural, anatomy.source, Target(target), PruneConfig(round_to=8)).shape
    assert shape.hidden % 8 == 0 and shape.ffn % 8 == 0
    end = run(anatomy, Target(0, shape))[-1]
    assert Shape.of(end) == shape and anatomy.count(end).total <= target
    with pytest.raises(UserError, match="round_to 64"):
        rounded_shape(anatomy, natural, anatomy.source, Target(target), PruneConfig(round_to=64))


def chosen_with_changing_scores(anatomy: Anatomy, target: int, seed: int, multiple: int, **options: Any) -> Structure:
    """The end of a run whose scores say something else after every step, and that is resumed after every step."""
    alive, events, step, state = anatomy.source, 0, 0, dict[str, Any]()
    while True:
        strategy = CoupledStrategy(anatomy, Target(target), PruneConfig(**options, round_to=multiple))
        strategy.load_state_dict(json.loads(json.dumps(state)))
        if strategy.is_finished(alive, anatomy.count(alive).total):
            return alive
        scores = random_scores(anatomy.source, 1000 * seed + step)
        mask_gone(scores, alive)
        step += 1
        choices = list(strategy.choose(scores, alive, Ratio(2, 1, 0), step, events))
        assert choices, "stopped before the end"
        alive, events, state = choices[-1].rest, events + len(choices), strategy.state_dict()


@pytest.mark.parametrize("attention", ["regular", "cluster"])
@pytest.mark.parametrize("compare", ["mean", "sum"])
def test_rounded_results_never_exceed_the_target(anatomy: Anatomy, attention: str, compare: str) -> None:
    """The first scores choose the shape, later ones the groups: other key/value heads may be kept than was expected."""
    for seed in range(12):
        for target, multiple in ((17_000, 4), (13_000, 8), (9_000, 16)):
            end = chosen_with_changing_scores(anatomy, target, seed, multiple, attention=attention, compare=compare)
            assert len(end.hidden) % multiple == 0 == len(end.layers[0].ffn) % multiple
            assert anatomy.count(end).total <= target


def test_rounding_finds_whatever_fits(anatomy: Anatomy) -> None:
    """Every target above the smallest round model is reached, and those below are refused at once."""
    config = PruneConfig(round_to=16)
    smallest = anatomy.count(cut_to(anatomy.source, hidden=16, heads=1, ffn=16)).total
    with pytest.raises(UserError, match=f"round_to 16: the smallest model with such widths has {smallest:,}"):
        check_rounding(anatomy, Target(smallest - 1), config)
    for target in (smallest, smallest + 300, smallest + 2000):
        check_rounding(anatomy, Target(target), config)
        for seed in range(6):
            assert anatomy.count(chosen_with_changing_scores(anatomy, target, seed, 16)).total <= target
    with pytest.raises(UserError, match="round_to 64: no multiple lies between"):
        check_rounding(anatomy, Target(15_000), PruneConfig(round_to=64))
    check_rounding(anatomy, Target(15_000), PruneConfig(groups=["attn", "ffn"]))


def cut_to(structure: Structure, *, hidden: int, heads: int, ffn: int) -> Structure:
    layers = [Layer(la.query_heads[:heads], la.kv_of_query[:heads], la.ffn[:ffn]) for la in structure.layers]
    return Structure(structure.hidden[:hidden], tuple(layers))


def test_coupled_rounding_needs_widths_that_are_equally_far_from_multiples(anatomy: Anatomy) -> None:
    """Coupled groups remove the same number of channels from every layer; the global mixture rounds each width."""
    prunable = Prunable(tiny_model("llama"))
    prunable.prune(Group("ffn", ((0, 1, 2), (), ())))
    uneven = Anatomy.of(prunable.compacted())
    target = Target(anatomy.count(anatomy.source).total // 2)
    with pytest.raises(UserError, match="round_to 4: the source's layers have different FFN widths: choose selection"):
        make_strategy(uneven, target, PruneConfig(selection="coupled", round_to=4))
    with pytest.raises(UserError, match="round_to 4: the source's layers have different FFN widths: choose 1"):
        make_strategy(uneven, target, PruneConfig(method="minitron", round_to=4))
    assert isinstance(make_strategy(uneven, target, PruneConfig(round_to=4)), GlobalStrategy)
    for config in (PruneConfig(round_to=4, groups=["attn", "stem"], min_heads=2), PruneConfig()):
        assert isinstance(make_strategy(uneven, target, config), CoupledStrategy)


def test_rounding_keeps_the_key_value_heads_of_the_natural_result(anatomy: Anatomy) -> None:
    """4 heads can be 2 × 2 or 4 × 1; the wider the key/value part, the narrower the FFN."""
    source, shapes, config = anatomy.source, {}, PruneConfig(groups=["attn", "ffn"], round_to=2)
    for kv, way in ((2, lambda q: q < 4), (4, lambda q: q % 2 == 0)):
        removed = Group("attn", tuple(tuple(q for q in la.query_heads if not way(q)) for la in source.layers))
        natural = source.without(removed)
        aim = rounded_shape(anatomy, natural, source, Target(15_000), config)
        assert (aim.shape.heads, aim.kv_heads) == (4, kv)
        selector = Selector(anatomy, Target(0, aim.shape), config, aim.kv_heads)
        for seed in range(5):
            scores, alive = random_scores(source, seed), source
            while (choice := next_choice(selector, scores, alive)) is not None:
                alive = choice.rest
                mask_gone(scores, alive)
            assert len(alive.layers[0].kv_heads) == kv and Shape.of(alive) == aim.shape
            assert 15_000 - 2 * (3 * 3 * 32 + 6) < anatomy.count(alive).total <= 15_000
        shapes[kv] = aim.shape.ffn
    assert shapes[4] < shapes[2]


@pytest.mark.parametrize("options", [{}, {"round_to": 8}, {"attention": "cluster", "compare": "sum"}])
def test_rounds_land_on_their_counts_and_then_on_the_target(anatomy: Anatomy, options: dict[str, Any]) -> None:
    """Intermediate counts are undershot by less than the smallest group; multiples are reachable until the end."""
    source, goal = anatomy.source, 12_000
    pacing = Rounds(anatomy.count(source).total, goal, 4)
    strategy, alive, events = CoupledStrategy(anatomy, Target(goal), PruneConfig(**options)), source, 0
    for number in range(1, 5):
        scores = random_scores(source, number)
        mask_gone(scores, alive)
        choices = list(strategy.choose(scores, alive, pacing, number, events))
        assert all(before.rest.contains(after.rest) for before, after in itertools.pairwise(choices))
        alive, events = choices[-1].rest, events + len(choices)
        left, channel = choices[-1].num_parameters, 3 * 3 * len(alive.hidden) + 3 * 2
        assert left <= pacing.planned(number)
        assert number == 4 or pacing.planned(number) - channel < left
    assert strategy.is_finished(alive, anatomy.count(alive).total)
    multiple = options.get("round_to", 1)
    assert len(alive.hidden) % multiple == 0 == len(alive.layers[0].ffn) % multiple
