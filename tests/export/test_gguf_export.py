"""GGUF files run in llama.cpp and say what the source says; what cannot be said is refused."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dwindle.anatomy.anatomy import Anatomy, cut
from dwindle.anatomy.structure import Group
from dwindle.core.errors import UserError
from dwindle.export import gguf_writer, verification
from dwindle.export.exporting import export
from dwindle.export.gguf_vocabulary import vocabulary_of
from dwindle.export.process import RuntimeFailure, RuntimeProcess
from dwindle.export.resize import resize
from dwindle.export.verification import PROMPTS
from dwindle.sources.common import interleaved_to_halves
from dwindle.sources.gguf_model import ARCHITECTURES
from dwindle.sources.loading import Loaded, load, load_config
from edge_models import byte_pair_tokenizer, greedy, pruned_smollm2, slow, tiny_loaded

pytest.importorskip("gguf", reason="pip install -e '.[gguf]'")
pytest.importorskip("xllamacpp", reason="pip install -e '.[gguf]'")


# The window is shorter than the prompts; llama.cpp knows full attention in every n-th layer.
EVERY_FOURTH = {"num_hidden_layers": 4, "sliding_window": 5} | {
    "layer_types": [*["sliding_attention"] * 3, "full_attention"]
}
FIRST_IS_FULL = {"query_pre_attn_scalar": 8, "layer_types": ["full_attention", *["sliding_attention"] * 2]}
LLAMACPP: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {},
    "granite": {},
    "olmo2": {},
    "phi3": {"sliding_window": None},
    "smollm3": {"num_hidden_layers": 4},  # its fourth layer has no rotation
    "olmo3": {"attention_bias": False, **EVERY_FOURTH},
    "exaone4": {"sliding_window": None, "layer_types": ["full_attention"] * 3},
    "ministral3": {"sliding_window": None},
    "seed_oss": {"attention_out_bias": False, "mlp_bias": False},
    "ernie4_5": {"use_bias": False},
    "hunyuan_v1_dense": {"attention_bias": False},
    "glm4": {},
    "arcee": {"attention_bias": False, "mlp_bias": False},
    "gemma3_text": {"query_pre_attn_scalar": 8, **EVERY_FOURTH},
    "granitemoehybrid": {"attention_bias": False},
    "lfm2": {"conv_bias": False},
}
OTHER_NAMES = {
    "mistral": "llama",
    "olmo3": "olmo2",
    "ministral3": "mistral3",
    "hunyuan_v1_dense": "hunyuan-dense",
    "gemma3_text": "gemma3",
    "granitemoehybrid": "granite",
}


def test_every_architecture_is_tried() -> None:
    assert {OTHER_NAMES.get(family, family) for family in LLAMACPP} | {"deci"} == set(ARCHITECTURES)


@pytest.mark.parametrize(  # whole models of all families are verified in test_families_exported.py
    ("family", "structure"),
    [
        *((family, "odd") for family in LLAMACPP),
        *((family, "full") for family in ("llama", "qwen2")),
        *((family, "depth") for family in ("llama", "qwen3", "lfm2")),
        *((family, "blocks") for family in ("llama", "qwen2")),
    ],
)
def test_every_family_runs_in_llamacpp(family: str, structure: str, tmp_path: Path) -> None:
    loaded = tiny_loaded(family, structure, **LLAMACPP[family])
    found = export(loaded, "gguf", tmp_path / "m.gguf", type="f32")
    limit = 3e-3 if family == "gemma3_text" else 1e-4  # ggml reads GELU from a table of 16 bits
    assert found.verified is not None and found.verified.max_error < limit
    other = OTHER_NAMES | ({"qwen2": "deci"} if structure == "odd" else {})
    other |= {"llama": "deci", "qwen2": "deci"} if structure == "blocks" else {}
    assert found.architecture == other.get(family, family)
    assert loaded.tokenizer is not None
    ids = loaded.tokenizer(PROMPTS[0]).input_ids
    with RuntimeProcess("llamacpp", found.out) as runtime:
        theirs = [place[0][0] for place in runtime.call("greedy", ids=ids, count=12)]
    assert theirs == greedy(loaded.model, ids, 12)


@pytest.mark.parametrize(
    ("family", "structure"),
    [
        *((family, "full") for family in LLAMACPP if family not in ("mistral", "granitemoehybrid")),
        ("llama", "depth"),
        ("llama", "blocks"),
        ("arcee", "odd"),  # its configuration refuses such a hidden size
    ],
)
def test_every_family_is_read_back(family: str, structure: str, tmp_path: Path) -> None:
    loaded = tiny_loaded(family, structure, **LLAMACPP[family])
    out = export(loaded, "gguf", tmp_path / "m.gguf", type="f32", verify=False).out
    again = load(out).model
    assert again.config.model_type == ("dwindle_" if structure in ("blocks", "odd") else "") + family
    batch = torch.arange(40).view(2, 20) + 3
    with torch.inference_mode():
        expected, found = loaded.model(input_ids=batch).logits, again(input_ids=batch).logits
    assert torch.allclose(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("family", "options", "reason"),
    [
        ("seed_oss", {"mlp_bias": False}, "llama.cpp's seed_oss ignores the bias of o_proj"),
        ("ernie4_5", {}, "llama.cpp's ernie4_5 ignores the bias of q_proj"),
        ("exaone4", {}, "llama.cpp's exaone4 knows sliding-window layers only in the 32B model"),
        ("gemma3_text", EVERY_FOURTH, "scales attention by the head size (8), the model by 6"),
        ("gemma3_text", FIRST_IS_FULL, "knows full attention only in every n-th layer"),
    ],
)
def test_what_llamacpp_would_not_compute_is_refused(
    family: str, options: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=re.escape(reason)) as refused:
        export(tiny_loaded(family, **options), "gguf", tmp_path / "m.gguf")
    assert str(refused.value).endswith(": export to hf or onnx instead")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("model", ["Phi-4-mini", "Llama-3.2-1B", "Qwen3-0.6B", "EXAONE-4.0-1.2B"])
def test_published_configurations_run_in_llamacpp(model: str, tmp_path: Path) -> None:
    """With their RoPE scalings and tied heads, pruned in hidden and FFN channels."""
    options: dict[str, Any] = {}
    if model == "Phi-4-mini":  # llama.cpp chooses the long or short table by its context, transformers by the text
        options = {"sliding_window": None, "original_max_position_embeddings": 4096, "max_position_embeddings": 8192}
    found = export(tiny_loaded(model, "odd", **options), "gguf", tmp_path / "m.gguf", type="f32")
    assert found.verified is not None and found.verified.max_error < 1e-4


def test_a_pruned_gemma_absorbs_its_factor(tmp_path: Path) -> None:
    """Its hidden size has no stock configuration, so that it is padded; the file runs."""
    loaded = tiny_loaded("gemma3_text", "odd", **LLAMACPP["gemma3_text"])
    assert loaded.model.config.model_type == "dwindle_gemma3_text"
    found = export(loaded, "gguf", tmp_path / "m.gguf", type="f32")
    assert found.architecture == "gemma3" and "padded to a multiple of the heads" in found.render()


@pytest.mark.parametrize("structure", ["cluster", "layers"])
@pytest.mark.parametrize(("stock", "architecture"), [(False, "deci"), (True, "llama")])
def test_unequal_layers_run_as_deci_or_made_equal(
    structure: str, stock: bool, architecture: str, tmp_path: Path
) -> None:
    found = export(tiny_loaded("llama", structure), "gguf", tmp_path / "m.gguf", type="f32", stock=stock)
    assert found.verified is not None and found.verified.max_error < 1e-3
    assert found.architecture == architecture


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_live_models_of_16_bits(dtype: torch.dtype, tmp_path: Path) -> None:
    """They are compared with what their weights compute in float32, and stay as they were."""
    loaded = tiny_loaded()
    loaded.model.to(dtype)
    found = export(loaded, "gguf", tmp_path / "m.gguf", type="f32")
    assert found.verified is not None and found.verified.max_error < 1e-3
    assert export(loaded, "gguf", tmp_path / "wide.gguf", type="q8_0", round_to=64).verified is not None
    assert loaded.model.dtype == dtype


def test_what_is_written_is_what_our_reader_reads(tmp_path: Path) -> None:
    loaded = tiny_loaded("llama", "odd")
    out = export(loaded, "gguf", tmp_path / "m.gguf", type="f32").out
    again = load(out)
    for (name, a), (_, b) in zip(loaded.model.named_parameters(), again.model.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    assert again.tokenizer is not None
    assert again.tokenizer.chat_template == loaded.tokenizer.chat_template
    text = "The lazy fox<|im_start|> pays 37."
    assert again.tokenizer(text).input_ids == loaded.tokenizer(text).input_ids


@pytest.mark.parametrize(
    ("family", "structure", "model_type"),
    [
        ("llama", "layers", "dwindle_llama"),
        ("llama", "cluster", "dwindle_llama"),
        ("mistral", "layers", "dwindle_llama"),
        ("qwen2", "layers", "dwindle_qwen2"),
        ("qwen2", "odd", "qwen2"),
    ],
)
def test_a_deci_file_is_read_back_layer_by_layer(family: str, structure: str, model_type: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"sliding_window": None} if family == "mistral" else {}
    loaded = tiny_loaded(family, structure, **options)
    found = export(loaded, "gguf", tmp_path / "m.gguf", type="f32", verify=False)
    assert found.architecture == "deci"
    again = load(found.out)
    assert again.model.config.model_type == load_config(found.out).model_type == model_type
    written = resize(loaded.model, uniform=False).model  # irregular layers are made regular, the others stay
    batch = torch.arange(40).view(2, 20) + 3
    with torch.inference_mode():
        assert torch.equal(again.model(input_ids=batch).logits, written(input_ids=batch).logits)
    same = Anatomy.of(again.model).source
    assert same == Anatomy.of(written).source and same.is_uniform == (structure == "odd")
    text = "The lazy fox<|im_start|> pays 37."
    assert again.tokenizer is not None and again.tokenizer(text).input_ids == loaded.tokenizer(text).input_ids


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_deci_file_may_begin_without_attention(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one of ours: llama.cpp reads the size of a head from the first layer, so we fill it."""
    monkeypatch.setattr(gguf_writer, "blocks_to_fill", lambda structure: frozenset())
    loaded = tiny_loaded(family)
    full = Anatomy.of(loaded.model).source
    model = cut(loaded.model, Anatomy.of(loaded.model), full.without(Group("layer", ((0,), (), ()))), full)
    out = export(Loaded(model, loaded.tokenizer, "tiny", "huggingface"), "gguf", tmp_path / "m.gguf", verify=False).out
    batch = torch.arange(40).view(2, 20) + 3
    with torch.inference_mode():
        expected = model(input_ids=batch).logits
        torch.testing.assert_close(load(out).model(input_ids=batch).logits, expected, atol=1e-2, rtol=1e-2)


