"""Adapt-Pruner's pieces against small independent computations; sizes land, floors hold, nothing comes back."""

from __future__ import annotations

import functools
import itertools
import random
from bisect import bisect_left
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dwindle
from dwindle.anatomy import Anatomy, Group, Layer, Structure
from dwindle.errors import UserError
from dwindle.pruning.allocation import AllocationOptions, Allocator, grown
from dwindle.pruning.anywhere import GlobalSelector, check_round_widths
from dwindle.pruning.bucketing import LayerShape, bucketed, few_shapes
from dwindle.pruning.calibration import calibrate
from dwindle.pruning.importance import LayerWatch, normalised
from dwindle.pruning.ledger import replay_structure
from dwindle.pruning.pacing import Stages, stage_shares
from dwindle.pruning.saliency import Scores, metric_named
from dwindle.pruning.selection import SelectionOptions
from dwindle.pruning.surgery import Prunable
from dwindle.pruning.target import Target
from tiny import tiny_directory, tiny_model, tokens

DECODER = SelectionOptions(groups=("attn", "ffn"))


def drawn_scores(alive: Structure, source: Structure, seed: int) -> Scores:
    """Random scores in the source's numbering; what is gone is infinite."""
    generator = torch.Generator().manual_seed(seed)

    def draw(full: tuple[int, ...], kept: tuple[int, ...]) -> torch.Tensor:
        values = torch.rand(len(full), generator=generator, dtype=torch.float64)
        values[[place for place, index in enumerate(full) if index not in kept]] = float("inf")
        return values

    pairs = list(zip(source.layers, alive.layers, strict=True))
    return Scores(
        source,
        [draw(full.query_heads, kept.query_heads) for full, kept in pairs],
        [draw(full.ffn, kept.ffn) for full, kept in pairs],
        draw(source.hidden, alive.hidden),
    )


@pytest.mark.parametrize("distance", ["cosine", "euclidean", "manhattan"])
@pytest.mark.parametrize("family", ["llama", "olmo2"])
def test_importance_is_the_mean_change_of_the_stream(family: str, distance: str) -> None:
    model, batches = tiny_model(family), [tokens(2, 9, seed=1), tokens(3, 5, seed=2)]
    watch = LayerWatch(distance)
    watch.attach(model)
    watch.open()
    with torch.no_grad():
        for batch in batches:
            model(input_ids=batch)
    found = watch.close()
    watch.detach()

    model.model.norm = nn.Identity()  # then the last hidden state is what the last layer puts out
    sums, count = [0.0] * 3, 0
    with torch.no_grad():
        for batch in batches:
            states = model(input_ids=batch, output_hidden_states=True).hidden_states
            count += batch.numel()
            for number in range(3):
                for x, y in zip(states[number].flatten(0, 1), states[number + 1].flatten(0, 1), strict=True):
                    change = {
                        "cosine": -(x @ y) / (x @ x).sqrt() / (y @ y).sqrt(),
                        "euclidean": ((y - x) @ (y - x)).sqrt(),
                        "manhattan": (y - x).abs().sum(),
                    }
                    sums[number] += float(change[distance])
    assert found == pytest.approx([total / count for total in sums], rel=1e-12)


def test_sparsity_is_the_papers() -> None:
    importance = [-0.9, -0.5, -0.7, -0.95]
    mean = sum(importance) / 4
    most = max(abs(value - mean) for value in importance)
    expected = [(value - mean) / most for value in importance]
    assert normalised(importance) == pytest.approx(expected)
    assert abs(sum(normalised(importance))) < 1e-12 and max(map(abs, normalised(importance))) == 1
    assert normalised([0.3, 0.3]) == [0.0, 0.0]
    sparsity = [0.1, 0.0, 0.985, 0.2]
    by_hand = [s + 0.015 - 0.02 * i for s, i in zip(sparsity, expected, strict=True)]
    wanted = [min(0.99, max(new, old)) for new, old in zip(by_hand, sparsity, strict=True)]
    assert grown(sparsity, expected, 0.015, 0.02) == pytest.approx(wanted)


