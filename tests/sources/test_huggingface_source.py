"""Hugging Face directories and hub ids: what loads, and how each kind of damage is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPTNeoConfig, GPTNeoForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import dwindle
from dwindle.core.errors import UserError
from dwindle.evaluation.in_memory import load_with_tokenizer
from dwindle.run.compare import compare
from dwindle.sources import huggingface
from dwindle.sources.loading import load, load_config, load_tokenizer
from tiny import FAMILIES, tiny_directory, tiny_model, tiny_tokenizer

IDS = torch.arange(20).reshape(2, 10)


def tiny(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=40,
        **changes,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    tiny().save_pretrained(path)
    backend = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]").save_pretrained(path)
    return path


def fails(source: Path | str, *words: str) -> None:
    with pytest.raises(UserError) as caught:
        load(source)
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


def test_directory_loads_with_its_tokenizer(folder: Path) -> None:
    loaded = load(folder)
    assert loaded.kind == "huggingface" and loaded.source == str(folder) and not loaded.model.training
    assert torch.equal(loaded.model(IDS).logits, tiny()(IDS).logits)
    assert loaded.model.config._attn_implementation == "sdpa"
    model, tokenizer = load(str(folder), dtype="bfloat16")
    assert model.dtype == torch.bfloat16 and tokenizer("a b x")["input_ids"] == [1, 2, 0]
    assert load_config(folder).hidden_size == 32
    assert load_tokenizer(folder)("b")["input_ids"] == [2]
    assert load(folder, dtype="auto").model.dtype == torch.float32


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_tokenizer_is_the_same_after_it_is_saved(family: str, tmp_path: Path) -> None:
    """Not that of the family's class, which normalises text and splits it by a pattern of its own."""
    tiny_directory(tmp_path / "model", family)
    saved = load_tokenizer(tmp_path / "model")
    assert json.loads(saved.backend_tokenizer.to_str()) == json.loads(tiny_tokenizer().backend_tokenizer.to_str())
    text = "e\u0301 it's 12"  # two characters that a normalizer would make one
    assert saved(text).input_ids == tiny_tokenizer()(text).input_ids and saved.decode(saved(text).input_ids) == text


def test_tied_model_shards_and_absent_tokenizer(tmp_path: Path) -> None:
    model = tiny(tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "m", max_shard_size="8KB")
    assert (tmp_path / "m" / "model.safetensors.index.json").is_file()
    loaded = load(tmp_path / "m")
    assert loaded.tokenizer is None
    assert loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight
    assert torch.equal(loaded.model(IDS).logits, model(IDS).logits)
    shard = sorted((tmp_path / "m").glob("model-0*.safetensors"))[1]
    shard.unlink()
    fails(tmp_path / "m", shard.name, "does not exist")


@pytest.mark.parametrize(
    "needs_text",
    [
        load_tokenizer,
        lambda source: load_with_tokenizer(source, "float32", "cpu"),
        lambda source: dwindle.prune(source, "90%", sequences=2, seq_len=8),
        lambda source: dwindle.quantize(source, scheme="w8a8", sequences=2, seq_len=8),
        lambda source: compare(source, metrics=["taylor"], to=["10%"]),
        lambda source: dwindle.export_model(source, "gguf", f"{source}.gguf"),
    ],
)
def test_whoever_needs_a_tokenizer_says_so_alike(tmp_path: Path, needs_text: Callable[[str], object]) -> None:
    tiny().save_pretrained(tmp_path / "m")
    with pytest.raises(UserError, match=r"^source .*/m: has no tokenizer, which is required here: put "):
        needs_text(str(tmp_path / "m"))