def test_deci_files_that_are_no_llama_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = gguf_writer._layer_sizes
    for key, value, message in (
        ("attention.head_count_kv", [4, 0, 4], "a linear layer in place of attention in layer 1"),
        ("attention.head_count_kv", [4, 4, 4], "6 query heads on 4 key/value heads in layer 1"),
        ("feed_forward_length", [32, 37], "the file is not a usable model"),
    ):
        monkeypatch.setattr(gguf_writer, "_layer_sizes", lambda *a, k=key, v=value: sizes(*a) | {k: v})
        out = export(tiny_loaded("llama", "layers"), "gguf", tmp_path / "m.gguf", verify=False, overwrite=True).out
        with pytest.raises(UserError, match=message):
            load_config(out)


@pytest.mark.parametrize("kind", ["f16", "bf16", "q8_0", "q4_0", "q4_1"])
def test_smaller_types_run_and_are_smaller(kind: str, tmp_path: Path) -> None:
    loaded = tiny_loaded("llama", hidden_size=64, intermediate_size=96)
    size = export(loaded, "gguf", tmp_path / "f32.gguf", type="f32").num_bytes
    found = export(loaded, "gguf", tmp_path / "m.gguf", type=kind)
    assert found.num_bytes < size and not found.warnings


def test_sizes_that_blocks_do_not_like_are_named_and_round_fixes_them(tmp_path: Path) -> None:
    loaded = tiny_loaded("llama", "odd")
    found = export(loaded, "gguf", tmp_path / "m.gguf", type="q8_0")
    assert len(found.warnings) == 1
    assert "hidden 31" in found.warnings[0] and "--round 32" in found.warnings[0]
    rounded = export(loaded, "gguf", tmp_path / "r.gguf", type="q8_0", round_to=32)
    assert not rounded.warnings
    assert rounded.resized is not None and rounded.resized.parameters_after > rounded.resized.parameters_before


