"""Adapt-Pruner's pieces against small independent computations; sizes land, floors hold, nothing comes back."""

from __future__ import annotations

from bisect import bisect_left
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn import drawn_scores
from torch import nn

import dwindle
from dwindle.anatomy.anatomy import Anatomy
from dwindle.anatomy.structure import Group, Layer, Structure
from dwindle.core.errors import UserError
from dwindle.pruning.calibration import calibrate
from dwindle.pruning.config import PruneConfig
from dwindle.pruning.importance import LayerWatch, normalised
from dwindle.pruning.ledger import replay_structure
from dwindle.pruning.metrics import metric_named
from dwindle.pruning.pacing import Stages, stage_shares
from dwindle.pruning.saliency import Scores
from dwindle.pruning.strategies import make_strategy
from dwindle.pruning.strategies.base import Choice
from dwindle.pruning.strategies.layerwise import AdaptStrategy, UniformStrategy, grown
from dwindle.pruning.surgery import Prunable
from dwindle.pruning.target import Target
from tiny import tiny_directory, tiny_model, tokens


def adapt(**settings: Any) -> PruneConfig:
    return PruneConfig(method="adapt", **settings)


def chosen(
    strategy: AdaptStrategy, scores: Scores, importance: list[float], alive: Structure, goal: int
) -> list[Choice]:
    """As if the layers had been watched and found so important."""
    strategy.importance = importance
    return strategy.choose_to(scores, alive, goal)


@pytest.mark.parametrize("distance", ["cosine", "euclidean", "manhattan"])
@pytest.mark.parametrize("family", ["llama", "olmo2"])
def test_importance_is_the_mean_change_of_the_stream(family: str, distance: str) -> None:
    model, batches = tiny_model(family), [tokens(2, 9, seed=1), tokens(3, 5, seed=2)]
    watch = LayerWatch(distance)  # type: ignore[arg-type]
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
    config, goal = adapt(attention=attention, amplitude=amplitude, balance=balance), total // 2
    strategy = AdaptStrategy(anatomy, Target(goal), config)
    channel = anatomy.count(source).total - anatomy.count(source.without(Group("ffn", ((0,), (), (), (), ())))).total
    alive = source
    for number in range(1, 7):
        aim = total - (total - goal) * number // 6
        importance = torch.randn(5, generator=torch.Generator().manual_seed(number)).tolist()
        scores = drawn_scores(alive, source, number)
        choices = chosen(strategy, scores, importance, alive, aim)
        rest = choices[-1].rest
        assert aim - channel < anatomy.count(rest).total <= aim and alive.contains(rest)
        for layer, kept in enumerate(rest.layers):
            assert len(kept.ffn) >= 8 and len(kept.query_heads) >= 1
            assert attention == "cluster" or kept.is_regular
            removed = set(alive.layers[layer].ffn) - set(kept.ffn)
            if removed:  # the least salient channels of the layer, and no others
                assert max(scores.ffn[layer][sorted(removed)]) < min(scores.ffn[layer][list(kept.ffn)])
        alive = rest
    widths = {(len(la.query_heads), len(la.ffn)) for la in alive.layers}
    assert amplitude < 0.5 or len(widths) > 1
    again = AdaptStrategy(anatomy, Target(goal), config)
    again.load_state_dict(strategy.state_dict())
    assert again.sparsity == strategy.sparsity