def test_pickle_only_directory_is_read_safely(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    assert torch.equal(load(folder).model(IDS).logits, tiny()(IDS).logits)
    torch.save({"model.norm.weight": Exploit(folder / "ran")}, folder / "pytorch_model.bin")
    fails(folder, "cannot be loaded")
    assert not (folder / "ran").exists()


class Exploit:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_damaged_weights_are_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    for content in (whole[:-10], whole[:5], b"", b"\xff" * 200):
        path.write_bytes(content)
        fails(folder, "model.safetensors", "damaged")
    path.unlink()
    fails(folder, "model.safetensors", "does not exist")


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"model_type": 3}'])
def test_broken_config_is_named(text: str, folder: Path) -> None:
    (folder / "config.json").write_text(text)
    fails(folder, "config.json")
    with pytest.raises(UserError, match=r"config\.json"):
        load_config(folder)


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_impossible_unknown_and_remote_configs(folder: Path) -> None:
    change_config(folder, num_attention_heads=5)
    fails(folder, "config.json", "llama", "is not a multiple of the number of attention heads (5)")
    change_config(folder, num_attention_heads=4, hidden_act=3)
    fails(folder, "llama", "Field 'hidden_act' expected str, got int (value: 3)")
    change_config(folder, hidden_act="silu")
    change_config(folder, model_type="nosuchmodel", num_attention_heads=4)
    fails(folder, "'nosuchmodel' is unknown")
    change_config(folder, auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"})
    (folder / "evil.py").write_text("raise SystemExit('ran')")
    fails(folder, "'nosuchmodel'", "never")
    change_config(folder, model_type="llama", quantization_config={"quant_method": "gptq", "bits": 4})
    fails(folder, "gptq")


def test_missing_and_misshapen_tensors_are_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    without = {name: value for name, value in weights.items() if name != "model.layers.1.mlp.up_proj.weight"}
    save_file(without, path, metadata={"format": "pt"})
    fails(folder, "model.layers.1.mlp.up_proj.weight", "missing")
    save_file({**weights, "model.norm.weight": torch.ones(31)}, path, metadata={"format": "pt"})
    fails(folder, "model.norm.weight", "(31,)", "(32,)")


def test_tensors_without_a_place_are_named(tmp_path: Path) -> None:
    tiny(attention_bias=True).save_pretrained(tmp_path / "m")
    change_config(tmp_path / "m", attention_bias=False)
    fails(tmp_path / "m", "model.layers.0.self_attn.k_proj.bias and 7 more", "config.json")
    change_config(tmp_path / "m", attention_bias=True, num_hidden_layers=1)
    fails(tmp_path / "m", "model.layers.1.", "and 12 more", "config.json")


def test_buffers_of_older_checkpoints_are_no_tensors_of_the_model(folder: Path, tmp_path: Path) -> None:
    path = folder / "model.safetensors"
    inverse = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(4) for layer in range(2)}
    save_file({**load_file(path), **inverse}, path, metadata={"format": "pt"})
    assert torch.equal(load(folder).model(IDS).logits, tiny()(IDS).logits)
    config = GPTNeoConfig(
        hidden_size=16, num_layers=2, num_heads=2, attention_types=[[["global", "local"], 1]], vocab_size=40
    )
    GPTNeoForCausalLM(config).save_pretrained(tmp_path / "neo")
    path = tmp_path / "neo" / "model.safetensors"
    masks = {"bias": torch.ones(1, 1, 2048, 2048, dtype=torch.bool), "masked_bias": torch.tensor(-1e9)}
    old = {f"transformer.h.0.attn.attention.{name}": value for name, value in masks.items()}
    save_file({**load_file(path), **old}, path, metadata={"format": "pt"})
    load(tmp_path / "neo")


@pytest.mark.parametrize("family", FAMILIES)
def test_no_honest_checkpoint_is_refused(family: str, tmp_path: Path) -> None:
    for tied in (False, True):
        path = tmp_path / str(tied)
        model = tiny_model(family, dtype=torch.float32, tie_word_embeddings=tied)
        model.save_pretrained(path)
        weights = load_file(path / "model.safetensors")
        both = {**weights, "lm_head.weight": model.lm_head.weight.detach().clone()}
        for tensors in (weights, both):  # many tied checkpoints hold their head all the same
            save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
            assert torch.equal(load(path).model(IDS).logits, model(IDS).logits)


def test_a_tied_configuration_with_a_head_of_its_own(folder: Path) -> None:
    change_config(folder, tie_word_embeddings=True)
    fails(folder, "lm_head.weight", "set tie_word_embeddings to false in config.json")
    assert load_config(folder).tie_word_embeddings
    change_config(folder, tie_word_embeddings=False)
    assert torch.equal(load(folder).model(IDS).logits, tiny()(IDS).logits)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_values_are_refused(value: float, folder: Path) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    weights["model.layers.0.self_attn.v_proj.weight"][1, 2] = value
    save_file(weights, path, metadata={"format": "pt"})
    fails(folder, "model.layers.0.self_attn.v_proj.weight", "non-finite")


def test_large_but_finite_values_are_kept(folder: Path) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    weights["model.norm.weight"].fill_(3e38)
    save_file(weights, path, metadata={"format": "pt"})
    assert load(folder).model.model.norm.weight[0] == 3e38
    with pytest.raises(UserError, match=r"model\.norm\.weight.*float16"):
        load(folder, dtype="float16")


def test_our_own_model_types_use_the_installed_classes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class OurConfig(LlamaConfig):
        model_type = "dwindle_llama"

    class OurModel(LlamaForCausalLM):
        config_class = OurConfig

    classes = {"dwindle_llama": (OurConfig, OurModel)}
    for module in ("dwindle.sources.huggingface", "dwindle.sources.common"):
        monkeypatch.setattr(f"{module}.classes_for", classes.__getitem__)
    change_config(folder, model_type="dwindle_llama", auto_map={"AutoConfig": "evil.C"})
    loaded = load(folder)
    assert type(loaded.model) is OurModel and type(load_config(folder)) is OurConfig
    assert torch.equal(loaded.model(IDS).logits, tiny()(IDS).logits)
    assert loaded.tokenizer is not None and loaded.tokenizer("b")["input_ids"] == [2]


