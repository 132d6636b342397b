"""``dwindle check-family``: every built-in family passes; a wrong table does not."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

import dwindle
from dwindle.anatomy import families, shrink
from dwindle.anatomy.anatomy import Anatomy
from dwindle.core.errors import UserError
from dwindle.run import family_check
from outside_family import STARCODER2, starcoder2, tables
from tiny import FAMILIES, tiny_model

NUM_STEPS = family_check.NUM_STEPS
WAYS = family_check.ways


def one_kind_at_a_time(anatomy: Anatomy, config: Any) -> dict[str, family_check.Way]:
    return {name: way for name, way in WAYS(anatomy, config).items() if not name.startswith("all groups")}


@pytest.fixture(autouse=True)
def nothing_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "_registered", {})


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """All but one check train less than the command does; tests/pruning/test_surgery.py trains every family longer."""
    monkeypatch.setattr(family_check, "NUM_STEPS", 3)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_built_in_family_passes(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if family == "qwen3":  # as the command does
        monkeypatch.setattr(family_check, "NUM_STEPS", NUM_STEPS)
    else:  # tests/pruning/test_surgery.py trains every family with Muon, and prunes all kinds together
        monkeypatch.setattr(family_check, "OPTIMIZERS", ("adamw",))
        monkeypatch.setattr(family_check, "ways", one_kind_at_a_time)
    found = family_check.check_config(tiny_model(family).config, family)
    assert found.passed, [check for check in found.checks if not check.passed]
    compared = {check.compared for check in found.checks}
    assert compared == {"norms", *family_check.OPTIMIZERS, "stock"}
    assert all(check.difference for check in found.checks if check.allowed == family_check.STOCK)


def test_ways_of_pruning_cover_kinds_and_shapes() -> None:
    """Equal layers, unequal ones, regular and cluster attention, and every kind on its own."""
    anatomy = Anatomy.of(tiny_model("qwen3"))
    ends = {}
    for name, way in family_check.ways(anatomy, tiny_model("qwen3").config).items():
        structure = anatomy.source
        for group in way(structure, random.Random(0)):
            structure = structure.without(group)
        ends[name] = structure
    source = anatomy.source.layers[0]
    assert ends["heads, regular"].is_uniform and len(ends["heads, regular"].layers[0].kv_heads) < len(source.kv_heads)
    assert not ends["heads, cluster"].is_uniform and ends["heads, cluster"].hidden == anatomy.source.hidden
    assert ends["FFN channels"].is_uniform and len(ends["FFN channels"].layers[0].ffn) == len(source.ffn) - 5
    assert len(ends["hidden channels"].hidden) == len(anatomy.source.hidden) - 2
    everything = ends["all groups, equal layers"]
    assert everything.is_uniform and len(everything.hidden) < len(anatomy.source.hidden)
    unequal = ends["all groups, unequal layers"].layers
    assert len({len(la.query_heads) for la in unequal}) == len({len(la.ffn) for la in unequal}) == len(unequal)


def real_config(**options: Any) -> Any:
    """Sizes of a Qwen3 with windows, as a user's config.json has them."""
    sizes = {"vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 128, "tie_word_embeddings": True}
    kinds = ["full_attention" if layer % 6 == 5 else "sliding_attention" for layer in range(28)]
    window = {"layer_types": kinds, "sliding_window": 4096, "use_sliding_window": True, "attention_dropout": 0.1}
    rope = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}
    return AutoConfig.for_model("qwen3", **{**sizes, **heads, **window, "rope_parameters": rope, **options})


def test_a_tiny_model_keeps_the_irregularities() -> None:
    tiny = shrink.tiny_config(real_config())
    assert tiny.num_attention_heads == 8 * tiny.num_key_value_heads
    assert tiny.head_dim * tiny.num_attention_heads != tiny.hidden_size
    assert tiny.tie_word_embeddings and tiny.sliding_window == shrink.WINDOW and not tiny.attention_dropout
    assert tiny.rope_parameters["rope_type"] == "yarn" and tiny.rope_parameters["factor"] == 4.0
    assert {*tiny.layer_types} == {"full_attention", "sliding_attention"} and len(tiny.layer_types) == 3
    plain = shrink.tiny_config(real_config(head_dim=64, tie_word_embeddings=False, num_key_value_heads=16))
    assert plain.head_dim * plain.num_attention_heads == plain.hidden_size and not plain.tie_word_embeddings
    assert plain.num_key_value_heads == plain.num_attention_heads
    assert sum(p.numel() for p in shrink.random_model(tiny).parameters()) < 300_000


def test_a_family_from_outside_is_checked_by_the_command(tmp_path: Path) -> None:
    """A configuration without weights and a table that is not beside it yet."""
    from typer.testing import CliRunner

    from dwindle.commands import check_family as command
    from dwindle.commands.app import app

    assert command
    starcoder2().config.save_pretrained(tmp_path)
    (tmp_path / "mine.toml").write_text(STARCODER2)
    arguments = ["check-family", str(tmp_path / "config.json"), "--family", str(tmp_path / "mine.toml"), "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["passed"] and found["model_type"] == "starcoder2" and found["largest"]["exact"] < 1e-10
    assert {check["way"] for check in found["checks"]} >= {"heads, cluster", "FFN channels"}


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        (
            '"self_attn.k_proj.bias" = "kv"',
            '"self_attn.k_proj.bias" = "dim"',
            "size mismatch for model.layers.0.self_attn.k_proj.bias",
        ),
        ('"mlp.c_fc.bias" = "ffn"', '"mlp.c_fc.bias" = "dim"', "size mismatch for model.layers.0.mlp.c_fc.bias"),
    ],
)
def test_a_wrong_row_fails_the_check(old: str, new: str, why: str) -> None:
    families.register_family(tables(STARCODER2.replace(old, new)))
    found = family_check.check_config(shrink.tiny_config(starcoder2().config), "tiny")
    assert not found.passed and any(why in check.error for check in found.checks), found.checks
    assert found.to_json()["largest"]["exact"] is None


def test_a_norm_that_is_not_found_fails_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dividing by all channels instead of the alive ones is wrong by little, and must show."""
    from dwindle.anatomy.anatomy import Row

    monkeypatch.setattr(Row, "is_norm", property(lambda row: False))
    found = family_check.check_config(tiny_model("qwen3").config, "tiny")
    failed = {check.way for check in found.checks if not check.passed}
    assert "hidden channels" in failed and "FFN channels" not in failed


def test_unknown_families_and_missing_sizes_are_one_line(tmp_path: Path) -> None:
    AutoConfig.for_model("gpt2").save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"'gpt2' is not supported: .*docs/families.md"):
        dwindle.check_family(tmp_path)
    with pytest.raises(UserError, match="does not exist"):
        dwindle.check_family(tmp_path / "config.json", family=tmp_path / "no.toml")
