"""How a model directory is run, as its card shows it: code for the runtime that loads it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from dwindle.export.running import PROMPT

Runtime = Literal["transformers", "onnxruntime", "transformers.js", "compressed-tensors", "vllm"]

PLACE = "path/to/this/directory"
_TOKENIZER = "from transformers import PreTrainedTokenizerFast"


def how_to_run(
    runtime: Runtime,
    *,
    chat: bool = False,
    custom_code: bool = False,
    padded: bool = False,
    tokenizer: bool = True,
    gguf: bool = True,
    mlx: bool = False,
) -> str:
    """Markdown: a code block, and for transformers how to get a file for llama.cpp.

    ``chat`` says that the tokenizer has a chat template, ``padded`` that llama.cpp needs equal layers, ``gguf``
    that it knows the family at all, ``mlx`` that mlx-lm computes it alike.
    """
    if not tokenizer:
        return _block("python", _load_only(custom_code))
    if runtime == "vllm":
        return _block("console", f"$ vllm serve {PLACE} --trust-remote-code  # for its configuration class")
    if runtime == "onnxruntime":
        return _block("python", _onnxruntime(chat))
    if runtime == "compressed-tensors":
        return _block("python", _transformers(chat, custom_code))
    if runtime == "transformers.js":
        return _block("js", _javascript(chat))
    code = _block("python", _transformers(chat, custom_code))
    if mlx:
        flag = " --trust-remote-code" if custom_code else ""
        command = f'$ mlx_lm.generate --model {PLACE}{flag} --prompt "{PROMPT}"'
        code = f"{code}\n\nIn mlx-lm:\n\n{_block('console', command)}"
    if not gguf:
        return code
    return f"{code}\n\nIn llama.cpp, Ollama and dwindle:\n\n{_block('console', _export_first(padded))}"


def _export_first(padded: bool) -> str:
    stock = " --stock" if padded else ""
    return (
        f"$ dwindle export {PLACE} --to gguf{stock} --out model.gguf\n"
        f'$ llama-cli -m model.gguf -p "{PROMPT}" -n 60\n'
        "$ ollama create smaller -f model.Modelfile && ollama run smaller\n"
        f'$ dwindle generate {PLACE} "{PROMPT}"'
    )


def as_published(card: str, repo: str, gguf: Sequence[str] = ()) -> str:
    """The card as it stands on the Hub: code that loads ``repo``, and llama.cpp and Ollama without an export."""
    if gguf:
        file = sorted(gguf, key=len)[0]
        commands = (
            f'$ llama-cli --hf-repo {repo} --hf-file {file} -p "{PROMPT}" -n 60\n'
            f"$ ollama run hf.co/{repo}:{file}\n"
            f'$ dwindle generate {repo} "{PROMPT}"'
        )
        for padded in (False, True):
            card = card.replace(_export_first(padded), commands)
    local, there = (f"{_TOKENIZER}\n\nfolder = {code}\n" for code in (f'"{PLACE}"', f'snapshot_download("{repo}")'))
    card = card.replace(local, f"from huggingface_hub import snapshot_download\n{there}")
    return card.replace(PLACE, repo)


def _block(language: str, text: str) -> str:
    return f"```{language}\n{text}\n```"


def _load_only(custom_code: bool) -> str:
    extra = ", trust_remote_code=True" if custom_code else ""
    return (
        "from transformers import AutoModelForCausalLM\n\n"
        f'model = AutoModelForCausalLM.from_pretrained("{PLACE}"{extra})  # its source has no tokenizer'
    )


def _ids(chat: bool, kind: str) -> str:
    """Code that sets ``inputs``: token ids and mask of the prompt, through the chat template where there is one."""
    if not chat:
        return f'inputs = tokenizer("{PROMPT}"{kind})'
    return (
        'messages = [{"role": "user", "content": "Tell me a story."}]\n'
        f"inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True{kind})"
    )


def _transformers(chat: bool, custom_code: bool) -> str:
    extra = ", trust_remote_code=True" if custom_code else ""
    return f"""from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "{PLACE}"
model = AutoModelForCausalLM.from_pretrained(folder{extra})
tokenizer = AutoTokenizer.from_pretrained(folder{extra})
{_ids(chat, ', return_tensors="pt"')}
output = model.generate(inputs["input_ids"], attention_mask=inputs["attention_mask"], max_new_tokens=60)
print(tokenizer.decode(output[0], skip_special_tokens=True))"""


def _javascript(chat: bool) -> str:
    prompt = '[{ role: "user", content: "Tell me a story." }]' if chat else f'"{PROMPT}"'
    return f"""// npm install @huggingface/transformers; dtype: "fp32", "q8" or "q4"
import {{ pipeline }} from "@huggingface/transformers";

const generator = await pipeline("text-generation", "{PLACE}", {{ dtype: "q4" }});
const output = await generator({prompt}, {{ max_new_tokens: 60 }});
console.log(output[0].generated_text);"""


def _onnxruntime(chat: bool) -> str:
    return f"""import numpy as np
import onnxruntime
{_TOKENIZER}

folder = "{PLACE}"
session = onnxruntime.InferenceSession(f"{{folder}}/model.onnx", providers=["CPUExecutionProvider"])
tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
{_ids(chat, "")}
tokens = new = list(inputs["input_ids"])
names = [output.name for output in session.get_outputs()]
past = [item for item in session.get_inputs() if item.name.startswith("past_key_values.")]
cache = {{item.name: np.zeros((1, item.shape[1], 0, item.shape[3]), np.float32) for item in past}}
for _ in range(60):  # the likeliest token, again and again; the cache holds all but the newest
    seen = len(tokens) - len(new)
    feeds = {{
        "input_ids": np.array([new]),
        "attention_mask": np.ones((1, len(tokens)), np.int64),
        "position_ids": np.arange(seen, len(tokens))[None],
    }}
    found = dict(zip(names, session.run(None, feeds | cache)))
    cache = {{name: found[name.replace("past_key_values", "present")] for name in cache}}
    new = [int(found["logits"][0, -1].argmax())]
    if new[0] == tokenizer.eos_token_id:
        break
    tokens = tokens + new
print(tokenizer.decode(tokens, skip_special_tokens=True))"""
