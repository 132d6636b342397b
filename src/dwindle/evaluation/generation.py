"""Answers of a model to prompts, in transformers or in llama.cpp."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from dwindle.anatomy.positions import switch_of
from dwindle.core.errors import UserError
from dwindle.distributed.precision import Precision, autocast_for
from dwindle.evaluation.config import GenerateConfig, SamplingConfig
from dwindle.evaluation.encoding import max_length_of
from dwindle.evaluation.in_memory import load_with_tokenizer
from dwindle.evaluation.sampling import decode, end_tokens, uniforms
from dwindle.evaluation.scoring import is_known_decoder
from dwindle.export.llamacpp import require_xllamacpp
from dwindle.export.process import RuntimeFailure, RuntimeProcess
from dwindle.sources.loading import chosen_device, load_config, load_tokenizer
from dwindle.training.sampling import continuation_text

_BATCH_CPU, _BATCH_GPU = 16, 128
_SPARE = 8
"""Tokens that llama.cpp's context has beyond prompt and answer."""


@dataclass(frozen=True, slots=True)
class Answer:
    text: str
    num_tokens: int
    is_finished: bool
    """The model ended it; False: cut at the maximum number of tokens."""


class Answerer(Protocol):
    """A model that answers; prompts are token ids of ``tokenizer``."""

    tokenizer: Any
    max_length: int
    runtime: str

    def reserve(self, tokens: int) -> None:
        """Make room for prompts with their answers of this length; before the first answer."""

    def groups(self, lengths: Sequence[int]) -> list[list[int]]:
        """Prompts (by number) that are answered together: a function of their lengths only."""

    def answer(self, rows: Sequence[list[int]], keys: Sequence[Sequence[int]], count: int) -> list[Answer]:
        """Answers to one group; ``keys`` decide, with the seed, what each row draws."""


class TransformersAnswerer:
    """A model in memory; prompts of similar length share a batch."""

    runtime = "transformers"

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        config: SamplingConfig,
        *,
        batch: int = 0,
        max_length: int | None = None,
        precision: Precision = "fp32",
    ) -> None:
        """``max_length`` of prompt and answer, not set: the model's; ``precision="bf16"`` computes under autocast."""
        self.model, self.tokenizer, self._config, self._precision = model, tokenizer, config, precision
        self.max_length = max_length or max_length_of(model.config, tokenizer)
        self._device = next(model.parameters()).device
        self._batch = batch or (_BATCH_CPU if self._device.type == "cpu" else _BATCH_GPU)
        self._padded = is_known_decoder(model) and switch_of(model) == math.inf
        """Attention layers alone ignore padding exactly; other models, and those whose longest row chooses the
        frequencies of all, get batches of equal lengths."""

    def reserve(self, tokens: int) -> None:
        """Nothing to do: a cache grows as needed."""

    def groups(self, lengths: Sequence[int]) -> list[list[int]]:
        """The longest prompts first, so that running out of memory happens at once."""
        groups: list[list[int]] = []
        for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
            last = groups[-1] if groups else []
            fits = last and len(last) < self._batch and (self._padded or lengths[last[0]] == lengths[index])
            if fits:
                last.append(index)
            else:
                groups.append([index])
        return groups

    def answer(self, rows: Sequence[list[int]], keys: Sequence[Sequence[int]], count: int) -> list[Answer]:
        ends = end_tokens(self.model, self.tokenizer)
        with autocast_for(self._precision, self._device):
            found = decode(self.model, rows, self._config, count=count, ends=ends, keys=keys, droppable=self._padded)
        return [
            Answer(continuation_text(self.tokenizer, row, one.ids), len(one.ids), one.is_finished)
            for row, one in zip(rows, found, strict=True)
        ]


