"""The contract of servers: a saved model is built, fed and run as vLLM's Transformers backend does it.

Read in vllm/model_executor/models/transformers (``base.py``, ``vllm_attention_forward``), vllm/config/model_arch.py and
vllm/transformers_utils/model_arch_config_convertor.py. v0.28.0rc2 gives every layer's attention object the head counts
of ``per_layer_config[layer]`` if ``is_heterogeneous``; v0.27.1 gives all layers the configuration's own counts.
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, StaticCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import dwindle
from dwindle.anatomy import configuration_dwindle
from dwindle.anatomy.structure import Structure
from dwindle.export.huggingface import save_model
from tiny import shrunk, tokens

FAMILIES = ("llama", "qwen3", "phi3", "gemma3_text")
SERVER = "a_server"


def saved(family: str, kind: str, out: Path, **options: Any) -> tuple[Any, Structure]:
    model, structure = shrunk(family, kind, **options)
    save_model(model, None, out, structure=structure, source="tiny", ledger=[{"event": "source"}])
    return model, structure


class ServerAttention:
    """One layer's attention of a server: it knows only the head counts that it is told, and is causal.

    Independent of transformers' own functions: flattened tokens in, flattened tokens out.
    """

    def __init__(self, config: Any) -> None:
        self.heads, self.kv_heads = getattr(config, "num_attention_heads", 0), config.num_key_value_heads
        self.size = config.head_dim

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        query = query.view(-1, self.heads, self.size)
        key, value = (states.view(-1, self.kv_heads, self.size) for states in (key, value))
        out = torch.empty_like(query)
        for head in range(self.heads):
            kv = head * self.kv_heads // self.heads
            for place in range(len(query)):
                weights = (key[: place + 1, kv] @ query[place, head] * scale).softmax(0)
                out[place, head] = weights @ value[: place + 1, kv]
        return out.flatten(1)


def server_attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """As vLLM's: everything flattened to [tokens, heads × size], the rest is the layer's own attention object."""
    length = query.shape[-2]
    query, key, value = (states.transpose(1, 2).reshape(length, -1) for states in (query, key, value))
    own = kwargs["attention_instances"][module.layer_idx]
    return own.forward(query, key, value, kwargs["scaling"]), None


class ServerLinear(nn.Module):
    """Stands for a server's own linear layer; only names, sizes and values are taken over."""

    def __init__(self, replaced: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(replaced.out_features, replaced.in_features))
        self.bias = None if replaced.bias is None else nn.Parameter(torch.empty(replaced.out_features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


def replace_linears(module: nn.Module) -> None:
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            setattr(module, name, ServerLinear(child))
        else:
            replace_linears(child)


def attention_instances(config: Any, version: str) -> dict[int, ServerAttention]:
    """``create_attention_instances``: per layer from 0.28 on, with one number of heads for all before."""
    if version == "0.28" and config.is_heterogeneous:
        return {number: ServerAttention(config.per_layer_config[number]) for number in range(config.num_hidden_layers)}
    return {number: ServerAttention(config) for number in range(config.num_hidden_layers)}


def served_logits(folder: Path, ids: torch.Tensor, version: str = "0.28") -> torch.Tensor:
    """Configuration → per-layer attention objects → model on meta → own linears → weights by name → one forward."""
    ALL_ATTENTION_FUNCTIONS.register(SERVER, server_attention)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    config._attn_implementation = SERVER
    with torch.device("meta"):
        model: Any = AutoModel.from_config(config, dtype=torch.float32, trust_remote_code=True)
    assert type(model).is_backend_compatible()
    assert model.config._attn_implementation == SERVER and model.tp_plan and model.supports_pp_plan
    replace_linears(model)
    weights = {name.removeprefix("model."): tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    head = weights.pop("lm_head.weight", weights["embed_tokens.weight"])
    assert {name for name, _ in model.named_parameters()} == set(weights)
    model.load_state_dict(weights, strict=False, assign=True)
    if hasattr(model.embed_tokens, "scalar_embed_scale"):
        model.embed_tokens.embed_scale = torch.tensor(model.embed_tokens.scalar_embed_scale)
    with torch.device("cpu"):  # a server keeps buffers off meta
        model.rotary_emb = type(model.rotary_emb)(config)
    instances = attention_instances(config, version)
    positions = torch.arange(ids.shape[0])
    hidden = model(
        input_ids=ids[None],
        position_ids=positions[None],
        use_cache=False,
        attention_instances=instances,
        return_dict=False,
    )[0]
    return nn.functional.linear(hidden[0], head)


@pytest.mark.parametrize("kind", ["stock", "ffn", "unequal", "cluster"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_server_builds_and_runs_it_with_its_own_attention(family: str, kind: str, tmp_path: Path) -> None:
    options = {"sliding_window": 64, "num_key_value_heads": 2} if family == "gemma3_text" else {}
    model, structure = saved(family, kind, tmp_path / "out", **options)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert ("per_layer_config" in config) == (kind != "stock")
    assert kind == "stock" or {"AutoConfig", "AutoModel", "AutoModelForCausalLM"} <= set(config["auto_map"])
    ids = tokens(9)
    with torch.no_grad():
        found, expected = served_logits(tmp_path / "out", ids), model(input_ids=ids[None]).logits[0]
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)
    assert kind != "cluster" or any(not layer.is_regular for layer in structure.layers)


def test_a_server_with_one_number_of_heads_runs_or_refuses_it(tmp_path: Path) -> None:
    """vLLM up to 0.27: FFN widths may differ; heads that differ are an error that says what to do, never wrong text."""
    model, _ = saved("llama", "ffn", tmp_path / "ffn")
    ids = tokens(9)
    with torch.no_grad():
        expected = model(input_ids=ids[None]).logits[0]
        for version in ("0.27", "0.28"):
            found = served_logits(tmp_path / "ffn", ids, version)
            torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)
    for kind in ("unequal", "cluster"):
        saved("llama", kind, tmp_path / kind)
        with pytest.raises(RuntimeError, match=r"layers differ: .* vLLM .* 0\.28 .*`dwindle export --to hf --as deci`"):
            served_logits(tmp_path / kind, ids, "0.27")


@pytest.mark.parametrize("version", ["4.57.1", "5.14.1"])
def test_an_older_transformers_is_told_in_one_line(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.__version__", version)
    if version.startswith("4."):
        monkeypatch.setitem(sys.modules, "transformers.integrations.heterogeneity.configuration_utils", None)
    with pytest.raises(ImportError, match=f"needs transformers 5.15 or newer, and this is {version}: pip install"):
        runpy.run_path(str(configuration_dwindle.__file__))


@pytest.mark.parametrize("kind", ["unequal", "cluster"])
def test_all_of_transformers_attention_functions_agree(kind: str, tmp_path: Path) -> None:
    """Eager and sdpa, chosen at loading or later; the function is the stock one, on the module's own sizes."""
    model, _ = saved("llama", kind, tmp_path / "out")
    ids = tokens(2, 11)
    expected = model(input_ids=ids).logits
    for chosen in ("eager", "sdpa"):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            tmp_path / "out", trust_remote_code=True, attn_implementation=chosen, dtype=torch.float32
        )
        assert loaded.config._attn_implementation == chosen
        torch.testing.assert_close(loaded(input_ids=ids).logits, expected, atol=1e-5, rtol=1e-4)
    loaded.set_attn_implementation("eager")
    output = loaded(input_ids=ids, output_attentions=True)
    heads = [own.num_attention_heads for own in loaded.config.per_layer_config]
    assert [weights.shape[1] for weights in output.attentions] == heads
    torch.testing.assert_close(output.logits, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["unequal", "cluster"])
def test_static_cache_compiled_and_exported(kind: str, tmp_path: Path) -> None:
    model, structure = saved("llama", kind, tmp_path / "out")
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True, dtype=torch.float32)
    ids = tokens(1, 7)
    greedy = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    plain = loaded.generate(ids, use_cache=True, **greedy)
    assert torch.equal(loaded.generate(ids, cache_implementation="static", disable_compile=True, **greedy), plain)
    cache = StaticCache(config=loaded.config, max_cache_len=16)
    loaded(input_ids=ids, past_key_values=cache)
    assert [la.keys.shape[1] for la in cache.layers] == [len(la.kv_heads) for la in structure.layers]

    expected = model(input_ids=ids).logits
    compiled = torch.compile(loaded, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(input_ids=ids, use_cache=False).logits, expected)
    exported = torch.export.export(loaded, (), {"input_ids": ids, "use_cache": False}, strict=False)
    torch.testing.assert_close(exported.module()(input_ids=ids, use_cache=False).logits, expected)


def test_directories_of_earlier_versions_still_load(tmp_path: Path) -> None:
    """They list ``layer_shapes`` instead of ``per_layer_config``."""
    model, structure = saved("llama", "cluster", tmp_path / "out")
    path = tmp_path / "out" / "config.json"
    config = json.loads(path.read_text())
    del config["per_layer_config"], config["queries_per_kv"]
    config["ffn_key"] = "intermediate_size"
    config["layer_shapes"] = [
        {"intermediate_size": len(la.ffn), "queries_per_kv": list(la.queries_per_kv)} for la in structure.layers
    ]
    path.write_text(json.dumps(config))
    loaded = dwindle.load(tmp_path / "out").model
    ids = tokens(1, 8)
    assert torch.equal(loaded(input_ids=ids).logits, model(input_ids=ids).logits)
    assert "layer_shapes" not in loaded.config.to_dict() and "per_layer_config" in loaded.config.to_dict()


def test_the_tensor_parallel_plan_leaves_irregular_groups_whole() -> None:
    regular, irregular = (shrunk("llama", kind)[0].config.base_model_tp_plan for kind in ("unequal", "cluster"))
    assert "layers.*.self_attn.q_proj" in regular
    assert irregular and not any(".self_attn." in name for name in irregular)
