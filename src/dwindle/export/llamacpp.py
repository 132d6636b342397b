"""llama.cpp through xllamacpp (a prebuilt wheel); runs in the child process of ``process.py``."""

from __future__ import annotations

import json
import secrets
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

from dwindle.core.errors import UserError, install_hint

_GREEDY = {"temperature": 0.0, "ignore_eos": True, "samplers": ["top_k"], "top_k": 1}
_FORCED = 1e6
open_here = build_opener(ProxyHandler({})).open
"""Opens addresses of this machine: a proxy of the environment would get the text and the key, and cannot reach them."""


def require_xllamacpp() -> None:
    """Raise unless xllamacpp is installed; it is imported only in the child process, because it starts threads."""
    if find_spec("xllamacpp") is None:
        raise UserError(f"llama.cpp is run through xllamacpp, which is not installed: {install_hint('gguf')}")


class LlamaCppEngine:
    """One model, one request at a time; the key/value cache is float32, so that differences come from the file."""

    exact = True

    def __init__(self, path: str, *, threads: int = 1, context: int = 512) -> None:
        require_xllamacpp()
        llama = import_module("xllamacpp")
        params = llama.CommonParams()
        params.model.path = path
        params.n_ctx = context
        params.n_batch = params.n_ubatch = max(32, min(512, context))
        params.n_parallel = 1
        params.n_gpu_layers = 0
        params.warmup = False
        params.verbosity = 1  # errors only
        params.fit_params = False
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        if self.exact:
            params.cache_type_k = params.cache_type_v = llama.ggml_type.GGML_TYPE_F32
            params.flash_attn_type = llama.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self._key = secrets.token_urlsafe(32)
        params.api_keys = [self._key]  # it listens on a port, which other programs and web pages can reach too
        self._reads_template = True
        try:
            self._server = llama.Server(params)
        except RuntimeError:  # it does not start with a chat template that it cannot read, which not all uses need
            params.chat_template, self._reads_template = "chatml", False
            self._server = llama.Server(params)
        self._safe_token: int | None = None

    def address(self) -> tuple[str, str]:
        """Its address and its key."""
        return str(self._server.listening_address), self._key

    def tokenize(self, text: str) -> list[int]:
        """Token ids by llama.cpp's own tokenizer, with the special tokens that it adds and parses."""
        tokens: list[int] = self._asked("tokenize", {"content": text, "add_special": True, "parse_special": True})[
            "tokens"
        ]
        return tokens

    def render(self, messages: list[dict[str, str]]) -> dict[str, str]:
        """The ``prompt`` that a chat is by the file's template, or the ``error`` that prevents it."""
        if not self._reads_template:
            return {"error": "it cannot read the template"}
        try:
            return self._asked("apply-template", {"messages": messages})
        except HTTPError as error:
            return {"error": json.load(error)["error"]["message"]}

    def _asked(self, what: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """The answer of our own server in this process."""
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self._key}"}
        data = None if body is None else json.dumps(body).encode()
        with open_here(Request(f"{self._server.listening_address}/{what}", data, headers), timeout=60) as answer:
            found: dict[str, Any] = json.load(answer)
        return found

    def greedy(self, ids: list[int], count: int, top: int = 1) -> list[list[tuple[int, float]]]:
        """The greedy continuation of ``count`` tokens: for each the ``top`` likeliest with their log-probabilities."""
        places: list[list[tuple[int, float]]] = []
        for _ in range(count):
            entries = self._next([*ids, *(place[0][0] for place in places)], top)
            places.append([(int(entry["id"]), float(entry["logprob"])) for entry in entries])
        return places

    def _next(self, ids: list[int], top: int) -> list[dict[str, Any]]:
        """The ``top`` likeliest next tokens.

        llama.cpp reports nothing for a token that ends inside a character, so a bias makes its sampler take a token
        that does not; the probabilities it reports are those before the bias.
        """
        request = {"prompt": ids, "n_predict": 1, "n_probs": top, "logit_bias": [[self._safe(), _FORCED]], **_GREEDY}
        logprobs = self._complete({"cache_prompt": True, **request})["choices"][0]["logprobs"]
        found: list[dict[str, Any]] = logprobs["content"][0]["top_logprobs"]
        return found

    def _safe(self) -> int:
        """A token that is a whole character."""
        if self._safe_token is None:
            self._safe_token = self.tokenize("a")[-1]
        return self._safe_token

    def timed(self, ids: list[int], new_tokens: int) -> tuple[float, float]:
        """Milliseconds for the whole prompt and per generated token, by llama.cpp's own clock."""
        answer = self._complete({"prompt": ids, "n_predict": new_tokens + 1, "cache_prompt": False, **_GREEDY})
        timings = answer["timings"]
        assert timings["cache_n"] == 0 and timings["predicted_n"] == new_tokens + 1
        return float(timings["prompt_ms"]), float(timings["predicted_ms"]) / new_tokens

    def complete(self, request: dict[str, Any]) -> dict[str, Any]:
        """An answer to a prompt of token ids: its text, its number of tokens, and whether the model ended it."""
        answer = self._complete(request)
        choice, count = answer["choices"][0], int(answer["usage"]["completion_tokens"])
        is_finished = choice["finish_reason"] == "stop"
        return {"text": str(choice["text"]), "tokens": count - is_finished, "finished": is_finished}

    def _complete(self, request: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = self._server.handle_completions({"cache_prompt": False, **request})
        if "error" in answer:
            raise RuntimeError(answer["error"].get("message", str(answer["error"])))
        return answer


class DefaultLlamaCppEngine(LlamaCppEngine):
    """With llama.cpp's default cache type and attention kernel: what its users run, and what is timed."""

    exact = False
