"""Chat templates of three families, tokenizers that have them, and conversations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'"
    " }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' +"
    " message['content'] | trim + '<|eot_id|>' }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set first = messages[0]['content'] + '\n\n' %}"
    "{% set turns = messages[1:] %}{% else %}{% set first = '' %}{% set turns = messages %}{% endif %}"
    "{% for message in turns %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else 'user') + '\n' +"
    " (first if loop.first else '') + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}"
    "{% set turns = messages[1:] %}{% else %}{% set turns = messages %}{% endif %}"
    "{% for message in turns %}{% if message['role'] == 'user' %}"
    "{% if system is defined and message == (turns | selectattr('role', 'equalto', 'user') | list)[-1] %}"
    "{{ '[INST] ' + system + '\n\n' + message['content'] + '[/INST]' }}{% else %}"
    "{{ '[INST] ' + message['content'] + '[/INST]' }}{% endif %}"
    "{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}"
)
"""Puts the system text into the last question, so earlier turns change."""

TEMPLATES: dict[str, tuple[str, list[str]]] = {
    "chatml": (CHATML, ["<|im_start|>", "<|im_end|>"]),
    "llama3": (LLAMA3, ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]),
    "gemma": (GEMMA, ["<start_of_turn>", "<end_of_turn>"]),
    "mistral": (MISTRAL, ["[INST]", "[/INST]"]),
}
ENDS = {"chatml": "<|im_end|>", "llama3": "<|eot_id|>", "gemma": "<end_of_turn>", "mistral": "</s>"}


def chat_tokenizer(family: str | None) -> Any:
    """Bytes as tokens, the special tokens of a template, and the template; none without a family."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    template, specials = TEMPLATES[family] if family else (None, [])
    specials = ["<s>", "</s>", *specials]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*specials, *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.add_special_tokens(specials)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = template
    return tokenizer


def turns(*contents: str, system: str = "") -> list[dict[str, str]]:
    """User and assistant in turn, after a system text."""
    said = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(contents)]
    return [*([{"role": "system", "content": system}] if system else []), *said]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def tiny_chats(count: int) -> list[dict[str, Any]]:
    """Rows of all three forms, of many lengths."""
    rows: list[dict[str, Any]] = []
    for n in range(count):
        question, answer = f"what is {n} plus {n % 7}?", f"it is {n + n % 7}" + "!" * (n % 5)
        if n % 3 == 0:
            rows.append({"messages": turns(question, answer, "sure?", "yes", system="be brief" if n % 2 else "")})
        elif n % 3 == 1:
            rows.append({"instruction": "add the numbers", "input": question if n % 2 else "", "output": answer})
        else:
            rows.append({"prompt": question, "completion": answer})
    return rows


def chat_directory(path: Path, family: str | None = "chatml", *, model: str = "llama", **options: Any) -> Path:
    """A tiny model, by default a Llama, with a chat template."""
    import torch

    from tiny import tiny_model

    tokenizer = chat_tokenizer(family)
    sizes: dict[str, Any] = {"vocab_size": len(tokenizer), "max_position_embeddings": 512}
    if model == "llama":
        sizes |= {"attention_bias": False, "mlp_bias": False}
    tiny_model(model, dtype=torch.float32, **sizes | options).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def write_answers(path: Path, answers: dict[int, str], question: str = "Question {}?") -> Path:
    rows = [
        {"id": name, "messages": [{"role": "user", "content": question.format(name)},
                                  {"role": "assistant", "content": text}]}
        for name, text in answers.items()
    ]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
