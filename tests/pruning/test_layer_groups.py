"""Whole blocks and layers as groups: masked equals compacted, saved equals loaded, scored and chosen as by hand."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from masked_steps import adamw, muon, train
from transformers import AutoModelForCausalLM

import dwindle
from dwindle.anatomy.anatomy import Anatomy, cut
from dwindle.anatomy.build import is_custom
from dwindle.anatomy.family import Family
from dwindle.anatomy.shrink import Float64Throughout
from dwindle.anatomy.structure import BLOCKS, Group, Structure
from dwindle.core.errors import UserError
from dwindle.export.huggingface import save_model
from dwindle.pruning.config import PostTrainingConfig, PruneConfig
from dwindle.pruning.event_bounds import coupled_events, global_events
from dwindle.pruning.layouts import final_count, largest_count
from dwindle.pruning.ledger import source_event, verified_structure
from dwindle.pruning.metrics import metric_named
from dwindle.pruning.pacing import Rounds
from dwindle.pruning.rounds import prune_in_rounds
from dwindle.pruning.saliency import ElementScores, begin_scores, rows_with_gradients
from dwindle.pruning.strategies import make_strategy
from dwindle.pruning.strategies.global_mixture import at_floors
from dwindle.pruning.surgery import Prunable
from dwindle.pruning.target import Target, parse_target
from dwindle.sources.loading import load
from tiny import FAMILIES, random_group, tiny_directory, tiny_model, tokens

ALL = ["attn", "ffn", "stem", "layer"]


def without(structure: Structure, members: dict[int, tuple[int, ...]]) -> Structure:
    return structure.without(Group("layer", tuple(members.get(n, ()) for n in range(len(structure.layers)))))


def whole_layer(structure: Structure) -> Structure:
    """Without the first layer (of lfm2 one of two convolutions), an FFN channel and a hidden channel."""
    rest = without(structure, {0: (0, 1)})
    for kind in ("ffn", "stem"):
        rest = rest.without(random_group(kind, rest))
    return rest


def single_blocks(structure: Structure) -> Structure:
    """Without the first attention block that has heads, and the FFN of another layer."""
    first = next((n for n, layer in enumerate(structure.layers) if layer.query_heads), None)
    rest = without(structure, {} if first is None else {first: (0,)})
    return without(rest, {2: (1,)})


def prepared(family: str, make: Any, keep: Any) -> tuple[Prunable, torch.optim.Optimizer]:
    prunable = Prunable(tiny_model(family))
    optimizer = make(prunable.model)
    train(prunable, optimizer, 3, seed=100)
    prunable.prune_to(keep(prunable.alive), optimizer)
    return prunable, optimizer


@pytest.mark.parity
@pytest.mark.parametrize(("keep", "make"), [(whole_layer, adamw), (single_blocks, muon)])
@pytest.mark.parametrize("family", FAMILIES)
def test_masked_equals_compacted(family: str, keep: Any, make: Any) -> None:
    assert "layer" in Anatomy.of(tiny_model(family)).family.groups
    masked, masked_optimizer = prepared(family, make, keep)
    sliced, sliced_optimizer = prepared(family, make, keep)
    moved = sliced.compact(optimizer=sliced_optimizer, rebuild=make)
    assert moved is not None
    assert sliced.num_parameters == sum(p.numel() for p in sliced.model.parameters()) == masked.num_parameters
    assert len(sliced.model.model.layers) == len(masked.alive.places)
    batch = tokens(2, 16, seed=7)
    with torch.no_grad(), Float64Throughout():
        difference = masked.model(input_ids=batch).logits - sliced.model(input_ids=batch).logits
    assert difference.abs().max() < 1e-10

    losses = train(masked, masked_optimizer, 6, seed=200), train(sliced, moved, 6, seed=200)
    assert losses[0] == pytest.approx(losses[1], abs=1e-10, rel=0)
    small = sliced.parameters
    for name, before in masked.parameters.items():
        row = masked.anatomy[name]
        if not row.is_in(masked.alive):
            assert name not in small and before.count_nonzero() == 0, f"{name}: pruned entries moved"
            continue
        kept = masked.anatomy.slice(row, before, masked.alive, masked.physical)
        assert torch.allclose(kept, small[name], atol=1e-9, rtol=0), name
        assert before.count_nonzero() == kept.count_nonzero(), f"{name}: pruned entries moved"


@pytest.mark.parametrize("keep", [whole_layer, single_blocks])
@pytest.mark.parametrize("family", ["llama", "olmo2", "gemma3_text", "lfm2", "qwen3_5_text"])
def test_saved_equals_loaded(family: str, keep: Any, tmp_path: Path) -> None:
    """Whole layers leave a stock model of fewer layers; it generates with a cache what it generates without one."""
    model = tiny_model(family, dtype=torch.float32)
    anatomy = Anatomy.of(model)
    rest = without(anatomy.source, {0: (0, 1)}) if keep is whole_layer else keep(anatomy.source)
    small = cut(model, anatomy, rest, anatomy.source)
    save_model(small, None, tmp_path / "out", structure=rest, source="tiny", ledger=[source_event("tiny", anatomy, {})])
    stock = keep is whole_layer
    assert is_custom(small.config) != stock
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=not stock, dtype=torch.float32)
    assert loaded.config.num_hidden_layers == len(loaded.model.layers) == (2 if stock else 3)
    assert Anatomy.of(loaded).count(Anatomy.of(loaded).source) == anatomy.count(rest)
    batch = tokens(2, 9, seed=7)
    prunable = Prunable(tiny_model(family, dtype=torch.float32))
    prunable.prune_to(rest)
    with torch.no_grad():
        expected = prunable.model(input_ids=batch).logits
        assert torch.allclose(loaded(input_ids=batch).logits, expected, atol=1e-5, rtol=1e-5)
        made = [
            loaded.generate(batch, max_new_tokens=5, do_sample=False, use_cache=cached, eos_token_id=None)
            for cached in (True, False)
        ]
    assert torch.equal(*made)


def test_a_pruned_model_is_pruned_again() -> None:
    """Of a source without some blocks the rest is prunable, and the next result is numbered by it."""
    model = tiny_model("llama")
    anatomy = Anatomy.of(model)
    rest = single_blocks(anatomy.source)
    again = Prunable(cut(model, anatomy, rest, anatomy.source))
    assert [layer.absent for layer in again.anatomy.source.layers] == [layer.absent for layer in rest.layers]
    whole, batch = without(again.alive, {1: (0, 1)}), tokens(1, 8)
    again.prune_to(whole)
    with torch.no_grad(), Float64Throughout():
        small = again.compacted()
        assert torch.allclose(again.model(input_ids=batch).logits, small(input_ids=batch).logits, atol=1e-10, rtol=0)
    assert len(small.model.layers) == 2


@pytest.mark.parametrize("groups", [["attn", "ffn", "stem"], ALL])
@pytest.mark.parametrize("family", ["llama", "olmo2", "lfm2"])
def test_bounds_of_events_hold_where_blocks_are_absent_already(family: str, groups: Any) -> None:
    model = tiny_model(family)
    anatomy = Anatomy.of(model)
    rest = without(anatomy.source, {1: (1,)})
    config = PostTrainingConfig(selection="global", metric="magnitude", groups=groups)
    for share in (0.9, 0.6):
        prunable = Prunable(cut(deepcopy(model), anatomy, rest, anatomy.source))
        target = Target(int(share * prunable.num_parameters))
        bounds = global_events(prunable.anatomy, target, config)
        events = prune_in_rounds(prunable, target, config, None, "tiny")
        assert bounds.fewest <= sum(event["event"] == "prune" for event in events) <= bounds.most


def _gradients(prunable: Prunable) -> dict[str, torch.Tensor]:
    batch = tokens(2, 12, seed=3)
    prunable.model(input_ids=batch, labels=batch).loss.backward()
    rows = rows_with_gradients(prunable, metric_named("group"), blocks=True)
    return {row.name: prunable.parameters[row.name].grad for row in rows}


@pytest.mark.parametrize("family", ["llama", "lfm2", "qwen3_5_text", "olmo2"])
def test_block_saliencies_equal_a_loop(family: str) -> None:
    """Sums over the output projections of a block."""
    prunable = Prunable(tiny_model(family))
    gradients = _gradients(prunable)
    found = begin_scores(prunable, gradients, None, metric_named("taylor"), blocks=True)().blocks
    for number in range(3):
        expected = []
        for block in BLOCKS:
            rows = [row for _, row in prunable.outputs if row.layer == number and row.block == block]
            assert len(rows) == 1
            w, g = prunable.parameters[rows[0].name].detach(), gradients[rows[0].name]
            expected.append(float((w * g - 0.5 * w**2 * g**2).abs().sum()))
        assert found[number].tolist() == pytest.approx([*expected, sum(expected)])


BLOCK_ENDS = {
    "llama": ("self_attn", "mlp"),
    "lfm2": ("conv", "feed_forward"),
    "olmo2": ("post_attention_layernorm", "post_feedforward_layernorm"),
    "gemma3_text": ("post_attention_layernorm", "post_feedforward_layernorm"),
    "glm4": ("post_self_attn_layernorm", "post_mlp_layernorm"),
}
"""The modules whose outputs are added to the residual stream; llama and lfm2 have output biases, the others norms."""


@pytest.mark.parametrize("family", BLOCK_ENDS)
def test_the_group_metric_is_the_derivative_by_a_mask(family: str) -> None:
    """One scalar multiplies what a block adds: the squared derivative of the loss by it is the block's saliency."""
    changes = {"attention_bias": True} if family == "olmo2" else {}  # a bias in front of the norm is not counted
    model, batch = tiny_model(family, **changes), tokens(2, 12, seed=3)
    number = next(n for n, layer in enumerate(model.model.layers) if hasattr(layer, BLOCK_ENDS[family][0]))
    masks = torch.ones(2, dtype=torch.float64, requires_grad=True)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # gains and biases that are not those of initialisation
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn(len(parameter), generator=generator))
    prunable = Prunable(deepcopy(model))
    found = begin_scores(prunable, _gradients(prunable), None, metric_named("group"), blocks=True)().blocks[number]
    for place, module in enumerate(BLOCK_ENDS[family]):

        def masked(_: Any, args: Any, output: Any, place: int = place) -> Any:
            return (output[0] * masks[place], *output[1:]) if isinstance(output, tuple) else output * masks[place]

        getattr(model.model.layers[number], module).register_forward_hook(masked)
    model(input_ids=batch, labels=batch).loss.backward()
    assert masks.grad is not None and masks.grad.abs().min() > 1e-6
    expected = [*(masks.grad**2).tolist(), float(masks.grad.sum()) ** 2]
    assert found.tolist() == pytest.approx(expected, rel=1e-4)  # norms compute in float32


