"""The code on a card runs as it stands, in the runtime that it names, and says what the model itself says."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch

import dwindle
from dwindle.core.quality import Quality, Sample
from dwindle.core.run_directory import RunDirectory
from dwindle.export.card import Card, model_card
from dwindle.export.card_figure import architecture_svg
from dwindle.export.card_running import PROMPT
from dwindle.export.exporting import export
from dwindle.export.origin import origin_of
from dwindle.pruning.ledger import read_ledger
from dwindle.quantization.quantize import load as load_quantised
from dwindle.sources.gguf_file import open_gguf
from edge_models import tiny_loaded
from tiny import tiny_directory

CHAT = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)


def code_of(folder: Path) -> str:
    blocks = re.findall(r"```python\n(.*?)\n```", (folder / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 1
    return blocks[0].replace("path/to/this/directory", str(folder))


def said_by(folder: Path) -> str:
    """What the card's code prints."""
    with redirect_stdout(StringIO()) as said:
        exec(compile(code_of(folder), "card", "exec"), {})
    return said.getvalue().rstrip("\n")


def greedy(model: Any, tokenizer: Any, ids: list[int], count: int = 60) -> str:
    """The likeliest token, again and again, without a cache."""
    with torch.inference_mode():
        for _ in range(count):
            token = int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax())
            if token == tokenizer.eos_token_id:
                break
            ids = [*ids, token]
    return str(tokenizer.decode(ids, skip_special_tokens=True)).rstrip("\n")


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize(("to", "structure"), [("hf", "odd"), ("hf", "layers"), ("onnx", "layers")])
def test_the_code_of_a_card_runs(to: str, structure: str, chat: bool, tmp_path: Path) -> None:
    if to == "onnx":
        pytest.importorskip("onnx", reason="pip install -e '.[onnx]'")
        pytest.importorskip("onnxruntime", reason="pip install -e '.[onnx]'")
    loaded = tiny_loaded("llama", structure)
    assert loaded.tokenizer is not None
    loaded.tokenizer.chat_template = CHAT if chat else None
    export(loaded, to, tmp_path / "out", verify=False)
    card = (tmp_path / "out" / "README.md").read_text()
    assert ("apply_chat_template" in card) is chat and ("onnxruntime" in card) is (to == "onnx")
    assert ("trust_remote_code" in card) is (to == "hf" and structure == "layers")
    prompt: Any = loaded.tokenizer(PROMPT).input_ids
    if chat:
        messages = [{"role": "user", "content": "Tell me a story."}]
        prompt = loaded.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True).input_ids
    assert said_by(tmp_path / "out") == greedy(loaded.model, loaded.tokenizer, list(prompt))


def test_a_quantised_folder_says_what_loads_it(tmp_path: Path) -> None:
    tiny_directory(tmp_path / "model")
    (tmp_path / "text.txt").write_text("one two three four five six seven " * 200)
    text = [str(tmp_path / "text.txt")]
    options: Any = {"sequences": 2, "seq_len": 16, "valid_seq_len": 16, "valid_tokens": 64}
    found = dwindle.quantize(tmp_path / "model", out=tmp_path / "out", data=text, valid=text, scheme="w8", **options)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "## What loads it\n\nvLLM (`vllm serve path/to/this/directory`), transformers" in card
    assert "--to gguf --type q4_k_m" in card
    assert f"| {found.perplexity['quantized']:.3f} |" in card and f"| {found.perplexity['source']:.3f} |" in card
    pytest.importorskip("compressed_tensors")
    model, tokenizer = load_quantised(tmp_path / "out")  # in float32, the code of the card in the stored bfloat16
    said, likeliest = said_by(tmp_path / "out"), greedy(model.bfloat16(), tokenizer, tokenizer(PROMPT).input_ids)
    some = len(PROMPT) + 30  # with a cache bfloat16 rounds in other places, and a near tie may end otherwise
    assert len(said) > some and said[:some] == likeliest[:some]


def test_results_stand_against_the_source(tmp_path: Path) -> None:
    """The card, its figure and quality.json of a pruned model, and of an export of it."""
    tiny_directory(tmp_path / "model")
    options: Any = {"sequences": 2, "seq_len": 16, "method": "adapt", "rounds": 2}
    result = dwindle.prune(tmp_path / "model", "70%", out=tmp_path / "out", **options)
    quality = result.quality
    assert quality is not None and quality.source_loss is not None and quality.result_loss is not None
    export(tmp_path / "out", "hf", tmp_path / "again", verify=False)
    for folder in (tmp_path / "out", tmp_path / "again"):
        card = (folder / "README.md").read_text()
        row = f"| {quality.source_loss:.4f} | {quality.result_loss:.4f} | {quality.change:+.4f} |"
        assert row in card and "| beginning | source | this model |" in card
        titles = ["How it was made", "Results", "Run it", "Architecture", "Limits"]
        assert re.findall(r"^## (.*)$", card, re.MULTILINE) == titles
        assert card.index("## Limits") < card.index("<details>") < card.index("- method: adapt")
        assert "(architecture.svg)" in card and (folder / "architecture.svg").is_file()
        assert RunDirectory(folder).read_quality() == quality
    export(tiny_loaded("llama", "odd"), "hf", tmp_path / "padded", round_to=16, verify=False)
    assert "nats per token" not in (tmp_path / "padded" / "README.md").read_text(), "of another source"


