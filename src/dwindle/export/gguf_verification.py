"""Verifies a GGUF file: the numbers that it states, and what llama.cpp computes from it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dwindle.anatomy.build import build_on_meta, restore_buffers
from dwindle.core.errors import UserError, first_line
from dwindle.export.gguf_types import BLOCK, K_BLOCK, block_of
from dwindle.export.gguf_vocabulary import chat_template_of, probes_of
from dwindle.export.process import RuntimeFailure, RuntimeProcess
from dwindle.export.verification import PROMPTS, Mismatch, Verified, check, check_same_numbers, logits_of, numbers_of
from dwindle.sources.built_tokenizers import CONTROL, UNKNOWN
from dwindle.sources.gguf_file import open_gguf
from dwindle.sources.gguf_model import gguf_config

NUM_CONTINUED = 8
_SYSTEM, _QUESTION = {"role": "system", "content": "Be brief."}, {"role": "user", "content": " What is 1 + 1? "}
_ANSWER = {"role": "assistant", "content": "It is 2.\n"}
CHATS = ([_QUESTION], [_SYSTEM, _QUESTION], [_QUESTION, _ANSWER, _QUESTION])
LLAMACPP_TOLERANCE = {"f32": 0.01, "f16": 0.005, "bf16": 0.03}
QUANTISED_TOLERANCE = 0.06
"""Allowed difference of log-probabilities (20 likeliest tokens) between llama.cpp and torch with the stored weights:
the largest for f32, the mean over a prompt for other types, which round activations to the type of the weights or, for
quantized types, to 8 bits."""

ROUNDING_FACTOR, ROUNDING_CAP = 3.0, 1.0
"""What the runtime must lose by rounding activations depends on the model: it is measured in torch, with the weights as
stored and the same rounding, and this factor times it is allowed where that is more than the tolerance, at most the
cap. Correct exports of tiny models, stories260K and SmolLM2, also pruned, are 0.6 to 1.3 times it on every prompt."""

DOUBT_FACTOR = 2.0
"""An export whose difference is above the allowed one, but not by more than this, is kept under another name."""


def check_metadata(path: Path, model: Any, tokenizer: Any) -> None:
    """``Mismatch`` unless the file has the model's numbers, some of which prompts hardly show, and special tokens."""
    frequencies = "rope_freqs.weight"  # Llama 3's divisors, which our reader turns into settings only if it knows them
    try:
        file = open_gguf(path)
        config = gguf_config(replace(file, tensors={k: v for k, v in file.tensors.items() if k != frequencies}))
    except UserError as error:
        raise Mismatch(f"export: the file cannot be read back ({error}): the output was removed") from error
    _same_tokenizer(file.metadata, tokenizer)
    stated: Any = build_on_meta(config)
    restore_buffers(stated, "cpu")
    found, own = numbers_of(stated), numbers_of(model)
    window, limit = own["sliding_window"], own["context"]
    if window is not None and found["sliding_window"] is None:  # without it, positions beyond it would be computed
        own |= {"sliding_window": None, "layers with a window": None, "context": min(window, limit)}
    if frequencies in file.tensors:
        found["model.rotary_emb.inv_freq"] /= torch.from_numpy(file.read(frequencies))
    check_same_numbers(found, own)


def _same_tokenizer(metadata: dict[str, Any], tokenizer: Any) -> None:
    """Compare the chat template, the special tokens, and which added tokens are special."""
    if (metadata.get("tokenizer.chat_template") or None) != (chat_template_of(tokenizer) or None):
        raise Mismatch("export: the file has another chat template than the tokenizer: the output was removed")
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        found, own = metadata.get(f"tokenizer.ggml.{key}_token_id"), getattr(tokenizer, f"{name}_token_id")
        if found != own:
            raise Mismatch(f"export: the file has {found} as the {key} token, not {own}: the output was removed")
    for number, token in tokenizer.added_tokens_decoder.items():
        type_ = metadata["tokenizer.ggml.token_type"][number]
        if token.special != (type_ == CONTROL) and type_ != UNKNOWN:
            kind = "an ordinary token" if token.special else "a special token"
            raise Mismatch(f"export: the file has as {kind}: {token.content!r:.60}: the output was removed")


