"""Verification: fixed prompts, and the comparisons that every export must pass before it is put in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dwindle.anatomy.anatomy import Anatomy
from dwindle.anatomy.build import is_custom, restore_buffers
from dwindle.core.errors import UserError, first_line
from dwindle.export.gguf_vocabulary import PROBES
from dwindle.export.process import CachedEngine

PROMPTS = (
    "The capital of France is",
    "Once upon a time there was a little girl who",
    "Water boils at a temperature of",
    "def fibonacci(n):\n",
    "The three most important things in life are",
)
NUM_CONTINUED, NUM_DECODED = 8, 16
LONG_PROMPT, ROOM = 256, 24
"""Tokens of the longest prompt at most, and those that remain for its continuation in a short context."""

HF_TOLERANCE = 1e-4
"""Largest allowed difference of a logit, relative to the largest logit."""

MOST_ROUNDING = {"F32": 1e-6, "F16": 1e-3, "BF16": 4e-3, "Q8_0": 0.025}
MOST_OF_FEWER_BITS = 0.4
"""Largest change of a row by rounding, relative to its norm: runtimes are compared with torch on the weights as stored,
so these are compared with the source's. 4 bits change a row by a tenth; by a third at worst, where every block has one
large value."""
MOST_GROWTH = 0.125
"""Largest change along the row itself: rounding makes values larger as often as smaller, except in such blocks, which
lose a ninth."""
_LEAST_SIZE = 1e-5
"""Root mean square below which a tensor may become zeros: scales have 16 bits."""


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


def fixed_prompts(tokenizer: Any, config: Any) -> list[list[int]]:
    """The prompts as token ids; random ids (with a fixed seed) if there is no tokenizer.

    The last one is longer, so that rotations which differ at late positions, and windows, are seen.
    """
    longest = max(1, min(LONG_PROMPT, (config.max_position_embeddings or LONG_PROMPT) - ROOM))
    if tokenizer is None:
        generator = torch.Generator().manual_seed(0)
        lengths = (5, 9, 12, 17, 24, longest)
        return [torch.randint(config.vocab_size, (length,), generator=generator).tolist() for length in lengths]
    prompts = [[int(t) for t in tokenizer(text).input_ids] for text in (*PROMPTS, "\n".join(PROBES))]
    return [ids if ids else [0] for ids in (*prompts[:-1], prompts[-1][:longest])]


@torch.inference_mode()
def logits_of(model: Any, ids: list[int]) -> Tensor:
    """Logits as float32 [length, vocabulary]."""
    batch = torch.tensor([ids], device=next(model.parameters()).device)
    logits: Tensor = model(input_ids=batch, use_cache=False).logits[0]
    return logits.float().cpu()


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Largest difference relative to the largest expected value; infinite if one is not finite."""
    if not torch.isfinite(found - expected).all():
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


def check_logits(runtime: str, model: Any, reference: Any, prompts: list[list[int]]) -> Verified:
    """Compare all logits of two models in torch on the prompts."""
    worst = max(relative_error(logits_of(model, ids), logits_of(reference, ids)) for ids in prompts)
    return check(Verified(runtime, worst, HF_TOLERANCE, "largest relative difference of a logit"))


def verify_transformers(folder: Any, model: Any, prompts: list[list[int]], *, written: Any = None) -> Verified:
    """Load the directory with transformers; compare all logits on the prompts, and the weights.

    ``written`` is the model that was written, where it is not ``model`` but should compute the same.
    """
    from transformers import AutoModelForCausalLM

    from dwindle.sources.common import quiet_transformers

    reference = as_float32(model)
    written = reference if written is None else as_float32(written)
    options: Any = {"trust_remote_code": is_custom(written.config), "dtype": torch.float32}
    with quiet_transformers():
        loaded = AutoModelForCausalLM.from_pretrained(folder, **options).eval()
    check_same_weights(loaded.state_dict(), written)
    check_same_numbers(numbers_of(loaded), numbers_of(written))
    return check_logits("transformers", loaded, reference, prompts)


def verify_cached(
    runtime: str, start: Callable[[], CachedEngine], reference: Any, batches: list[list[list[int]]], tolerance: float
) -> Verified:
    """Compare prefill and ``NUM_DECODED`` tokens from the cache, for each batch; shorter rows are padded."""
    worst = 0.0
    try:
        engine = start()
        for batch in batches:
            padding = [max(map(len, batch)) - len(row) for row in batch]
            engine.reset(padding)
            rows = [list(row) for row in batch]
            found = [torch.as_tensor(engine.step([[0] * n + row for n, row in zip(padding, rows, strict=True)]))]
            for _ in range(NUM_DECODED):
                for row, logits in zip(rows, found[-1], strict=True):
                    row.append(int(logits[-1].argmax()))
                found.append(torch.as_tensor(engine.step([row[-1:] for row in rows])))
            triples = zip(torch.cat(found, dim=1), rows, padding, strict=True)
            worst = max(worst, *(relative_error(logits[n:], logits_of(reference, row)) for logits, row, n in triples))
    except UserError:
        raise
    except Exception as error:
        raise Mismatch(
            f"export: {runtime} cannot run the exported model ({first_line(error)}): the output was removed"
        ) from error
    return check(Verified(runtime, worst, tolerance, "largest relative difference of a logit"))


