"""What a recipe means for its model, worked out before anything is trained (``dwindle pretrain --dry-run``)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.table import Table

from dwindle.anatomy import Anatomy, Structure
from dwindle.errors import UserError
from dwindle.memory import Footprint, footprint
from dwindle.pruning.allocation import AllocationOptions, Allocator, level_scores
from dwindle.pruning.anywhere import GlobalSelector
from dwindle.pruning.choosing import ChooserKind, make_chooser
from dwindle.pruning.pacing import Horizon, Pacing, Ratio, Stages
from dwindle.pruning.saliency import ElementScores, metric_named
from dwindle.pruning.selection import SelectionOptions, Selector, final_count, rounded_shape
from dwindle.pruning.surgery import Prunable
from dwindle.pruning.target import Sizes, Target, parse_target, sizes_of, sizes_text
from dwindle.recipe import Recipe
from dwindle.sizes import format_bytes
from dwindle.sources import load, load_config, load_tokenizer
from dwindle.training.loss import Precision, weights_dtype

_MICRO_TOKENS = {"cpu": 2048, "cuda": 65536}
"""At most in one forward pass: with fewer, a GPU waits for the host while it trains a small model."""
_MEMORY_SHARE = 0.8
"""Of a GPU, which the estimate may fill; the rest is for what it does not know and for other shapes of one run."""


@dataclass(frozen=True, slots=True)
class PruningPlan:
    """The [prune] table for one model."""

    target: Target
    end_count: int
    pacing: Pacing
    selection: SelectionOptions
    chooser: ChooserKind
    milestones: list[tuple[str, int]]


def plan_pruning(recipe: Recipe, anatomy: Anatomy) -> PruningPlan | None:
    """None without pruning; refuses targets that this model, or this many tokens, cannot reach."""
    prune = recipe.prune
    if not prune.enabled:
        return None
    selection = SelectionOptions(
        groups=prune.effective_groups,
        attention=prune.attention,
        compare=prune.compare,
        min_heads=prune.min_heads,
        min_ffn=prune.min_ffn,
        min_hidden=prune.min_hidden,
    )
    target = parse_target(prune.target, anatomy, "prune.target")
    kind: ChooserKind = "adapt" if prune.method == "adapt" else prune.selection
    make_chooser(kind, anatomy, target, selection)  # refuses what cannot be reached
    start, end = anatomy.count(anatomy.source).total, final_count(anatomy, target)
    pacing: Pacing
    if prune.method == "adapt":
        pacing = Stages(start, end, prune.warmup_steps, recipe.num_steps, prune.interleaves)
    elif prune.steps_ratio is not None:
        pacing = Ratio(*prune.steps_ratio, first_step=prune.warmup_steps)
        _check_enough_events(pacing, recipe, start - end, _largest_group(anatomy, target, selection, kind))
    else:
        assert prune.effective_horizon is not None
        last = max(round(prune.effective_horizon * recipe.num_steps), prune.warmup_steps + 1)
        pacing = Horizon(start, end, prune.warmup_steps, last)
    milestones = [(text, parse_target(text, anatomy, "prune.milestones").num_parameters) for text in prune.milestones]
    for text, size in milestones:
        if size <= end:
            raise UserError(f"prune.milestones: {text!r} is not above prune.target = {prune.target}")
    return PruningPlan(target, end, pacing, selection, kind, milestones)


def _largest_group(anatomy: Anatomy, target: Target, selection: SelectionOptions, kind: ChooserKind) -> int:
    """The most that one event can remove."""
    source = anatomy.source
    level, count = level_scores(source), anatomy.count(source).total
    if kind == "global":
        left = GlobalSelector(anatomy, target, selection).sizes_after_one(level, source)
    else:
        found = Selector(anatomy, target, selection).candidates(level, source).values()
        left = [anatomy.count(source.without(candidate.group)).total for candidate in found]
    return count - min(left)


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


def teacher_dtype(precision: Precision, device: str) -> torch.dtype:
    """A teacher is never updated, so bf16 training on a GPU needs no wider copy of it."""
    return torch.bfloat16 if precision == "bf16" and device == "cuda" else weights_dtype(precision)


def teacher_of(recipe: Recipe, config: Any) -> str | None:
    """The source of the teacher, checked against the model that is trained; None without distillation."""
    distill = recipe.distill
    if not distill.weight:
        return None
    teacher, key = distill.teacher or recipe.source.model, "distill.teacher"
    vocabulary = load_config(teacher).vocab_size
    if vocabulary != config.vocab_size:
        raise UserError(
            f"{key}: {teacher} has {vocabulary:,} tokens, {recipe.source.model} has {config.vocab_size:,}: choose a "
            "teacher with the same tokenizer"
        )
    if distill.teacher and load_tokenizer(teacher).get_vocab() != load_tokenizer(recipe.source.model).get_vocab():
        raise UserError(
            f"{key}: {teacher} gives other numbers to tokens than {recipe.source.model}: choose a teacher with the "
            "same tokenizer"
        )
    if distill.top_k > vocabulary:
        raise UserError(
            f"distill.top_k: {distill.top_k:,} is above the {vocabulary:,} tokens of {teacher}: use 0 for all"
        )
    return teacher


def footprint_of(recipe: Recipe, device: str, config: Any, shards: int = 1) -> Footprint:
    """Memory of the run on one of the devices that share the weights."""
    source, precision = teacher_of(recipe, config), precision_of(recipe, device)
    teacher = None if source is None else (load_config(source), teacher_dtype(precision, device))
    return footprint(config, recipe.training, precision, shards=shards, teacher=teacher)


def micro_batch_of(recipe: Recipe, device: str, config: Any, shards: int = 1) -> int:
    """Sequences in one forward pass: what the recipe says, or what a device likes and can hold."""
    chosen = recipe.training.micro_batch or max(1, _MICRO_TOKENS[device] // recipe.data.seq_len)
    chosen = min(chosen, recipe.num_sequences_per_step)
    if recipe.training.micro_batch or device != "cuda":
        return chosen
    room = _MEMORY_SHARE * torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    needed = footprint_of(recipe, device, config, shards)
    while chosen > 1 and needed.total(chosen * recipe.data.seq_len) > room:
        chosen = -(-chosen // 2)
    return chosen


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
    shape_before: Sizes
    shape_estimate: Sizes
    memory_bytes_estimate: int
    milestones: dict[str, int]
    teacher: str | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def render(self) -> Table:
        table = Table("plan", self.model, title_justify="left", show_header=True)
        shape, before = sizes_text(self.shape_estimate), sizes_text(self.shape_before)
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
            "teacher": self.teacher or "none",
            "memory": f"about {format_bytes(self.memory_bytes_estimate)} on {self.device} ({self.precision})",
        }
        for name, text in rows.items():
            table.add_row(name, text)
        return table


def check_data(recipe: Recipe) -> None:
    """Refuse texts and task sets that are not there."""
    recipe.data.check()
    if recipe.validation.tasks:
        from dwindle.evaluation.callback import recipe_data

        recipe_data(recipe.validation)


def check_processes(recipe: Recipe, num_processes: int) -> None:
    """Refuse more processes than a step has sequences, before any of them is started."""
    available = recipe.num_sequences_per_step
    if num_processes > available:
        raise UserError(
            f"--nproc {num_processes}: a step has {available} sequences (training.tokens_per_step / data.seq_len) and "
            f"every process needs one: use at most {available}, or raise training.tokens_per_step"
        )


def make_plan(recipe: Recipe) -> Plan:
    """Everything that can be known without training; loads the source's weights to estimate the final shape."""
    check_data(recipe)
    device = device_of(recipe)
    config = load_config(recipe.source.model)
    anatomy = Anatomy.of_config(config)
    plan = plan_pruning(recipe, anatomy)
    before = anatomy.count(anatomy.source).total
    micro_batch = micro_batch_of(recipe, device, config)
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
        micro_batch=micro_batch,
        parameters_before=before,
        parameters_target=end,
        events_estimate=events,
        last_event_step=plan.pacing.last_step if plan is not None else None,
        shape_before=sizes_of(anatomy.source),
        shape_estimate=sizes_of(structure),
        memory_bytes_estimate=footprint_of(recipe, device, config).total(micro_batch * recipe.data.seq_len),
        milestones=dict(plan.milestones) if plan is not None else {},
        teacher=teacher_of(recipe, config),
    )


def _simulate(recipe: Recipe, plan: PruningPlan) -> tuple[int, Structure]:
    prunable = Prunable(load(recipe.source.model).model)
    if plan.chooser != "coupled":
        return _simulate_layers(recipe, plan, prunable)
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


def _simulate_layers(recipe: Recipe, plan: PruningPlan, prunable: Prunable) -> tuple[int, Structure]:
    """Methods that give every layer its own sizes; layer importance is not known yet, so all layers count alike."""
    anatomy, alive = prunable.anatomy, prunable.alive
    scores = ElementScores(prunable, {}, {}, metric_named("magnitude")).scores
    if plan.chooser == "global":
        choices = GlobalSelector(anatomy, plan.target, plan.selection).choose_while(scores, alive, lambda *_: True)
        events = len(choices)
    else:
        allocator = Allocator(
            anatomy, plan.target, plan.selection, AllocationOptions(amplitude=0.0, balance=recipe.prune.balance)
        )
        choices = allocator.choose(scores, [0.0] * anatomy.num_layers, alive, plan.end_count)
        events = recipe.prune.interleaves * len(choices)
    return events, choices[-1].rest if choices else alive
