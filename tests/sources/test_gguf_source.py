"""GGUF files: written here with the ``gguf`` package's own writer and name map, read back by ours."""

from __future__ import annotations

import contextlib
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from dwindle.core.errors import UserError
from dwindle.sources.common import SourceNotice
from dwindle.sources.gguf_model import ARCHITECTURES
from dwindle.sources.loading import load, load_config, load_tokenizer

gguf = pytest.importorskip("gguf")

LAYERS = 4
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 80,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
PERMUTED = {"llama", "deci", "granite", "smollm3"}
FAMILY_CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 32},
    "phi3": {"sliding_window": 7, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    "granite": {
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "logits_scaling": 8.0,
        "attention_multiplier": 0.3,
    },
    "olmo2": {},
    "smollm3": {"tie_word_embeddings": True},
}


def tiny(model_type: str, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    values = {**SIZES, "tie_word_embeddings": False, **changes}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **values))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.3 if parameter.ndim == 1 else 0.0, 0.2)
    return model.eval()


def permute(weights: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's own reordering, as in its converter."""
    shape = weights.shape
    return weights.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    *,
    arch: str | None = None,
    quantise: Any = None,
    keys: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray] | None = None,
    skip: tuple[str, ...] = (),
    vocabulary: Any = None,
) -> Path:
    config = model.config
    arch = arch or config.model_type
    writer = gguf.GGUFWriter(path, arch)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    numbers = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.dimension_count": int(head_dim * config.rope_parameters.get("partial_rotary_factor", 1.0)),
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        **(keys or {}),
    }
    for key, value in numbers.items():
        if isinstance(value, list):
            writer.add_array(f"{arch}.{key}", value)
        elif isinstance(value, str):
            writer.add_string(f"{arch}.{key}", value)
        elif isinstance(value, float):
            writer.add_float32(f"{arch}.{key}", value)
        else:
            writer.add_uint32(f"{arch}.{key}", value)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if vocabulary is not None:
        vocabulary(writer)
    arch_id = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(arch_id, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name in skip or (name == "lm_head.weight" and config.tie_word_embeddings):
            continue
        values = tensor.float().numpy()
        if arch in PERMUTED and ".q_proj." in name:
            values = permute(values, config.num_attention_heads)
        elif arch in PERMUTED and ".k_proj." in name:
            values = permute(values, config.num_key_value_heads)
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert target is not None, name
        if quantise is not None and values.ndim == 2:
            writer.add_tensor(target, gguf.quants.quantize(np.ascontiguousarray(values), quantise), raw_dtype=quantise)
        else:
            writer.add_tensor(target, np.ascontiguousarray(values))
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def logits(model: PreTrainedModel) -> torch.Tensor:
    ids = torch.arange(60).remainder(79).reshape(2, 30)
    with torch.no_grad():
        return model(ids).logits


def keys_for(model_type: str, model: PreTrainedModel) -> dict[str, Any]:
    config = model.config
    if model_type == "phi3":
        return {"attention.sliding_window": config.sliding_window}
    if model_type == "granite":
        return {
            "embedding_scale": config.embedding_multiplier,
            "residual_scale": config.residual_multiplier,
            "logit_scale": config.logits_scaling,
            "attention.scale": config.attention_multiplier,
        }
    return {}


WRITTEN_HERE = [name for name, known in ARCHITECTURES.items() if known.model_type in FAMILY_CASES]
"""The others are written by the export, run in llama.cpp and read back: tests/export/test_gguf_export.py."""


@pytest.mark.parametrize("architecture", WRITTEN_HERE)
def test_every_family_gives_the_same_weights_and_logits(architecture: str, tmp_path: Path) -> None:
    model_type = ARCHITECTURES[architecture].model_type
    model = tiny(model_type, **FAMILY_CASES[model_type])
    path = write_gguf(tmp_path / "m.gguf", model, arch=architecture, keys=keys_for(model_type, model))
    loaded = load(path)
    assert loaded.kind == "gguf" and loaded.tokenizer is None
    read, written = loaded.model.state_dict(), model.state_dict()
    assert read.keys() == written.keys()
    assert all(torch.equal(read[name], written[name]) for name in written)
    assert torch.equal(logits(loaded.model), logits(model))
    assert type(loaded.model) is type(model) and not loaded.model.training
    assert loaded.model.config.architectures == [type(model).__name__]
    assert loaded.model.generation_config.eos_token_id == 2


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "F16", "BF16"])
def test_stored_types_equal_their_own_dequantised_values(kind: str, tmp_path: Path) -> None:
    quantise = gguf.GGMLQuantizationType[kind]
    model = tiny("llama")
    expected = {}
    for name, tensor in model.state_dict().items():
        values = tensor.numpy()
        if values.ndim == 2:
            heads = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2])
            values = values if heads is None else permute(values, heads)
            values = gguf.quants.dequantize(gguf.quants.quantize(np.ascontiguousarray(values), quantise), quantise)
            if heads is not None:
                values = values.reshape(heads, 8, 2, -1).swapaxes(1, 2).reshape(values.shape)
        expected[name] = torch.from_numpy(values.copy())
    read = load(write_gguf(tmp_path / "m.gguf", model, quantise=quantise)).model.state_dict()
    assert all(torch.equal(read[name], expected[name]) for name in expected)


