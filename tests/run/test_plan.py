"""What is known before a run begins: what fits the machine, how many events there can be, what cannot work."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from rich.console import Console
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config

from dwindle.anatomy.anatomy import Anatomy
from dwindle.core.config import from_dict
from dwindle.core.errors import UserError
from dwindle.core.run_directory import RunDirectory
from dwindle.data.config import DataConfig, SourceConfig
from dwindle.pruning.config import PruneConfig
from dwindle.pruning.event_bounds import coupled_events, global_events
from dwindle.pruning.pacing import Horizon, Ratio
from dwindle.pruning.target import Target, parse_target
from dwindle.recipe.recipe import Recipe
from dwindle.run.memory import footprint
from dwindle.run.plan import Plan, PlanWarning, make_plan, micro_batch_of, plan_pruning
from dwindle.run.pretrain import begin_run, pretrain
from tiny import tiny_directory

SMOLLM2 = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_key_value_heads": 3}
QWEN3 = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_key_value_heads": 8}
SMOLLM = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24, "num_key_value_heads": 32}

LLAMA_7B = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_key_value_heads": 32}
SMALLER = {"hidden_size": 1216, "intermediate_size": 3072, "num_hidden_layers": 24, "num_key_value_heads": 19}


def recipe(*, prune: dict[str, Any] | None = None, model: Any = "nowhere", **training: Any) -> Recipe:
    return from_dict(
        Recipe,
        {
            "source": {"model": str(model), "device": "cuda" if prune is None else "cpu"},
            "data": {"train": ["pydoc:train"], "seq_len": 1024},
            "training": {"tokens": "16M", "tokens_per_step": 65536, "optimizer": "adamw", **training},
            "prune": {"enabled": False} if prune is None else {"selection": "coupled", "metric": "taylor"} | prune,
            "distill": {"weight": 0.0},
        },
    )


def config(sizes: dict[str, int]) -> PretrainedConfig:
    if sizes is QWEN3:
        return Qwen3Config(**sizes, num_attention_heads=16, head_dim=128, vocab_size=151936, tie_word_embeddings=True)
    if sizes is LLAMA_7B:
        return LlamaConfig(**sizes, num_attention_heads=32, vocab_size=32000, tie_word_embeddings=False)
    heads = sizes["hidden_size"] // 64
    return LlamaConfig(**sizes, num_attention_heads=heads, vocab_size=49152, tie_word_embeddings=True)


@pytest.mark.parametrize(
    ("sizes", "gigabytes", "training", "sequences"),
    [
        (SMOLLM2, 150, {"compile": True}, 64),  # all of the step: 50 GB by the estimate, 38 as measured
        (SMOLLM2, 150, {"compile": True, "tokens_per_step": 16384}, 16),
        (SMOLLM2, 24, {"compile": True}, 16),
        (SMOLLM2, 24, {}, 8),  # eager layers keep more
        (SMOLLM2, 24, {"activation_checkpointing": True}, 64),
        (SMOLLM2, 24, {"micro_batch": 64}, 64),  # a person's choice is kept
        (SMOLLM, 150, {"compile": True}, 32),  # 94 GB as measured
        (SMOLLM, 8, {}, 1),
        (QWEN3, 150, {}, 32),  # queries twice as wide as the stream
        (QWEN3, 150, {"compile": True}, 64),
    ],
)
def test_the_micro_batch_fits_the_gpu(
    monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int], gigabytes: int, training: dict[str, Any], sequences: int
) -> None:
    card = SimpleNamespace(total_memory=gigabytes * 10**9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert micro_batch_of(recipe(**training), "cuda", config(sizes)) == sequences


def test_shards_and_teachers_count() -> None:
    """Weights are shared out, activations are not; a teacher brings its weights, final states and logits."""
    training, sizes = recipe(compile=True).training, config(SMOLLM)
    alone, spread = (footprint(sizes, training, "bf16", shards=n) for n in (1, 8))
    assert spread.fixed == alone.fixed / 8 and spread.per_token == alone.per_token
    assert alone.fixed == 14 * 1_711_376_384  # fp32 weight and two moments, and the bf16 copy
    assert (alone.gradients, spread.gradients) == (4 * 1_711_376_384, 4 * 1_711_376_384 / 8)
    taught = footprint(sizes, training, "bf16", teacher=(config(SMOLLM2), torch.bfloat16))
    assert taught.fixed - alone.fixed == 2 * 134_515_008 and taught.per_token - alone.per_token == 2 * 576
    assert taught.total(1024) > alone.total(1024) + 2 * 1024 * 49152
    eager = [recipe().training, "bf16"]
    with_teacher = footprint(sizes, *eager, teacher=(config(SMOLLM2), torch.bfloat16))
    assert with_teacher.total(1024) > footprint(sizes, *eager).total(1024) + 12 * 1024 * 49152
    assert footprint(sizes, training, "fp64").fixed == 24 * 1_711_376_384


def test_gradients_and_activations_are_there_at_the_same_time_only_with_several_micro_batches() -> None:
    """In the first backward pass gradients appear as activations are freed: the larger of the two counts."""
    one = footprint(config(SMOLLM), recipe(tokens_per_step=16384).training, "bf16")
    passes = int(one.fixed + one.per_token * 16384 + one.per_chunk_token * min(16384, one.chunk_tokens))
    assert one.total(16384) == passes > one.fixed + one.gradients
    several = footprint(config(SMOLLM), recipe(tokens_per_step=32768).training, "bf16")
    assert several.total(16384) == int(passes + one.gradients)
    tiny = footprint(config(SMOLLM), recipe(tokens_per_step=1024, compile=True).training, "bf16")
    assert tiny.total(1024) == int(tiny.fixed + tiny.gradients)


def test_switches_that_save_memory_count() -> None:
    """By hand for SmolLM-1.7B: what each switch leaves of weights, gradients, moments and bf16 copies."""
    total, embedding, layer = 1_711_376_384, 49152 * 2048, 4 * 2048**2 + 3 * 2048 * 8192 + 2 * 2048
    assert total == embedding + 24 * layer + 2048

    def fixed(**training: Any) -> float:
        return footprint(config(SMOLLM), recipe(**training).training, "bf16").fixed

    outside = total - 24 * layer
    assert fixed(optimizer="muon") == (4 + 2) * total + 4 * 24 * layer + 8 * outside
    assert fixed(optimizer="muon", moments="bf16") == (4 + 2) * total + 2 * 24 * layer + 4 * outside
    assert fixed(moments="bf16") == (4 + 4 + 2) * total
    assert fixed(activation_checkpointing=True) == 12 * total + 2 * layer  # copies of the layer that is recomputed
    assert fixed(lora_rank=4) == (4 + 2) * total
    assert footprint(config(SMOLLM), recipe(lora_rank=4).training, "bf16").gradients == 0
    in_float8 = footprint(config(SMOLLM), recipe().training, "fp8").fixed
    assert in_float8 == 12 * total + 24 * layer + 2 * outside  # copies of one byte in the layers
    muon = footprint(config(SMOLLM), recipe(optimizer="muon").training, "bf16")
    assert muon.update == 10 * 2**27 and muon.total(1) == int(muon.fixed + muon.gradients + muon.update)
    assert footprint(config(SMOLLM), recipe().training, "bf16").update == 0


BF16 = {"bf16_residual": True}


@pytest.mark.parametrize(
    ("sizes", "training", "precision", "tokens", "gigabytes"),
    [
        (SMOLLM, BF16, "bf16", 32768, 90.72),
        (SMOLLM, {**BF16, "ce_chunk_tokens": 8192}, "bf16", 32768, 91.55),
        (SMOLLM, BF16, "fp8", 32768, 68.29),
        (SMALLER, BF16, "bf16", 32768, 38.22),
        (SMALLER, {**BF16, "ce_chunk_tokens": 8192, "tokens_per_step": 65536}, "bf16", 65536, 69.46),
        (SMOLLM2, {**BF16, "optimizer": "muon"}, "bf16", 16384, 11.0),
        (SMOLLM2, {**BF16, "optimizer": "muon", "tokens_per_step": 65536}, "bf16", 65536, 36.3),
        (LLAMA_7B, {**BF16, "optimizer": "muon", "moments": "bf16", "ce_chunk_tokens": 8192, "tokens_per_step": 131072},
         "bf16", 8192, 117.57),
        (SMOLLM, {}, "bf16", 32768, 94.08),
        (SMOLLM2, {}, "bf16", 16384, 11.98),
        (SMOLLM2, {"tokens_per_step": 65536}, "bf16", 65536, 39.08),
        (SMOLLM2, {"optimizer": "muon"}, "bf16", 16384, 11.52),
        (SMOLLM2, {"optimizer": "muon", "tokens_per_step": 65536}, "bf16", 65536, 38.65),
    ],
)  # fmt: skip
def test_the_estimate_is_close_to_what_was_measured(
    sizes: dict[str, int], training: dict[str, Any], precision: Any, tokens: int, gigabytes: float
) -> None:
    """Peaks of an H200, compiled (docs/benchmarks.md); within 3 % if the residual stream is bf16."""
    settings = recipe(**{"compile": True, "tokens_per_step": tokens, **training}).training
    found = footprint(config(sizes), settings, precision).total(tokens) / 1e9
    assert found == pytest.approx(gigabytes, rel=0.03 if "bf16_residual" in training else 0.08)


def test_the_micro_batch_of_a_cpu() -> None:
    assert micro_batch_of(recipe(), "cpu", config(SMOLLM)) == 2


class Sizes(NamedTuple):
    """Of the small model below, in which every layer keeps the same."""

    hidden: int
    kv: int
    per_kv: int
    """With cluster attention: all queries, and ``kv`` of the key/value heads have some."""
    ffn: int


FULL, LAYERS, HEAD, VOCAB = Sizes(18, 3, 2, 18), 2, 4, 50


@pytest.fixture(scope="module")
def anatomy() -> Anatomy:
    sizes = {"hidden_size": 18, "intermediate_size": 18, "num_hidden_layers": LAYERS, "vocab_size": VOCAB}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": HEAD, "tie_word_embeddings": True}
    return Anatomy.of_config(LlamaConfig(**sizes, **heads))


def parameters(sizes: Sizes, attention: str = "regular") -> int:
    """By hand: embedding, norms, q and o, k and v, the FFN."""
    queries = sizes.per_kv if attention == "cluster" else sizes.kv * sizes.per_kv
    layer = 2 * queries * HEAD * sizes.hidden + 2 * sizes.kv * HEAD * sizes.hidden + 3 * sizes.ffn * sizes.hidden
    return VOCAB * sizes.hidden + sizes.hidden + LAYERS * (layer + 2 * sizes.hidden)


def one_less(sizes: Sizes, attention: str, groups: tuple[str, ...]) -> Iterator[Sizes]:
    """Everything that one event can make of it (floors: 8, 8 and one head)."""
    if "stem" in groups and sizes.hidden > 8:
        yield sizes._replace(hidden=sizes.hidden - 1)
    if "ffn" in groups and sizes.ffn > 8:
        yield sizes._replace(ffn=sizes.ffn - 1)
    if "attn" not in groups:
        return
    if attention == "cluster":
        left = sizes.per_kv - 1
        for kv in (sizes.kv, sizes.kv - 1):
            if left and kv <= left <= 2 * kv:
                yield sizes._replace(per_kv=left, kv=kv)
        return
    if sizes.kv > 1:
        yield sizes._replace(kv=sizes.kv - 1)
    if sizes.per_kv > 1:
        yield sizes._replace(per_kv=sizes.per_kv - 1)


def choices(sizes: Sizes, attention: str, groups: tuple[str, ...], target: int) -> Iterator[Sizes]:
    """What scores can make the next: one way for heads, then of all types those that fit, or else the smallest."""
    rest = list(one_less(sizes, attention, groups))
    heads = [one for one in rest if (one.hidden, one.ffn) == (sizes.hidden, sizes.ffn)]
    for way in heads or [None]:
        candidates = [one for one in rest if one not in heads or one == way]
        fitting = [one for one in candidates if parameters(one, attention) >= target]
        if candidates:
            yield from fitting or [max(candidates, key=lambda one: parameters(one, attention))]


@pytest.mark.parametrize("attention", ["regular", "cluster"])
@pytest.mark.parametrize("groups", [("attn", "ffn", "stem"), ("attn", "ffn"), ("ffn", "stem"), ("attn", "stem")])
def test_the_range_of_events_is_that_of_all_orders(anatomy: Anatomy, attention: Any, groups: Any) -> None:
    """Every order of events is walked. Key/value heads of cluster attention may also be removed in some layers only."""

    @cache
    def lengths(sizes: Sizes, target: int) -> tuple[float, float]:
        if parameters(sizes, attention) <= target:
            return 0, 0
        found = [lengths(rest, target) for rest in choices(sizes, attention, groups, target)]
        ends = [pair for pair in found if pair[1] >= 0]  # the others are stuck above the target
        return (1 + min(p[0] for p in ends), 1 + max(p[1] for p in ends)) if ends else (float("inf"), -1)

    start = FULL if attention == "regular" else FULL._replace(per_kv=6)
    full = parameters(start, attention)
    assert full == anatomy.count(anatomy.source).total
    config = PruneConfig(groups=list(groups), attention=attention)
    shares = (0.97, 0.9, 0.86, 0.83) + ((0.7, 0.6, 0.5) if len(groups) == 3 else ())
    for target in [int(share * full) for share in shares] + [full - 3 * 2 * 18 * 4 if "ffn" in groups else full - 1]:
        found, walked = coupled_events(anatomy, Target(target), config), lengths(start, target)
        if attention == "regular" or "attn" not in groups:
            assert (found.fewest, found.most) == walked
        else:
            assert walked[0] - 2 <= found.fewest <= walked[0] and walked[1] <= found.most <= walked[1] + 2


def test_exact_shapes_need_an_exact_number_of_events(anatomy: Anatomy) -> None:
    for attention, heads, events in (("regular", 4, 1), ("regular", 3, 1), ("cluster", 4, 2), ("cluster", 3, 3)):
        config = PruneConfig(attention=attention, min_heads=6, min_ffn=18)
        found = coupled_events(anatomy, parse_target(f"hidden=10,heads={heads},ffn=9", anatomy), config)
        assert (found.fewest, found.most) == (events + 8 + 9, events + 8 + 9)
    found = coupled_events(anatomy, parse_target("heads=2", anatomy), PruneConfig())
    assert (found.fewest, found.most) == (2, 2)  # one key/value head with both queries, or two with one each


def test_round_widths_need_events_until_one_of_the_round_results(anatomy: Anatomy) -> None:
    target = int(0.6 * parameters(FULL))
    ends = []
    for hidden in (8, 12, 16):
        for kv, per_kv in ((kv, per_kv) for kv in (1, 2, 3) for per_kv in (1, 2)):
            fits = [f for f in (8, 12, 16) if parameters(Sizes(hidden, kv, per_kv, f)) <= target]
            ends += [18 - hidden + 18 - max(fits) + 3 - kv + 2 - per_kv] if fits else []
    found = coupled_events(anatomy, Target(target), PruneConfig(round_to=4))
    assert (found.fewest, found.most) == (min(ends), max(ends))


@pytest.mark.parametrize("attention", ["regular", "cluster"])
def test_the_limits_of_single_groups_contain_both_extremes(anatomy: Anatomy, attention: Any) -> None:
    """Only channels are removed: one event each. Only hidden channels: the same events as with coupled groups."""
    full, channel = parameters(FULL), 3 * 18
    for gone in (1, 5, 20):  # of 2 × 10 channels
        config = PruneConfig(groups=["ffn"], attention=attention)
        found = global_events(anatomy, Target(full - gone * channel), config)
        assert (found.fewest, found.most) == (gone, gone)
        both = PruneConfig(attention=attention)
        assert global_events(anatomy, Target(full - gone * channel), both).most >= gone
    stem = PruneConfig(groups=["stem"], attention=attention)
    assert global_events(anatomy, Target(int(0.8 * full)), stem) == coupled_events(
        anatomy, Target(int(0.8 * full)), stem
    )
    heads = PruneConfig(groups=["attn"], attention=attention)
    found = global_events(anatomy, Target(full - 8 * HEAD * 18), heads)
    assert found.fewest <= 2 <= found.most <= 4  # two key/value heads with their queries; or four queries


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(tiny_directory(tmp_path_factory.mktemp("plan") / "model", max_position_embeddings=1024))


def text_of(plan: Plan) -> str:
    console = Console(file=io.StringIO(), width=400)
    console.print(plan.render())
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_a_plan_says_what_is_known_and_no_more(model: Path) -> None:
    plan = make_plan(recipe(model=model, prune={"target": "50%"}, tokens="1M"))
    assert 0 < plan.events_fewest < plan.events_most and plan.shape_target is None and not plan.warnings
    shown = text_of(plan)
    assert f"{plan.events_fewest} to {plan.events_most}, by step" in shown
    assert "about" not in shown.split("train: about")[0] and "estimate" not in shown and "shape at the end" not in shown
    assert "warning" not in shown


def test_a_plan_knows_an_exact_shape(model: Path) -> None:
    plan = make_plan(recipe(model=model, prune={"target": "hidden=24,heads=4,ffn=20"}))
    assert plan.shape_target == {"hidden": 24, "heads": 4, "ffn": 20}
    assert (plan.events_fewest, plan.events_most) == (8 + 20 + 1, 8 + 20 + 2)  # 4 × 1 or 2 × 2 heads
    widest = 257 * 24 * 2 + 24 + 3 * (2 * 24 + 4 * 4 * 4 * 24 + 3 * 20 * 24)
    assert plan.parameters_target == widest
    shown = text_of(plan)
    assert "hidden 24, heads 4, ffn 20" in shown and "estimate" not in shown


def test_a_plan_shows_the_layers_that_are_left(model: Path) -> None:
    plan = make_plan(recipe(model=model, prune={"target": "layers=2"}))
    assert plan.shape_target == plan.shape_before | {"layers": 2} and plan.shape_before["layers"] == 3
    assert "layers 3" in text_of(plan) and "layers 2" in text_of(plan)


def test_a_plan_without_pruning_has_no_events(model: Path) -> None:
    plan = make_plan(recipe(model=model, prune={"enabled": False}))
    assert plan.parameters_target == plan.parameters_before and plan.events_most == 0
    shown = text_of(plan)
    assert "none" in shown and "at most" not in shown and "→" not in shown


def test_plans_need_no_weights(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = (model / "model.safetensors").rename(model / "elsewhere")
    assert make_plan(recipe(model=model, prune={"target": "50%", "round_to": 8})).events_most
    weights.rename(model / "model.safetensors")


def test_too_few_events_are_a_warning_if_they_may_be_enough(model: Path) -> None:
    """One event in a step; a horizon always arrives, because any number of groups is removed in a step."""
    prune = {"target": "50%", "ratio": "1:1"}
    per_step = 1024
    needs = make_plan(recipe(model=model, prune={"target": "50%"}))

    def with_steps(steps: int, **other: Any) -> Plan:
        tokens = {"tokens": steps * per_step, "tokens_per_step": per_step, "warmup": 0}
        return make_plan(recipe(model=model, prune=other or prune, **tokens))

    fewest, most = needs.events_fewest, needs.events_most
    with pytest.raises(UserError, match=rf"prune.ratio: 1:1 gives {fewest - 1} events .* at least {fewest}: raise"):
        with_steps(fewest - 1)
    assert not with_steps(most).warnings and not with_steps(fewest, target="50%").warnings
    for steps in (fewest, most - 1):
        (warning,) = with_steps(steps).warnings
        assert warning.startswith(f"{steps} events possible in {steps} steps, the target needs {fewest} to {most}: ")
        assert "may not be reached; raise training.tokens" in warning
        assert warning in text_of(with_steps(steps)) and with_steps(steps).to_json()["warnings"] == [warning]


def test_sequences_beyond_the_positions_of_the_source_are_told(model: Path, tmp_path: Path) -> None:
    """Rotations go on, so it can be meant; but the source never saw such positions."""
    settings = recipe(model=model, prune={"enabled": False}, tokens=2048, tokens_per_step=2048)
    settings.data.seq_len = 2048
    told = "data.seq_len: 2,048 is more than the 1,024 positions that the source was made for"
    assert make_plan(settings).warnings == [told]
    with pytest.warns(PlanWarning, match=told):
        begin_run(settings, RunDirectory(tmp_path / "run"), overwrite=False)


def test_a_teacher_that_is_the_start_of_a_run_is_told(model: Path) -> None:
    settings = recipe(model=model, prune={"enabled": False}, tokens=2048, tokens_per_step=2048)
    settings.distill.weight = 0.75
    (warning,) = make_plan(settings).warnings
    assert warning.startswith("distill.weight: this run does not prune, so its teacher is its own start")
    settings.distill.teacher = str(model)  # meant, then
    assert not make_plan(settings).warnings
    settings.distill.teacher, settings.source.random_init = "", True  # the source itself is another model
    assert not make_plan(settings).warnings


def test_text_that_is_read_too_often_is_told(model: Path, tmp_path: Path) -> None:
    """Tokens over tokens, counted by hand: a byte is a token here."""
    (tmp_path / "a.txt").write_text("It was the best of times. " * 40)
    settings = recipe(model=model, prune={"enabled": False}, tokens=8192, tokens_per_step=1024)
    settings.data = DataConfig(train=[str(tmp_path / "a.txt")], seq_len=128)
    assert make_plan(settings).warnings == [
        "training.tokens: reads train about 8 times, so it may be memorised: add text, or watch the validation loss"
    ]
    with pytest.warns(PlanWarning, match=r"training.tokens: reads train 8\.0 times, so it may be memorised"):
        pretrain(settings, tmp_path / "run")
    settings.training.tokens = 4096
    assert not make_plan(settings).warnings
    with warnings.catch_warnings():
        warnings.simplefilter("error", PlanWarning)
        pretrain(settings, tmp_path / "short")


def test_a_plan_says_what_comes_from_the_network(model: Path, tmp_path: Path) -> None:
    """How long that is, nobody knows; the other source is counted by its share."""
    (tmp_path / "a.txt").write_text("It was the best of times. " * 40)
    settings = recipe(model=model, prune={"enabled": False}, tokens=16384, tokens_per_step=1024)
    settings.data = DataConfig(
        sources={"web": SourceConfig(paths=["hf:org/name"]), "book": SourceConfig(paths=[str(tmp_path / "a.txt")])},
        seq_len=128,
    )
    plan = make_plan(settings)
    assert plan.to_json()["network"] == ["hf:org/name"] and "from the network" in text_of(plan)
    (warning,) = plan.warnings
    assert warning.startswith("training.tokens: reads book about 8 times, so")
    assert "network" not in text_of(make_plan(recipe(model=model, prune={"enabled": False})))


def test_multiples_that_cannot_fit_are_refused_before_anything_is_loaded() -> None:
    tiny = Anatomy.of_config(
        LlamaConfig(
            hidden_size=32,
            intermediate_size=40,
            num_hidden_layers=3,
            num_attention_heads=8,
            num_key_value_heads=4,
            vocab_size=257,
        )
    )
    with pytest.raises(UserError, match=r"prune.round_to 64: no multiple lies between the minimum sizes"):
        plan_pruning(recipe(prune={"target": "50%", "round_to": 64}), tiny)
    with pytest.raises(
        UserError, match=r"prune.round_to 32: the smallest model with such widths has [\d,]+ parameters"
    ):
        plan_pruning(recipe(prune={"target": "40%", "round_to": 32}), tiny)
    for prune, kind in (({}, Horizon), ({"ratio": "1:1"}, Ratio)):
        found = plan_pruning(recipe(prune={"target": "50%", "round_to": 16, **prune}), tiny)
        assert found is not None and isinstance(found.pacing, kind)
