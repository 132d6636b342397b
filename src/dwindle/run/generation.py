"""``dwindle generate``: the continuation of a prompt, in the runtime that a model was written for."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

from dwindle.core.config import takes
from dwindle.core.errors import UserError
from dwindle.core.sizes import at_least
from dwindle.data.readers import without_lone_surrogates
from dwindle.evaluation.config import GenerateConfig
from dwindle.evaluation.generation import open_answerer, room_for
from dwindle.evaluation.prompts import prompt_ids
from dwindle.export.process import RuntimeFailure, RuntimeProcess
from dwindle.sources.loading import load_tokenizer, model_in
from dwindle.training.sampling import continuation_text

ONNX_FILE = "model.onnx"
DEFAULT_TOKENS = 48


@takes(GenerateConfig)
def generate(
    model: str | PathLike[str],
    prompt: str,
    *,
    config: GenerateConfig,
    chat: bool = False,
    threads: int = 1,
    device: str = "auto",
) -> str:
    """The continuation: a GGUF file is run by llama.cpp, a directory with ``model.onnx`` by onnxruntime (greedy only),
    others by transformers.

    ``chat`` puts the prompt into the model's chat template. ``threads`` is for llama.cpp and onnxruntime.
    """
    at_least(1, threads=threads)
    if not prompt:
        raise UserError("prompt: is empty: give the beginning of a text")
    where = model_in(model)
    message = [{"role": "user", "content": without_lone_surrogates(prompt)}]
    count = config.tokens or DEFAULT_TOKENS
    if (Path(where) / ONNX_FILE).is_file():
        if config.temperature:
            raise UserError("temperature: onnxruntime is used for greedy continuations only: leave it out")
        tokenizer = load_tokenizer(where)
        ids = prompt_ids(tokenizer, message, "chat" if chat else "prompt", chat=chat)
        found = _onnx(f"{where}/{ONNX_FILE}", threads, ids=ids, count=count, end=tokenizer.eos_token_id)
        return continuation_text(tokenizer, ids, found)
    with open_answerer(where, config, device=device, threads=threads) as answerer:
        ids = prompt_ids(answerer.tokenizer, message, "chat" if chat else "prompt", chat=chat)
        room = room_for(len(ids), count, answerer.max_length, "prompt")
        answerer.reserve(len(ids) + room)
        return answerer.answer([ids], [(0, 0)], room)[0].text


def _onnx(path: str, threads: int, **arguments: Any) -> Any:
    try:
        with RuntimeProcess("onnx", path, threads=threads, context=2048) as runtime:
            return runtime.call("generate", **arguments)
    except RuntimeFailure as error:
        raise UserError(f"{path}: {error}") from error
