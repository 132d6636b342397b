"""``dwindle check-family``: prunes a tiny random model of a configuration in every way and compares.

Each way of pruning is checked with AdamW and with Muon in float64: a model whose groups are zeroed and one whose groups
are sliced out must have equal logits, equal losses over ``NUM_STEPS`` further steps and equal weights after them. A
result with stock shapes is also saved, loaded by plain transformers in float32, compared and made to generate.
"""

from __future__ import annotations

import functools
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Group as Lines
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM

from dwindle.anatomy.anatomy import Anatomy
from dwindle.anatomy.build import has_stock_config, is_custom
from dwindle.anatomy.families import register_family
from dwindle.anatomy.shrink import VOCAB, Float64Throughout, random_model, tiny_config
from dwindle.anatomy.structure import Group, Layer, Structure
from dwindle.core.errors import UserError, first_line
from dwindle.core.terminal import right, titled
from dwindle.export.huggingface import save_model
from dwindle.pruning.ledger import source_event
from dwindle.pruning.surgery import Prunable
from dwindle.sources.common import quiet_transformers
from dwindle.sources.loading import load_config
from dwindle.training.config import TrainingConfig
from dwindle.training.optim import build_optimizer

NUM_STEPS = 20
EXACT = 1e-10
"""Largest difference of a logit or a loss between zeroed and sliced models, in float64."""
WEIGHTS = 1e-9
"""Largest difference of a weight after training. Adam divides gradients that are zero but for rounding (key biases) by
its epsilon."""
STOCK = 1e-5
"""Largest difference of a logit, relative to the largest one, between the model in float64 and stock float32."""
OPTIMIZERS: tuple[Literal["adamw", "muon"], ...] = ("adamw", "muon")
COMPARED = ("norms", *OPTIMIZERS, "stock")
"""What is compared: our norms with the family's; zeroed and sliced models, trained; the result in stock float32."""
_WARM_UP_STEPS = 3
_NUM_GENERATED = 4

Way = Callable[[Structure, random.Random], Iterator[Group]]
"""The groups to remove from a structure, one after the other."""
Trained = tuple[Prunable, torch.optim.Optimizer]


@dataclass(slots=True)
class Check:
    """One comparison and its largest difference; ``error`` says why it could not be made."""

    way: str
    compared: str
    difference: float | None
    allowed: float
    error: str = ""

    @property
    def passed(self) -> bool:
        return self.difference is not None and self.difference <= self.allowed

    @property
    def shown(self) -> str:
        value = "failed" if self.difference is None else f"{self.difference:.1e}"
        return value if self.passed or self.difference is None else f"{value} failed"


@dataclass(slots=True)
class FamilyCheck:
    """All comparisons for one configuration."""

    source: str
    model_type: str
    tiny: dict[str, int]
    """Sizes of the tiny model."""
    checks: list[Check] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return bool(self.checks) and all(check.passed for check in self.checks)

    @property
    def largest(self) -> dict[str, float]:
        """The largest difference in float64 and in stock float32."""
        found: dict[str, float] = {}
        for check in self.checks:
            key = "stock" if check.allowed == STOCK else "exact"
            value = float("inf") if check.difference is None else check.difference
            found[key] = max(found.get(key, 0.0), value)
        return found

    def to_json(self) -> dict[str, Any]:
        checks = [asdict(check) | {"passed": check.passed} for check in self.checks]
        return {"source": self.source, "model_type": self.model_type, "tiny": self.tiny, "passed": self.passed} | {
            "largest": {key: value if value < float("inf") else None for key, value in self.largest.items()},
            "checks": checks,
        }

    def render(self) -> Lines:
        """A table with a row for each way of pruning, what failed, and a verdict."""
        sizes = "{layers} layers, hidden {hidden}, {heads} heads on {kv_heads} of size {head_dim}, FFN {ffn}"
        table = Table("pruned", *right(*COMPARED))
        for way in dict.fromkeys(check.way for check in self.checks):
            own = {check.compared: check.shown for check in self.checks if check.way == way}
            table.add_row(way, *(own.get(name, "") for name in COMPARED))
        table.add_section()
        table.add_row("allowed", *(f"{STOCK if name == 'stock' else EXACT:.0e}" for name in COMPARED))
        failed = [check for check in self.checks if not check.passed]
        lines = [f"{check.way}, {check.compared}: {check.error or check.shown}" for check in failed]
        verdict = f"all {len(self.checks)} checks passed"
        if failed:
            verdict = f"{len(failed)} of {len(self.checks)} checks failed: a row of the table is wrong or missing"
        return Lines(titled(f"{self.model_type}: {sizes.format(**self.tiny)}", table), *lines, verdict)