def verify_llamacpp(
    path: Any, reference: Any, tokenizer: Any, prompts: list[list[int]], *, type_: str, threads: int
) -> tuple[Verified, list[str]]:
    """Compare token ids of the test texts, and probabilities over the greedy continuations of the prompts.

    llama.cpp's greedy choice must also be the reference's, up to ties within the tolerance. Also returns warnings
    about chats: the file has their template, but llama.cpp knows less of Jinja.
    """
    tolerance = LLAMACPP_TOLERANCE.get(type_, QUANTISED_TOLERANCE)
    context = max(256, max(map(len, prompts)) + NUM_CONTINUED + 8)
    try:
        with RuntimeProcess("llamacpp", path, threads=threads, context=context) as runtime:
            _same_tokens(runtime, tokenizer)
            warnings = _chat_warnings(runtime, tokenizer)
            found = [_prompt_errors(runtime, reference, ids) for ids in prompts]
    except RuntimeFailure as error:
        raise Mismatch(f"export: llama.cpp cannot run the exported file ({error}): the output was removed") from error
    if type_ == "f32":
        worst = max(float(differences.max()) for differences, _ in found)
        return check(Verified("llama.cpp", worst, tolerance, "largest difference of a log-probability")), warnings
    prompt_errors = []
    for differences, sequence in found:
        rounding = activation_rounding_error(reference, sequence, type_, NUM_CONTINUED)
        allowed = max(tolerance, min(ROUNDING_FACTOR * rounding, ROUNDING_CAP))
        measure = "mean difference of a log-probability"
        prompt_errors.append(Verified("llama.cpp", float(differences.mean()), allowed, measure))
    verified = max(prompt_errors, key=lambda one: one.max_error / one.tolerance)
    return check(verified, doubt_factor=DOUBT_FACTOR), warnings


def activation_rounding_error(reference: Any, sequence: list[int], type_: str, last: int) -> float:
    """Mean difference of log-probabilities if the inputs of every linear layer are rounded as in llama.cpp.

    Over the 20 likeliest tokens at the ``last`` places of the sequence.
    """
    expected = logits_of(reference, sequence).log_softmax(-1)[-last:]

    def rounded(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return rounded_input(inputs[0], type_), *inputs[1:]

    with ExitStack() as hooks:
        for layer in reference.modules():
            if isinstance(layer, nn.Linear):
                hooks.enter_context(layer.register_forward_pre_hook(rounded))
        found = logits_of(reference, sequence).log_softmax(-1)[-last:]
    likeliest = expected.topk(min(20, expected.shape[-1])).indices
    return float((found.gather(1, likeliest) - expected.gather(1, likeliest)).abs().mean())


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
    """Compare tokens of the test texts."""
    for text in (*PROMPTS, *probes_of(tokenizer)):
        ours, theirs = [int(t) for t in tokenizer(text).input_ids], runtime.call("tokenize", text=text)
        if ours != theirs:
            place = _first_difference(ours, theirs)
            raise Mismatch(
                f"export: llama.cpp tokenizes {text!r:.200} differently (from token {place} on): its vocabulary cannot "
                "express this tokenizer; the output was removed; export to hf or onnx instead"
            )


def _first_difference(a: Sequence[Any], b: Sequence[Any]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _chat_warnings(runtime: RuntimeProcess, tokenizer: Any) -> list[str]:
    """Where llama.cpp renders a chat differently from the tokenizer, by the same template, or not at all."""
    if chat_template_of(tokenizer) is None:
        return []
    elsewhere = "give llama-server another with --chat-template-file, or use `dwindle chat`"
    for messages in CHATS:
        try:
            own = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception:  # the template refuses such chats, with whatever its code leads to
            continue
        found, begin = runtime.call("render", messages=messages), tokenizer.bos_token or ""
        *roles, last = (message["role"] for message in messages)
        chat = f"a chat of {', '.join(roles)}{' and ' * bool(roles)}{last}"
        if "error" in found:
            return [f"llama.cpp cannot render {chat}: {first_line(found['error'])}: {elsewhere}"]
        theirs, own = (text.removeprefix(begin) for text in (found["prompt"], own))  # which llama.cpp adds to tokens
        if theirs != own:
            place = max(0, _first_difference(theirs, own) - 10)
            shown = f"{theirs[place:]!r:.60} instead of {own[place:]!r:.60}"
            return [f"llama.cpp renders {chat} differently from the tokenizer: {shown}: {elsewhere}"]
    return []


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
