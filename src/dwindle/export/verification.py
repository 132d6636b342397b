"""Fixed prompts, and the comparisons that every export has to pass before it is put in place."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dwindle.core.errors import UserError
from dwindle.export.gguf_vocabulary import PROBES
from dwindle.export.gguf_writer import BLOCK
from dwindle.export.process import RuntimeFailure, RuntimeProcess

PROMPTS = (
    "The capital of France is",
    "Once upon a time there was a little girl who",
    "Water boils at a temperature of",
    "def fibonacci(n):\n",
    "The three most important things in life are",
)
NUM_CONTINUED = 8

HF_TOLERANCE = 1e-4
"""Largest difference of a logit, relative to the largest logit."""

LLAMACPP_TOLERANCE = {"f32": 0.01, "f16": 0.02, "bf16": 0.1, "q8_0": 0.15, "q4_0": 0.15, "q4_1": 0.15}
"""For f32 the largest, for the others the mean difference of a log-probability (of the 20 likeliest tokens), llama.cpp
against torch with the weights as stored. What is left is what llama.cpp rounds besides: activations, to the type of the
weights or, for all quantised ones, to 8 bits. Found on tiny models, stories260K and SmolLM2: 0.0004 to 0.005 (f16),
0.003 to 0.04 (bf16), 0.007 to 0.10 (quantised); an FFN half too strong gives 0.23 or more, a wrong order of rows more
than 1."""

ROUNDING_FACTOR, ROUNDING_CAP = 3.0, 0.5
"""Activations of a model that was pruned and not trained can be so large that their rounding alone is above that (0.24
for SmolLM2 by magnitude): then this many times what the same rounding does in torch is allowed, and never more than the
cap."""


class Mismatch(UserError):
    """The written model does not compute what the source computes; the output was removed."""


@dataclass(frozen=True, slots=True)
class Verified:
    """How far the export is from the model it came from."""

    runtime: str
    max_error: float
    tolerance: float
    measure: str

    def to_json(self) -> dict[str, Any]:
        return {
            "runtime": self.runtime,
            "max_error": self.max_error,
            "tolerance": self.tolerance,
            "measure": self.measure,
        }

    def describe(self) -> str:
        return f"{self.runtime}: {self.measure} {self.max_error:.2g} (allowed {self.tolerance:.3g})"


def fixed_prompts(tokenizer: Any, vocab_size: int) -> list[list[int]]:
    """The same prompts every time, as token ids; random ids where there is no tokenizer."""
    if tokenizer is not None:
        prompts = [[int(t) for t in tokenizer(text).input_ids] for text in PROMPTS]
        return [ids if ids else [0] for ids in prompts]
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(vocab_size, (length,), generator=generator).tolist() for length in (5, 9, 12, 17, 24)]


@torch.inference_mode()
def logits_of(model: Any, ids: list[int]) -> Tensor:
    """float32 [length, vocabulary]"""
    batch = torch.tensor([ids], device=next(model.parameters()).device)
    logits: Tensor = model(input_ids=batch, use_cache=False).logits[0]
    return logits.float().cpu()


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Not finite counts as infinitely wrong."""
    if not torch.isfinite(found).all():
        return float("inf")
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1.0))


def check(verified: Verified) -> Verified:
    if not verified.max_error <= verified.tolerance:
        raise Mismatch(
            f"export: the written model differs from the source in {verified.runtime} ({verified.measure} "
            f"{verified.max_error:.3g}, allowed {verified.tolerance:.3g}): the output was removed"
        )
    return verified


def verify_transformers(folder: Any, model: Any, prompts: list[list[int]], *, remote_code: bool) -> Verified:
    """Load the directory with stock transformers and compare all logits of the prompts."""
    from transformers import AutoModelForCausalLM

    from dwindle.sources.common import quiet_transformers

    with quiet_transformers():
        loaded = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=remote_code, dtype=torch.float32).eval()
    reference = as_float32(model)
    worst = max(relative_error(logits_of(loaded, ids), logits_of(reference, ids)) for ids in prompts)
    return check(Verified("transformers", worst, HF_TOLERANCE, "largest relative difference of a logit"))


def verify_resized(larger: Any, model: Any, prompts: list[list[int]]) -> Verified:
    """The enlarged model against the source, before any type or format comes in between."""
    larger, model = as_float32(larger), as_float32(model)
    worst = max(relative_error(logits_of(larger, ids), logits_of(model, ids)) for ids in prompts)
    return check(Verified("torch", worst, HF_TOLERANCE, "largest relative difference of a logit once enlarged"))