def test_the_figure_shows_every_head_and_channel(tmp_path: Path) -> None:
    tiny_directory(tmp_path / "model")
    options: Any = {"sequences": 2, "seq_len": 16, "selection": "global"}
    result = dwindle.prune(tmp_path / "model", "60%", out=tmp_path / "out", **options)
    root = ElementTree.parse(tmp_path / "out" / "architecture.svg").getroot()
    shapes = list(root.iter("{http://www.w3.org/2000/svg}rect"))
    before = dwindle.load(tmp_path / "model").model.config
    kept = sum(len(layer.query_heads) for layer in result.structure.layers)
    count = {name: sum(shape.get("class") == name for shape in shapes) for name in ("kept", "gone", "lost", "ffn")}
    layers = before.num_hidden_layers
    heads = layers * before.num_attention_heads
    assert count == {"kept": kept, "gone": heads - kept, "lost": layers, "ffn": layers}
    tall = {name: [float(s.get("height") or 0) for s in shapes if s.get("class") == name] for name in ("lost", "ffn")}
    shares = [after / whole for after, whole in zip(tall["ffn"], tall["lost"], strict=True)]
    assert shares == pytest.approx(
        [len(layer.ffn) / before.intermediate_size for layer in result.structure.layers], abs=0.01
    )
    source = [event for event in read_ledger(tmp_path / "out") if event["event"] == "source"]
    assert architecture_svg({"layers": []}, source) is None


def test_a_dequantised_source_is_said(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="pip install -e '.[gguf]'")
    given: dict[str, Any] = {"structure": {}, "ledger": []}
    assert "dequantised from a Q4_1 GGUF file" in model_card(Card("m", "smollm2-135m", **given))
    loaded = tiny_loaded("llama", "stock")
    for type_, rounded in (("f16", False), ("q8_0", True)):
        export(loaded, "gguf", tmp_path / f"{type_}.gguf", type=type_, verify=False)
        assert origin_of(str(tmp_path / f"{type_}.gguf")).dequantised == "a quantised GGUF file" * rounded
    dwindle.prune(tmp_path / "q8_0.gguf", "70%", out=tmp_path / "out", metric="magnitude")
    card = (tmp_path / "out" / "README.md").read_text()
    assert ", dequantised from a quantised GGUF file) was pruned" in card and "\n- dequantised\n" in card
    assert origin_of(str(tmp_path / "out")).dequantised == "a quantised model", "also of what is made from it"
    assert not origin_of(str(tmp_path / "f16.gguf")).dequantised


def test_two_sentences_say_how_it_was_made(tmp_path: Path) -> None:
    ledger: list[dict[str, Any]] = [
        {"event": "source", "parameters": 200_000, "options": {"method": "efficientllm", "selection": "global"}},
        {"event": "prune", "type": "ffn", "indices": [[0]], "tokens": 5000, "parameters": 100_000},
    ]
    recipe = '[training]\ntokens = "2M"\n[distill]\nweight = 0.75\n'
    given: dict[str, Any] = {"structure": {}, "ledger": ledger}
    card = model_card(Card("m", "org/s", recipe=recipe, results={"training tokens": 16_000_000}, **given))
    made = card.split("## How it was made\n\n")[1].split("\n\n")[0]
    assert made == (
        "[org/s](https://huggingface.co/org/s) (200k parameters) was pruned to 100k in 1 prune events during continued "
        "pretraining: always the least salient group of any layer. It was trained on 16M tokens (pruning ended after "
        "5k) with org/s (the unpruned source) as teacher (weight 0.75)."
    )
    assert "It was trained on 2M tokens" in model_card(Card("m", "org/s", recipe=recipe, **given))


def test_what_a_model_says_cannot_become_markup() -> None:
    text = "<b>*x*</b> | ![a](b) `c`\n# d"
    quality = Quality(["t|<i>.txt"], 10, True, 1.0, 2.0, [Sample(text, text, text)])
    card = model_card(Card("m", "org/s", {}, [], quality=quality))
    row = next(line for line in card.splitlines() if "&lt;b&gt;" in line)
    cell = r"&lt;b&gt;\*x\*&lt;/b&gt; / \!\[a\](b) 'c' \# d"
    assert row == f"| {cell} | {cell} | {cell} |" and "(t/&lt;i&gt;.txt)" in card


def test_a_gguf_file_says_what_it_was_made_from(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="pip install -e '.[gguf]'")
    export(tiny_loaded("llama", "stock"), "hf", tmp_path / "source", verify=False)
    for name in ("structure.json", "ledger.jsonl"):
        (tmp_path / "source" / name).unlink()
    (tmp_path / "source" / "README.md").write_text("---\nlicense: mit\nbase_model: org/first\n---\n")
    pruned = dwindle.prune(tmp_path / "source", "70%", out=tmp_path / "small", metric="magnitude")
    for place, text in (
        ("small", f": pruned from {pruned.before.total:,} to {pruned.after.total:,} parameters."),
        ("source", "."),
    ):
        export(tmp_path / place, "gguf", tmp_path / f"{place}.gguf", verify=False)
        found = open_gguf(tmp_path / f"{place}.gguf").metadata
        about = "org/first, written by dwindle for llama.cpp and what is built on it"
        assert found["general.description"] == about + text
        assert (found["general.name"], found["general.license"]) == (place, "mit")