def test_dtype_and_directory_with_one_file(tmp_path: Path) -> None:
    model = tiny("llama")
    write_gguf(tmp_path / "m.gguf", model)
    loaded = load(tmp_path, dtype="bfloat16").model
    assert loaded.dtype == torch.bfloat16
    assert torch.equal(loaded.model.norm.weight, model.model.norm.weight.to(torch.bfloat16))
    assert loaded.model.rotary_emb.inv_freq.dtype == torch.float32
    write_gguf(tmp_path / "n.gguf", model)
    with pytest.raises(UserError, match="2 GGUF files"):
        load(tmp_path)


def test_heads_that_do_not_divide_the_hidden_size_become_mistral(tmp_path: Path) -> None:
    model = tiny("mistral", hidden_size=60, num_attention_heads=8, head_dim=16, sliding_window=None)
    loaded = load(write_gguf_as_llama(tmp_path / "m.gguf", model)).model
    assert loaded.config.model_type == "mistral" and loaded.config.sliding_window is None
    assert torch.equal(logits(loaded), logits(model))


def write_gguf_as_llama(path: Path, model: PreTrainedModel) -> Path:
    return write_gguf(path, model, arch="llama")


def test_config_is_clean_and_survives_saving(tmp_path: Path) -> None:
    config = load_config(write_gguf(tmp_path / "m.gguf", tiny("llama")))
    assert config.rms_norm_eps == 1e-5 and config.vocab_size == 80 and config.tie_word_embeddings is False
    text = config.to_json_string()
    assert "gguf" not in text and "quantization" not in text
    model = load(tmp_path / "m.gguf").model
    model.save_pretrained(tmp_path / "out")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), logits(model))


def llama3_divisors(factor: float, theta: float, head_dim: int) -> np.ndarray:
    """As llama.cpp's converter writes them."""
    result = []
    for frequency in 1.0 / theta ** (np.arange(0, head_dim, 2) / head_dim):
        wavelength = 2 * math.pi / frequency
        if wavelength < 8192 / 4:
            result.append(1.0)
        elif wavelength > 8192:
            result.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / 3
            result.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(result, np.float32)


