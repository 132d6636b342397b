"""llama.cpp behind a few plain functions, through xllamacpp (a prebuilt wheel). Runs inside ``process.py``."""

from __future__ import annotations

import json
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from urllib.request import Request, urlopen

from dwindle.core.errors import UserError, install_hint

_GREEDY = {"temperature": 0.0, "ignore_eos": True, "samplers": ["top_k"], "top_k": 1}
_FORCED = 1e6


def require_xllamacpp() -> None:
    """Without importing it: its threads belong in a process of their own."""
    if find_spec("xllamacpp") is None:
        raise UserError(f"llama.cpp is run through xllamacpp, which is not installed: {install_hint('gguf')}")


class LlamaCppEngine:
    """One model, one request at a time. Keys and values are cached in float32 so that comparisons measure the file."""

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
        self._server = llama.Server(params)
        self._safe_token: int | None = None

    def tokenize(self, text: str) -> list[int]:
        """As llama.cpp itself cuts the text, with the special tokens it adds and finds in it."""
        body = json.dumps({"content": text, "add_special": True, "parse_special": True}).encode()
        request = Request(f"{self._server.listening_address}/tokenize", body, {"Content-Type": "application/json"})
        with urlopen(request, timeout=60) as answer:  # our own server in this process
            tokens: list[int] = json.load(answer)["tokens"]
        return tokens

    def greedy(self, ids: list[int], count: int, top: int = 1) -> list[list[tuple[int, float]]]:
        """The most likely continuation: for each place the ``top`` likeliest tokens (the first one is taken) with
        the logarithm of their probability."""
        places: list[list[tuple[int, float]]] = []
        for _ in range(count):
            entry = self._next([*ids, *(place[0][0] for place in places)], self._safe(), top)
            assert entry is not None
            places.append([(int(e["id"]), float(e["logprob"])) for e in entry["top_logprobs"]])
        return places

    def nll(self, ids: list[int], start: int) -> list[float]:
        """−log p of every token from ``start`` on; the cache makes each of them cost one token."""
        found = []
        for place in range(start, len(ids)):
            entry = self._next(ids[:place], ids[place], 1)
            if entry is None:  # half a character: look it up among all tokens
                whole = self._next(ids[:place], self._safe(), 1_000_000)
                assert whole is not None
                entry = next(e for e in whole["top_logprobs"] if e["id"] == ids[place])
            assert entry["id"] == ids[place], "llama.cpp did not take the forced token"
            found.append(-float(entry["logprob"]))
        return found

    def _next(self, ids: list[int], forced: int, top: int) -> dict[str, Any] | None:
        """Probabilities of the next token. A bias makes the sampler take ``forced``, as llama.cpp reports nothing for
        a token that ends inside a character; what it reports are the probabilities before the bias."""
        request = {"prompt": ids, "n_predict": 1, "n_probs": top, "logit_bias": [[forced, _FORCED]], **_GREEDY}
        logprobs = self._complete({"cache_prompt": True, **request})["choices"][0]["logprobs"]
        entry: dict[str, Any] | None = logprobs["content"][0] if logprobs else None
        return entry

    def _safe(self) -> int:
        """A token that is a whole character."""
        if self._safe_token is None:
            self._safe_token = self.tokenize("a")[-1]
        return self._safe_token

    def timed(self, ids: list[int], new_tokens: int) -> tuple[float, float]:
        """Milliseconds of the whole prompt, and of one generated token, by llama.cpp's own clock."""
        answer = self._complete({"prompt": ids, "n_predict": new_tokens + 1, "cache_prompt": False, **_GREEDY})
        timings = answer["timings"]
        assert timings["cache_n"] == 0 and timings["predicted_n"] == new_tokens + 1
        return float(timings["prompt_ms"]), float(timings["predicted_ms"]) / new_tokens

    def _complete(self, request: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = self._server.handle_completions({"cache_prompt": False, **request})
        if "error" in answer:
            raise RuntimeError(answer["error"].get("message", str(answer["error"])))
        return answer


class DefaultLlamaCppEngine(LlamaCppEngine):
    """With llama.cpp's own choices for cache and attention: what its users get, and what is timed."""

    exact = False
