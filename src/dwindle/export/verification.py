"""Verification: fixed prompts, and the comparisons that every export must pass before it is put in place."""

from __future__ import annotations

from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dwindle.anatomy.build import restore_buffers
from dwindle.core.errors import UserError
from dwindle.export.gguf_types import BLOCK, K_BLOCK, block_of
from dwindle.export.gguf_vocabulary import PROBES
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
"""Largest allowed difference of a logit, relative to the largest logit."""

LLAMACPP_TOLERANCE = {"f32": 0.01, "f16": 0.02, "bf16": 0.1}
QUANTISED_TOLERANCE = 0.15
"""Allowed difference of log-probabilities (20 likeliest tokens) between llama.cpp and torch with the stored weights:
the largest for f32, the mean for other types. It covers the activations, which llama.cpp rounds to the type of the
weights or, for quantized types, to 8 bits. Measured on tiny models, stories260K and SmolLM2: 0.0004 to 0.005 (f16),
0.003 to 0.04 (bf16), 0.007 to 0.10 (quantized). For comparison: an FFN scaled by 1.5 gives 0.23 or more, wrong row
order more than 1."""

ROUNDING_FACTOR, ROUNDING_CAP = 3.0, 1.0
"""What the runtime must lose by rounding activations depends on the model: it is measured in torch, with the weights as
stored and the same rounding, and this factor times it is allowed where that is more than the tolerance, at most the
cap. Correct exports of stories260K and SmolLM2, pruned by taylor, magnitude and random, are 0.6 to 1.2 times it."""

MOST_ROUNDING = 0.4
"""Largest change of a tensor by rounding, relative to its norm: runtimes are compared with torch on the weights as
stored, so these are compared with the source's. 4 bits change a tensor by a tenth; by a third at worst, where every
block has one large value."""
_LEAST_SIZE = 1e-5
"""Root mean square below which a tensor may become zeros: scales have 16 bits."""

DOUBT_FACTOR = 2.0
"""An export whose difference is above the allowed one, but not by more than this, is kept under another name."""


class Mismatch(UserError):
    """The exported model does not compute the same as its source; the output was removed."""


class Doubtful(Mismatch):
    """The difference is a little above what rounding explains; the output may be good."""


@dataclass(frozen=True, slots=True)
class Verified:
    """How far the export is from its source."""

    runtime: str
    max_error: float
    tolerance: float
    measure: str

    def describe(self) -> str:
        return f"{self.runtime}: {self.measure} {self.max_error:.2g} (allowed {self.tolerance:.3g})"


def fixed_prompts(tokenizer: Any, vocab_size: int) -> list[list[int]]:
    """The prompts as token ids; random ids (with a fixed seed) if there is no tokenizer."""
    if tokenizer is not None:
        prompts = [[int(t) for t in tokenizer(text).input_ids] for text in PROMPTS]
        return [ids if ids else [0] for ids in prompts]
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(vocab_size, (length,), generator=generator).tolist() for length in (5, 9, 12, 17, 24)]