def test_llama3_rope_is_recovered_from_its_divisors(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    model = tiny("llama", rope_parameters=rope, head_dim=64, max_position_embeddings=131072)
    divisors = llama3_divisors(32.0, 500000.0, 64)
    loaded = load(write_gguf(tmp_path / "m.gguf", model, extra={"rope_freqs.weight": divisors})).model
    assert loaded.config.rope_parameters == rope
    torch.testing.assert_close(loaded.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq, rtol=0, atol=0)
    divisors[5] *= 1.5
    with pytest.raises(UserError, match="rope_freqs"):
        load(write_gguf(tmp_path / "n.gguf", model, extra={"rope_freqs.weight": divisors}))
    for odd in (0.0, -2.0, np.inf, np.nan):
        for damaged in (np.full_like(divisors, odd), np.append(divisors[1:], np.float32(odd)), divisors[:-1]):
            with pytest.raises(UserError, match="rope_freqs"):
                load(write_gguf(tmp_path / "n.gguf", model, extra={"rope_freqs.weight": damaged}))
    for theta in (0.0, -5.0):
        for extra in ({}, {"rope_freqs.weight": llama3_divisors(32.0, 500000.0, 64)}):
            with pytest.raises(UserError, match=r"llama\.rope\.freq_base is"):
                load(write_gguf(tmp_path / "n.gguf", model, keys={"rope.freq_base": theta}, extra=extra))


def test_phi3_longrope_tables(tmp_path: Path) -> None:
    tables = {"long_factor": [1.0 + i for i in range(8)], "short_factor": [1.0 + i / 8 for i in range(8)]}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16, "factor": 8.0}
    model = tiny("phi3", rope_parameters=rope | tables, original_max_position_embeddings=16)
    extra = {f"rope_factors_{k[:-7]}.weight": np.array(v, np.float32) for k, v in tables.items()}
    attention = math.sqrt(1 + math.log(8) / math.log(16))
    keys = {"rope.scaling.original_context_length": 16, "rope.scaling.attn_factor": attention}
    loaded = load(write_gguf(tmp_path / "m.gguf", model, keys=keys, extra=extra)).model
    torch.testing.assert_close(logits(loaded), logits(model), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("keys", "rope"),
    [
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 32,
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        ),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.attn_factor": 0.5},
            {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.5 * (0.1 * math.log(4) + 1)},
        ),
    ],
)
def test_rope_scaling_keys(keys: dict[str, Any], rope: dict[str, Any], tmp_path: Path) -> None:
    model = tiny("qwen3", rope_parameters={"rope_theta": 1e4, **rope})
    loaded = load(write_gguf(tmp_path / "m.gguf", model, keys=keys)).model
    assert torch.equal(logits(loaded), logits(model))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rope.scaling.type": "longrope"}, "longrope"),
        ({"rope.scaling.type": "yarn", "rope.scaling.yarn_attn_factor": 0.5}, "attn_factor"),
        ({"rope.dimension_count": 8}, "rotates 8 of 16"),
        ({"expert_count": 8}, "mixture of experts"),
        ({"attention.head_count_kv": [2, 2, 1, 2]}, "in every layer"),
        ({"attention.value_length": 8}, "values of size 8"),
        ({"block_count": 5}, "model.layers.4.*missing"),
        ({"feed_forward_length": 90}, "shape"),
        ({"attention.head_count_kv": 3}, "m.gguf"),
    ],
)
def test_what_cannot_be_loaded_exactly_is_refused(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny("llama"), keys=keys)
    with pytest.raises(UserError, match=message) as caught:
        load(path)
    assert "\n" not in str(caught.value) and "m.gguf" in str(caught.value)


def test_unknown_architecture_tensor_and_missing_tensor(tmp_path: Path) -> None:
    model = tiny("llama")
    with pytest.raises(UserError, match=r"blk\.0\.attn_sinks\.weight"):
        load(write_gguf(tmp_path / "a.gguf", model, extra={"blk.0.attn_sinks.weight": np.ones(4, np.float32)}))
    with pytest.raises(UserError, match=r"model\.norm\.weight.*missing"):
        load(write_gguf(tmp_path / "b.gguf", model, skip=("model.norm.weight",)))
    gemma = tmp_path / "c.gguf"
    writer = gguf.GGUFWriter(gemma, "gemma2")
    writer.add_block_count(1)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        step()
    writer.close()
    with pytest.raises(UserError, match="'gemma2' is not supported: give one of llama"):
        load_config(gemma)