def test_sources_that_are_nothing(tmp_path: Path, folder: Path) -> None:
    fails("nonsense", "nonsense", "smollm2-135m", ".gguf", "org/name")
    fails("", "smollm2-135m")
    fails("missing.gguf", "missing.gguf", "does not exist")
    fails("./org/name", "does not exist")
    fails(tmp_path / "empty", "does not exist")
    (tmp_path / "empty").mkdir()
    fails(tmp_path / "empty", "config.json", "does not exist")
    fails(folder / "model.safetensors", "give the directory")
    (tmp_path / "notes.txt").write_text("x")
    fails(tmp_path / "notes.txt", "notes.txt")


def test_bad_dtype_and_device(folder: Path) -> None:
    for dtype in ("float99", "int8", torch.int64, "nn"):
        with pytest.raises(UserError, match="dtype"):
            load(folder, dtype=dtype)
    with pytest.raises(UserError, match="device: 'nowhere'"):
        load(folder, device="nowhere")


def hub_error(name: str) -> Exception:
    from huggingface_hub import errors

    kind = getattr(errors, name)
    error: Exception = kind.__new__(kind)
    error.args = (f"{name} happened\nsecond line",)
    return error


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("GatedRepoError", "gated"),
        ("RepositoryNotFoundError", "no such model"),
        ("LocalEntryNotFoundError", "cannot be reached"),
        ("HfHubHTTPError", "download failed"),
    ],
)
def test_hub_failures_say_which(name: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> str:
        raise hub_error(name)

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", refuse)
    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    fails("some-org/some-model", "some-org/some-model", words, "local directory")


def test_hub_id_without_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The real client with downloads forbidden, as in every test run."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    fails("some-org/no-such-model", "some-org/no-such-model", "local directory")


def test_hub_id_is_loaded_from_what_the_hub_gives(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def download(repo_id: str, allow_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, **__: None)
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert load("org/name").kind == "huggingface"
    assert load_config("org/name").hidden_size == 32
    assert "model.safetensors" in asked[0] and "model.safetensors" not in asked[1]
    assert not any("bin" in pattern for pattern in asked[0])


def test_a_complete_cached_copy_serves_without_network(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: Any, **__: Any) -> None:
        raise ConnectionError("no route")

    def cached(repo_id: str, local_files_only: bool = False, **_: Any) -> str:
        assert local_files_only
        return str(folder)

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", unreachable)
    monkeypatch.setattr("huggingface_hub.snapshot_download", cached)
    assert torch.equal(load("org/name").model(IDS).logits, tiny()(IDS).logits)
    (folder / "model.safetensors").unlink()
    assert load_config("org/name").hidden_size == 32
    fails("org/name", "cannot be reached")


def test_an_existing_path_wins_over_a_hub_id(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder.parent / "org").mkdir()
    shutil.copytree(folder, folder.parent / "org" / "name")
    monkeypatch.chdir(folder.parent)
    monkeypatch.setattr(huggingface, "fetch", lambda *_, **__: pytest.fail("asked the hub"))
    assert load("org/name").source == "org/name"


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int64])
def test_integer_weights_without_a_quantisation_are_named(dtype: torch.dtype, folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    weights[name] = (100 * weights[name].abs()).to(dtype)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    fails(folder, name, f"is stored as {str(dtype).removeprefix('torch.')}, ", "quantisation")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    fails(folder, name, f"is stored as {str(dtype).removeprefix('torch.')}, ")


def test_where_the_hub_is_silent_what_is_near_and_here_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A misspelt path of two parts looks like a hub id, and the alias holds nearly the model that was asked for."""

    def refuse(*_: Any, **__: Any) -> str:
        raise ConnectionError("no route")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", refuse)
    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "books-to-50pct").mkdir(parents=True)
    fails("runs/books-to-50", "no such path is here either: did you mean runs/books-to-50pct?")
    fails("HuggingFaceTB/SmolLM2-135M", "smollm2-135m (HuggingFaceTB/SmolLM2-135M-Instruct from a pip package)")


def test_a_folder_of_runs_is_not_the_gguf_file_beside_them(tmp_path: Path) -> None:
    (tmp_path / "runs" / "half").mkdir(parents=True)
    (tmp_path / "runs" / "half.gguf").write_bytes(b"GGUF")
    (tmp_path / "runs" / "half" / "recipe.toml").write_text("")
    fails(tmp_path / "runs", "holds runs", str(tmp_path / "runs" / "half"))
