"""What a recipe means for its model, computed before anything is trained (``dwindle pretrain --dry-run``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.table import Table

from dwindle.anatomy.anatomy import Anatomy
from dwindle.anatomy.positions import beyond_positions, can_be_packed
from dwindle.core.config import in_section, write_toml
from dwindle.core.errors import UserError
from dwindle.core.notebook import Shown
from dwindle.core.run_directory import RunDirectory
from dwindle.core.sizes import counted, format_bytes, format_count, format_duration, format_range
from dwindle.data.estimate import estimate, streamed_inputs
from dwindle.distributed.engines import Parallel, choose_parallel, num_shards
from dwindle.distributed.precision import Precision, is_bf16, weights_dtype
from dwindle.distributed.world import World, joined
from dwindle.pruning.config import PretrainPruneConfig
from dwindle.pruning.event_bounds import EventRange
from dwindle.pruning.layouts import final_count, largest_count
from dwindle.pruning.pacing import Pacing, Ratio, training_pacing
from dwindle.pruning.strategies import make_strategy
from dwindle.pruning.target import Shape, Sizes, Target, parse_target, sizes_of, sizes_text
from dwindle.recipe.recipe import Recipe, load_recipe
from dwindle.recipe.recommended import PASSES
from dwindle.run.memory import Footprint, footprint
from dwindle.run.start import Start, file_sizes, start_of
from dwindle.sources.loading import load_config, load_tokenizer
from dwindle.training.float8 import check_float8

_MICRO_TOKENS = {"cpu": 2048, "cuda": 65536}
"""Maximum in one forward pass; with fewer, a GPU waits for the host while it trains a small model."""
_MEMORY_SHARE = 0.8
"""Fraction of a GPU that the estimate may fill; the rest covers what it does not model."""
_MORE_EVENTS = "raise training.tokens, choose a faster prune.ratio, or use prune.horizon"


@dataclass(frozen=True, slots=True)
class PruningPlan:
    """The [prune] table for one model."""

    target: Target
    end_count: int
    pacing: Pacing
    events: EventRange
    milestones: list[tuple[str, int]]


def plan_pruning(recipe: Recipe, anatomy: Anatomy, start: Start | None = None) -> PruningPlan | None:
    """None without pruning; refuses targets that this model, or this many tokens, cannot reach.

    ``start`` is that of ``anatomy``, if it is known already: choosing the tokens again may require counting a text
    again.
    """
    prune = recipe.prune
    if not prune.enabled:
        return None
    with in_section("prune", PretrainPruneConfig):
        files = file_sizes(start or start_of(recipe), f"prune.target {prune.target}")
        target = parse_target(prune.target, anatomy, "prune.target", files)
        strategy = make_strategy(anatomy, target, prune)
    before, end = anatomy.count(anatomy.source).total, final_count(anatomy, target)
    first, num_steps = recipe.num_steps_before_pruning, recipe.num_steps
    pacing = training_pacing(prune, start=before, end=end, first_step=first, num_steps=num_steps)
    events = strategy.event_bounds(pacing)
    if isinstance(pacing, Ratio) and events.fewest > (available := pacing.events_by(num_steps)):
        raise UserError(
            f"prune.ratio: {prune.ratio} gives {available:,} events in {num_steps:,} steps, the target "
            f"needs at least {events.fewest:,}: {_MORE_EVENTS}"
        )
    milestones = [(text, parse_target(text, anatomy, "prune.milestones").num_parameters) for text in prune.milestones]
    for text, size in milestones:
        if size <= end:
            raise UserError(f"prune.milestones: {text!r} is not above prune.target = {prune.target}")
    return PruningPlan(target, end, pacing, events, milestones)


def device_of(recipe: Recipe) -> str:
    """Where to train."""
    wanted = recipe.source.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UserError("source.device: cuda is not available on this machine: use cpu or auto")
    return "cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu"


def precision_of(recipe: Recipe, device: str) -> Precision:
    """``auto`` is bf16 on a GPU and fp32 on a CPU; fp8 is refused where the device cannot multiply it."""
    wanted = recipe.training.precision
    if wanted == "fp8":
        check_float8(device)
    if wanted == "auto":
        return "bf16" if device == "cuda" else "fp32"
    return wanted


def joined_for(recipe: Recipe) -> AbstractContextManager[World]:
    """The processes that train this recipe; a single one is a group if the recipe shards it."""
    training = recipe.training
    return joined(device_of(recipe), training.timeout_s, also_alone=training.parallel == "fsdp")


def parallel_of(recipe: Recipe, world: World, anatomy: Anatomy) -> Parallel:
    """How the processes share the work."""
    wanted = recipe.training.parallel
    if wanted == "auto" and recipe.training.lora_rank:
        wanted = "ddp"  # adapters are put on whole weights
    if recipe.training.precision == "fp8" and world.size > 1:
        raise UserError(f"training.precision: fp8 is for one process, and there are {world.size}: use bf16")
    chosen = choose_parallel(world, wanted, anatomy.count(anatomy.source).total)
    if recipe.training.precision == "fp8" and chosen != "none":
        raise UserError("training.precision: fp8 is for a model that is not sharded: use bf16, or parallel = auto")
    return chosen


def teacher_dtype(precision: Precision, device: str) -> torch.dtype:
    """A teacher is never updated, so bf16 training on a GPU needs no wider copy of it."""
    return torch.bfloat16 if is_bf16(precision) and device == "cuda" else weights_dtype(precision)


def teacher_of(recipe: Recipe, config: Any) -> str | None:
    """The source of the teacher, checked against the model that is trained; None without distillation."""
    distill = recipe.distill
    if not recipe.teacher_weight:
        return None
    teacher, key = distill.teacher or recipe.source.model, "distill.teacher"
    theirs, ours = (load_config(source).vocab_size for source in (teacher, recipe.source.model))
    if theirs != ours:
        raise UserError(
            f"{key}: {teacher} has {theirs:,} tokens, {recipe.source.model} has {ours:,}: choose a teacher with the "
            "same tokenizer, or start at a model with all tokens and give vocabulary.size, which also trims the teacher"
        )
    if distill.teacher and load_tokenizer(teacher).get_vocab() != load_tokenizer(recipe.source.model).get_vocab():
        raise UserError(
            f"{key}: {teacher} gives other numbers to tokens than {recipe.source.model}: choose a teacher with the "
            "same tokenizer"
        )
    if distill.top_k > config.vocab_size:
        which = "that are kept" if recipe.vocabulary.size is not None else f"of {teacher}"
        raise UserError(
            f"distill.top_k: {distill.top_k:,} is above the {config.vocab_size:,} tokens {which}: use 0 for all"
        )
    return teacher


def packs(recipe: Recipe, config: Any) -> bool:
    """Whether several conversations share a row: the model and its teacher must both keep them apart."""
    teacher = teacher_of(recipe, config)
    return can_be_packed(config) and (teacher is None or can_be_packed(load_config(teacher)))


def footprint_of(recipe: Recipe, device: str, config: Any, shards: int = 1) -> Footprint:
    """Memory of the run on one of the devices that share the weights."""
    source, precision = teacher_of(recipe, config), precision_of(recipe, device)
    teacher = None if source is None else (deepcopy(load_config(source)), teacher_dtype(precision, device))
    if teacher is not None:
        teacher[0].vocab_size, teacher[0].pad_token_id = config.vocab_size, None  # it is cut to the same tokens
    return footprint(config, recipe.training, precision, shards=shards, teacher=teacher)


def liked_micro_batch(recipe: Recipe, device: str) -> int:
    """Sequences in one forward pass: what the recipe says, or what is fastest on a device with enough memory."""
    chosen = recipe.training.micro_batch or max(1, _MICRO_TOKENS[device] // recipe.data.seq_len)
    return min(chosen, recipe.num_sequences_per_step)


def micro_batch_of(recipe: Recipe, device: str, config: Any, shards: int = 1) -> int:
    """Sequences in one forward pass: what the recipe says, or what is fastest and fits in memory."""
    chosen = liked_micro_batch(recipe, device)
    if recipe.training.micro_batch or device != "cuda":
        return chosen
    room = _MEMORY_SHARE * torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    needed = footprint_of(recipe, device, config, shards)
    while chosen > 1 and needed.total(chosen * recipe.data.seq_len) > room:
        chosen = -(-chosen // 2)
    return chosen


def settle(recipe: Recipe, run: RunDirectory, world: World) -> Recipe:
    """The recipe with what depends on the machine: chosen once, by the main process, and saved in the run.

    All processes then do the same on unequal devices, and so does a run that is resumed on another machine.
    """

    def choose() -> None:
        training = recipe.training
        if not world.is_main or (training.micro_batch and training.precision != "auto"):
            return
        training.precision = precision_of(recipe, device_of(recipe))
        if not training.micro_batch:
            config = start_of(recipe, run).config()
            shards = num_shards(world, parallel_of(recipe, world, Anatomy.of_config(config)))
            training.micro_batch = micro_batch_of(recipe, device_of(recipe), config, shards)
        write_toml(recipe, run.recipe)

    world.main_first("settle", choose)
    return recipe if world.is_main else load_recipe(run.recipe)


@dataclass(slots=True)
class Plan(Shown):
    """A run on paper. The gradients of the run decide the number of events and the final shape."""

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
    events_fewest: int
    events_most: int
    last_event_step: int | None
    shape_before: Sizes
    shape_target: Sizes | None
    """None where the target is a number of parameters."""
    file: str | None
    """The target, where it is the size of a file."""
    memory_bytes_estimate: int
    text_tokens: dict[str, float]
    """Estimated tokens of each source that is not streamed."""
    text_passes: dict[str, float]
    """How often each of them is read by the end, what ``data.skip`` leaves out included."""
    milestones: dict[str, int]
    teacher: str | None
    network: list[str]
    """Texts that are not on this machine: the run reads them as it begins."""
    warnings: list[str]
    seconds: float | None = None
    """Time of the whole run on this machine, from a few measured steps; None if none were measured."""
    memory_bytes_measured: int | None = None
    """Largest memory of those steps: on a CPU of the whole process."""
    cost: float | None = None
    """Cost of the run at the given price of an hour."""

    def render(self) -> Table:
        table = Table("plan", self.model, title_justify="left", show_header=True)
        rows = {
            "steps": f"{self.steps:,} of {self.tokens_per_step:,} tokens "
            f"({counted(self.sequences_per_step, 'sequence')}, {self.micro_batch} at a time)",
            "tokens": f"{self.tokens:,}",
            "parameters": self._parameters_text(),
            "events": self._events_text(),
            "shape now": sizes_text(self.shape_before),
            "shape at the end": sizes_text(self.shape_target or {}),
            "milestones": ", ".join(self.milestones) or "none",
            "teacher": self.teacher or "none",
            "from the network": ", ".join(self.network),
            "text": self._text(),
            "memory": self._memory_text(),
            "time": self._time_text(),
            "warning": "\n".join(self.warnings),
        }
        for name, text in rows.items():
            if text:
                table.add_row(name, text)
        return table

    def _parameters_text(self) -> str:
        before = f"{self.parameters_before:,}"
        return f"{before} → {self._target_text()}" if self.parameters_target < self.parameters_before else before

    def _target_text(self) -> str:
        if self.file is None:
            return f"at most {self.parameters_target:,}"
        return f"about {self.parameters_target:,}, until its file is {self.file}"

    def _text(self) -> str:
        return ", ".join(
            f"{name}: about {format_count(tokens)} tokens, read {_passes(self.text_passes[name])} times"
            for name, tokens in self.text_tokens.items()
        )

    def _memory_text(self) -> str:
        if self.memory_bytes_measured is not None:
            return f"{format_bytes(self.memory_bytes_measured)} on {self.device} ({self.precision}), measured"
        return f"about {format_bytes(self.memory_bytes_estimate)} on {self.device} ({self.precision})"

    def _time_text(self) -> str:
        if self.seconds is None:
            return ""
        hours = f" ({self.seconds / 3600:.2g} GPU-hours)" if self.device == "cuda" else ""
        cost = "" if self.cost is None else f", {self.cost:.2f} at the given price"
        return f"about {format_duration(self.seconds)} on this machine{hours}{cost}, from a few measured steps"

    def _events_text(self) -> str:
        if not self.events_most:
            return "none"
        last = "until the target" if self.last_event_step is None else f"by step {self.last_event_step:,}"
        return f"{format_range((self.events_fewest, self.events_most))}, {last}"


def check_data(recipe: Recipe) -> None:
    """Refuse texts and task sets that are not there."""
    recipe.data.check(recipe.task)
    if recipe.validation.tasks:
        from dwindle.evaluation.callback import recipe_data

        recipe_data(recipe.validation)


def check_processes(recipe: Recipe, num_processes: int, option: str = "--nproc") -> None:
    """Refuse more processes than a step has sequences, before any of them is started; ``option`` gave their number."""
    available = recipe.num_sequences_per_step
    if num_processes > available:
        raise UserError(
            f"{option} {num_processes}: a step has {available} sequences (training.tokens_per_step / data.seq_len) and "
            f"every process needs one: use at most {available}, or raise training.tokens_per_step"
        )


def make_plan(recipe: Recipe, start: Start | None = None) -> Plan:
    """Everything that can be known without training; reads no weights. ``start`` as in ``plan_pruning``."""
    check_data(recipe)
    device = device_of(recipe)
    start = start or start_of(recipe)
    config = start.config()
    anatomy = Anatomy.of_config(config)
    plan = plan_pruning(recipe, anatomy, start)
    before = anatomy.count(anatomy.source).total
    micro_batch = micro_batch_of(recipe, device, config)
    found = estimate(recipe.data, recipe.task, start.tokenizer, packed=packs(recipe, config))
    often = repetition(found.epochs, recipe, "about ")
    shape = {} if plan is None else _shape_target(anatomy, plan.target)
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
        parameters_target=before if plan is None else largest_count(anatomy, plan.target, recipe.prune),
        events_fewest=0 if plan is None else plan.events.fewest,
        events_most=0 if plan is None else plan.events.most,
        last_event_step=None if plan is None else plan.pacing.last_step,
        shape_before=sizes_of(anatomy.source) | ({"layers": len(anatomy.source.places)} if "layers" in shape else {}),
        shape_target=shape or None,
        file=recipe.prune.target if plan is not None and plan.target.file is not None else None,
        memory_bytes_estimate=footprint_of(recipe, device, config).total(micro_batch * recipe.data.seq_len),
        text_tokens=found.tokens,
        text_passes=found.epochs(recipe.last_sample),
        milestones={} if plan is None else dict(plan.milestones),
        teacher=teacher_of(recipe, config),
        network=streamed_inputs(recipe.data, recipe.task),
        warnings=[*plan_warnings(recipe, config, plan), *([often] if often else [])],
    )


def _shape_target(anatomy: Anatomy, target: Target) -> Sizes:
    """Sizes of a shape; unchanged ones stay different where the source's layers differ.

    Layers are among them if some are removed; empty without a shape.
    """
    if target.shape is None:
        return {}
    now, least, wanted = sizes_of(anatomy.source), asdict(Shape.of(anatomy.source)), asdict(target.shape)
    changed = {"layers": wanted["layers"]} if wanted["layers"] < least["layers"] else {}
    return {key: now[key] if wanted[key] == least[key] else wanted[key] for key in now} | changed


def repetition(epochs: Callable[[int], Mapping[str, float]], recipe: Recipe, about: str = "") -> str:
    """A warning if a run repeats a text too often, else empty; ``epochs`` gives the passes over each text."""
    passes_over = epochs(recipe.last_sample)
    often = {name: passes for name, passes in passes_over.items() if round(passes) > PASSES}
    if not often:
        return ""
    named = ", ".join(f"{name} {about}{passes:,.{0 if about else 1}f} times" for name, passes in often.items())
    return f"training.tokens: reads {named}, so it may be memorised: add text, or watch the validation loss"


def _passes(number: float) -> str:
    """``0.16``, ``4``, ``1,076``."""
    return f"{number:.2g}" if number < 10 else f"{number:,.0f}"


class PlanWarning(UserWarning):
    """A likely mistake in a recipe."""


def plan_warnings(recipe: Recipe, config: Any, plan: PruningPlan | None) -> list[str]:
    """What may go wrong, for the user to decide before the run."""
    long = beyond_positions(recipe.data.seq_len, config, "data.seq_len")
    found = [long] if long else []
    if recipe.task.kind == "chat" and recipe.task.text_share and not recipe.data.trained_on():
        found.append("data.train: no plain text between the conversations, which keeps what the model knows: add some")
    own_start = recipe.teacher_weight and not (recipe.distill.teacher or recipe.source.random_init)
    if own_start and not recipe.prune.enabled:
        found.append(
            "distill.weight: this run does not prune, so its teacher is its own start, which holds it back: set 0, or "
            "name distill.teacher"
        )
    if plan is None or not isinstance(plan.pacing, Ratio):
        return found
    possible, events = plan.pacing.events_by(recipe.num_steps), plan.events
    if possible < events.most:
        found.append(
            f"{possible:,} events possible in {recipe.num_steps:,} steps, the target needs "
            f"{format_range((events.fewest, events.most))}: it may not be reached; {_MORE_EVENTS}"
        )
    return found
