"""Counts and slices from the tables equal what torch says."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

import dwindle.anatomy.families as tables
from dwindle.anatomy.anatomy import Anatomy, cut
from dwindle.anatomy.build import config_for
from dwindle.anatomy.structure import Structure
from dwindle.core.errors import UserError
from tiny import FAMILIES, random_group, tiny_model, tokens


def test_every_family_has_a_parity_line() -> None:
    assert set(FAMILIES) == set(tables.FAMILIES)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_counts_equal_torch(family: str, tied: bool) -> None:
    model = tiny_model(family, tie_word_embeddings=tied)
    anatomy = Anatomy.of(model)
    assert anatomy.count(anatomy.source).total == sum(p.numel() for p in model.parameters())
    embedding = model.get_input_embeddings().weight.numel() * (1 if tied else 2)
    assert anatomy.count(anatomy.source).embedding == embedding
    assert Anatomy.of_config(model.config).count(anatomy.source) == anatomy.count(anatomy.source)
    structure = anatomy.source
    for seed, kind in enumerate(["attn", "ffn", "stem", "attn", "attn", "stem"]):
        structure = structure.without(random_group(kind, structure, seed))
        smaller = cut(model, anatomy, structure, anatomy.source)
        assert anatomy.count(structure).total == sum(p.numel() for p in smaller.parameters())
        again = Anatomy.of(smaller)
        assert again.count(again.source) == anatomy.count(structure)


def test_what_the_loss_does_not_compute_is_refused() -> None:
    for key in ("final_logit_softcapping", "attn_logit_softcapping"):
        with pytest.raises(UserError, match=f"config.json sets {key}"):
            Anatomy.of(tiny_model("gemma3_text", **{key: 30.0}))


def test_fused_rows_are_cut_by_segment() -> None:
    """phi3's qkv is query rows, then keys, then values; gate_up is gate rows, then up rows."""
    model = tiny_model("phi3")
    anatomy = Anatomy.of(model)
    keep = anatomy.source.without(random_group("attn", anatomy.source, 5))
    keep = keep.without(random_group("ffn", keep, 6))
    smaller = dict(cut(model, anatomy, keep, anatomy.source).named_parameters())
    big = dict(model.named_parameters())
    for number, layer in enumerate(keep.layers):
        name = f"model.layers.{number}.self_attn.qkv_proj.weight"
        heads = [f"q{h}" for h in layer.query_heads] + [f"k{h}" for h in layer.kv_heads]
        heads += [f"v{h}" for h in layer.kv_heads]
        start = {"q": 0, "k": 8 * 4, "v": 12 * 4}
        rows = [start[h[0]] + int(h[1:]) * 4 + i for h in heads for i in range(4)]
        assert torch.equal(smaller[name], big[name][rows])
        name = f"model.layers.{number}.mlp.gate_up_proj.weight"
        assert torch.equal(smaller[name], big[name][[*layer.ffn, *(40 + c for c in layer.ffn)]])


def test_llama_with_odd_hidden_becomes_an_equal_mistral() -> None:
    model = tiny_model("llama", dtype=torch.float32, attention_bias=False, mlp_bias=False)
    anatomy = Anatomy.of(model)
    keep = anatomy.source.without(random_group("stem", anatomy.source))
    smaller = cut(model, anatomy, keep, anatomy.source)
    assert smaller.config.model_type == "mistral" and smaller.config.sliding_window is None
    # The independent computation: the llama code, made to accept the sizes, with the same weights.
    values = smaller.config.to_dict() | {"hidden_size": 32}
    config = LlamaConfig(**{key: value for key, value in values.items() if key != "model_type"})
    config.__dict__["hidden_size"] = 31
    llama = AutoModelForCausalLM.from_config(config).eval()
    llama.load_state_dict(smaller.state_dict())
    batch = tokens(2, 20)
    assert torch.equal(llama(input_ids=batch).logits, smaller(input_ids=batch).logits)


def test_llama_with_biases_and_odd_hidden_keeps_its_biases() -> None:
    model = tiny_model("llama")
    anatomy = Anatomy.of(model)
    keep = anatomy.source.without(random_group("stem", anatomy.source))
    assert config_for(model.config, keep).model_type == "dwindle_llama"


def test_structure_round_trips_through_json() -> None:
    anatomy = Anatomy.of(tiny_model("llama"))
    structure = anatomy.source
    for seed, kind in enumerate(["attn", "ffn", "stem"]):
        structure = structure.without(random_group(kind, structure, seed))
    data = structure.to_json("somewhere")
    assert Structure.from_json(data) == structure
    assert data["layers"][0]["kv_heads"] == sorted(set(data["layers"][0]["kv_of_query"]))
    with pytest.raises(UserError, match="format 99"):
        Structure.from_json({**data, "format": 99})


def test_unknown_family_is_named() -> None:
    """With the tensors that the nearest table does not explain, and where to read how to write one."""
    with pytest.raises(UserError) as refused:
        Anatomy.of_config(AutoConfig.for_model("gpt2"))
    message = str(refused.value)
    assert "'gpt2' is not supported: the nearest table (" in message
    assert "no row for transformer.wte.weight, transformer.wpe.weight, transformer.h.N.ln_1.weight" in message
    assert "write a table (docs/families.md); `dwindle families` lists those that are" in message
    with pytest.raises(UserError, match=r"'starcoder2'.*no row for .*mlp.c_fc.weight.*input_layernorm.bias"):
        Anatomy.of_config(AutoConfig.for_model("starcoder2", hidden_size=32, num_hidden_layers=2))


def test_mixtures_of_experts_are_refused_in_one_line() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 8, "moe_intermediate_size": 8, "num_hidden_layers": 1}
    for family in ("mixtral", "qwen3_moe", "olmoe", "granitemoe"):
        with pytest.raises(UserError, match=rf"'{family}' is a mixture of experts .*: give a dense model"):
            Anatomy.of_config(AutoConfig.for_model(family, **sizes))


@pytest.mark.parametrize("family", FAMILIES)
def test_norms_around_blocks_are_rows_of_the_table(family: str) -> None:
    table = tables.FAMILIES[family]
    for norm in (*table.norm_before.values(), *table.norm_after.values()):
        assert table.layer[f"{norm}.weight"] == "hidden"
    hidden = {name for name, axes in table.layer.items() if axes == "hidden" and name.endswith("norm.weight")}
    assert hidden == {f"{norm}.weight" for norm in (*table.norm_before.values(), *table.norm_after.values())}