def check_family(model: str | PathLike[str], *, family: str | PathLike[str] | None = None) -> FamilyCheck:
    """Check the table of a model's family; ``model`` is a directory, hub id or config.json, weights are not read.

    ``family`` is a table from outside (.toml or .json) to check before it is put beside the model or into a package.
    """
    path = Path(model)
    config = load_config(path.parent if path.name == "config.json" and path.is_file() else model)
    if family is not None:
        register_family(family)  # in place of one beside the model
    with quiet_transformers():
        Anatomy.of_config(config)  # refuses unknown families and tensors without a row
        try:
            small = tiny_config(config)
            random_model(small)
        except Exception as error:  # whatever the configuration or the model says
            raise UserError(
                f"model {model}: no tiny model of its configuration can be made ({first_line(error)}): "
                "set the sizes that it needs in the table's `tiny`"
            ) from error
        return check_config(small, str(model))


def check_config(config: Any, source: str) -> FamilyCheck:
    """The same checks for a configuration that is tiny already."""
    anatomy = Anatomy.of(random_model(config))
    sizes = {
        "layers": anatomy.num_layers,
        "hidden": config.hidden_size,
        "heads": config.num_attention_heads,
        "kv_heads": getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        "head_dim": anatomy.head_dim,
        "ffn": len(anatomy.source.layers[0].ffn),
    }
    found = FamilyCheck(source, config.model_type, sizes)
    found.checks += _compared("nothing", "norms", EXACT, partial(_norms_difference, config))
    warmed_up = functools.cache(partial(_warmed_up, config))
    for name, way in ways(anatomy, config).items():
        for optimizer in OPTIMIZERS:
            trained = partial(_training_difference, warmed_up, way, optimizer)
            found.checks += _compared(name, optimizer, EXACT, trained)
        found.checks += _compared(name, "stock", STOCK, partial(_stock_difference, config, way))
    return found


def ways(anatomy: Anatomy, config: Any) -> dict[str, Way]:
    """Ways to prune a model of this family: each kind of group, all of them, equal and unequal layers."""
    groups = family_groups(anatomy)
    found: dict[str, Way] = {}
    if "attn" in groups:
        found["heads, regular"] = _regular_heads
        found["heads, cluster"] = lambda structure, rng: _repeated("attn", 3, structure, rng)
    if "ffn" in groups:
        found["FFN channels"] = lambda structure, rng: _repeated("ffn", 5, structure, rng)
    if "stem" in groups:
        found["hidden channels"] = lambda structure, rng: _hidden(config, structure, rng)
    if "layer" in groups:
        found["one layer"] = lambda structure, rng: _blocks(anatomy, ((0, 1),), structure)
        found["attention of one, FFN of another"] = lambda structure, rng: _blocks(anatomy, ((0,), (1,)), structure)
    found["all groups, equal layers"] = lambda structure, rng: _everything(groups, config, structure, rng)
    found["all groups, unequal layers"] = lambda structure, rng: _unequal(groups, structure, rng)
    return found


def family_groups(anatomy: Anatomy) -> list[str]:
    """The kinds of group that this model can lose."""
    has = {"attn": any(layer.query_heads for layer in anatomy.source.layers)}
    has["layer"] = bool(anatomy.removable_layers(anatomy.source))
    return [kind for kind in anatomy.family.groups if has.get(kind, True)]


def _regular_heads(structure: Structure, rng: random.Random) -> Iterator[Group]:
    """One query of every key/value head (if it has several), then one key/value head (if there are several)."""
    each = [tuple(rng.choice(la.queries_of(kv)) for kv in la.kv_heads) for la in structure.layers]
    if max((n for la in structure.layers for n in la.queries_per_kv), default=1) > 1:
        first = Group("attn", tuple(each))
        structure = structure.without(first)
        yield first
    if max(len(la.kv_heads) for la in structure.layers) > 1:
        drawn = (la.queries_of(rng.choice(la.kv_heads)) if la.kv_heads else () for la in structure.layers)
        yield Group("attn", tuple(drawn))


