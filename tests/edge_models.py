"""Tiny models and a byte-pair tokenizer for the exports, and the real model for the opt-in checks."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

import dwindle
from dwindle.anatomy.anatomy import Anatomy, cut
from dwindle.anatomy.structure import Group, Structure
from dwindle.sources.loading import Loaded, load
from tiny import random_group, tiny_model

TEXT = "The quick brown fox jumps over the lazy dog. It's 2024, and we'll pay for 37 apples. " * 20

slow = pytest.mark.skipif(os.environ.get("DWINDLE_SLOW") != "1", reason="minutes: set DWINDLE_SLOW=1 to run it")


def byte_pair_tokenizer(pre: Any = None) -> Any:
    """A trained byte-level BPE of 300 tokens with GPT-2's cut."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre or pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([TEXT], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=special[0],
        eos_token=special[0],
        chat_template="{% for m in messages %}{{ m['content'] }}{% endfor %}",
    )


def tiny_loaded(family: str = "llama", structure: str = "full", **options: Any) -> Loaded:
    """``full``, ``odd`` (hidden 31, FFN 38), ``cluster``, ``layers`` (heads and FFN differ from layer to layer),
    ``depth`` (without the first layer) or ``blocks`` (one layer without attention, one without FFN)."""
    plain = {"attention_bias": False, "mlp_bias": False} if family in ("llama", "smollm3") else {}
    values = {"vocab_size": 310, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None, **plain, **options}
    model = tiny_model(family, dtype=torch.float32, **values)
    anatomy = Anatomy.of(model)
    kept = tiny_structure(anatomy.source, structure)
    if kept is not anatomy.source:
        model = cut(model, anatomy, kept, anatomy.source)
    return Loaded(model, byte_pair_tokenizer(), "tiny", "huggingface")


def tiny_structure(full: Structure, kind: str) -> Structure:
    if kind == "full":
        return full
    if kind == "odd":
        for seed, group in enumerate(("stem", "ffn", "ffn")):
            full = full.without(random_group(group, full, seed))
        return full
    if kind in ("depth", "blocks"):
        places = {"depth": [(0, 1), (), ()], "blocks": [(), (0,), (1,)]}[kind]
        return full.without(Group("layer", (*places, *[()] * (len(full.layers) - 3))))
    if kind == "cluster":
        for seed in range(3):
            full = full.without(random_group("attn", full, seed))
        return full
    layers = list(full.layers)
    layers[0] = layers[0].without(ffn=range(8))
    layers[1] = layers[1].without(query_heads=[0, 1], ffn=range(3))
    layers[2] = layers[2].without(query_heads=[0, 2, 4, 6])
    return Structure(full.hidden, tuple(layers))


def greedy(model: Any, ids: list[int], count: int) -> list[int]:
    """Token by token."""
    found = list(ids)
    with torch.inference_mode():
        past = None
        step = torch.tensor([found])
        for _ in range(count):
            out = model(input_ids=step, past_key_values=past, use_cache=True)
            past = out.past_key_values
            found.append(int(out.logits[0, -1].argmax()))
            step = torch.tensor([found[-1:]])
    return found[len(ids) :]


def per_layer(source: Loaded) -> Loaded:
    """SmolLM2 with fewer key/value heads and channels in some layers, irregular in others."""
    anatomy = Anatomy.of(source.model)
    layers = []
    for number, layer in enumerate(anatomy.source.layers):
        gone = {q for q in layer.query_heads if number % 3 == 1 and q // 3 == 2}
        gone |= {q for q in layer.query_heads if number % 5 == 2 and q % 3 == 0}
        layers.append(layer.without(query_heads=gone, ffn=range(1536 - 32 * number, 1536)))
    structure = Structure(anatomy.source.hidden, tuple(layers))
    return Loaded(cut(source.model, anatomy, structure, anatomy.source), source.tokenizer, source.source, "huggingface")


def pruned_smollm2(kind: str) -> Loaded:
    source = load("smollm2-135m")
    if kind == "source":
        return source
    if kind == "layers":
        return per_layer(source)
    to = {"odd": "hidden=563,heads=6,ffn=1000", "cluster": "70%", "half": "50%nonemb"}[kind]
    attention = "cluster" if kind == "cluster" else "regular"
    pruned = dwindle.prune(source, to, metric="magnitude", attention=attention)  # type: ignore[arg-type]
    return Loaded(pruned.model, pruned.tokenizer, kind, "huggingface")