def as_float32(model: Any) -> Any:
    """The model itself where it is float32 already, otherwise a copy.

    ``model.to(torch.bfloat16)`` rounds the rotary frequencies too. They are no weights and no file holds them, so the
    copy has those of the configuration.
    """
    if next(model.parameters()).dtype == torch.float32:
        return model
    copy = deepcopy(model).float()
    backbone = copy.model
    backbone.rotary_emb = type(backbone.rotary_emb)(config=copy.config).to(next(copy.parameters()).device)
    return copy


def verify_llamacpp(
    path: Any, reference: Any, tokenizer: Any, prompts: list[list[int]], *, type_: str, threads: int
) -> Verified:
    """Same token ids for the test texts, same probabilities after the prompts, and a greedy continuation that the
    reference finds likeliest too (but for ties within the tolerance)."""
    tolerance = LLAMACPP_TOLERANCE[type_]
    context = max(256, max(map(len, prompts)) + NUM_CONTINUED + 8)
    try:
        with RuntimeProcess("llamacpp", path, threads=threads, context=context) as runtime:
            _same_tokens(runtime, tokenizer)
            errors = torch.cat([_prompt_errors(runtime, reference, ids) for ids in prompts])
    except RuntimeFailure as error:
        raise Mismatch(f"export: llama.cpp does not run the written file ({error}): the output was removed") from error
    if type_ == "f32":
        return check(Verified("llama.cpp", float(errors.max()), tolerance, "largest difference of a log-probability"))
    found = float(errors.mean())
    if tolerance < found <= ROUNDING_CAP:
        usual = ROUNDING_FACTOR * activation_rounding_error(reference, prompts, type_)
        tolerance = max(tolerance, min(usual, ROUNDING_CAP))
    return check(Verified("llama.cpp", found, tolerance, "mean difference of a log-probability"))


def activation_rounding_error(reference: Any, prompts: list[list[int]], type_: str) -> float:
    """The mean difference of a log-probability once the inputs of every linear layer are rounded as llama.cpp does."""
    expected = [logits_of(reference, ids).log_softmax(-1) for ids in prompts]
    hooks = [
        layer.register_forward_pre_hook(lambda _, inputs: (rounded_input(inputs[0], type_), *inputs[1:]))
        for layer in reference.modules()
        if isinstance(layer, nn.Linear)
    ]
    try:
        found = [logits_of(reference, ids).log_softmax(-1) for ids in prompts]
    finally:
        for hook in hooks:
            hook.remove()
    likeliest = [values.topk(min(20, values.shape[-1])).indices for values in expected]
    triples = zip(found, expected, likeliest, strict=True)
    return float(torch.cat([(a.gather(1, at) - b.gather(1, at)).abs().flatten() for a, b, at in triples]).mean())


def rounded_input(x: Tensor, type_: str) -> Tensor:
    """To 16 bits, or to 8 bits with a scale for every block of 32; rows that blocks do not divide are f16."""
    if type_ == "bf16":
        return x.bfloat16().to(x.dtype)
    if type_ == "f16" or x.shape[-1] % BLOCK:
        return x.half().to(x.dtype)
    blocks = x.reshape(*x.shape[:-1], -1, BLOCK)
    scale = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
    return ((blocks / scale).round() * scale).reshape(x.shape)


def _same_tokens(runtime: RuntimeProcess, tokenizer: Any) -> None:
    for text in (*PROMPTS, *PROBES):
        ours, theirs = [int(t) for t in tokenizer(text).input_ids], runtime.call("tokenize", text=text)
        if ours != theirs:
            place = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), len(ours))
            raise Mismatch(
                f"export: llama.cpp cuts {text!r} into other tokens (from token {place} on): its vocabulary cannot "
                "express this tokenizer; the output was removed, export to hf or onnx instead"
            )


def _prompt_errors(runtime: RuntimeProcess, reference: Any, ids: list[int]) -> Tensor:
    """Differences over the greedy continuation that llama.cpp chose: the 20 likeliest tokens of every place, and how
    much less likely than its favourite the reference finds the chosen one (halved: both may be off)."""
    places = runtime.call("greedy", ids=ids, count=NUM_CONTINUED, top=20)
    chosen = [place[0][0] for place in places]
    expected = logits_of(reference, [*ids, *chosen[:-1]]).log_softmax(-1)[len(ids) - 1 :]
    tokens, found = (torch.tensor([[entry[part] for entry in place] for place in places]) for part in (0, 1))
    differences = (expected.gather(1, tokens) - found).abs()
    ties = (expected.max(-1).values - expected.gather(1, tokens)[:, 0]) / 2
    return torch.nan_to_num(torch.cat([differences.flatten(), ties]), nan=float("inf"))