def check_same_weights(found: Mapping[str, Tensor], model: Any) -> None:
    """``Mismatch`` unless these are the model's weights, bit for bit: prompts do not read every row of an embedding."""
    for name, own in model.state_dict().items():
        if name not in found or not torch.equal(found[name].float().cpu(), own.float().cpu()):
            raise Mismatch(f"export: {name} was written with other values than the source's: the output was removed")


def check_same_numbers(found: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """``Mismatch`` unless these are the same ``numbers_of`` a model: prompts hardly show an epsilon."""
    for name in own:
        values = ([] if one is None else one for one in (own[name], found.get(name)))
        a, b = (torch.as_tensor(one, dtype=torch.float64) for one in values)
        if a.shape != b.shape or not torch.allclose(a, b, rtol=1e-5, atol=0):
            shown = f"{b.item():g}, not {a.item():g}" if a.numel() == b.numel() == 1 else "another one"
            raise Mismatch(f"export: for {name} the output states {shown}: the output was removed")


def numbers_of(model: Any) -> dict[str, Any]:
    """What a model computes with besides its weights."""
    config, layers = model.config, Anatomy.of(model).source.layers
    rope = getattr(config, "rope_parameters", None) or {}
    slides = [kind == "sliding_attention" for kind in getattr(config, "layer_types", None) or ()]
    is_used = getattr(config, "use_sliding_window", True) and (any(slides) or not slides)
    found = {
        "query heads": [len(layer.query_heads) for layer in layers],
        "key/value heads": [len(layer.kv_heads) for layer in layers],
        "FFN widths": [len(layer.ffn) for layer in layers],
        "context": config.max_position_embeddings,
        "sliding_window": getattr(config, "sliding_window", None) if is_used else None,
        "layers with a window": slides if any(slides) else None,
        **{key: rope.get(key) for key in ("llama_4_scaling_beta", "long_factor", "short_factor")},
        **{name: value for name, value in model.named_buffers() if name.endswith("inv_freq")},
    }
    for name in [name for name in found if "original_inv_freq" in name]:  # the other one may follow the last text
        found[name.replace("original_", "")] = found.pop(name)
    for path, module in model.named_modules():  # epsilons, scales and multipliers
        of_module = {key: value for key, value in vars(module).items() if type(value) is float and "dropout" not in key}
        found |= {f"{path}.{key}": value for key, value in of_module.items()}
    return found


def verify_resized(larger: Any, model: Any, prompts: list[list[int]]) -> Verified:
    """Compare the padded model with its source, both in torch and float32."""
    return check_logits("torch, after padding", as_float32(larger), as_float32(model), prompts)


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
    """A float32 copy of the model with these weights."""
    changed = deepcopy(model).float()
    if "lm_head.weight" in tensors:  # stored, and rounded, apart from an embedding that it may be tied to
        changed.lm_head.weight = nn.Parameter(changed.lm_head.weight.detach().clone())
    parameters = dict(changed.named_parameters())
    with torch.no_grad():
        for name, values in tensors.items():
            parameters[name].copy_(values)
    return changed


def check_rounded(name: str, stored: Tensor, own: Tensor, kind: str) -> None:
    """``Mismatch`` unless every row that is stored is the model's own, but for the rounding of its type."""
    if torch.equal(stored, own):
        return
    most, off = MOST_ROUNDING.get(kind, MOST_OF_FEWER_BITS), stored - own
    size, moved = (x.reshape(-1, x.shape[-1]).square().mean(dim=-1).sqrt() for x in (own, off))
    grown = (off * own).reshape(-1, own.shape[-1]).mean(dim=-1).abs() / size.clamp(min=_LEAST_SIZE)
    least = MOST_OF_FEWER_BITS * _LEAST_SIZE
    if not bool(((moved <= most * size + least) & (grown <= MOST_GROWTH * size + least)).all()):
        share = float((moved / size.clamp(min=_LEAST_SIZE)).nan_to_num(torch.inf).max())
        raise Mismatch(
            f"export: a row of {name} was written {share:.0%} off the source's; {kind.lower()} rounds by at most "
            f"{most:.2g} of it: the output was removed"
        )
