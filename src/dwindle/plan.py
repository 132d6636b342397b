"""What a recipe means for its model, worked out before anything is trained (``dwindle pretrain --dry-run``)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.table import Table

from dwindle.anatomy import Anatomy, Structure
from dwindle.errors import UserError
from dwindle.pruning.pacing import Horizon, Pacing, Ratio
from dwindle.pruning.saliency import ElementScores, Scores, metric_named
from dwindle.pruning.selection import SelectionOptions, Selector, final_count, rounded_shape
from dwindle.pruning.surgery import Prunable
from dwindle.pruning.target import Shape, Target, parse_target
from dwindle.recipe import Recipe
from dwindle.sizes import format_bytes
from dwindle.sources import load, load_config
from dwindle.training.loss import Precision

_MICRO_TOKENS = {"cpu": 2048, "cuda": 16384}
_ADAM_BYTES = 16
"""Per parameter in training: weight, gradient and two moments in fp32."""


@dataclass(frozen=True, slots=True)
class PruningPlan:
    """The [prune] table for one model."""

    target: Target
    end_count: int
    pacing: Pacing
    selection: SelectionOptions
    milestones: list[tuple[str, int]]


def plan_pruning(recipe: Recipe, anatomy: Anatomy) -> PruningPlan | None:
    """None without pruning; refuses targets that this model, or this many tokens, cannot reach."""
    prune = recipe.prune
    if not prune.enabled:
        return None
    selection = SelectionOptions(
        groups=tuple(prune.groups),
        attention=prune.attention,
        compare=prune.compare,
        min_heads=prune.min_heads,
        min_ffn=prune.min_ffn,
        min_hidden=prune.min_hidden,
    )
    target = parse_target(prune.target, anatomy, "prune.target")
    selector = Selector(anatomy, target, selection)
    start, end = anatomy.count(anatomy.source).total, final_count(anatomy, target)
    pacing: Pacing
    if prune.steps_ratio is not None:
        pacing = Ratio(*prune.steps_ratio, first_step=prune.warmup_steps)
        _check_enough_events(pacing, recipe, start - end, _largest_group(anatomy, selector))
    else:
        assert prune.effective_horizon is not None
        last = max(round(prune.effective_horizon * recipe.num_steps), prune.warmup_steps + 1)
        pacing = Horizon(start, end, prune.warmup_steps, last)
    milestones = [(text, parse_target(text, anatomy, "prune.milestones").num_parameters) for text in prune.milestones]
    for text, size in milestones:
        if size <= end:
            raise UserError(f"prune.milestones: {text!r} is not above prune.target = {prune.target}")
    return PruningPlan(target, end, pacing, selection, milestones)


def _largest_group(anatomy: Anatomy, selector: Selector) -> int:
    """The most that one event can remove."""
    count = anatomy.count(anatomy.source).total
    layers = anatomy.source.layers
    level = Scores(
        anatomy.source,
        [torch.zeros(len(la.query_heads)) for la in layers],
        [torch.zeros(len(la.ffn)) for la in layers],
        torch.zeros(len(anatomy.source.hidden)),
    )
    found = selector.candidates(level, anatomy.source).values()
    return max(count - anatomy.count(anatomy.source.without(c.group)).total for c in found)


def _check_enough_events(pacing: Ratio, recipe: Recipe, excess: int, largest: int) -> None:
    available = pacing.events_by(recipe.num_steps)
    needed = -(-excess // largest)
    if needed > available:
        raise UserError(
            f"prune.ratio: {recipe.prune.ratio} gives {available:,} events in {recipe.num_steps:,} steps, the target "
            f"needs at least {needed:,}: raise training.tokens, choose a faster ratio, or use prune.horizon"
        )


def device_of(recipe: Recipe) -> str:
    """Where to train."""
    wanted = recipe.source.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UserError("source.device: cuda is not available on this machine: use cpu or auto")
    return "cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu"


def precision_of(recipe: Recipe, device: str) -> Precision:
    """``auto`` is bf16 on a GPU and fp32 on a CPU."""
    wanted = recipe.training.precision
    if wanted == "auto":
        return "bf16" if device == "cuda" else "fp32"
    return wanted


def micro_batch_of(recipe: Recipe, device: str) -> int:
    """Sequences in one forward pass."""
    chosen = recipe.training.micro_batch or max(1, _MICRO_TOKENS[device] // recipe.data.seq_len)
    return min(chosen, recipe.num_sequences_per_step)


@dataclass(slots=True)
class Plan:
    """A run on paper. Events and the final shape are estimates: the gradients of the run decide."""

    model: str
    device: str
    precision: str
    steps: int
    tokens: int
    tokens_per_step: int
    sequences_per_step: int
    micro_batch: int
    parameters_before: int
    parameters_target: int
    events_estimate: int
    last_event_step: int | None
    shape_before: dict[str, int]
    shape_estimate: dict[str, int]
    memory_bytes_estimate: int
    milestones: dict[str, int]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def render(self) -> Table:
        table = Table("plan", self.model, title_justify="left", show_header=True)
        shape = ", ".join(f"{key} {value}" for key, value in self.shape_estimate.items())
        before = ", ".join(f"{key} {value}" for key, value in self.shape_before.items())
        last = "until the target" if self.last_event_step is None else f"by step {self.last_event_step:,}"
        rows = {
            "steps": f"{self.steps:,} of {self.tokens_per_step:,} tokens ({self.sequences_per_step} sequences, "
            f"{self.micro_batch} at a time)",
            "tokens": f"{self.tokens:,}",
            "parameters": f"{self.parameters_before:,} → at most {self.parameters_target:,}",
            "events": f"about {self.events_estimate:,}, {last}",
            "shape now": before,
            "shape expected": f"{shape} (estimate from weight magnitudes; the gradients of the run decide)",
            "milestones": ", ".join(self.milestones) or "none",
            "memory": f"about {format_bytes(self.memory_bytes_estimate)} on {self.device} ({self.precision})",
        }
        for name, text in rows.items():
            table.add_row(name, text)
        return table


def make_plan(recipe: Recipe) -> Plan:
    """Everything that can be known without training; loads the source's weights to estimate the final shape."""
    recipe.data.check()
    device = device_of(recipe)
    config = load_config(recipe.source.model)
    anatomy = Anatomy.of_config(config)
    plan = plan_pruning(recipe, anatomy)
    before = anatomy.count(anatomy.source).total
    events, end, structure = 0, before, anatomy.source
    if plan is not None:
        events, structure = _simulate(recipe, plan)
        end = plan.end_count
    return Plan(
        model=recipe.source.model,
        device=device,
        precision=precision_of(recipe, device),
        steps=recipe.num_steps,
        tokens=recipe.num_tokens,
        tokens_per_step=recipe.num_tokens_per_step,
        sequences_per_step=recipe.num_sequences_per_step,
        micro_batch=micro_batch_of(recipe, device),
        parameters_before=before,
        parameters_target=end,
        events_estimate=events,
        last_event_step=plan.pacing.last_step if plan is not None else None,
        shape_before=asdict(Shape.of(anatomy.source)),
        shape_estimate=asdict(Shape.of(structure)),
        memory_bytes_estimate=_memory(recipe, config, before, device),
        milestones=dict(plan.milestones) if plan is not None else {},
    )


