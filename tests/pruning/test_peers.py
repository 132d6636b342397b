"""Other papers' methods: each score against a loop written here, each result against its target and its rule."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

import dwindle
from dwindle.anatomy.anatomy import Anatomy
from dwindle.anatomy.build import with_output_bias
from dwindle.anatomy.families import FAMILIES
from dwindle.anatomy.shrink import Float64Throughout
from dwindle.anatomy.structure import Layer, Structure
from dwindle.core.config import from_dict
from dwindle.core.errors import UserError
from dwindle.pruning.activity import LayerWalk, observe, output_rows
from dwindle.pruning.config import PostTrainingConfig, PretrainPruneConfig, PruneConfig
from dwindle.pruning.methods import METHODS, MethodName, markdown
from dwindle.pruning.rounds import check_prunable, prune_in_rounds
from dwindle.pruning.strategies import make_strategy
from dwindle.pruning.strategies.peers import LlmPrunerStrategy
from dwindle.pruning.surgery import Prunable
from dwindle.pruning.target import Target, parse_target
from dwindle.recipe.recipe import Recipe
from tiny import shrunk, tiny_directory, tiny_model, tokens

PEERS = ["wanda-sp", "flap", "llm-pruner", "minitron"]
WINDOWS = tokens(5, 12, seed=3)
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    """Stock norms compute in float32, ours while pruning do not."""
    with Float64Throughout():
        yield


def inputs_of(model: Any, windows: Tensor = WINDOWS) -> dict[str, Tensor]:
    """[sequences, tokens, columns] of the inputs of ``o`` and ``down``, and of the outputs of norms, by module."""
    seen: dict[str, list[Tensor]] = {}
    handles = []
    for name, module in model.named_modules():
        if name.endswith(("o_proj", "down_proj")):
            handles.append(
                module.register_forward_pre_hook(lambda _, args, name=name: seen.setdefault(name, []).append(args[0]))
            )
        elif name.endswith(("layernorm", "model.norm")):
            handles.append(
                module.register_forward_hook(lambda _, args, out, name=name: seen.setdefault(name, []).append(out))
            )
    with torch.no_grad():
        for window in windows:
            model(input_ids=window[None])
    for handle in handles:
        handle.remove()
    return {name: torch.cat(parts) for name, parts in seen.items()}


def measured(method: Any, model: Any, **settings: Any) -> Any:
    prunable = Prunable(model)
    count = prunable.num_parameters
    config = PostTrainingConfig(method=method, **settings)
    strategy = make_strategy(prunable.anatomy, Target(count * 8 // 10), config)
    return strategy.measure(prunable, WINDOWS, None)


def pruned(method: Any, model: Any, target: Target, **settings: Any) -> tuple[Prunable, list[dict[str, Any]]]:
    anatomy, config = Anatomy.of(model), PostTrainingConfig(method=method, **settings)
    prunable = Prunable(with_output_bias(model, anatomy.source) if method == "flap" else model)
    return prunable, prune_in_rounds(prunable, target, config, WINDOWS, "tiny")


def test_wanda_sp_scores_weights_times_inputs() -> None:
    """Of the first layer; the next one is scored on what the pruned first one computes."""
    model = tiny_model("llama")
    seen, scores = inputs_of(model), measured("wanda-sp", model)
    wanted: dict[str, list[float]] = {}
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        w, x = (
            model.get_parameter(f"model.layers.0.{name}.weight").tolist(),
            seen[f"model.layers.0.{name}"].flatten(0, 1),
        )
        columns = range(x.shape[1])
        wanted[name] = [sum(abs(row[j]) for row in w) / len(w) * float((x[:, j] @ x[:, j]).sqrt()) for j in columns]
    assert scores.ffn[0].tolist() == pytest.approx(wanted["mlp.down_proj"], rel=1e-12)
    heads = [sum(wanted["self_attn.o_proj"][4 * head : 4 * head + 4]) for head in range(8)]
    assert scores.attn[0].tolist() == pytest.approx(heads, rel=1e-12)


def test_wanda_sp_sees_the_inputs_of_pruned_layers() -> None:
    model = tiny_model("llama", num_hidden_layers=3)
    total = sum(p.numel() for p in model.parameters())
    reference = tiny_model("llama", num_hidden_layers=3)
    prunable, _ = pruned("wanda-sp", model, Target(total * 6 // 10))
    sizes = {(len(la.query_heads), len(la.kv_heads), len(la.ffn)) for la in prunable.alive.layers}
    assert len(sizes) == 1
    by_hand = Prunable(reference)
    for number, kept in enumerate(prunable.alive.layers):  # one layer after the other, scored in this test
        seen = inputs_of(by_hand.model)
        down = by_hand.model.model.layers[number].mlp.down_proj
        x = seen[f"model.layers.{number}.mlp.down_proj"].flatten(0, 1)
        score = down.weight.abs().mean(0) * x.square().sum(0).sqrt()
        best = score.argsort(descending=True)[: len(kept.ffn)]
        assert sorted(best.tolist()) == list(kept.ffn)
        layers = [*prunable.alive.layers[: number + 1], *by_hand.anatomy.source.layers[number + 1 :]]
        by_hand.prune_to(Structure(by_hand.anatomy.source.hidden, tuple(layers)))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_walk_sees_what_whole_passes_see(family: str) -> None:
    """Also after the layers behind have changed; then the model computes what it did before."""
    model = tiny_model(family)
    prunable, walk = Prunable(model), LayerWalk()
    for number, layer in enumerate(model.model.layers):
        rows = list(output_rows(prunable.anatomy, [number]).values())
        plain = observe(prunable, WINDOWS, rows)
        walked = observe(prunable, WINDOWS, rows, passes=walk.to(list(model.model.layers), number))
        assert plain.keys() == walked.keys() and plain
        for name, seen in plain.items():
            torch.testing.assert_close(walked[name].square_N, seen.square_N, rtol=0, atol=0)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.mul_(0.5)


@pytest.mark.parametrize("options", [{}, {"num_key_value_heads": 8}], ids=["grouped", "multi-head"])
def test_flap_scores_standardised_fluctuations(options: dict[str, Any]) -> None:
    model = tiny_model("llama", **options)
    seen, scores = inputs_of(model), measured("flap", model)
    for number, layer in enumerate(model.model.layers):
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            weight = layer.get_parameter(f"{name}.weight").detach()
            x = seen[f"model.layers.{number}.{name}"].flatten(0, 1)
            raw = [float(x[:, j].var(correction=0)) * float(weight[:, j] @ weight[:, j]) for j in range(x.shape[1])]
            if name == "self_attn.o_proj":
                raw = [one**2 for one in raw]
            mean = sum(raw) / len(raw)
            deviation = (sum((one - mean) ** 2 for one in raw) / (len(raw) - 1)) ** 0.5
            z = [(one - mean) / deviation for one in raw]
            if name == "mlp.down_proj":
                assert scores.ffn[number].tolist() == pytest.approx(z, rel=1e-9)
            else:
                heads = [sum(z[4 * head : 4 * head + 4]) for head in range(8)]
                assert scores.attn[number].tolist() == pytest.approx(heads, rel=1e-9)


def test_flap_removes_what_is_below_one_threshold_and_keeps_its_mean() -> None:
    model = tiny_model("llama", num_hidden_layers=4, attention_bias=False, mlp_bias=False)
    source = tiny_model("llama", num_hidden_layers=4, attention_bias=False, mlp_bias=False)
    total, scores = sum(p.numel() for p in model.parameters()), measured("flap", source)
    prunable, _ = pruned("flap", model, Target(total * 7 // 10))
    removed, kept = list[float](), list[float]()
    for number, layer in enumerate(prunable.alive.layers):
        by_head, per = scores.attn[number] / 4, prunable.anatomy.source.layers[number]
        for kv in per.kv_heads:
            z = float(by_head[list(per.queries_of(kv))].mean())
            (kept if kv in layer.kv_heads else removed).append(z)
        for channel, z in enumerate(scores.ffn[number].tolist()):
            (kept if channel in layer.ffn else removed).append(z)
    assert max(removed) < min(kept)
    seen = inputs_of(source)
    for number in range(4):
        layer, old = prunable.alive.layers[number], source.model.layers[number]
        new = prunable.model.model.layers[number]
        gone = [c for c in range(40) if c not in layer.ffn]
        mean = seen[f"model.layers.{number}.mlp.down_proj"].flatten(0, 1).mean(0)
        wanted = sum((old.mlp.down_proj.weight[:, c] * mean[c] for c in gone), torch.zeros(32).double())
        assert torch.allclose(new.mlp.down_proj.bias, wanted, atol=1e-12)
        gone = [4 * q + d for q in range(8) if q not in layer.query_heads for d in range(4)]
        mean = seen[f"model.layers.{number}.self_attn.o_proj"].flatten(0, 1).mean(0)
        wanted = sum((old.self_attn.o_proj.weight[:, c] * mean[c] for c in gone), torch.zeros(32).double())
        assert torch.allclose(new.self_attn.o_proj.bias, wanted, atol=1e-12)
        assert not new.self_attn.q_proj.bias.any() and not new.mlp.gate_proj.bias.any()
    smaller = prunable.compacted()
    assert sum(p.numel() for p in smaller.parameters()) == prunable.num_parameters  # with all biases
    ids = tokens(2, 9)
    assert torch.allclose(smaller(ids).logits, prunable.model(ids).logits, atol=1e-10)


@pytest.mark.parametrize("family", [name for name, table in FAMILIES.items() if table.output_bias_keys])
def test_a_family_with_bias_keys_gets_biases_and_stays_the_same_model(family: str) -> None:
    options = dict.fromkeys((*FAMILIES[family].output_bias_keys, "attention_bias"), False)
    model, ids = tiny_model(family, **options), tokens(2, 9)
    anatomy = Anatomy.of(model)
    before = model(ids).logits
    biased = with_output_bias(model, anatomy.source)
    names = dict(biased.named_parameters())
    assert all(f"{row.module}.bias" in names for _, row in anatomy.outputs)
    assert torch.equal(biased(ids).logits, before)


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_llm_pruner_scores_all_coupled_matrices(family: str) -> None:
    model = tiny_model(family)
    scores = measured("llm-pruner", model)
    gradients: dict[str, Tensor] = {}
    squares: dict[str, Tensor] = {}
    for window in WINDOWS:
        model.zero_grad()
        model.requires_grad_(True)
        model(input_ids=window[None], labels=window[None]).loss.backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            gradients[name] = gradients.get(name, 0) + parameter.grad / len(WINDOWS)
            squares[name] = squares.get(name, 0) + parameter.grad**2 / len(WINDOWS)
    for number in range(3):
        element = {}
        for name, w in model.named_parameters():
            if name.startswith(f"model.layers.{number}.") and name.endswith("proj.weight"):
                found = (w * gradients[name] - 0.5 * w * w * squares[name]).abs().detach()
                element[name.split(".")[-2]] = found
        if family == "phi3":
            element["q_proj"], element["k_proj"], element["v_proj"] = element["qkv_proj"].split([32, 16, 16])
            element["gate_proj"], element["up_proj"] = element["gate_up_proj"].split([40, 40])
        channels = element["gate_proj"].sum(1) + element["up_proj"].sum(1) + element["down_proj"].sum(0)
        assert scores.ffn[number].tolist() == pytest.approx(channels.tolist(), rel=1e-9)
        for kv in range(4):
            queries = slice(8 * kv, 8 * kv + 8)  # two heads of four
            keys = slice(4 * kv, 4 * kv + 4)
            whole = sum(
                float(part.sum())
                for part in (
                    element["q_proj"][queries],
                    element["k_proj"][keys],
                    element["v_proj"][keys],
                    element["o_proj"][:, queries],
                )
            )
            assert float(scores.kv[number][kv]) == pytest.approx(whole, rel=1e-9)


@pytest.mark.parametrize(("layers", "spared"), [(30, [0, 1, 2, 3, 28, 29]), (16, [0, 1, 15]), (5, [0]), (3, [])])
def test_llm_pruner_spares_the_ends(layers: int, spared: list[int]) -> None:
    anatomy = Anatomy.of(tiny_model("llama", num_hidden_layers=layers))
    total = anatomy.count(anatomy.source).total
    strategy = LlmPrunerStrategy(anatomy, Target(total * 8 // 10), PostTrainingConfig(method="llm-pruner"))
    assert sorted(strategy.spared) == spared


@pytest.mark.parametrize("family", ["llama", "olmo2"])
def test_minitron_scores_activations(family: str) -> None:
    model = tiny_model(family)
    seen, scores = inputs_of(model), measured("minitron", model)

    def importance(norms: Tensor) -> float:  # [sequences, tokens]
        return sum(float(sum(row) / len(row)) ** 2 for row in norms) ** 0.5

    for number in range(3):
        down, o = seen[f"model.layers.{number}.mlp.down_proj"], seen[f"model.layers.{number}.self_attn.o_proj"]
        wanted = [importance(down[:, :, j].abs()) for j in range(40)]
        assert scores.ffn[number].tolist() == pytest.approx(wanted, rel=1e-9)
        wanted = [importance(o[:, :, 4 * h : 4 * h + 4].square().sum(2).sqrt()) for h in range(8)]
        assert scores.attn[number].tolist() == pytest.approx(wanted, rel=1e-9)
    norms = [x for name, x in seen.items() if name.endswith("norm")]
    assert len(norms) == 7
    wanted = [sum(importance(x[:, :, j].abs()) for x in norms) for j in range(32)]
    assert scores.stem.tolist() == pytest.approx(wanted, rel=1e-9)


def test_minitron_prunes_to_one_shape() -> None:
    """Heads inside key/value groups, the most active of everything; a shape may be given."""
    model = tiny_model("llama")
    scores = measured("minitron", tiny_model("llama"))
    target = parse_target("hidden=24,heads=4,ffn=30", Anatomy.of(model))
    prunable, _ = pruned("minitron", model, target)
    assert list(prunable.alive.hidden) == sorted(scores.stem.argsort(descending=True)[:24].tolist())
    for number, layer in enumerate(prunable.alive.layers):
        assert list(layer.ffn) == sorted(scores.ffn[number].argsort(descending=True)[:30].tolist())
        assert layer.kv_of_query == (0, 1, 2, 3)  # one query of each key/value head: its more active one
        assert list(layer.query_heads) == [2 * kv + int(scores.attn[number][2 * kv :][:2].argmax()) for kv in range(4)]
    with pytest.raises(UserError, match=r"heads=6: minitron keeps all 4 key/value heads: choose one of \[4, 8\]"):
        pruned("minitron", tiny_model("llama"), parse_target("heads=6", Anatomy.of(tiny_model("llama"))))


@pytest.mark.parametrize("share", [0.85, 0.45])
@pytest.mark.parametrize("family", ["llama", "qwen3", "olmo2", "phi3", "Llama-3.2-1B"])
@pytest.mark.parametrize("method", PEERS)
def test_each_lands_within_one_of_its_groups(method: str, family: str, share: float) -> None:
    anatomy = Anatomy.of(tiny_model(family, num_hidden_layers=4))
    if method == "flap" and not anatomy.family.output_bias_keys:
        with pytest.raises(UserError, match="no biases on o and down for its repair: choose adapt"):
            check_prunable(anatomy, Target(1000), PostTrainingConfig(method="flap"))
        return
    model = tiny_model(family, num_hidden_layers=4)
    target = Target(int(anatomy.count(anatomy.source).total * share))
    prunable, events = pruned(method, model, target)
    count, source = prunable.num_parameters, anatomy.source.layers[0]
    layer = prunable.anatomy.count_layer(0, 32, source)
    group = layer - prunable.anatomy.count_layer(0, 32, source.without(ffn=[0]))  # a channel
    if method == "flap":
        group = layer - prunable.anatomy.count_layer(0, 32, source.without(query_heads=source.queries_of(0)))
    else:
        group *= 4  # of every layer
    assert target.num_parameters - group < count <= target.num_parameters
    assert sum(p.numel() for p in prunable.compacted().parameters()) == count
    assert events[0]["options"]["method"] == method and "metric" not in events[0]["options"]
    if method in ("wanda-sp", "minitron"):
        assert prunable.alive.is_uniform


@pytest.mark.parametrize(("kv", "round_to", "percent"), [(8, 1, 98), (4, 4, 79), (4, 8, 85), (8, 8, 84), (1, 4, 93)])
@pytest.mark.parametrize("method", ["minitron", "sheared"])
def test_a_uniform_shape_is_within_one_group(method: Any, kv: int, round_to: int, percent: int) -> None:
    """Sizes at which the shape with the most equal shares is further from the target."""
    anatomy = Anatomy.of(tiny_model("llama", num_key_value_heads=kv))
    target = Target(anatomy.count(anatomy.source).total * percent // 100)
    shape = make_strategy(anatomy, target, PruneConfig(method=method, round_to=round_to)).target.shape
    assert shape is not None and shape.hidden % round_to == shape.ffn % round_to == 0
    kv_of_query = tuple(head * kv // shape.heads for head in range(shape.heads))
    layer = Layer(tuple(range(shape.heads)), kv_of_query, tuple(range(shape.ffn)))
    count = anatomy.count(Structure(tuple(range(shape.hidden)), (layer,) * 3)).total
    channels = 3 * 3 * shape.hidden * round_to  # of gate, up and down in three layers
    assert target.num_parameters - channels < count <= target.num_parameters


@pytest.mark.parametrize("method", ["minitron", "sheared"])
@pytest.mark.parametrize(
    ("to", "message"),
    [
        ("5%", "below the smallest model that method {} can reach, 3,384 parameters at these minimum sizes"),
        ("layers=2", "target layers=2: {} keeps all layers: give hidden, heads or ffn"),
        ("heads=5", r"heads=5: {} keeps all 4 key/value heads: choose one of \[4, 8\]"),
    ],
)
def test_a_target_that_no_uniform_shape_reaches(method: Any, to: str, message: str) -> None:
    anatomy = Anatomy.of(tiny_model("llama"))
    with pytest.raises(UserError, match=message.format(method)):
        make_strategy(anatomy, parse_target(to, anatomy), PruneConfig(method=method))


@pytest.mark.parametrize("method", ["minitron", "sheared"])
def test_layers_with_different_heads_have_no_common_shape(method: Any) -> None:
    """Their heads stay, if they are asked for nothing else."""
    anatomy = Anatomy.of(shrunk("llama", "unequal")[0])
    target = parse_target("70%", anatomy)
    with pytest.raises(UserError, match=f"method {method}: the source's layers already have different heads: choose"):
        make_strategy(anatomy, target, PruneConfig(method=method))
    make_strategy(anatomy, target, PruneConfig(method=method, groups=["ffn", "stem"]))
    make_strategy(anatomy, parse_target("hidden=24", anatomy), PruneConfig(method=method))


@pytest.mark.parametrize("method", ["uniform", "wanda-sp", "llm-pruner"])
def test_layers_that_differ_are_refused_before_any_work(method: Any) -> None:
    anatomy = Anatomy.of(shrunk("llama", "ffn")[0])
    with pytest.raises(UserError, match=f"method {method}: the source's layers already have different sizes"):
        check_prunable(anatomy, parse_target("70%", anatomy), PostTrainingConfig(method=method))


def cluster_source() -> Prunable:
    """A model from which single query heads were removed."""
    prunable = Prunable(tiny_model("llama"))
    config = PostTrainingConfig(attention="cluster", groups=["attn"], metric="magnitude")
    prune_in_rounds(prunable, parse_target("heads=5", prunable.anatomy), config, None, "tiny")
    return Prunable(prunable.compacted())


def test_a_source_with_cluster_attention() -> None:
    """Who does not prune heads does not mind them; for the others, the advice works."""
    prunable = cluster_source()
    anatomy = prunable.anatomy
    target = Target(anatomy.count(anatomy.source).total * 8 // 10)
    for free in (PostTrainingConfig(method="shortgpt"), PostTrainingConfig(groups=["ffn", "stem"], metric="magnitude")):
        prune_in_rounds(cluster_source(), target, free, WINDOWS, "tiny")
    for method in ("wanda-sp", "minitron"):
        with pytest.raises(
            UserError, match=f"method {method}: cannot prune the cluster attention .*: choose "
        ) as error:
            check_prunable(anatomy, target, PostTrainingConfig(method=method))
    with pytest.raises(UserError, match="choose efficientllm, adapt or uniform, with attention cluster"):
        make_strategy(anatomy, target, PretrainPruneConfig(method="sheared", target="80%"))
    able = str(error.value).rpartition("choose ")[2].partition(", with")[0].replace(" or ", ", ").split(", ")
    for method in able:
        check_prunable(anatomy, target, PostTrainingConfig(method=method, attention="cluster"))
    with pytest.raises(UserError, match="attention: the source already has cluster attention: choose cluster"):
        check_prunable(anatomy, target, PostTrainingConfig(method="llm-pruner"))


@pytest.mark.parametrize("method", PEERS)
def test_pruned_then_trained(method: str, tmp_path: Path) -> None:
    """Prune, write, load, rebuild from the ledger, and train the result with its source as teacher."""
    source, text = tiny_directory(tmp_path / "source", num_hidden_layers=4), tmp_path / "text.txt"
    text.write_text("\n\n".join(f"{n} sheep sleep, {n * n} goats graze." for n in range(60)))
    about: dict[str, Any] = {"data": [str(text)], "sequences": 4, "seq_len": 24, "measure": False}
    result = dwindle.prune(source, "70%", method=method, out=tmp_path / "out", device="cpu", **about)
    assert result.after.total <= int(0.7 * result.before.total)
    loaded = dwindle.load(tmp_path / "out", device="cpu")
    ids = tokens(2, 9)
    assert torch.allclose(loaded.model(ids).logits, result.model(ids).logits, atol=1e-5)
    again = dwindle.replay(source, tmp_path / "out" / "ledger.jsonl")
    assert again.structure == result.structure and again.after == result.after
    if method not in ("flap", "minitron"):  # the others have no more than these
        return
    settings: dict[str, Any] = {
        "source": {"model": str(tmp_path / "out"), "device": "cpu"},
        "data": {"train": [str(text)], "seq_len": 24, "cache_dir": str(tmp_path / "tokens")},
        "training": {"tokens": 288, "tokens_per_step": 96, "compile": False},
        "prune": {"enabled": False, "method": method},
        "distill": {"teacher": str(source), "weight": 0.5},
    }
    run = dwindle.pretrain(from_dict(Recipe, settings), tmp_path / "run")
    trained = dwindle.load(run.model, device="cpu").model
    assert sum(p.numel() for p in trained.parameters()) == result.after.total
    if method == "flap":
        assert trained.model.layers[0].mlp.down_proj.bias.any()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "flap", "metric": "taylor"}, "metric: is a setting of method efficientllm or adapt or uniform"),
        ({"method": "wanda-sp", "attention": "cluster"}, "attention: is a setting of method .*, not wanda-sp"),
        ({"method": "wanda-sp", "rounds": 3}, "rounds: is a setting of method .*, not wanda-sp"),
        ({"method": "flap", "second_order": True}, "second_order: is a setting"),
        ({"method": "llm-pruner", "groups": ["stem"]}, "groups: stem: llm-pruner keeps the hidden size"),
        (
            {"method": "minitron", "groups": ["ffn", "layer"]},
            "layer: minitron keeps all layers: choose among attn, ffn",
        ),
        ({"method": "wanda-sp", "min_hidden": 4}, "min_hidden: is a setting of method .*, not wanda-sp"),
    ],
)
def test_settings_of_other_methods_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        PostTrainingConfig(**settings)


@pytest.mark.parametrize("method", ["sheared", "shortgpt"])
@pytest.mark.parametrize("setting", [{"smoothing": 0.5}, {"fisher": "adam"}])
def test_averages_of_gradients_are_refused_without_them(method: str, setting: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"{next(iter(setting))}: is a setting of method .*, not {method}"):
        PretrainPruneConfig(method=method, target="60%", **setting)


def test_all_kinds_in_an_older_recipe_mean_those_that_are_prunable() -> None:
    for method, kinds in (("adapt", ("attn", "ffn")), ("slicegpt", ("stem",)), ("minitron", ("attn", "ffn", "stem"))):
        assert PruneConfig(method=method, groups=["attn", "ffn", "stem"]).effective_groups == kinds


def test_a_peer_in_a_recipe_names_the_way() -> None:
    with pytest.raises(UserError, match="flap prunes before training: run dwindle prune --method flap, then train"):
        PretrainPruneConfig(method="flap", target="60%")


def test_the_page_of_methods_is_the_table() -> None:
    assert list(get_args(MethodName)) == list(METHODS)
    page = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    assert markdown() in page