@pytest.mark.parametrize("stages", [1, 2, 7, 20])
def test_stages_shrink_by_one_ratio_and_train_longer_and_longer(stages: int) -> None:
    shares = stage_shares(stages)
    assert sum(shares) == pytest.approx(1) and shares == pytest.approx([(i + 1) * shares[0] for i in range(stages)])
    pacing = Stages(350_000, 125_000, first_step=10, num_steps=1010, num_stages=stages)
    sizes = pacing.sizes()
    ratio = (125 / 350) ** (1 / stages)
    assert sizes == [pytest.approx(350_000 * ratio ** (i + 1), abs=1) for i in range(stages)] and sizes[-1] == 125_000
    starts = [10 + round(1000 * sum(shares[:i])) for i in range(stages)]
    assert pacing.starts() == [max(11, start) for start in starts]
    for size, start in zip(sizes, pacing.starts(), strict=True):
        assert pacing.planned(start) <= size and pacing.due(start, size + 1, 0) and not pacing.due(start - 1, size, 0)
        assert pacing.next_step(1, size + 1, 0) == start
    assert pacing.next_step(500, 125_000, 0) is None and not pacing.due(10, 350_000, 0)


@pytest.mark.parametrize("attention", ["regular", "cluster"])
@pytest.mark.parametrize("amplitude", [0.0, 0.02, 0.5])
@pytest.mark.parametrize("balance", ["score", "ratio"])
def test_every_iteration_lands_on_its_count(attention: str, amplitude: float, balance: Any) -> None:
    anatomy = Anatomy.of(tiny_model("llama", num_hidden_layers=5))
    source, total = anatomy.source, anatomy.count(anatomy.source).total
    options = SelectionOptions(groups=("attn", "ffn"), attention=attention)  # type: ignore[arg-type]
    goal = total // 2
    how = AllocationOptions(amplitude=amplitude, balance=balance)
    allocator = Allocator(anatomy, Target(goal), options, how)
    channel = anatomy.count(source).total - anatomy.count(source.without(Group("ffn", ((0,), (), (), (), ())))).total
    alive = source
    for number in range(1, 7):
        aim = total - (total - goal) * number // 6
        importance = torch.randn(5, generator=torch.Generator().manual_seed(number)).tolist()
        scores = drawn_scores(alive, source, number)
        choices = allocator.choose(scores, importance, alive, aim)
        rest = choices[-1].rest
        assert aim - channel < anatomy.count(rest).total <= aim and alive.contains(rest)
        for layer, kept in enumerate(rest.layers):
            assert len(kept.ffn) >= 8 and len(kept.query_heads) >= 1
            assert attention == "cluster" or kept.is_regular
            gone = set(alive.layers[layer].ffn) - set(kept.ffn)
            if gone:  # the weakest channels of the layer, and no others
                assert max(scores.ffn[layer][sorted(gone)]) < min(scores.ffn[layer][list(kept.ffn)])
        alive = rest
    widths = {(len(la.query_heads), len(la.ffn)) for la in alive.layers}
    assert amplitude < 0.5 or len(widths) > 1
    again = Allocator(anatomy, Target(goal), options, how)
    again.load_state_dict(allocator.state_dict())
    assert again.sparsity == allocator.sparsity