def _simulate(recipe: Recipe, plan: PruningPlan) -> tuple[int, Structure]:
    prunable = Prunable(load(recipe.source.model).model)
    target, end = plan.target, prunable.alive
    for _ in range(2):
        selector = Selector(prunable.anatomy, target, plan.selection)
        elements = ElementScores(prunable, {}, {}, metric_named("magnitude"))
        alive, events = prunable.alive, 0
        while (choice := selector.choose(elements.scores, alive)) is not None:
            elements.remove(choice.group)
            alive, events = choice.rest, events + 1
        end = alive
        if target.shape is not None or recipe.prune.round_to <= 1:
            break
        shape = rounded_shape(prunable.anatomy, end, prunable.alive, target, plan.selection, recipe.prune.round_to)
        target = Target(0, shape)
    return events, end


def _memory(recipe: Recipe, config: Any, parameters: int, device: str) -> int:
    """Weights, gradients and moments, the activations of a micro-batch, and the logits of one chunk."""
    tokens = micro_batch_of(recipe, device) * recipe.data.seq_len
    wide = 2 if precision_of(recipe, device) == "bf16" else 4
    per_layer = 10 * config.hidden_size + 4 * config.intermediate_size
    layers = 1 if recipe.training.activation_checkpointing else config.num_hidden_layers
    activations = tokens * wide * (per_layer * layers + config.hidden_size * config.num_hidden_layers)
    logits = 3 * 4 * min(tokens, recipe.training.ce_chunk_tokens) * config.vocab_size
    return int(parameters * _ADAM_BYTES + activations + logits)
