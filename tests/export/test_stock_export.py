"""Cluster attention, unequal layers and odd widths made stock: more numbers, the same function."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import dwindle
from dwindle.anatomy.anatomy import Anatomy, cut
from dwindle.anatomy.shrink import Float64Throughout
from dwindle.anatomy.structure import Group, Structure
from dwindle.core.errors import UserError
from dwindle.export import resize as resizing
from dwindle.export.exporting import export
from dwindle.export.resize import resize
from dwindle.export.verification import Mismatch
from dwindle.sources.loading import load
from edge_models import tiny_loaded
from tiny import FAMILIES, tiny_model, tokens

EXACT = [family for family in FAMILIES if not family.startswith("olmo")]


def logits(model: Any, batch: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=batch).logits


@pytest.mark.parity
@pytest.mark.parametrize("structure", ["cluster", "layers", "odd", "blocks"])
@pytest.mark.parametrize("family", EXACT)
def test_the_enlarged_model_is_stock_and_exact(family: str, structure: str) -> None:
    model = tiny_loaded(family, structure).model
    found = resize(model, uniform=True)
    shape = Anatomy.of(found.model).source
    assert shape.is_uniform and not found.model.config.model_type.startswith("dwindle_")
    assert found.parameters_after == sum(p.numel() for p in found.model.parameters())
    assert found.parameters_before == sum(p.numel() for p in model.parameters())
    batch = tokens(2, 12)
    assert torch.allclose(logits(found.model, batch), logits(model, batch), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", EXACT)
def test_widths_are_rounded_exactly(family: str) -> None:
    model = tiny_loaded(family, "odd").model
    if family == "qwen3_5_text":  # its linear attention has norms of the same epsilon
        with pytest.raises(UserError, match=r"--round: hidden size 31 .* 32 in this family.*--round-to instead"):
            resize(model, uniform=True, round_to=16)
        return
    found = resize(model, uniform=True, round_to=16)
    shape = Anatomy.of(found.model).source
    assert len(shape.hidden) == 32 and {len(la.ffn) for la in shape.layers} == {48}
    batch = tokens(2, 12)
    assert torch.allclose(logits(found.model, batch), logits(model, batch), atol=2e-5, rtol=1e-4)


def test_layers_are_made_regular_one_by_one() -> None:
    model = tiny_loaded("llama", "layers").model
    found = resize(model, uniform=False)
    layers = Anatomy.of(found.model).source.layers
    assert all(layer.is_regular for layer in layers)
    assert len({(len(la.query_heads), len(la.ffn)) for la in layers}) > 1
    batch = tokens(2, 12)
    assert torch.allclose(logits(found.model, batch), logits(model, batch), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("counts", [(3, 1, 2), (1, 1), (4,), (2, 2, 1), (5, 1, 1, 1)])
def test_the_grouping_is_the_smallest_possible(counts: tuple[int, ...]) -> None:
    """Against every grouping that could hold these heads."""
    per_kv, kv_heads = resizing._smallest([counts])
    fits = [
        (kv, group)
        for kv, group in itertools.product(range(1, 20), range(1, 8))
        if sum(-(-n // group) for n in counts) <= kv
    ]
    assert kv_heads * (per_kv + 1) == min(kv * (group + 1) for kv, group in fits)
    plan = resizing._layer_plan(counts, per_kv, kv_heads, ())
    owners = [head for head, n in enumerate(counts) for _ in range(n)]
    for place, query in enumerate(plan.query):
        assert query == resizing.NOTHING or plan.kv[place // per_kv] == owners[query]
    assert sorted(q for q in plan.query if q != resizing.NOTHING) == list(range(sum(counts)))


def test_nothing_to_do_costs_nothing() -> None:
    model = tiny_loaded("llama").model
    found = resize(model, uniform=True)
    assert found.model is model and not found.changed


def test_norms_over_all_heads_are_refused() -> None:
    with pytest.raises(UserError, match="one norm over all heads"):
        resize(tiny_loaded("olmo2", "cluster").model, uniform=True)


def test_stock_directory_loads_anywhere_and_says_what_it_cost(tmp_path: Path) -> None:
    loaded = tiny_loaded("llama", "cluster")
    found = export(loaded, "hf", tmp_path / "out", stock=True)
    assert found.verified is not None and found.resized is not None
    assert "KV cache per token" in found.render()
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    batch = tokens(2, 12)
    assert torch.allclose(logits(theirs, batch), logits(loaded.model, batch), atol=1e-5, rtol=1e-5)
    structure = json.loads((tmp_path / "out" / "structure.json").read_text())
    assert len(structure["layers"][0]["query_heads"]) == theirs.config.num_attention_heads
    assert not (tmp_path / "out" / "modeling_dwindle.py").exists()


def test_a_plain_export_keeps_structure_ledger_and_dtype(tmp_path: Path) -> None:
    loaded = tiny_loaded()
    dwindle.prune(loaded, "90%", metric="magnitude", attention="cluster", out=tmp_path / "in", dtype=torch.bfloat16)
    found = export(tmp_path / "in", "hf", tmp_path / "out")
    assert found.type == "bfloat16" and load(tmp_path / "out", dtype="auto").model.dtype == torch.bfloat16
    for name in ("structure.json", "ledger.jsonl"):
        assert (tmp_path / "out" / name).read_text() == (tmp_path / "in" / name).read_text()
    assert export(tmp_path / "in", "hf", tmp_path / "half", type="f16").type == "float16"


def test_an_export_replaces_exports_and_never_its_source(tmp_path: Path) -> None:
    dwindle.prune(tiny_loaded(), "90%", metric="magnitude", out=tmp_path / "run" / "model", dtype=torch.float32)
    (tmp_path / "run" / "recipe.toml").touch()
    before = (tmp_path / "run" / "model" / "model.safetensors").read_bytes()
    for kind in ("f16", "bf16"):
        assert export(tmp_path / "run", "hf", tmp_path / "out", type=kind, verify=False, overwrite=True).type
    for source in (tmp_path / "run", tmp_path / "run" / "model", load(tmp_path / "run" / "model")):
        for to in ("hf", "onnx"):
            with pytest.raises(UserError, match="the input"):
                export(source, to, tmp_path / "run" / "model", overwrite=True)
    assert (tmp_path / "run" / "model" / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("family", FAMILIES)
def test_a_live_model_of_16_bits_is_kept_so(family: str, tmp_path: Path) -> None:
    """``to`` rounds its rotary frequencies as well, which no file holds."""
    loaded = tiny_loaded(family)
    loaded.model.to(torch.bfloat16)
    found = export(loaded, "hf", tmp_path / "out")
    assert found.type == "bfloat16" and found.verified is not None and found.verified.max_error < 1e-6
    assert loaded.model.dtype == torch.bfloat16


def test_a_wrong_directory_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = tiny_loaded("llama", "cluster")

    def wrong(*args: Any, **kwargs: Any) -> Any:
        found = resize(*args, **kwargs)
        with torch.no_grad():
            next(found.model.model.layers[0].parameters()).mul_(1.5)
        return found

    monkeypatch.setattr("dwindle.export.exporting.resize", wrong)
    with pytest.raises(Mismatch, match="after padding"):
        export(loaded, "hf", tmp_path / "out", stock=True)
    monkeypatch.undo()
    written = type(loaded.model).save_pretrained

    def damaged(self: Any, folder: Any, **kwargs: Any) -> None:
        other = tiny_loaded("llama", "cluster", rms_norm_eps=0.5).model
        written(other, folder, **kwargs)

    monkeypatch.setattr(type(loaded.model), "save_pretrained", damaged)
    with pytest.raises(Mismatch, match=r"variance_epsilon the output states 0\.5, not 1e-06"):
        export(loaded, "hf", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("layout", "key", "value", "said"),
    [
        (None, "rms_norm_eps", 1.001e-6, "variance_epsilon"),
        (None, "max_position_embeddings", 300, "context"),
        (None, "sliding_window", 400, "sliding_window"),
        ("deci", "rms_norm_eps", 1.001e-6, "variance_epsilon"),
        ("deci", "max_position_embeddings", 300, "context"),
    ],
)
def test_numbers_that_prompts_hardly_show_are_compared(
    layout: str | None, key: str, value: float, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged(model: Any, tokenizer: Any, folder: Path, **options: Any) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {key: value}))

    monkeypatch.setattr("dwindle.export.huggingface.write_beside", damaged)
    window = None if layout else 300  # the layout has none
    loaded = tiny_loaded("mistral", max_position_embeddings=512, sliding_window=window)
    with pytest.raises(Mismatch, match=f"for .*{said} the output states"):
        export(loaded, "hf", tmp_path / "out", layout=layout)


def test_rotations_that_followed_a_long_text_are_no_difference(tmp_path: Path) -> None:
    """Phi's model keeps the frequencies of the last text: long ones here, where a fresh one begins with short ones."""
    loaded = tiny_loaded("Phi-4-mini", original_max_position_embeddings=32, max_position_embeddings=128)
    logits(loaded.model, tokens(1, 40))
    export(loaded, "hf", tmp_path / "out")