def test_non_finite_values_are_refused(tmp_path: Path) -> None:
    model = tiny("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = float("nan")
    path = write_gguf(tmp_path / "m.gguf", model)
    with pytest.raises(UserError, match=r"model\.layers\.1\.mlp\.up_proj\.weight holds non-finite values"):
        load(path)


def test_truncated_and_corrupt_files_are_named(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "m.gguf", tiny("llama"), vocabulary=byte_level_vocabulary).read_bytes()
    broken = tmp_path / "broken.gguf"
    for size in [0, 3, 10, 23, 50, 200, 1000, 2000, 4000, len(whole) // 2, len(whole) - 1]:
        broken.write_bytes(whole[:size])
        with pytest.raises(UserError, match=r"broken\.gguf"):
            load(broken)
    for damage in (
        b"GGUX" + whole[4:],
        whole[:4] + struct.pack("<I", 9) + whole[8:],
        whole[:16] + b"\xff" * 8 + whole[24:],
    ):
        broken.write_bytes(damage)
        with pytest.raises(UserError, match=r"broken\.gguf"):
            load(broken)
    generator = np.random.default_rng(0)
    for _ in range(60):
        noisy = bytearray(whole)
        for position in generator.integers(8, 3000, size=8):
            noisy[position] = int(generator.integers(256))
        broken.write_bytes(bytes(noisy))
        with contextlib.suppress(UserError):
            load(broken)


@pytest.mark.parametrize("head_is_finer", [True, False])
def test_a_tied_embedding_that_is_stored_twice_stays_tied(tmp_path: Path, head_is_finer: bool) -> None:
    """As in Qwen2.5's own files: head and embedding are one matrix, rounded in two ways; the finer copy is read."""
    model = tiny("qwen2", tie_word_embeddings=True)
    exact = model.get_input_embeddings().weight.detach().numpy()
    rounded = gguf.quants.dequantize(
        gguf.quants.quantize(exact, gguf.GGMLQuantizationType.Q5_0), gguf.GGMLQuantizationType.Q5_0
    )
    kind = gguf.GGMLQuantizationType.Q5_0 if head_is_finer else None
    other = exact if head_is_finer else rounded.astype(np.float16)
    path = write_gguf(tmp_path / "twice.gguf", model, quantise=kind, extra={"output.weight": other})
    if not head_is_finer:  # two floating-point matrices that differ are two matrices
        assert not load_config(path).tie_word_embeddings
        return
    with pytest.warns(SourceNotice, match=r"its head is its embedding, stored again: .* without token_embd\.weight"):
        loaded = load(path).model
    assert loaded.config.tie_word_embeddings
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert np.array_equal(loaded.lm_head.weight.detach().numpy(), exact)


def test_missing_gguf_package_gives_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantise = gguf.GGMLQuantizationType.Q8_0
    path = write_gguf(tmp_path / "m.gguf", tiny("llama"), quantise=quantise)
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    assert load_config(path).hidden_size == 64
    with pytest.raises(UserError, match=r"pip install -c constraints.txt -e '\.\[gguf\]'"):
        load(path)


def byte_level_vocabulary(writer: Any, pre: str = "smollm") -> None:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    merges = ["t h", "Ġ th", "Ġth e", "Ċ Ċ", "Ġ Ġ", "a n", "an d"]
    tokens = ["<|endoftext|>", "<s>", "</s>", *bytes_to_unicode().values(), *(m.replace(" ", "") for m in merges)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([*tokens, "<think>"])
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3) + [4])
    writer.add_token_merges(merges)
    writer.add_unk_token_id(0)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")


TEXTS = ["", " ", "the and the", "\n\n1. the  2 and\n3", "naïve 日本語 🤖", "<think>the</think> </s>and", "a\tb\r\nc"]


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "llama-bpe", "qwen2", "tekken"])
def test_byte_level_tokenizer_round_trips(pre: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny("llama"), vocabulary=lambda w: byte_level_vocabulary(w, pre))
    tokenizer = load_tokenizer(path)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token) == ("<s>", "</s>", "<|endoftext|>")
    tokenizer.save_pretrained(tmp_path / "out")
    load_config(path).save_pretrained(tmp_path / "out")
    again = AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in TEXTS:
        ids = tokenizer(text)["input_ids"]
        assert again(text)["input_ids"] == ids
        assert tokenizer.decode(ids, skip_special_tokens="</s>" not in text).removeprefix("<s>") == text
    assert again.chat_template == tokenizer.chat_template is not None
    assert tokenizer("<think>", add_special_tokens=False)["input_ids"] == [len(tokenizer) - 1]
    assert (tokenizer("a")["input_ids"][0] == 1) == (pre in ("llama-bpe", "tekken"))


def test_digits_are_cut_off_first(tmp_path: Path) -> None:
    """As in the original tokenizer and in llama.cpp (``tokenizer.ggml.pre = smollm``)."""
    path = write_gguf(tmp_path / "m.gguf", tiny("llama"), vocabulary=byte_level_vocabulary)
    assert load_tokenizer(path).tokenize("\n\n1") == ["ĊĊ", "1"]


def test_sentencepiece_vocabulary(tmp_path: Path) -> None:
    def vocabulary(writer: Any) -> None:
        pieces = ["▁t", "he", "▁the", "▁", "t", "h", "e", "a"]
        writer.add_tokenizer_model("llama")
        writer.add_token_list(["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *pieces])
        writer.add_token_scores([0.0] * 259 + [-float(i) for i in range(len(pieces))])
        writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * len(pieces))
        writer.add_unk_token_id(0)

    tokenizer = load_tokenizer(write_gguf(tmp_path / "m.gguf", tiny("llama"), vocabulary=vocabulary))
    assert tokenizer.tokenize("the the") == ["▁the", "▁the"]
    assert tokenizer("the é")["input_ids"] == [1, 261, 262, 3 + 0xC3, 3 + 0xA9]
    assert tokenizer.decode(tokenizer("the é  a")["input_ids"], skip_special_tokens=True) == "the é  a"
    tokenizer.save_pretrained(tmp_path / "out")
    load_config(tmp_path / "m.gguf").save_pretrained(tmp_path / "out")
    again = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert all(again(text)["input_ids"] == tokenizer(text)["input_ids"] for text in TEXTS)
