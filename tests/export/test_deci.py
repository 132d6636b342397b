"""The layout of ``DeciLMForCausalLM``: what is written, computed by a loop that knows only its published rules."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

import dwindle
from dwindle.core.errors import UserError
from dwindle.export import deci
from dwindle.export.verification import Mismatch
from dwindle.sources.loading import Loaded
from tiny import shrunk, tiny_tokenizer, tokens


def loaded(family: str, kind: str, **options: Any) -> Loaded:
    model, _ = shrunk(family, kind, vocab_size=257, **options)
    return Loaded(model, tiny_tokenizer(), "tiny", "huggingface")


def logits_of_files(folder: Path, ids: list[int]) -> torch.Tensor:
    """Head by head and token by token, in float64, from config.json and the weights alone."""
    config = json.loads((folder / "config.json").read_text())
    w = {name: tensor.double() for name, tensor in load_file(folder / "model.safetensors").items()}
    size, heads = config["head_dim"], config["num_attention_heads"]

    def norm(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + config["rms_norm_eps"]).sqrt() * gain

    def speed(i: int) -> float:
        plain, scaling = config["rope_theta"] ** (-2 * i / size), config["rope_scaling"]
        if scaling is None:
            return plain
        if scaling["rope_type"] == "linear":
            return plain / scaling["factor"]
        length, long = scaling["original_max_position_embeddings"], 2 * math.pi / plain
        if long < length / scaling["high_freq_factor"]:
            return plain
        if long > length / scaling["low_freq_factor"]:
            return plain / scaling["factor"]
        share = (length / long - scaling["low_freq_factor"]) / (
            scaling["high_freq_factor"] - scaling["low_freq_factor"]
        )
        return (1 - share) * plain / scaling["factor"] + share * plain

    def rotate(x: torch.Tensor, place: int) -> torch.Tensor:
        turned = torch.empty_like(x)
        for i in range(size // 2):
            angle = place * speed(i)
            a, b = x[i], x[i + size // 2]
            turned[i] = a * math.cos(angle) - b * math.sin(angle)
            turned[i + size // 2] = b * math.cos(angle) + a * math.sin(angle)
        return turned

    x = w["model.embed_tokens.weight"][ids]
    for number, block in enumerate(config["block_configs"]):
        at = f"model.layers.{number}."
        y = norm(x, w[at + "input_layernorm.weight"])
        group = block["attention"]["n_heads_in_group"]
        q, k, v = (y @ w[at + f"self_attn.{part}_proj.weight"].T for part in "qkv")
        out = torch.zeros(len(ids), heads * size, dtype=torch.float64)
        for head in range(heads):
            mine, theirs = (
                slice(head * size, (head + 1) * size),
                slice(head // group * size, (head // group + 1) * size),
            )
            keys = torch.stack([rotate(k[t, theirs], t) for t in range(len(ids))])
            for t in range(len(ids)):
                scores = keys[: t + 1] @ rotate(q[t, mine], t) / math.sqrt(size)
                out[t, mine] = scores.softmax(0) @ v[: t + 1, theirs]
        x = x + out @ w[at + "self_attn.o_proj.weight"].T
        y = norm(x, w[at + "post_attention_layernorm.weight"])
        gate, up = (y @ w[at + f"mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        ffn = block["ffn"]
        told = ffn.get("intermediate_size") or -(-int(2 * ffn["ffn_mult"] * len(x[0]) / 3) // 256) * 256
        assert up.shape[1] == told
        x = x + (gate * gate.sigmoid() * up) @ w[at + "mlp.down_proj.weight"].T
    head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
    return norm(x, w["model.norm.weight"]) @ head.T


@pytest.mark.parametrize(("family", "kind"), [("llama", "unequal"), ("llama", "cluster"), ("mistral", "stock")])
def test_the_files_alone_give_the_same_logits(family: str, kind: str, tmp_path: Path) -> None:
    source = loaded(family, kind, attention_bias=False, mlp_bias=False, sliding_window=None)
    done = dwindle.export_model(source, "hf", tmp_path / "out", layout="deci")
    assert done.architecture == "DeciLMForCausalLM" and done.verified is not None
    ids = tokens(8).tolist()
    with torch.no_grad():
        expected = source.model(input_ids=torch.tensor([ids])).logits[0].double()
    torch.testing.assert_close(logits_of_files(tmp_path / "out", ids), expected, atol=2e-5, rtol=1e-4)
    assert not (tmp_path / "out" / "modeling_dwindle.py").exists()
    assert "vllm serve" in (tmp_path / "out" / "README.md").read_text()
    config = AutoConfig.from_pretrained(tmp_path / "out", trust_remote_code=True)
    groups = [block.attention.n_heads_in_group for block in config.block_configs]
    assert all(config.num_attention_heads % group == 0 for group in groups)
    assert config.architectures == ["DeciLMForCausalLM"] and json.loads(config.to_json_string())["block_configs"]
    assert hasattr(config.block_configs[0].ffn, "intermediate_size")  # readers ask


def test_widths_of_256_are_stored_as_factors(tmp_path: Path) -> None:
    source = loaded("llama", "stock", attention_bias=False, mlp_bias=False, intermediate_size=512)
    dwindle.export_model(source, "hf", tmp_path / "out", layout="deci")
    ids = tokens(5).tolist()
    with torch.no_grad():
        expected = source.model(input_ids=torch.tensor([ids])).logits[0].double()
    torch.testing.assert_close(logits_of_files(tmp_path / "out", ids), expected, atol=2e-5, rtol=1e-4)
    block = json.loads((tmp_path / "out" / "config.json").read_text())["block_configs"][0]
    assert "intermediate_size" not in block["ffn"]


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    "scaling", [{"rope_type": "llama3", **LLAMA3}, {"rope_type": "linear", "factor": 4.0}], ids=["llama3", "linear"]
)
def test_rotations_come_from_the_written_configuration(scaling: dict[str, Any], tmp_path: Path) -> None:
    rope = {"rope_theta": 100.0, **scaling}
    source = loaded("llama", "unequal", attention_bias=False, mlp_bias=False, rope_parameters=rope, head_dim=16)
    dwindle.export_model(source, "hf", tmp_path / "out", layout="deci")
    ids = tokens(24).tolist()
    with torch.no_grad():
        expected = source.model(input_ids=torch.tensor([ids])).logits[0].double()
    torch.testing.assert_close(logits_of_files(tmp_path / "out", ids), expected, atol=2e-5, rtol=1e-4)
    path = tmp_path / "out" / "config.json"
    written = json.loads(path.read_text())
    path.write_text(json.dumps(written | {"rope_scaling": written["rope_scaling"] | {"factor": 1.0}}))
    with pytest.raises(Mismatch):  # a wrong scaling in the file is found
        deci.verify(tmp_path / "out", source.model, [ids])


def test_other_models_are_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="layout deci: the layout computes Llama layers, and this is a qwen3"):
        dwindle.export_model(loaded("qwen3", "unequal"), "hf", tmp_path / "out", layout="deci")
    with pytest.raises(UserError, match="no sliding window"):
        dwindle.export_model(loaded("mistral", "stock", sliding_window=4), "hf", tmp_path / "out", layout="deci")
    with pytest.raises(UserError, match="computes silu, and this model gelu"):
        dwindle.export_model(loaded("llama", "stock", hidden_act="gelu"), "hf", tmp_path / "out", layout="deci")
    for to, layout, stock in (("gguf", "deci", False), ("hf", "deci", True), ("hf", "nas", False)):
        with pytest.raises(UserError, match=f"layout {layout}: the layouts are deci"):
            dwindle.export_model(loaded("llama", "stock"), to, tmp_path / "out.gguf", layout=layout, stock=stock)
    assert not list(tmp_path.iterdir())