def test_commands(tmp_path: Path) -> None:
    import dwindle.commands.export  # noqa: F401  (registers the commands)
    from dwindle.commands.app import app

    loaded = tiny_loaded("llama", "cluster")
    export(loaded, "hf", tmp_path / "in")
    run = CliRunner()
    done = run.invoke(
        app, ["export", str(tmp_path / "in"), "--to", "hf", "--stock", "--out", str(tmp_path / "out"), "--json"]
    )
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert found["cost"]["parameters_after"] > found["cost"]["parameters_before"]
    assert found["verified"]["max_error"] <= found["verified"]["tolerance"]


@pytest.mark.parametrize(
    ("structure", "options", "said"),
    [
        ("odd", {"round_to": 16}, "padded to multiples of 16: parameters"),
        ("cluster", {"stock": True}, "made stock: parameters"),
        ("layers", {"stock": True, "round_to": 16}, "made stock and padded to multiples of 16: parameters"),
    ],
)
def test_what_was_done_is_said(structure: str, options: dict[str, Any], said: str, tmp_path: Path) -> None:
    found = export(tiny_loaded("llama", structure), "hf", tmp_path / "out", verify=False, **options)
    assert said in found.render()


def test_a_run_stands_for_its_model(tmp_path: Path) -> None:
    """As in ``dwindle eval``; the card still says how the run was made."""
    import dwindle.commands.export
    import dwindle.commands.inspect
    from dwindle.commands.app import app

    export(tiny_loaded(), "hf", tmp_path / "run" / "model")
    (tmp_path / "run" / "recipe.toml").write_text("[distill]\nweight = 0.5\n")
    (tmp_path / "run" / "metrics.jsonl").touch()
    run, out = str(tmp_path / "run"), tmp_path / "out"
    done = CliRunner().invoke(app, ["export", run, "--to", "hf", "--out", str(out), "--json"])
    assert done.exit_code == 0, done.output
    assert f"{run} is a run: using its model, {run}/model\n" in done.stderr
    assert "- distilled from tiny" in (out / "README.md").read_text()
    done = CliRunner().invoke(app, ["inspect", run, "--json"])
    assert done.exit_code == 0 and json.loads(done.stdout)["source"] == f"{run}/model"
    assert export(run, "hf", tmp_path / "again").parameters == json.loads(done.stdout)["parameters"]["total"]
    assert dwindle.inspect(run).source == f"{run}/model"