class LlamaCppAnswerer:
    """A GGUF file in llama.cpp, one prompt after the other, so that answers do not depend on other prompts."""

    runtime = "llama.cpp"

    def __init__(self, path: str, config: SamplingConfig, *, threads: int = 1) -> None:
        require_xllamacpp()
        self._path, self._config, self._threads = path, config, threads
        self.tokenizer = load_tokenizer(path)
        self.max_length = max_length_of(load_config(path), self.tokenizer)
        self._process: RuntimeProcess | None = None
        self._reserved = self._context = 0

    def reserve(self, tokens: int) -> None:
        self._reserved = min(self.max_length, tokens + _SPARE)

    def groups(self, lengths: Sequence[int]) -> list[list[int]]:
        return [[index] for index in range(len(lengths))]

    def answer(self, rows: Sequence[list[int]], keys: Sequence[Sequence[int]], count: int) -> list[Answer]:
        answers = []
        for row, key in zip(rows, keys, strict=True):
            request = sampling_request(self._config, key) | {"prompt": row, "max_tokens": count}
            found = self._call("complete", self._context_for(len(row) + count), request=request)
            answers.append(Answer(found["text"], found["tokens"], found["finished"]))
        return answers

    def _context_for(self, tokens: int) -> int:
        """The context size. It depends on the prompt only: a resumed file equals an uninterrupted one.

        A prompt that does not fit in what was reserved (an answer may have more tokens when it is tokenized again) gets
        its own process.
        """
        needed = tokens + _SPARE
        return self._reserved if needed <= self._reserved else min(self.max_length, 1 << (needed - 1).bit_length())

    def _call(self, method: str, context: int, **arguments: Any) -> Any:
        try:
            if self._context != context:
                self.close()
            if self._process is None:
                self._context = context
                self._process = RuntimeProcess("llamacpp-default", self._path, threads=self._threads, context=context)
            return self._process.call(method, **arguments)
        except RuntimeFailure as error:
            raise UserError(f"{self._path}: {error}") from error

    def close(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None

    def __enter__(self) -> LlamaCppAnswerer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def sampling_request(config: SamplingConfig, key: Sequence[int]) -> dict[str, Any]:
    """The same settings under llama.cpp's names."""
    if config.temperature == 0:
        return {"temperature": 0.0, "samplers": ["top_k"], "top_k": 1}
    seed = int(uniforms(config.seed, key, 1)[0] * 2**31)
    return {
        "temperature": config.temperature,
        "samplers": ["temperature", "top_k", "top_p"],
        "top_k": config.top_k,
        "top_p": config.top_p,
        "seed": seed,
    }


def is_for_llamacpp(source: str, config: GenerateConfig, device: str) -> bool:
    """Whether ``config`` asks for llama.cpp; by default it is for .gguf files on a CPU."""
    is_file = Path(source).suffix == ".gguf" and Path(source).is_file()
    if config.runtime == "llama.cpp" and not is_file:
        raise UserError(f"runtime llama.cpp: {source} is not a .gguf file: export one, or use transformers")
    return is_file and (config.runtime == "llama.cpp" or (config.runtime == "auto" and device == "cpu"))


def open_answerer(
    source: str, config: GenerateConfig, *, device: str, threads: int
) -> AbstractContextManager[Answerer]:
    """The model in the runtime that ``config`` asks for; a context manager, which ends llama.cpp's process."""
    place = chosen_device(device)
    if is_for_llamacpp(source, config, place):
        return LlamaCppAnswerer(source, config, threads=threads)
    model, tokenizer = load_with_tokenizer(source, config.dtype or "float32", place)
    return nullcontext(TransformersAnswerer(model, tokenizer, config, batch=config.batch))


def plan_groups(answerer: Answerer, lengths: Sequence[int], wanted: int) -> list[tuple[list[int], int]]:
    """Prompts (by number) that are answered together, and how many tokens their answers may have.

    Prompts whose answers the context cuts are answered one by one, so that they do not shorten others.
    """
    roomy = [place for place, length in enumerate(lengths) if length + wanted <= answerer.max_length]
    narrow = [place for place, length in enumerate(lengths) if length + wanted > answerer.max_length]
    together = answerer.groups([lengths[place] for place in roomy])
    found = [([roomy[one] for one in group], wanted) for group in together]
    return found + [([place], answerer.max_length - lengths[place]) for place in narrow]


def room_for(prompt: int, wanted: int, max_length: int, where: str) -> int:
    """Tokens that an answer may have after a prompt of this length."""
    if prompt >= max_length:
        raise UserError(
            f"{where}: the prompt has {prompt:,} tokens, the model's context {max_length:,}: shorten or remove it"
        )
    return min(wanted, max_length - prompt)
