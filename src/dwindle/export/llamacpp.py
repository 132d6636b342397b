"""llama.cpp behind a few plain functions, through xllamacpp (a prebuilt wheel). Runs inside ``process.py``."""

from __future__ import annotations

import json
from typing import Any
from urllib.request import Request, urlopen

from dwindle.errors import UserError

_GREEDY = {"temperature": 0.0, "ignore_eos": True, "samplers": ["top_k"], "top_k": 1}
_FORCED = 1e6


def import_xllamacpp() -> Any:
    try:
        import xllamacpp
    except ImportError as error:
        raise UserError("llama.cpp is run through xllamacpp: pip install 'dwindle[gguf]'") from error
    return xllamacpp


class LlamaCppEngine:
    """One model, one request at a time. Keys and values are cached in float32 so that comparisons measure the file."""

    def __init__(self, path: str, *, threads: int = 1, context: int = 512) -> None:
        llama = import_xllamacpp()
        params = llama.CommonParams()
        params.model.path = path
        params.n_ctx = context
        params.n_batch = params.n_ubatch = max(32, min(512, context))
        params.n_parallel = 1
        params.n_gpu_layers = 0
        params.warmup = False
        params.verbosity = -1
        params.fit_params = False
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        params.cache_type_k = params.cache_type_v = llama.ggml_type.GGML_TYPE_F32
        params.flash_attn_type = llama.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self._server = llama.Server(params)

    def tokenize(self, text: str) -> list[int]:
        """As llama.cpp itself cuts the text, with the special tokens it adds and finds in it."""
        body = json.dumps({"content": text, "add_special": True, "parse_special": True}).encode()
        request = Request(f"{self._server.listening_address}/tokenize", body, {"Content-Type": "application/json"})
        with urlopen(request, timeout=60) as answer:  # our own server in this process
            tokens: list[int] = json.load(answer)["tokens"]
        return tokens

    def greedy(self, ids: list[int], count: int) -> list[int]:
        """The most likely continuation."""
        answer = self._complete({"prompt": ids, "n_predict": count, "n_probs": 1, **_GREEDY})
        return [int(entry["id"]) for entry in answer["choices"][0]["logprobs"]["content"]]

    def top(self, ids: list[int], count: int) -> list[tuple[int, float]]:
        """The likeliest next tokens with the logarithm of their probability."""
        answer = self._complete({"prompt": ids, "n_predict": 1, "n_probs": count, **_GREEDY})
        entries = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        return [(int(entry["id"]), float(entry["logprob"])) for entry in entries]

    def nll(self, ids: list[int], start: int) -> list[float]:
        """−log p of every token from ``start`` on. A bias makes the sampler take the true token; the reported
        probability is the one before the bias, and the cache makes each request cost one token."""
        found = []
        for place in range(start, len(ids)):
            request = {"prompt": ids[:place], "n_predict": 1, "n_probs": 1, "cache_prompt": True, **_GREEDY}
            request |= {"logit_bias": [[ids[place], _FORCED]], "samplers": ["top_k"]}
            entry = self._complete(request)["choices"][0]["logprobs"]["content"][0]
            assert entry["id"] == ids[place], "llama.cpp did not take the forced token"
            found.append(-float(entry["logprob"]))
        return found

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