def test_sizes_that_no_configuration_accepts_are_noted_and_padded(tmp_path: Path) -> None:
    """Gemma's hidden size must be a multiple of the heads: otherwise a modelling file, or padding with ``--stock``."""
    import dwindle.commands.prune  # noqa: F401  (registers the command)
    from dwindle.commands.app import app

    export(tiny_loaded("gemma3_text"), "hf", tmp_path / "in")
    out = tmp_path / "out"
    options = ["--to", "hidden=29,ffn=36", "--metric", "magnitude", "--out", str(out)]
    done = CliRunner().invoke(app, ["prune", str(tmp_path / "in"), *options])
    assert done.exit_code == 0, done.output
    note = "note: transformers accepts no gemma3_text of hidden size 29 with 8 heads, so the model is stored with a "
    assert note + "modelling file; `dwindle export --to hf --stock` pads it" in done.stderr
    found = export(out, "hf", tmp_path / "stock", stock=True)
    assert found.architecture == "gemma3_text" and "padded to a multiple of the heads" in found.render()
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "stock", dtype=torch.float32)
    assert theirs.config.hidden_size == 32
    batch = tokens(2, 12)
    assert torch.allclose(logits(theirs, batch), logits(load(out).model, batch), atol=1e-5, rtol=1e-5)


def test_phi_4_mini_is_stock_only_at_heads_times_head_size() -> None:
    """Its configuration derives the length of the rotary tables from hidden size / heads."""
    model = tiny_loaded("Phi-4-mini", "odd").model
    assert model.config.model_type == "dwindle_phi3"
    found = resize(model, uniform=True)
    assert found.model.config.model_type == "phi3" and found.model.config.hidden_size == 48
    batch = tokens(2, 12)
    assert torch.allclose(logits(found.model, batch), logits(model, batch), atol=1e-5, rtol=1e-5)
    whole = tiny_model("Phi-4-mini", dtype=torch.float32)
    anatomy = Anatomy.of(whole)
    fewer = anatomy.source.without(Group("attn", ((0, 3),) * 3))
    without_heads = cut(whole, anatomy, fewer, anatomy.source)
    with pytest.raises(UserError, match="transformers accepts no phi3 of hidden size 48 with 4 heads of size 8"):
        resize(without_heads, uniform=True)


@pytest.mark.parametrize("tied", [True, False])
def test_stock_gemma_absorbs_the_factor_of_its_embeddings(tied: bool) -> None:
    """Against a stock model whose factor is set by hand to that of the source."""
    model = tiny_model("gemma3_text", tie_word_embeddings=tied)
    anatomy = Anatomy.of(model)
    keep = Structure(anatomy.source.hidden[3:27], anatomy.source.layers)
    small = cut(model, anatomy, keep, anatomy.source)
    assert small.config.model_type == "gemma3_text"
    by_hand = AutoModelForCausalLM.from_config(small.config).double()
    tensors = {n: anatomy.slice(anatomy[n], p.detach(), keep, anatomy.source) for n, p in model.named_parameters()}
    by_hand.load_state_dict(tensors, strict=False)
    by_hand.tie_weights()
    by_hand.model.embed_tokens.embed_scale.fill_(32**0.5)
    batch = tokens(2, 12)
    with Float64Throughout():
        assert (logits(small, batch) - logits(by_hand.eval(), batch)).abs().max() < 1e-12
