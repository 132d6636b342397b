"""``dwindle generate``: the likeliest continuation of a prompt, in the runtime that a model was written for."""

from __future__ import annotations

from os import PathLike, fspath
from pathlib import Path
from typing import Any

from dwindle.core.errors import UserError
from dwindle.core.sizes import at_least
from dwindle.export.llamacpp import require_xllamacpp
from dwindle.export.process import RuntimeFailure, RuntimeProcess
from dwindle.sources.loading import load, load_tokenizer, model_of_run, needed_tokenizer
from dwindle.training.sampling import continuation_text, greedy_tokens

ONNX_FILE = "model.onnx"


def generate(
    model: str | PathLike[str],
    prompt: str,
    *,
    tokens: int = 48,
    chat: bool = False,
    threads: int = 1,
    device: str = "auto",
) -> str:
    """Greedy: a GGUF file is run by llama.cpp, a directory with ``model.onnx`` by onnxruntime, others by transformers.

    ``chat`` puts the prompt into the model's chat template. ``threads`` is for llama.cpp and onnxruntime.
    """
    at_least(1, tokens=tokens, threads=threads)
    if not prompt:
        raise UserError("prompt: is empty: give the beginning of a text")
    where = str(model_of_run(Path(model)) or fspath(model))
    if Path(where).suffix == ".gguf" and Path(where).is_file():
        require_xllamacpp()
        return str(_in_child("llamacpp-default", where, threads, text=prompt, count=tokens, chat=chat))
    if (Path(where) / ONNX_FILE).is_file():
        tokenizer = load_tokenizer(where)
        ids = _prompt_ids(tokenizer, prompt, chat)
        found = _in_child("onnx", f"{where}/{ONNX_FILE}", threads, ids=ids, count=tokens, end=tokenizer.eos_token_id)
        return continuation_text(tokenizer, ids, found)
    loaded = load(where, device=device)
    tokenizer = needed_tokenizer(loaded.tokenizer, where)
    ids = _prompt_ids(tokenizer, prompt, chat)
    return continuation_text(tokenizer, ids, greedy_tokens(loaded.model, ids, tokens, tokenizer))


def _prompt_ids(tokenizer: Any, prompt: str, chat: bool) -> list[int]:
    if not chat:
        return [int(token) for token in tokenizer(prompt).input_ids]
    if not tokenizer.chat_template:
        raise UserError("chat: the model has no chat template: leave it out")
    message = [{"role": "user", "content": prompt}]
    return list(tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False))


def _in_child(engine: str, path: str, threads: int, **arguments: Any) -> Any:
    try:
        with RuntimeProcess(engine, path, threads=threads, context=2048) as runtime:
            return runtime.call("generate", **arguments)
    except RuntimeFailure as error:
        raise UserError(f"{path}: {error}") from error