def _repeated(kind: str, count: int, structure: Structure, rng: random.Random) -> Iterator[Group]:
    """``count`` times one head or channel of every layer, or one hidden channel."""
    for _ in range(count):
        group = _one_each(kind, structure, rng)
        structure = structure.without(group)
        yield group


def _one_each(kind: str, structure: Structure, rng: random.Random) -> Group:
    if kind == "stem":
        return Group("stem", ((rng.choice(structure.hidden),),))

    def drawn(layer: Layer) -> tuple[int, ...]:
        present = layer.query_heads if kind == "attn" else layer.ffn
        return (rng.choice(present),) if len(present) > 1 else ()

    return Group("attn" if kind == "attn" else "ffn", tuple(map(drawn, structure.layers)))


def _blocks(anatomy: Anatomy, wanted: Sequence[tuple[int, ...]], structure: Structure) -> Iterator[Group]:
    """The first group of whole blocks of each wanted kind that may be removed, each from another layer."""
    for places in wanted:
        free = [n for n, found in anatomy.removable_blocks(structure) if found == places]
        free = [number for number in free if not structure.layers[number].absent]
        if free:
            group = Group.of_layer("layer", free[0], places, anatomy.num_layers)
            structure = structure.without(group)
            yield group


def _hidden(config: Any, structure: Structure, rng: random.Random) -> Iterator[Group]:
    """A few hidden channels; as many as a stock configuration of the family accepts, if it accepts any."""

    def fits(count: int) -> bool:
        return has_stock_config(config, replace(structure, hidden=structure.hidden[count:]))

    count = next(filter(fits, range(2, len(structure.hidden) // 2)), 4)
    return _repeated("stem", count, structure, rng)


def _everything(groups: list[str], config: Any, structure: Structure, rng: random.Random) -> Iterator[Group]:
    """All kinds, in a mixed order; the layers stay equal and regular."""
    for kind in ("ffn", "attn", "ffn", "stem", "ffn"):
        if kind not in groups:
            continue
        made = _repeated("ffn", 1, structure, rng)
        if kind != "ffn":
            made = _regular_heads(structure, rng) if kind == "attn" else _hidden(config, structure, rng)
        for group in list(made):
            structure = structure.without(group)
            yield group


def _unequal(groups: list[str], structure: Structure, rng: random.Random) -> Iterator[Group]:
    """Layer l loses l heads and 2·l + 1 channels, so that no two layers are alike."""
    for kind in ("attn", "ffn"):
        for times in range(2 * len(structure.layers) if kind in groups else 0):
            group = _one_each(kind, structure, rng)
            least = times if kind == "attn" else times // 2
            members = tuple(gone if number > least else () for number, gone in enumerate(group.members))
            if any(members):
                group = Group(group.kind, members)
                structure = structure.without(group)
                yield group
    if "stem" in groups:
        yield from _repeated("stem", 2, structure, rng)


def _compared(way: str, compared: str, allowed: float, difference: Callable[[], float | None]) -> list[Check]:
    """One check; none where the comparison does not apply (no stock model has such shapes)."""
    try:
        found = difference()
        return [] if found is None else [Check(way, compared, found, allowed)]
    except Exception as error:  # a wrong table fails in many ways; all of them are results here
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        named = next((line for line in lines if line.startswith("size mismatch for")), lines[0])  # load_state_dict
        return [Check(way, compared, None, allowed, named)]


def _norms_difference(config: Any) -> float:
    """Our norms, which divide by the number of alive channels, against the family's own, in float32."""
    model = random_model(config, dtype=torch.float32)
    before = _logits(model)
    return _difference(before, _logits(Prunable(model).model))


def _make_optimizer(name: Literal["adamw", "muon"], model: Any) -> torch.optim.Optimizer:
    return build_optimizer(model, TrainingConfig(tokens=1, lr=1e-2, weight_decay=0.1, optimizer=name))


def _warmed_up(config: Any, optimizer: Literal["adamw", "muon"]) -> Trained:
    """A model after a few steps, so that pruning meets non-trivial moments; every way of pruning begins with it."""
    prunable = Prunable(random_model(config))
    moments = _make_optimizer(optimizer, prunable.model)
    _train(prunable, moments, _WARM_UP_STEPS, seed=100)
    return prunable, moments


def copied(trained: Trained, make: Callable[[Any], torch.optim.Optimizer]) -> Trained:
    """A copy of the model with its own optimizer, with the same weights and moments."""
    prunable = deepcopy(trained[0])
    optimizer = make(prunable.model)
    for group, before in zip(optimizer.param_groups, trained[1].param_groups, strict=True):
        for parameter, original in zip(group["params"], before["params"], strict=True):
            optimizer.state[parameter] = deepcopy(trained[1].state[original])
    return prunable, optimizer


def _training_difference(
    warmed_up: Callable[[Literal["adamw", "muon"]], Trained], way: Way, optimizer: Literal["adamw", "muon"]
) -> float:
    """The largest difference of logits and losses between the zeroed and the sliced model."""
    make = partial(_make_optimizer, optimizer)
    pairs: list[Trained] = []
    for _ in range(2):
        prunable, moments = copied(warmed_up(optimizer), make)
        for group in way(prunable.alive, random.Random(0)):
            prunable.prune(group, moments)
        pairs.append((prunable, moments))
    (zeroed, zeroed_moments), (sliced, sliced_moments) = pairs
    moved = sliced.compact(optimizer=sliced_moments, rebuild=make)
    assert moved is not None and sliced.physical != zeroed.physical, "nothing was pruned"
    worst = _difference(_logits(zeroed.model), _logits(sliced.model))
    losses = [_train(*pair, NUM_STEPS, seed=200) for pair in ((zeroed, zeroed_moments), (sliced, moved))]
    worst = max(worst, _difference(*(torch.tensor(values, dtype=torch.float64) for values in losses)))
    _check_weights(zeroed, sliced)
    return worst


def _check_weights(zeroed: Prunable, sliced: Prunable) -> None:
    """Kept weights are equal, pruned ones still zero."""
    small = sliced.parameters
    for name, whole in zeroed.parameters.items():
        row = zeroed.anatomy[name]
        if not row.is_in(zeroed.alive):
            if whole.count_nonzero():
                raise ValueError(f"{name}: pruned entries became non-zero")
            continue
        kept = zeroed.anatomy.slice(row, whole.detach(), zeroed.alive, zeroed.physical)
        if (gap := _difference(kept, small[name].detach())) > WEIGHTS:
            raise ValueError(f"{name}: weights differ by {gap:.1e} after training")
        if whole.count_nonzero() != kept.count_nonzero():
            raise ValueError(f"{name}: pruned entries became non-zero")


def _stock_difference(config: Any, way: Way) -> float | None:
    """Zeroed model in float64 against its saved and stock-loaded result in float32; None if no stock model fits."""
    prunable = Prunable(random_model(config))
    for group in way(prunable.alive, random.Random(0)):
        prunable.prune(group)
    expected, small = _logits(prunable.model), prunable.compacted().float()
    if is_custom(small.config):
        return None
    with tempfile.TemporaryDirectory() as folder, quiet_transformers():
        out, anatomy = Path(folder) / "out", prunable.anatomy
        ledger = [source_event("tiny", anatomy, {})]
        save_model(small, None, out, structure=prunable.alive, source="tiny", ledger=ledger)
        loaded = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    found = _logits(loaded).double()
    _check_generation(loaded)
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1.0))


@torch.no_grad()
def _check_generation(model: Any) -> None:
    """Greedy generation with a cache gives the likeliest tokens of whole passes."""
    prompt = _tokens(2, 7, seed=3)
    options = {"max_new_tokens": _NUM_GENERATED, "do_sample": False, "eos_token_id": None}
    made = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    whole = model(input_ids=made, use_cache=False).logits[:, prompt.shape[1] - 1 : -1].argmax(-1)
    if not torch.equal(whole, made[:, prompt.shape[1] :]):
        raise ValueError("generation with a cache differs from whole passes")


def _train(prunable: Prunable, optimizer: torch.optim.Optimizer, steps: int, seed: int) -> list[float]:
    losses = []
    for step in range(steps):
        batch = _tokens(2, 12, seed=seed + step)
        with Float64Throughout():
            loss = prunable.model(input_ids=batch, labels=batch, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        prunable.mask_gradients()
        torch.nn.utils.clip_grad_norm_(prunable.model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def _logits(model: Any) -> Tensor:
    with Float64Throughout():
        logits: Tensor = model(input_ids=_tokens(2, 16, seed=7), use_cache=False).logits
    return logits


def _difference(one: Tensor, other: Tensor) -> float:
    """The largest absolute difference; infinite if a value is not finite."""
    gap = float((one - other).abs().max())
    return gap if gap == gap else float("inf")


def _tokens(*shape: int, seed: int) -> Tensor:
    return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(seed))