@torch.inference_mode()
def logits_of(model: Any, ids: list[int]) -> Tensor:
    """Logits as float32 [length, vocabulary]."""
    batch = torch.tensor([ids], device=next(model.parameters()).device)
    logits: Tensor = model(input_ids=batch, use_cache=False).logits[0]
    return logits.float().cpu()


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Largest difference relative to the largest expected value; infinite if ``found`` is not finite."""
    if not torch.isfinite(found).all():
        return float("inf")
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1.0))


def check(verified: Verified, *, doubt_factor: float = 1.0) -> Verified:
    """Return ``verified``, or raise ``Mismatch`` if its error exceeds the tolerance, ``Doubtful`` up to the factor."""
    if verified.max_error <= verified.tolerance:
        return verified
    problem = (
        f"export: the exported model differs from its source in {verified.runtime} ({verified.measure} "
        f"{verified.max_error:.3g}, allowed {verified.tolerance:.3g})"
    )
    if verified.max_error <= doubt_factor * verified.tolerance:
        raise Doubtful(problem)
    raise Mismatch(f"{problem}: the output was removed")


def verify_transformers(folder: Any, model: Any, prompts: list[list[int]], *, remote_code: bool) -> Verified:
    """Load the directory with transformers and compare all logits on the prompts."""
    from transformers import AutoModelForCausalLM

    from dwindle.sources.common import quiet_transformers

    with quiet_transformers():
        loaded = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=remote_code, dtype=torch.float32).eval()
    reference = as_float32(model)
    worst = max(relative_error(logits_of(loaded, ids), logits_of(reference, ids)) for ids in prompts)
    return check(Verified("transformers", worst, HF_TOLERANCE, "largest relative difference of a logit"))


def verify_resized(larger: Any, model: Any, prompts: list[list[int]]) -> Verified:
    """Compare the padded model with its source, both in torch and float32."""
    larger, model = as_float32(larger), as_float32(model)
    worst = max(relative_error(logits_of(larger, ids), logits_of(model, ids)) for ids in prompts)
    return check(Verified("torch", worst, HF_TOLERANCE, "largest relative difference of a logit after padding"))


def as_float32(model: Any) -> Any:
    """The model itself if it is float32, otherwise a float32 copy.

    ``model.to(torch.bfloat16)`` also rounds the rotary frequencies, which no file stores: the copy gets those of the
    configuration.
    """
    if next(model.parameters()).dtype == torch.float32:
        return model
    copy = deepcopy(model).float()
    restore_buffers(copy, next(copy.parameters()).device)
    return copy


def with_tensors(model: Any, tensors: dict[str, Tensor]) -> Any:
    """A float32 copy of the model with weights as they are stored; ``Mismatch`` unless they are its own except for
    rounding."""
    changed = deepcopy(model).float()
    if "lm_head.weight" in tensors:  # stored, and rounded, apart from an embedding that it may be tied to
        changed.lm_head.weight = nn.Parameter(changed.lm_head.weight.detach().clone())
    parameters = dict(changed.named_parameters())
    with torch.no_grad():
        for name, values in tensors.items():
            own = parameters[name]
            moved = float((values.to(own.device) - own).norm() / own.norm().clamp(min=_LEAST_SIZE * own.numel() ** 0.5))
            if not moved <= MOST_ROUNDING:
                raise Mismatch(
                    f"export: rounding changed {name} by {moved:.0%}, more than any type does: the output was removed"
                )
            own.copy_(values)
    return changed


def verify_llamacpp(
    path: Any, reference: Any, tokenizer: Any, prompts: list[list[int]], *, type_: str, threads: int
) -> Verified:
    """Compare token ids of the test texts, and probabilities over the greedy continuations of the prompts.

    llama.cpp's greedy choice must also be the reference's, up to ties within the tolerance.
    """
    tolerance = LLAMACPP_TOLERANCE.get(type_, QUANTISED_TOLERANCE)
    context = max(256, max(map(len, prompts)) + NUM_CONTINUED + 8)
    try:
        with RuntimeProcess("llamacpp", path, threads=threads, context=context) as runtime:
            _same_tokens(runtime, tokenizer)
            found = [_prompt_errors(runtime, reference, ids) for ids in prompts]
    except RuntimeFailure as error:
        raise Mismatch(f"export: llama.cpp cannot run the exported file ({error}): the output was removed") from error
    errors = torch.cat([differences for differences, _ in found])
    if type_ == "f32":
        return check(Verified("llama.cpp", float(errors.max()), tolerance, "largest difference of a log-probability"))
    rounding = activation_rounding_error(reference, [ids for _, ids in found], type_, NUM_CONTINUED)
    tolerance = max(tolerance, min(ROUNDING_FACTOR * rounding, ROUNDING_CAP))
    verified = Verified("llama.cpp", float(errors.mean()), tolerance, "mean difference of a log-probability")
    return check(verified, doubt_factor=DOUBT_FACTOR)


def activation_rounding_error(reference: Any, sequences: list[list[int]], type_: str, last: int) -> float:
    """Mean difference of log-probabilities if the inputs of every linear layer are rounded as in llama.cpp.

    Over the 20 likeliest tokens at the ``last`` places of each sequence.
    """
    expected = [logits_of(reference, ids).log_softmax(-1)[-last:] for ids in sequences]

    def rounded(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return rounded_input(inputs[0], type_), *inputs[1:]

    with ExitStack() as hooks:
        for layer in reference.modules():
            if isinstance(layer, nn.Linear):
                hooks.enter_context(layer.register_forward_pre_hook(rounded))
        found = [logits_of(reference, ids).log_softmax(-1)[-last:] for ids in sequences]
    likeliest = [values.topk(min(20, values.shape[-1])).indices for values in expected]
    triples = zip(found, expected, likeliest, strict=True)
    return float(torch.cat([(a.gather(1, at) - b.gather(1, at)).abs().flatten() for a, b, at in triples]).mean())


def rounded_input(x: Tensor, type_: str) -> Tensor:
    """``x`` in 16 bits, or in 8 bits with a scale per block of 32 or (K types) 256; f16 if blocks do not fit."""
    if type_ == "bf16":
        return x.bfloat16().to(x.dtype)
    if type_ in ("f16", "f32") or x.shape[-1] % BLOCK:
        return x.half().to(x.dtype)
    size = K_BLOCK if block_of(type_) == K_BLOCK and x.shape[-1] % K_BLOCK == 0 else BLOCK
    blocks = x.reshape(*x.shape[:-1], -1, size)
    scale = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
    return ((blocks / scale).round() * scale).reshape(x.shape)


def _same_tokens(runtime: RuntimeProcess, tokenizer: Any) -> None:
    for text in (*PROMPTS, *PROBES):
        ours, theirs = [int(t) for t in tokenizer(text).input_ids], runtime.call("tokenize", text=text)
        if ours != theirs:
            place = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), len(ours))
            raise Mismatch(
                f"export: llama.cpp tokenizes {text!r} differently (from token {place} on): its vocabulary cannot "
                "express this tokenizer; the output was removed; export to hf or onnx instead"
            )


def _prompt_errors(runtime: RuntimeProcess, reference: Any, ids: list[int]) -> tuple[Tensor, list[int]]:
    """Differences of log-probabilities over llama.cpp's greedy continuation, and the tokens up to its last place.

    For each position those of the 20 likeliest tokens, and by how much the reference prefers its own choice to
    llama.cpp's (halved, because both may be off).
    """
    places = runtime.call("greedy", ids=ids, count=NUM_CONTINUED, top=20)
    chosen = [place[0][0] for place in places]
    sequence = [*ids, *chosen[:-1]]
    expected = logits_of(reference, sequence).log_softmax(-1)[len(ids) - 1 :]
    tokens, found = (torch.tensor([[entry[part] for entry in place] for place in places]) for part in (0, 1))
    differences = (expected.gather(1, tokens) - found).abs()
    ties = (expected.max(-1).values - expected.gather(1, tokens)[:, 0]) / 2
    return torch.nan_to_num(torch.cat([differences.flatten(), ties]), nan=float("inf")), sequence