def test_calibration_collects_what_the_group_metric_needs(tmp_path: Path) -> None:
    """Behind a norm the derivatives are those by its gain: a projection's would be zero for every block."""
    source = tiny_directory(tmp_path / "model", "olmo2")
    for selection in ("coupled", "global"):
        options: dict[str, Any] = {"groups": ["layer"], "metric": "group", "selection": selection}
        found = dwindle.prune(source, "75%", sequences=4, seq_len=32, measure=False, **options)
        events = [event for event in found.ledger if event["event"] == "prune"]
        assert events and all(event["saliency"]["layer"] > 1e-12 for event in events)


@pytest.mark.parametrize("compare", ["saved", "mean", "sum"])
def test_blocks_are_compared_with_other_groups_as_by_hand(compare: str) -> None:
    """The first group of a global selection is the minimum over a loop through all blocks and channels."""
    prunable = Prunable(tiny_model("llama", seed=5))
    anatomy, source = prunable.anatomy, prunable.alive
    config = PruneConfig(groups=["ffn", "layer"], selection="global", metric="group", compare=compare)
    target = Target(anatomy.count(source).total // 2)
    scores = begin_scores(prunable, _gradients(prunable), None, metric_named("group"), blocks=True)()
    for layer in (0, 2):  # make one block the least salient
        scores.blocks[layer][:] *= 1e-9 if layer == 2 else 1.0
    options: list[tuple[float, str, int, tuple[int, ...]]] = []
    for number, layer in enumerate(source.layers):
        for members in ((0,), (1,), (0, 1)):
            columns = [len(layer.query_heads) * anatomy.head_dim, len(layer.ffn)]
            saved = anatomy.count(source).total - anatomy.count(without(source, {number: members})).total
            size = {"saved": saved, "mean": 32 * sum(columns[m] for m in members), "sum": 1}[compare]
            value = float(scores.blocks[number][2 if len(members) > 1 else members[0]])
            options.append((value / size, "layer", number, members))
        saved = 3 * 32 + 2  # with the biases of gate and up
        size = {"saved": saved, "mean": 32, "sum": 1}[compare]
        options += [(float(scores.ffn[number][c]) / size, "ffn", number, (c,)) for c in range(len(layer.ffn))]
    least = min(options)
    strategy = make_strategy(anatomy, target, config)
    choice = next(strategy.choose(scores, source, Rounds(0, 0, 1), 1, 0))
    assert (choice.group.kind, choice.group.members[least[2]]) == (least[1], least[3])
    assert choice.saliency[choice.group.kind] == pytest.approx(least[0])


@pytest.mark.parametrize("metric", ["taylor", "group"])
def test_every_choice_leaves_a_model_and_lands_near_the_target(metric: str) -> None:
    """Down to the smallest model: an attention block of every kind and an FFN are left, counts and bounds agree."""
    for family in ("llama", "lfm2", "qwen3_5_text"):
        prunable = Prunable(tiny_model(family))
        anatomy = prunable.anatomy
        config = PruneConfig(groups=["ffn", "stem", "layer"], selection="global", min_ffn=30, min_hidden=24)
        full = anatomy.count(anatomy.source).total
        target = Target(anatomy.count(at_floors(anatomy, config)).total + 50)
        strategy = make_strategy(anatomy, target, config)
        scores = begin_scores(prunable, _gradients(prunable), None, metric_named(metric), blocks=True)()
        chosen = list(strategy.choose(scores, prunable.alive, Rounds(full, 0, 1), 1, 0))
        assert any(choice.group.kind == "layer" for choice in chosen)
        last = chosen[-1]
        assert last.num_parameters == anatomy.count(last.rest).total <= target.num_parameters
        assert anatomy.has_every_kind(last.rest)
        before = chosen[-2].rest
        options = [without(before, {number: places}) for number, places in anatomy.removable_blocks(before)]
        options += [replace(before, hidden=before.hidden[1:])] if len(before.hidden) > 24 else []
        for n, layer in enumerate(before.layers):
            layers = (*before.layers[:n], replace(layer, ffn=layer.ffn[1:]), *before.layers[n + 1 :])
            options += [replace(before, layers=layers)] if len(layer.ffn) > 30 else []
        smallest = min(anatomy.count(before).total - anatomy.count(rest).total for rest in options)
        assert all(choice.num_parameters >= target.num_parameters for choice in chosen[:-1])
        assert target.num_parameters - last.num_parameters < smallest
        bounds = global_events(anatomy, target, strategy.config)
        assert bounds.fewest <= len(chosen) <= bounds.most


@pytest.mark.parametrize("selection", ["global", "coupled"])
def test_the_last_block_is_the_smallest(selection: Any) -> None:
    """The least salient block that fits goes before the least salient one that does not: nothing overshoots by more."""
    kinds = ["conv", "full_attention", "conv", "full_attention", "conv"]
    prunable = Prunable(tiny_model("lfm2", num_hidden_layers=5, layer_types=kinds))
    anatomy, source = prunable.anatomy, prunable.alive
    full = anatomy.count(source).total
    scores = begin_scores(prunable, _gradients(prunable), None, metric_named("group"), blocks=True)()
    sizes = anatomy.layer_counts(source)
    for number, size in enumerate(sizes):  # the largest blocks are the least salient
        scores.blocks[number][:] = torch.tensor([1e-6, 1e-6, 1e-9]) / size**3
    config = PruneConfig(groups=["layer"], selection=selection)
    targets = [full - 1, full - min(sizes), full - min(sizes) - 1, full - max(sizes), full - sum(sorted(sizes)[:2]) - 5]
    for target in map(Target, targets):
        strategy = make_strategy(anatomy, target, config)
        chosen = list(strategy.choose(scores.copy(), source, Rounds(full, 0, 1), 1, 0))
        before = chosen[-2].rest if len(chosen) > 1 else source
        wholes = [(n, (0, 1)) for n in anatomy.removable_wholes(before)]
        blocks = anatomy.removable_blocks(before) if selection == "global" else wholes
        options = [without(before, {number: places}) for number, places in blocks]
        smallest = min(anatomy.count(before).total - anatomy.count(rest).total for rest in options)
        assert all(choice.num_parameters >= target.num_parameters for choice in chosen[:-1])
        assert 0 <= target.num_parameters - chosen[-1].num_parameters < smallest


@pytest.mark.parametrize("metric", ["taylor", "group"])
def test_choosing_goes_on_where_it_stopped(metric: str) -> None:
    """A second call with the same scores knows what the first one removed from the blocks."""
    prunable = Prunable(tiny_model("llama"))
    anatomy = prunable.anatomy
    config = PruneConfig(groups=["attn", "ffn", "layer"], selection="global", min_ffn=30)
    full, target = anatomy.count(anatomy.source).total, Target(anatomy.count(anatomy.source).total // 2)
    scores = begin_scores(prunable, _gradients(prunable), None, metric_named(metric), blocks=True)()
    strategy = make_strategy(anatomy, target, config)
    chosen = list(strategy.choose(scores.copy(), prunable.alive, Rounds(full, 0, 1), 1, 0))
    half = next(n for n, choice in enumerate(chosen) if choice.group.kind == "layer" and n)
    list(islice(strategy.choose(scores, prunable.alive, Rounds(full, 0, 1), 1, 0), half))
    again = list(strategy.choose(scores, chosen[half - 1].rest, Rounds(full, 0, 1), 1, 0))
    assert [choice.group for choice in again] == [choice.group for choice in chosen[half:]]
    for one, other in zip(again, chosen[half:], strict=True):
        assert one.saliency == pytest.approx(other.saliency)


@pytest.mark.parametrize("metric", ["taylor", "group"])
def test_blocks_lose_the_saliency_of_what_is_removed_from_them(metric: str) -> None:
    """Within a step (``remove``) and in what is smoothed over steps (``mask``); squares of sums cannot."""
    prunable = Prunable(tiny_model("llama"))
    scores = begin_scores(prunable, _gradients(prunable), None, metric_named(metric), blocks=True)()
    removed, masked, before = scores.copy(), scores.copy(), scores.blocks
    rest = prunable.alive
    for kind in ("attn", "ffn"):
        removed.remove(group := random_group(kind, rest))
        rest = rest.without(group)
    prunable.prune_to(rest)
    masked.mask(prunable.pruned).mask(prunable.pruned)
    for after in (removed.blocks, masked.blocks):
        for number, layer in enumerate(rest.layers):
            left = [float(scores.attn[number][list(layer.query_heads)].sum())]
            left.append(float(scores.ffn[number][list(layer.ffn)].sum()))
            expected = [*left, sum(left)] if metric == "taylor" else before[number].tolist()
            assert after[number].tolist() == pytest.approx(expected, rel=1e-9)


def test_coupled_layers_are_whole_and_updated_element_by_element() -> None:
    prunable = Prunable(tiny_model("lfm2", num_hidden_layers=4, layer_types=["conv", "full_attention"] * 2))
    anatomy, gradients = prunable.anatomy, _gradients(prunable)
    config = PruneConfig(groups=["ffn", "stem", "layer"])
    target = Target(int(0.4 * anatomy.count(anatomy.source).total))
    strategy = make_strategy(anatomy, target, config)
    fishers = {name: gradient.square() for name, gradient in gradients.items()}
    scores = ElementScores(prunable, gradients, fishers, metric_named("taylor"), blocks=True)
    chosen = list(strategy.choose(scores, prunable.alive, Rounds(0, 0, 1), 1, 0))
    wholes = [choice.group for choice in chosen if choice.group.kind == "layer"]
    assert wholes and all({*map(len, group.members)} == {0, 2} for group in wholes)
    assert chosen[-1].rest.is_uniform and chosen[-1].num_parameters <= target.num_parameters
    bounds = coupled_events(anatomy, target, config)
    assert bounds.fewest <= len(chosen) <= bounds.most
    prunable.prune_to(chosen[-1].rest)  # the sums that were updated are those of what is left
    rest = ElementScores(prunable, gradients, fishers, metric_named("taylor"), blocks=True)
    alive = torch.isfinite(rest.current.stem)
    assert torch.allclose(scores.current.stem[alive], rest.current.stem[alive])
    for number in chosen[-1].rest.places:
        assert torch.allclose(scores.current.blocks[number], rest.current.blocks[number])


def test_ledgers_of_layer_groups_are_checked() -> None:
    anatomy = Anatomy.of(tiny_model("llama"))

    def ledger(*removed: dict[int, tuple[int, ...]], extra: int = 0) -> list[dict[str, Any]]:
        structure, lines = anatomy.source, [source_event("tiny", anatomy, {})]
        for members in removed:
            structure = without(structure, members)
            indices = [list(members.get(n, ())) for n in range(3)]
            count = anatomy.count(structure).total + extra
            lines.append({"event": "prune", "type": "layer", "indices": indices, "parameters": count})
        return lines

    found = verified_structure(anatomy, ledger({1: (0, 1)}, {2: (1,)}), "ledger")
    assert [layer.absent for layer in found.layers] == [(), BLOCKS, ("mlp",)]
    first, *rest = ledger({1: (0, 1)}, {2: (1,)})
    known = {key: first[key] for key in ("event", "format", "source", "parameters", "options")}
    assert verified_structure(anatomy, [known, *rest], "ledger") == found  # of before it had the sizes
    with pytest.raises(UserError, match="hidden is not that of the source"):
        verified_structure(anatomy, [first | {"hidden": 1}, *rest], "ledger")
    for removed, reason in (
        (({1: (0,)}, {1: (0, 1)}), "index 0 of layer is not there or was removed before"),
        (({0: (0, 1), 1: (0, 1), 2: (0, 1)},), "would be left"),
        (({0: (0,), 1: (0,), 2: (0,)},), "would be left"),
    ):
        with pytest.raises(UserError, match=reason):
            verified_structure(anatomy, ledger(*removed), "ledger")
    with pytest.raises(UserError, match="where 18,304 are left"):
        verified_structure(anatomy, ledger({1: (0, 1)}, extra=1), "ledger")
    lines = ledger({1: (0, 1)})
    lines[1]["indices"][1] = [0, 2]
    with pytest.raises(UserError, match="index 2 of layer is not there"):
        verified_structure(anatomy, lines, "ledger")


def test_structures_keep_their_absent_blocks() -> None:
    rest = single_blocks(whole_layer(Anatomy.of(tiny_model("llama", num_hidden_layers=5)).source))
    assert Structure.from_json(rest.to_json("tiny")) == rest
    assert rest.places == {1: 0, 2: 1, 3: 2, 4: 3} and not rest.is_uniform
    for absent in (["attn"], ["legs"], ["mlp", "attn"]):
        damaged = rest.to_json("tiny")
        damaged["layers"][3]["absent"] = absent
        with pytest.raises(UserError, match="which the layer's sizes do not fit"):
            Structure.from_json(damaged)


@pytest.mark.parametrize(
    ("to", "options", "reason"),
    [
        ("layers=0", {}, "layers must be at least 1"),
        ("layers=4", {}, "layers must lie between 1 and the source's 3"),
        ("layers=3", {}, "these are the source's own sizes"),
        ("20%", {"groups": ["layer"]}, "below the smallest reachable model, 23,456 parameters"),
        ("20%", {"groups": ["layer"], "selection": "global"}, "below the smallest reachable model, 23,456 parameters"),
        ("layers=2", {"groups": ["ffn"]}, "needs the group layer"),
        ("layers=2", {"selection": "global"}, "every layer gets its own sizes"),
        ("layers=2", {"method": "adapt"}, "give a size"),
        ("60%", {"method": "adapt", "groups": ["ffn", "layer"]}, "adapt keeps all layers"),
        ("60%", {"groups": ["layer"], "round_to": 8}, "round_to 8: with the group layer give selection global"),
    ],
)
def test_bad_depths_are_refused_before_any_work(to: str, options: dict[str, Any], reason: str, tmp_path: Path) -> None:
    tiny_directory(tmp_path / "model")
    with pytest.raises(UserError, match=reason) as error:
        dwindle.prune(tmp_path / "model", to, out=tmp_path / "out", **options)
    assert "\n" not in str(error.value) and [path.name for path in tmp_path.iterdir()] == ["model"]


def test_families_without_blocks_refuse_the_group() -> None:
    """A norm that both blocks read (parallel blocks) belongs to neither."""
    family = Anatomy.of(tiny_model("llama")).family
    shared = {"self_attn": "input_layernorm", "mlp": "input_layernorm"}
    rows = {name: axes for name, axes in family.layer.items() if not name.startswith("post_attention")}
    parallel = Family(stem=family.stem, layer=rows, norm_before=shared)
    assert parallel.groups == ["attn", "ffn", "stem"]
    with pytest.raises(UserError, match="groups: layer: this family keeps such groups whole"):
        PruneConfig(groups=["layer"]).for_family(parallel)
    with pytest.raises(UserError, match="groups: layer: this family keeps such groups whole"):
        PruneConfig().with_layers().for_family(parallel)
    assert PruneConfig().for_family(parallel).effective_groups == ("attn", "ffn", "stem")
    with pytest.raises(UserError, match="groups: layer: input_layernorm is not a block's norm"):
        Family(stem=family.stem, layer=rows, norm_before=shared, groups=["layer"])


def test_a_changed_table_is_checked() -> None:
    family = Anatomy.of(tiny_model("llama")).family
    other = family.changed(layer=family.layer | {"stray_norm.weight": "hidden"})
    assert other.blocks["stray_norm"] is None and "layer" not in other.groups
    assert "stray_norm" not in family.blocks and "layer" in family.groups
    assert other.output_bias_keys == family.output_bias_keys


def test_a_shape_with_layers_is_reached(tmp_path: Path) -> None:
    tiny_directory(tmp_path / "model")
    found = dwindle.prune(tmp_path / "model", "layers=2,ffn=30", sequences=4, seq_len=32, out=tmp_path / "out")
    assert found.model.config.num_hidden_layers == 2 and found.model.config.intermediate_size == 30
    assert not is_custom(found.model.config)
    again = dwindle.replay(tmp_path / "model", tmp_path / "out")
    assert again.structure == found.structure and "layers 2" in repr(found)
    assert parse_target("layers=2", Anatomy.of(tiny_model("llama"))).shape is not None


def uneven(path: Path) -> Path:
    """A model whose third layer has fewer FFN channels, and changes the least."""
    loaded = load(tiny_directory(path / "even", num_hidden_layers=4))
    anatomy = Anatomy.of(loaded.model)
    layers = list(anatomy.source.layers)
    layers[2] = replace(layers[2], ffn=layers[2].ffn[:20])
    rest = replace(anatomy.source, layers=tuple(layers))
    model: Any = cut(loaded.model, anatomy, rest, anatomy.source)
    with torch.no_grad():
        for projection in (model.model.layers[2].self_attn.o_proj, model.model.layers[2].mlp.down_proj):
            projection.weight.mul_(1e-3)
    ledger = [source_event("tiny", anatomy, {})]
    save_model(model, loaded.tokenizer, path / "uneven", structure=rest, source="tiny", ledger=ledger)
    return path / "uneven"


@pytest.mark.parametrize("options", [{}, {"groups": ["layer"]}, {"method": "shortgpt"}])
def test_fewer_layers_keep_their_widths(options: dict[str, Any], tmp_path: Path) -> None:
    """A target that names layers alone changes nothing else, also where the smallest layer goes."""
    source = uneven(tmp_path)
    anatomy = Anatomy.of(load(source).model)
    widths = [len(layer.ffn) for layer in anatomy.source.layers]
    found = dwindle.prune(source, "layers=3", sequences=4, seq_len=32, measure=False, **options)
    assert [len(layer.ffn) for layer in found.structure.layers] == [*widths[:2], 0, widths[3]]
    assert final_count(anatomy, parse_target("layers=3", anatomy)) <= anatomy.count(found.structure).total
    config = PruneConfig(groups=["layer"])
    assert largest_count(anatomy, parse_target("layers=3", anatomy), config) == anatomy.count(found.structure).total
    for to in ("layers=3,ffn=20", "layers=3,ffn=10"):
        with pytest.raises(UserError, match="the source's layers differ in ffn: give layers alone"):
            dwindle.prune(source, to, **options)
