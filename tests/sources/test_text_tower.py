"""Vision-language models: their text model is loaded, and computes what the whole model computes for text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
)

import dwindle
from dwindle.core.errors import UserError
from dwindle.distributed.lazy_weights import source_tensors
from dwindle.sources.common import SourceNotice
from dwindle.sources.loading import load, load_config
from tiny import tiny_model, tokens

TEXT = {
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": 70,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2} | {
    "image_size": 28,
    "patch_size": 14,
}


def whole_model(kind: str, tied: bool) -> Any:
    torch.manual_seed(0)
    text = {**TEXT, "tie_word_embeddings": tied}
    if kind == "gemma3":
        config = Gemma3Config(
            text_config={**text, "model_type": "gemma3_text", "sliding_window": 5, "query_pre_attn_scalar": 5},
            vision_config={**VISION, "model_type": "siglip_vision_model"},
            mm_tokens_per_image=4,
            tie_word_embeddings=tied,
        )
        return Gemma3ForConditionalGeneration(config).eval()
    config = Mistral3Config(
        text_config={**text, "model_type": "ministral3"},
        vision_config={**VISION, "model_type": "pixtral", "head_dim": 4},
        tie_word_embeddings=tied,
    )
    return Mistral3ForConditionalGeneration(config).eval()


@pytest.mark.parametrize("names", ["as saved", "as in memory"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("kind", "family"), [("gemma3", "gemma3_text"), ("mistral3", "ministral3")])
def test_the_text_model_is_loaded(kind: str, family: str, tied: bool, names: str, tmp_path: Path) -> None:
    whole = whole_model(kind, tied)
    whole.save_pretrained(tmp_path / "in")
    if names == "as in memory":  # transformers saves the names of older files
        renamed = {n: t.clone() for n, t in whole.state_dict().items() if not (tied and n.startswith("lm_head"))}
        save_file(renamed, tmp_path / "in" / "model.safetensors", metadata={"format": "pt"})
    with pytest.warns(SourceNotice, match=rf"only its text model \({family}\) is loaded; \d+ tensors"):
        model = load(tmp_path / "in").model
    assert model.config.model_type == load_config(tmp_path / "in").model_type == family
    batch = tokens(2, 12)
    with torch.no_grad():
        expected, found = whole(input_ids=batch).logits, model(input_ids=batch).logits
    assert torch.equal(found, expected)
    fetch = source_tensors(str(tmp_path / "in"), torch.float32, None)  # type: ignore[arg-type]  # no process is asked
    for name, parameter in model.named_parameters():
        assert torch.equal(fetch(name), parameter), name


@pytest.mark.filterwarnings("ignore:source .* only its text model")
def test_it_is_pruned_like_any_other(tmp_path: Path) -> None:
    whole_model("gemma3", tied=True).save_pretrained(tmp_path / "in")
    smaller = dwindle.prune(tmp_path / "in", "hidden=12,ffn=15", metric="magnitude", out=tmp_path / "out")
    assert dwindle.inspect(tmp_path / "out").model_type == "gemma3_text"
    again = load(tmp_path / "out").model
    assert smaller.after.total == sum(parameter.numel() for parameter in again.parameters())


def test_weights_without_a_text_model_are_refused(tmp_path: Path) -> None:
    whole_model("gemma3", tied=True).save_pretrained(tmp_path / "in")
    file = tmp_path / "in" / "model.safetensors"
    vision = {name: tensor for name, tensor in load_file(file).items() if name.startswith("vision_tower")}
    save_file(vision, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match="no tensors of a text model"):
        load(tmp_path / "in")


def test_dropout_is_switched_off(tmp_path: Path) -> None:
    """Seed-OSS states dropout, with which masked and compacted models could not train alike."""
    model = tiny_model("seed_oss", dtype=torch.float32, attention_dropout=0.1, residual_dropout=0.1)
    model.save_pretrained(tmp_path / "in")
    loaded = load(tmp_path / "in").model.train()
    batch = tokens(1, 12)
    assert torch.equal(loaded(input_ids=batch).logits, model(input_ids=batch).logits)