@pytest.mark.parametrize("amplitude", [0.0, 0.02])
def test_it_lands_although_heads_become_strong_on_the_way(amplitude: float) -> None:
    """Heads that were half-way to leaving are kept later: the channels owed instead do not all leave at once."""
    anatomy = Anatomy.of(tiny_model("llama", num_hidden_layers=6, intermediate_size=200))
    source, total = anatomy.source, anatomy.count(anatomy.source).total
    allocator = Allocator(anatomy, Target(total * 8 // 10), DECODER, AllocationOptions(amplitude=amplitude))
    channel = total - anatomy.count(source.without(Group("ffn", ((0,), (), (), (), (), ())))).total
    alive = source
    for number, (share, weight) in enumerate([(0.10, 0.3), (0.12, 0.3), (0.124, 100.0)]):
        scores = drawn_scores(alive, source, 0)
        for heads in scores.attn:
            heads *= weight
        importance = torch.randn(6, generator=torch.Generator().manual_seed(number)).tolist()
        aim = total - int(share * total)
        alive = allocator.choose(scores, importance, alive, aim)[-1].rest
        assert aim - channel < anatomy.count(alive).total <= aim


def test_unimportant_layers_lose_more() -> None:
    anatomy = Anatomy.of(tiny_model("llama"))
    total = anatomy.count(anatomy.source).total
    allocator = Allocator(anatomy, Target(total // 2), DECODER, AllocationOptions(amplitude=0.1))
    alive = anatomy.source
    for number in range(1, 4):
        scores = drawn_scores(alive, anatomy.source, number)
        alive = allocator.choose(scores, [-0.9, -0.99, -0.5], alive, total - total * number // 10)[-1].rest
    left = [len(la.ffn) for la in alive.layers]
    assert left[1] < left[0] < left[2]
    assert allocator.sparsity[1] > allocator.sparsity[0] > allocator.sparsity[2]


def test_by_score_the_weakest_group_of_the_layer_leaves_first() -> None:
    """Against a plain simulation: always the lowest mean, until the layer's share is as near as it gets."""
    anatomy = Anatomy.of(tiny_model("llama", num_hidden_layers=1))
    source = anatomy.source
    layer, full = source.layers[0], anatomy.count_layer(0, 32, source.layers[0])
    scores = drawn_scores(source, source, 8)
    scores.ffn[0] /= 4  # as a head's sum is over four columns
    (plan,) = Allocator(anatomy, Target(9000), DECODER, AllocationOptions())._plans(scores, source)
    for sparsity in (0.0, 0.1, 0.3, 0.55, 0.8):
        passed = [layer]
        while len(passed[-1].ffn) > 8 or len(passed[-1].kv_heads) > 1:
            alive, means = passed[-1], {}
            if len(alive.kv_heads) > 1:
                for queries in map(alive.queries_of, alive.kv_heads):
                    means[sum(float(scores.attn[0][q]) for q in queries) / len(queries) / 4] = queries, ()
            if len(alive.ffn) > 8:
                means |= {float(scores.ffn[0][c]): ((), (c,)) for c in alive.ffn}
            queries, channels = means[min(means)]
            passed.append(alive.without(query_heads=queries, ffn=channels))
        missed = [abs(1 - anatomy.count_layer(0, 32, rest) / full - sparsity) for rest in passed]
        best = passed[missed.index(min(missed))]
        assert plan.left_at(sparsity) == (len(best.kv_heads), len(best.ffn)), sparsity


def test_uniform_takes_the_same_of_every_layer() -> None:
    anatomy = Anatomy.of(tiny_model("llama"))
    source, total = anatomy.source, anatomy.count(anatomy.source).total
    allocator = Allocator(anatomy, Target(total * 7 // 10), DECODER, AllocationOptions())
    rest = allocator.choose_uniform(drawn_scores(source, source, 0), source, total * 7 // 10)[-1].rest
    assert rest.is_uniform and len(rest.hidden) == 32
    width = len(rest.layers[0].ffn)
    layers = [Layer(la.query_heads, la.kv_of_query, tuple(range(width + 1))) for la in rest.layers]
    wider = anatomy.count(Structure(rest.hidden, tuple(layers))).total
    assert anatomy.count(rest).total <= total * 7 // 10 < wider


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


@pytest.mark.parametrize("family", ["llama", "qwen2", "olmo2"])
def test_layers_of_different_sizes_masked_equals_compacted_and_saved(family: str, tmp_path: Path) -> None:
    prunable = Prunable(tiny_model(family))
    prunable.prune(Group("ffn", (tuple(range(3, 14)), (1, 5), ())))
    prunable.prune(Group("attn", ((0, 1), (), (2, 3, 6, 7))))
    prunable.prune(Group("ffn", ((), (), tuple(range(0, 40, 2)))))
    assert [(len(la.kv_heads), len(la.ffn)) for la in prunable.alive.layers] == [(3, 29), (4, 38), (2, 20)]
    batch, plain = tokens(2, 16, seed=3), prunable.compacted()
    with torch.no_grad():
        masked, logits = prunable.model(input_ids=batch).logits, plain(input_ids=batch).logits
        prunable.compact()
        assert (masked - prunable.model(input_ids=batch).logits).abs().max() < 1e-10
    assert (masked - logits).abs().max() < 1e-5  # stock norms compute in float32

    from dwindle.export.huggingface import save_model

    save_model(plain, None, tmp_path / "model", structure=prunable.alive, source="tiny", ledger=[])
    loaded = dwindle.load(tmp_path / "model", dtype=torch.float64).model
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=batch).logits, logits)
        cached = loaded.generate(batch, max_new_tokens=8, do_sample=False, use_cache=True, eos_token_id=None)
        plain = loaded.generate(batch, max_new_tokens=8, do_sample=False, use_cache=False, eos_token_id=None)
    assert torch.equal(cached, plain)


def test_windows_in_one_pass_give_the_gradient_of_one_by_one() -> None:
    windows, metric = tokens(5, 12, seed=4), metric_named("taylor1")
    found = calibrate(Prunable(tiny_model("llama")), windows, metric)
    model = tiny_model("llama")
    for window in windows:
        (model(input_ids=window[None], labels=window[None]).loss / 5).backward()
    assert len(found.gradients) == 6
    for name, gradient in found.gradients.items():
        assert torch.allclose(gradient, model.get_parameter(name).grad, atol=1e-6, rtol=0), name  # float32 norms


def test_buckets_are_few_and_hold_what_lives() -> None:
    """Eight layers; heads of every kind that two queries on each of four key/value heads leave."""
    anatomy = Anatomy.of(tiny_model("llama", num_hidden_layers=8))
    source, widths = anatomy.source, [37, 40, 12, 13, 25, 26, 8, 39]
    gone = [(), (0, 1), (0, 2, 4, 6), (2, 3, 4, 5), (), (1, 3, 5, 7), (0, 1, 2, 3, 4, 5), (0, 1, 2, 3, 4, 7)]
    alive = source.without(Group("ffn", tuple(tuple(range(width, 40)) for width in widths)))
    alive = alive.without(Group("attn", tuple(gone)))
    for most in (1, 3, 8):
        keep = bucketed(anatomy, alive, source, 4, most)
        assert source.contains(keep) and keep.contains(alive)
        shapes = {(la.queries_per_kv, len(la.ffn)) for la in keep.layers}
        assert len(shapes) <= most and all(la.is_regular and len(la.ffn) % 4 == 0 for la in keep.layers)
    assert [len(la.ffn) for la in keep.layers] == [-(-width // 4) * 4 for width in widths]
    assert [la.query_heads for la in keep.layers] == [la.query_heads for la in alive.layers]
    assert bucketed(anatomy, alive, source, 4, 1).layers[6].query_heads == source.layers[6].query_heads
    # What was rebuilt before lacks channels and heads: then a layer stays as it is.
    again = bucketed(anatomy, alive, keep, 4, 1)
    assert keep.contains(again) and again.contains(alive)
    assert [la.query_heads for la in again.layers] == [la.query_heads for la in alive.layers]


def test_buckets_add_little() -> None:
    """Against every way to put layers together; an uneven layer only goes with those that have its heads."""
    generator = random.Random(1)
    for _ in range(20):
        kinds = [(1,), (2,), (2, 2), (1, 1, 1), (2, 2, 2)]
        shapes = [LayerShape(generator.choice(kinds), 4 * generator.randint(1, 20)) for _ in range(6)]
        size = lambda shape: 30 * sum(shape.queries) + 15 * len(shape.queries) + shape.ffn  # noqa: E731
        found = few_shapes(shapes, size, 3)
        assert len(set(found)) <= 3 and all(one.around(aim) == aim for one, aim in zip(shapes, found, strict=True))
        best = min(
            sum(size(functools.reduce(union_of, part)) * len(part) for part in parts) for parts in partitions(shapes, 3)
        )
        assert best <= sum(map(size, found)) <= 1.2 * best
    uneven = [LayerShape((2, 1), 8), LayerShape((2, 2), 8), LayerShape((2, 1), 12)]
    assert few_shapes(uneven, lambda shape: shape.ffn, 1) == [uneven[2], uneven[1], uneven[2]]


def union_of(one: LayerShape, other: LayerShape) -> LayerShape:
    both = one.around(other)
    assert both is not None
    return both


def partitions(items: list[Any], most: int) -> Any:
    """Every way to divide a list into at most so many parts."""
    if not items:
        yield []
        return
    for parts in partitions(items[1:], most):
        for place in range(len(parts)):
            yield [*parts[:place], [items[0], *parts[place]], *parts[place + 1 :]]
        if len(parts) < most:
            yield [[items[0]], *parts]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(tiny_directory(tmp_path_factory.mktemp("adapt") / "model", num_hidden_layers=4))


@pytest.mark.parametrize(
    "options",
    [
        {"method": "adapt", "rounds": 6, "amplitude": 0.05},
        {"method": "adapt", "rounds": 2, "distance": "manhattan", "attention": "cluster"},
        {"method": "adapt", "rounds": 2, "second_order": True},
        {"method": "adapt", "rounds": 1, "metric": "magnitude"},
        {"method": "adapt", "rounds": 3, "balance": "ratio"},
        {"method": "uniform"},
        {"method": "uniform", "balance": "ratio", "rounds": 2},
        {"selection": "global", "metric": "taylor1", "rounds": 2},
    ],
    ids=["adapt", "cluster", "second order", "magnitude", "ratio", "uniform", "uniform ratio", "global"],
)
def test_prune_by_layers_lands_and_replays(directory: Path, options: dict[str, Any], tmp_path: Path) -> None:
    source = Anatomy.of(dwindle.load(directory).model)
    result = dwindle.prune(directory, "70%", out=tmp_path / "out", num_sequences=4, seq_len=32, **options)
    goal = int(0.7 * source.count(source.source).total)
    loaded = dwindle.load(tmp_path / "out").model
    assert sum(p.numel() for p in loaded.parameters()) == result.after.total <= goal
    coarse = 4 if options.get("method") == "uniform" else 1  # one channel of every layer, or of one
    assert goal - result.after.total < coarse * 3 * 32
    assert replay_structure(source.source, result.ledger) == result.structure
    assert result.structure.is_uniform == (options.get("method") == "uniform")
    if options.get("method") == "adapt":
        allocated = [event for event in result.ledger if event["event"] == "allocation"]
        assert len(allocated) == options["rounds"] and len(allocated[0]["importance"]) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "adapt", "amplitude": -0.1}, "amplitude"),
        ({"method": "adapt", "amplitude": 1.5}, "amplitude"),
        ({"method": "adapt", "rounds": 0}, "rounds"),
        ({"method": "adapt", "balance": "luck"}, "balance"),
        ({"method": "adapt", "distance": "angle"}, "distance"),
        ({"method": "adapt", "groups": ["attn", "stem"]}, "hidden size"),
        ({"method": "adapt", "to": "20%"}, "smallest model"),
        ({"method": "adapt", "to": "hidden=16"}, "finds the sizes"),
        ({"method": "adapt", "round_to": 8}, "round_to"),
        ({"method": "adapt", "selection": "global"}, "selection global"),
        ({"selection": "global", "to": "0.1%"}, "smallest"),
        ({"selection": "nowhere"}, "selection"),
        ({"method": "wizard"}, "method"),
        ({"amplitude": 0.1}, "belong to the method adapt"),
        ({"distance": "manhatan"}, "distance"),
        ({"method": "uniform", "distance": "manhattan"}, "belong to the method adapt"),
        ({"balance": "ratio"}, "balance"),
        ({"method": "adapt", "compare": "sum"}, "compare"),
        ({"method": "adapt", "num_sequences": 0}, "num_sequences"),
        ({"groups": ["attn"], "min_heads": 5, "to": "92%"}, "smallest reachable"),
        ({"groups": ["attn"], "min_heads": 5, "to": "92%", "selection": "global"}, "smallest reachable"),
    ],
)
def test_bad_options_are_refused_before_work(directory: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        dwindle.prune(directory, **{"to": "70%", **options})


def test_uniform_refuses_layers_that_differ_already(directory: Path, tmp_path: Path) -> None:
    adapted = dwindle.prune(
        directory, "80%", out=tmp_path / "adapted", method="adapt", rounds=2, amplitude=0.2, num_sequences=2, seq_len=16
    )
    assert not adapted.structure.is_uniform
    with pytest.raises(UserError, match="different sizes already"):
        dwindle.prune(tmp_path / "adapted", "90%", method="uniform", num_sequences=2, seq_len=16)


def test_an_amplitude_that_would_empty_layers_is_clipped_at_the_floors(directory: Path) -> None:
    result = dwindle.prune(
        directory, "60%", method="adapt", amplitude=1.0, rounds=5, min_ffn=4, num_sequences=2, seq_len=16
    )
    assert all(len(la.ffn) >= 4 and len(la.query_heads) >= 1 for la in result.structure.layers)
    assert torch.isfinite(result.model(input_ids=tokens(1, 8)).logits).all()