@pytest.mark.parametrize(
    ("structure", "said"),
    [
        ("odd", "and hidden 31 and FFN 38 in all layers are not multiples of it: "),
        ("layers", "and FFN 37 to 40 in 2 of 3 layers and heads 4 to 6 of size 4 are not multiples of it: "),
    ],
)
def test_odd_sizes_are_said_in_one_sentence(structure: str, said: str, tmp_path: Path) -> None:
    found = export(tiny_loaded("llama", structure), "gguf", tmp_path / "m.gguf", type="q8_0", verify=False)
    assert said in found.warnings[0]


def test_heads_alone_may_be_odd(tmp_path: Path) -> None:
    """Nothing pads heads, so no option is named; the file is complete."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2}
    found = export(tiny_loaded("mistral", **sizes, head_dim=8), "gguf", tmp_path / "m.gguf", type="q8_0", verify=False)
    said = "and heads 6 of size 8 is not a multiple of it: 3 tensors are stored as f16 ("
    assert said in found.warnings[0] and "--round" not in found.warnings[0]


def test_row_order_is_the_inverse_of_the_readers() -> None:
    rows = torch.randn(12 * 4, 5)
    assert torch.equal(interleaved_to_halves(gguf_writer.interleaved_from(rows, 4), 4), rows)


def test_of_several_chat_templates_that_of_ordinary_chats_is_written(tmp_path: Path) -> None:
    loaded = tiny_loaded()
    tokenizer: Any = loaded.tokenizer
    tokenizer.chat_template = {"default": "{{ 1 }}", "tool_use": "{{ 2 }}"}
    out = export(loaded, "gguf", tmp_path / "m.gguf").out
    again = load(out).tokenizer
    assert again is not None and again.chat_template == "{{ 1 }}"


def test_a_tied_head_that_llamacpp_wants_apart_is_stored_and_verified(tmp_path: Path) -> None:
    loaded = tiny_loaded("olmo2", "odd", tie_word_embeddings=True)
    for type_ in ("f16", "q8_0"):
        found = export(loaded, "gguf", tmp_path / f"{type_}.gguf", type=type_).verified
        assert found is not None and found.max_error < 0.05


def test_what_a_killed_export_left_is_removed(tmp_path: Path) -> None:
    import socket
    import subprocess
    import sys

    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    (tmp_path / f".m.writing-{socket.gethostname()}-{ended.pid}.gguf").write_text("half")
    (tmp_path / ".m.writing-elsewhere-1.gguf").write_text("another machine's")
    export(tiny_loaded(), "gguf", tmp_path / "m.gguf", verify=False)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".m.writing-elsewhere-1.gguf", "m.Modelfile", "m.gguf"]


def test_pre_tokenizers_known_alike_and_unknown() -> None:
    from tokenizers import Regex, pre_tokenizers

    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    gpt2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    spelled_out = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(gpt2), "isolated"), bytes_only])
    assert vocabulary_of(byte_pair_tokenizer(), 310, "m").pre == "gpt-2"
    alike = vocabulary_of(byte_pair_tokenizer(spelled_out), 310, "m")
    assert alike.pre == "gpt-2" and "unknown pre-tokenizer" in str(alike.warning)
    with pytest.raises(UserError, match="pre-tokenizers splits text like its own"):
        vocabulary_of(byte_pair_tokenizer(bytes_only), 310, "m")


def test_user_errors(tmp_path: Path) -> None:
    loaded = tiny_loaded()
    with pytest.raises(UserError, match=r"ends in \.gguf"):
        export(loaded, "gguf", tmp_path / "m.bin")
    with pytest.raises(UserError, match="--type"):
        export(loaded, "gguf", tmp_path / "m.gguf", type="q5")
    with pytest.raises(UserError, match="--to"):
        export(loaded, "pickle", tmp_path / "m")
    (tmp_path / "there.gguf").write_text("mine")
    with pytest.raises(UserError, match="already exists"):
        export(loaded, "gguf", tmp_path / "there.gguf")
    with pytest.raises(UserError, match="no tokenizer"):
        export(Loaded(loaded.model, None, "tiny", "huggingface"), "gguf", tmp_path / "m.gguf")
    with pytest.raises(UserError, match="unequal layers"):
        export(tiny_loaded("qwen3", "layers"), "gguf", tmp_path / "m.gguf")
    with pytest.raises(RuntimeFailure):
        RuntimeProcess("llamacpp", tmp_path / "there.gguf")
    assert [p.name for p in tmp_path.iterdir()] == ["there.gguf"]


def test_the_file_that_is_read_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    export(tiny_loaded(), "gguf", tmp_path / "in" / "m.gguf", type="f16", verify=False)
    before = (tmp_path / "in" / "m.gguf").read_bytes()
    for source in ("in/m.gguf", "in"):
        with pytest.raises(UserError, match=r"--out in/m\.gguf is the input in/m\.gguf"):
            export(source, "gguf", "in/m.gguf", type="q8_0", verify=False, overwrite=True)
    assert (tmp_path / "in" / "m.gguf").read_bytes() == before
    for _ in range(2):
        export("in/m.gguf", "gguf", "in/small.gguf", type="q8_0", verify=False, overwrite=True)


def test_stories260k_in_llamacpp(shared_data: Path, tmp_path: Path) -> None:
    """A sentencepiece vocabulary with byte fallback."""
    source = load(shared_data / "models" / "stories260K" / "stories260K.bin")
    found = export(source, "gguf", tmp_path / "m.gguf", type="f32")
    assert found.verified is not None and found.verified.max_error < 1e-3


@slow
@pytest.mark.parametrize(
    ("kind", "stock", "architecture"),
    [
        ("source", False, "llama"),
        ("odd", False, "llama"),
        ("half", False, "llama"),
        ("cluster", True, "llama"),
        ("cluster", False, "deci"),
        ("layers", False, "deci"),
    ],
)
def test_smollm2_greedy_continuations_are_equal(kind: str, stock: bool, architecture: str, tmp_path: Path) -> None:
    loaded = pruned_smollm2(kind)
    found = export(loaded, "gguf", tmp_path / "m.gguf", type="f32", stock=stock)
    assert found.architecture == architecture
    print(json.dumps({"kind": kind, **found.to_json()}))
    with RuntimeProcess("llamacpp", found.out, context=128) as runtime:
        for text in PROMPTS:
            ids = loaded.tokenizer(text).input_ids  # type: ignore[misc]
            theirs = [place[0][0] for place in runtime.call("greedy", ids=ids, count=64)]
            assert theirs == greedy(loaded.model, ids, 64), text


@slow
def test_smollm2_q8_0_keeps_perplexity(shared_data: Path, tmp_path: Path) -> None:
    from dwindle.data.text_windows import validation_windows

    loaded = load("smollm2-135m")
    path = export(loaded, "gguf", tmp_path / "m.gguf", type="q8_0").out
    text = str(shared_data / "corpus" / "wikitext-2-raw.test.txt")
    windows = validation_windows([text], loaded.tokenizer, 256, 2048)  # type: ignore[arg-type]
    differences: list[float] = []
    with RuntimeProcess("llamacpp", path, context=300) as runtime:
        for ids in windows.tolist():
            log_p = verification.logits_of(loaded.model, ids[:-1]).log_softmax(-1)
            for place in range(1, len(ids), 8):
                likeliest = dict(map(tuple, runtime.call("greedy", ids=ids[:place], count=1, top=1000)[0]))
                if ids[place] in likeliest:  # the whole vocabulary would take seconds per token
                    differences.append(float(log_p[place - 1, ids[place]]) - likeliest[ids[place]])
    ratio = math.exp(float(np.mean(differences)))
    print(f"perplexity of q8_0 in llama.cpp relative to the source: × {ratio:.4f} over {len(differences)} tokens")
    assert len(differences) > 200 and ratio < 1.01