@pytest.mark.parametrize("amplitude", [0.0, 0.02])
def test_it_lands_although_heads_become_strong_on_the_way(amplitude: float) -> None:
    """Heads that were half-way to being pruned are kept: the channels owed instead are not all pruned at once."""
    anatomy = Anatomy.of(tiny_model("llama", num_hidden_layers=6, intermediate_size=200))
    source, total = anatomy.source, anatomy.count(anatomy.source).total
    strategy = AdaptStrategy(anatomy, Target(total * 8 // 10), adapt(amplitude=amplitude))
    channel = total - anatomy.count(source.without(Group("ffn", ((0,), (), (), (), (), ())))).total
    alive = source
    for number, (share, weight) in enumerate([(0.10, 0.3), (0.12, 0.3), (0.124, 100.0)]):
        scores = drawn_scores(alive, source, 0)
        for heads in scores.attn:
            heads *= weight
        importance = torch.randn(6, generator=torch.Generator().manual_seed(number)).tolist()
        aim = total - int(share * total)
        alive = chosen(strategy, scores, importance, alive, aim)[-1].rest
        assert aim - channel < anatomy.count(alive).total <= aim


@pytest.mark.parametrize("method", ["adapt", "uniform", "flap"])
@pytest.mark.parametrize(("attention", "min_heads"), [("cluster", 3), ("cluster", 1), ("regular", 3)])
def test_what_is_accepted_is_reached(method: Any, attention: Any, min_heads: int) -> None:
    """The least accepted target, whichever key/value heads the salient queries read."""
    anatomy = Anatomy.of(tiny_model("llama"))
    config = PruneConfig(method=method, attention=attention, min_heads=min_heads)

    def accepted(goal: int) -> bool:
        try:
            return bool(make_strategy(anatomy, Target(goal), config))
        except UserError:
            return False

    full = anatomy.count(anatomy.source).total
    least = bisect_left(range(full), True, key=accepted)
    assert 0 < least < full
    for seed in range(20):
        strategy: Any = make_strategy(anatomy, Target(least), config)
        strategy.importance = [0.0] * anatomy.num_layers
        scores = drawn_scores(anatomy.source, anatomy.source, seed)
        assert strategy.choose_to(scores, anatomy.source, least)[-1].num_parameters <= least


def test_unimportant_layers_lose_more() -> None:
    anatomy = Anatomy.of(tiny_model("llama"))
    total = anatomy.count(anatomy.source).total
    strategy = AdaptStrategy(anatomy, Target(total // 2), adapt(amplitude=0.1))
    alive = anatomy.source
    for number in range(1, 4):
        scores = drawn_scores(alive, anatomy.source, number)
        alive = chosen(strategy, scores, [-0.9, -0.99, -0.5], alive, total - total * number // 10)[-1].rest
    left = [len(la.ffn) for la in alive.layers]
    assert left[1] < left[0] < left[2]
    assert strategy.sparsity[1] > strategy.sparsity[0] > strategy.sparsity[2]


def test_by_score_the_least_salient_group_of_the_layer_is_removed_first() -> None:
    """Against a plain simulation: always the lowest mean, until the layer's share is as near as it gets."""
    anatomy = Anatomy.of(tiny_model("llama", num_hidden_layers=1))
    source = anatomy.source
    layer, full = source.layers[0], anatomy.count_layer(0, 32, source.layers[0])
    scores = drawn_scores(source, source, 8)
    scores.ffn[0] /= 4  # as a head's sum is over four columns
    (plan,) = AdaptStrategy(anatomy, Target(9000), adapt())._plans(scores, source)
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
        assert plan.kept_at(sparsity) == (len(best.kv_heads), len(best.ffn)), sparsity


def test_uniform_takes_the_same_of_every_layer() -> None:
    anatomy = Anatomy.of(tiny_model("llama"))
    source, total = anatomy.source, anatomy.count(anatomy.source).total
    strategy = UniformStrategy(anatomy, Target(total * 7 // 10), PruneConfig(method="uniform"))
    rest = strategy.choose_to(drawn_scores(source, source, 0), source, total * 7 // 10)[-1].rest
    assert rest.is_uniform and len(rest.hidden) == 32
    width = len(rest.layers[0].ffn)
    layers = [Layer(la.query_heads, la.kv_of_query, tuple(range(width + 1))) for la in rest.layers]
    wider = anatomy.count(Structure(rest.hidden, tuple(layers))).total
    assert anatomy.count(rest).total <= total * 7 // 10 < wider


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
    found = calibrate(Prunable(tiny_model("llama")), windows, metric, adapt())
    model = tiny_model("llama")
    for window in windows:
        (model(input_ids=window[None], labels=window[None]).loss / 5).backward()
    assert len(found.gradients) == 6
    for name, gradient in found.gradients.items():
        assert torch.allclose(gradient, model.get_parameter(name).grad, atol=1e-6, rtol=0), name  # float32 norms


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
    result = dwindle.prune(directory, "70%", out=tmp_path / "out", sequences=4, seq_len=32, **options)
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
        ({"method": "adapt", "amplitude": -0.1}, "amplitude: -0.1 must be at least 0 and at most 1"),
        ({"method": "adapt", "amplitude": 1.5}, "amplitude: 1.5 must be at least 0 and at most 1"),
        ({"method": "adapt", "rounds": 0}, "rounds: 0 must be at least 1"),
        ({"method": "adapt", "balance": "luck"}, 'balance: expected one of "score", "ratio", got "luck"'),
        ({"method": "adapt", "distance": "angle"}, "distance: expected one of"),
        ({"method": "adapt", "groups": ["attn", "stem"]}, "hidden size"),
        ({"method": "adapt", "to": "20%"}, "smallest model"),
        ({"method": "adapt", "to": "hidden=16"}, "finds the sizes"),
        (
            {"method": "adapt", "round_to": 8},
            "round_to: is a setting of method efficientllm or minitron or .*, not adapt",
        ),
        ({"method": "adapt", "selection": "global"}, "selection: is a setting of method efficientllm, not adapt"),
        ({"selection": "global", "to": "0.1%"}, "smallest"),
        ({"selection": "nowhere"}, 'selection: expected one of "coupled", "global", got "nowhere"'),
        ({"method": "wizard"}, 'method: expected one of .*, got "wizard"'),
        ({"amplitude": 0.1}, "amplitude: is a setting of method adapt, not efficientllm"),
        ({"distance": "manhatan"}, "distance: .*did you mean .manhattan"),
        ({"method": "uniform", "distance": "manhattan"}, "distance: is a setting of method adapt, not uniform"),
        ({"balance": "ratio"}, "balance: is a setting of method adapt or uniform, not efficientllm"),
        ({"method": "adapt", "compare": "sum"}, "compare: is a setting of method efficientllm, not adapt"),
        ({"method": "adapt", "sequences": 0}, "sequences: 0 must be at least 1"),
        ({"groups": ["attn"], "min_heads": 5, "to": "92%"}, "smallest reachable"),
        ({"groups": ["attn"], "min_heads": 5, "to": "92%", "selection": "global"}, "smallest reachable"),
    ],
)
def test_bad_options_are_refused_before_work(directory: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        dwindle.prune(directory, **{"to": "70%", **options})


def test_iterations_without_text_are_counted_too(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dwindle.core.progress._PLAIN_LINE_EVERY_S", 0)
    dwindle.prune(directory, "70%", method="uniform", metric="magnitude", rounds=3)
    assert [line.split(",")[0] for line in capsys.readouterr().err.splitlines()][-1] == "pruning: 3/3"


def test_uniform_refuses_layers_that_differ_already(directory: Path, tmp_path: Path) -> None:
    adapted = dwindle.prune(
        directory, "80%", out=tmp_path / "adapted", method="adapt", rounds=2, amplitude=0.2, sequences=2, seq_len=16
    )
    assert not adapted.structure.is_uniform
    with pytest.raises(UserError, match="layers already have different sizes: choose adapt"):
        dwindle.prune(tmp_path / "adapted", "90%", method="uniform", sequences=2, seq_len=16)


def test_an_amplitude_that_would_empty_layers_is_clipped_at_the_floors(directory: Path) -> None:
    result = dwindle.prune(
        directory, "60%", method="adapt", amplitude=1.0, rounds=5, min_ffn=4, sequences=2, seq_len=16
    )
    assert all(len(la.ffn) >= 4 and len(la.query_heads) >= 1 for la in result.structure.layers)
    assert torch.isfinite(result.model(input_ids=tokens(1, 8)).logits).all()
