"""Every knob of pruning, declared once.

``PruneConfig`` holds what both drivers share: the training callback (``pruner``) and the rounds without training
(``rounds``). Each driver adds its own timing: ``PretrainPruneConfig`` is the ``[prune]`` table of a recipe,
``PostTrainingConfig`` the options of ``dwindle prune`` and the keyword arguments of ``dwindle.prune``.
"""

from __future__ import annotations

import re
from collections.abc import Set
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from dwindle.anatomy.family import Family
from dwindle.anatomy.structure import ALL_KINDS, KINDS, Kind
from dwindle.core.config import Config
from dwindle.core.errors import UserError
from dwindle.core.sizes import parse_count, parse_size
from dwindle.pruning.methods import METHODS, METHODS_OF, MethodName, help_text

DEFAULT_HORIZON = 0.03
MASK_PHASE = 0.2
"""The horizon of sheared if none is set."""
DEFAULT_GRAM_TOKENS = 4096
Distance = Literal["cosine", "euclidean", "manhattan"]
Selection = Literal["coupled", "global"]
_WHOLE: dict[Kind, str] = {
    "attn": "all heads",
    "ffn": "all FFN channels",
    "stem": "the hidden size",
    "layer": "all layers",
}


class PruneConfig(Config):
    """What is pruned and how it is chosen."""

    method: Annotated[MethodName, Field(description=help_text())] = "efficientllm"
    selection: Selection | None = None
    """With efficientllm: coupled removes the same group from every layer, global the least salient group anywhere. Not
    set: global; coupled where the target is a shape, and without training, which keeps stock shapes, unless the
    source's layers already have different heads."""
    metric: str | None = None
    """Saliency of a weight: taylor, taylor1, obd, group, wanda, obc, magnitude, random or a registered metric; the
    group with the lowest saliency is removed first. Not set: group, without training taylor, with adapt and uniform
    taylor1. The other methods have scores of their own."""
    groups: list[Kind] | None = None
    """Prunable kinds of group: attn (heads), ffn (FFN channels), stem (hidden channels), layer (whole layers; with
    selection global also the attention or the FFN of one). Not set: all that the method prunes, but no layers with
    efficientllm."""
    attention: Literal["cluster", "regular"] = "regular"
    """Grouped-query attention: cluster removes any query head; regular keeps the shape of stock models."""
    compare: Literal["mean", "sum", "saved", "zscore"] = "mean"
    """How groups are compared: mean saliency of an element, the sum over the group, or the sum per parameter saved.
    zscore, with selection global: in standard deviations from the mean of the heads, or channels, of its layer."""
    amplitude: Annotated[float, Field(ge=0, le=1)] = 0.02
    """With adapt: how far apart one iteration moves the sparsities of the least and the most important layer."""
    distance: Distance = "cosine"
    """With adapt: how a layer's change of the residual stream, its importance, is measured."""
    balance: Literal["score", "ratio"] = "score"
    """With adapt and uniform: remove a layer's least salient groups, or equal shares of its heads and channels."""
    min_heads: Annotated[int, Field(ge=1)] = 1
    """Minimum query heads per layer."""
    min_ffn: Annotated[int, Field(ge=1)] = 8
    """Minimum FFN channels per layer."""
    min_hidden: Annotated[int, Field(ge=1)] = 8
    """Minimum hidden channels."""
    round_to: Annotated[int, Field(ge=1)] = 1
    """With efficientllm, minitron, slicegpt and sheared: final FFN and hidden sizes are multiples of this; 1 is exact.
    Not given with a quantized file as the target: 32, its blocks."""
    second_order: bool = False
    """Update the remaining weights when a group is removed, from the layers' inputs (EfficientLLM-B)."""
    damping: Annotated[float, Field(ge=0)] = 0.01
    """Ridge of that update, as a fraction of the mean curvature."""
    gram_tokens: str | int | None = None
    """Tokens whose layer inputs are used by second_order, wanda and obc: evenly spaced ones of every sequence, at least
    one of each. Not set: 4096 of a training step, all calibration tokens without training."""

    @property
    def keeps_hidden_size(self) -> bool:
        """Whether only the layers are pruned (Adapt-Pruner, LLM-Pruner, …), not the hidden size."""
        return "stem" not in METHODS[self.method].kinds

    @property
    def effective_metric(self) -> str:
        """The metric in use: without training each paper's own where none is set; the method's name if it has its own
        score."""
        return self.metric or METHODS[self.method].default_metric or self.method

    @property
    def has_own_score(self) -> bool:
        """Whether the method itself scores groups; then no metric can be chosen."""
        return METHODS[self.method].default_metric is None

    @property
    def effective_selection(self) -> Selection:
        """The selection in use; without training stock shapes where none is set."""
        return self.selection or "coupled"

    def multiple_for(self, target: str, option: str) -> int:
        """``round_to`` for a target: rows of quantized files are stored in blocks, other widths make them larger."""
        if "@" not in target or self.method != "efficientllm" or "round_to" in self.model_fields_set:
            return self.round_to
        return parse_size(target, option).block

    def can_round(self, kinds: Set[Kind], target: str) -> bool:
        """Whether ``round_to``, if it were given, would round the widths of ``kinds``: a shape names its sizes, and
        what is not prunable keeps its own."""
        rounds = "round_to" in METHODS[self.method].settings and self.round_to == 1
        return rounds and parse_size(target, "target").kind != "shape" and kinds <= {*self.effective_groups}

    @property
    def effective_groups(self) -> tuple[Kind, ...]:
        """The prunable kinds in use."""
        kinds = METHODS[self.method].kinds
        wanted = kinds if self.groups is None else self.groups
        return tuple(kind for kind in wanted if kind in self._allowed_groups)

    @property
    def _allowed_groups(self) -> tuple[Kind, ...]:
        return ALL_KINDS if self.method == "efficientllm" else METHODS[self.method].kinds

    def with_layers(self) -> Self:
        """For a target that names layers: they are prunable unless groups were set."""
        if self.groups is not None or self.method != "efficientllm":
            return self
        return self.model_copy(update={"groups": list(ALL_KINDS)})

    def for_family(self, family: Family) -> Self:
        """With the groups that the family has; a requested group that it does not have is refused."""
        if {*self.effective_groups} <= {*family.groups}:
            return self
        has = tuple(kind for kind in self.effective_groups if kind in family.groups)
        all_kinds = set(KINDS) <= set(self.groups or KINDS)
        missing = [kind for kind in self.groups or () if kind not in family.groups]
        if (missing and not all_kinds) or "layer" in missing or not has:  # layer is never meant by "all of them"
            wanted = "layer" if "layer" in missing else (missing or list(self.effective_groups))[0]
            raise UserError(
                f"groups: {wanted}: this family keeps such groups whole: choose among {', '.join(family.groups)}"
            )
        return self.model_copy(update={"groups": list(has)})

    @property
    def num_gram_tokens(self) -> int | None:
        return None if self.gram_tokens is None else parse_count(self.gram_tokens, "gram_tokens")

    def record(self) -> dict[str, Any]:
        """The settings in use, for the ledger: with the method's defaults, without what it does not use."""
        unused = {name for name, methods in METHODS_OF.items() if self.method not in methods}
        used = self.model_dump(exclude=unused | {"enabled", "target", "milestones"}, exclude_none=True)
        if "selection" not in unused:
            used["selection"] = self.effective_selection
        metric = {"metric": self.effective_metric} if not self.has_own_score else {}
        return used | metric | {"groups": list(self.effective_groups)}

    @model_validator(mode="after")
    def _check_method(self) -> PruneConfig:
        """Settings that the method does not use are refused, not ignored."""
        method = self.method
        if self.groups is not None and not self.groups:
            raise ValueError(f"groups: nothing is prunable: name at least one of {', '.join(ALL_KINDS)}")
        self._check_groups()
        try:
            if self.num_gram_tokens == 0:
                raise ValueError(f"gram_tokens: {self.gram_tokens} must be at least 1")
        except UserError as error:  # pydantic adds the section to a ValueError alone
            raise ValueError(str(error)) from None
        fields = type(self).model_fields
        for name, methods in METHODS_OF.items():
            value = getattr(self, name, None)
            is_old_default = (name, value) in (("selection", "coupled"), ("smoothing", 0))  # saved by earlier runs
            if name in fields and method not in methods and value != fields[name].default and not is_old_default:
                wanted = " or ".join(methods)
                raise ValueError(f"{name}: is a setting of method {wanted}, not {method}: remove it, or set the method")
        return self

    def _check_groups(self) -> None:
        """A kind that the method does not prune is refused by name."""
        if self.compare == "zscore" and "layer" in self.effective_groups:
            raise ValueError("compare: zscore compares groups with those of their layer: remove layer from groups")
        allowed = self._allowed_groups
        if set(KINDS) == set(self.groups or ()) and self.effective_groups:
            return  # older recipes list all kinds, and mean those that are prunable
        for kind in self.groups or ():
            if kind not in allowed:
                choice = allowed[0] if len(allowed) == 1 else f"among {', '.join(allowed[:-1])} and {allowed[-1]}"
                raise ValueError(f"groups: {kind}: {self.method} keeps {_WHOLE[kind]}: choose {choice}")


class PretrainPruneConfig(PruneConfig):
    """What is pruned during training, and when."""

    enabled: bool = True
    """Set to false to train without pruning."""
    target: str = ""
    """Final size: 100M parameters, 60% (or 0.6) of them, 50%nonemb of those outside the embedding; any of hidden=512,
    heads=8, ffn=1280, layers=24, joined by commas; or that of the exported file, 90MB@q8_0."""
    interleaves: Annotated[int, Field(ge=1)] = 20
    """With adapt and uniform: how many times the model is pruned and trained."""
    horizon: Annotated[float, Field(gt=0, le=1)] | None = None
    """With efficientllm: fraction of the tokens over which events are evenly spread, from the first one on (0.03 if
    neither horizon nor ratio is set). With sheared: fraction over which masks are learned (0.2 if not set)."""
    ratio: str | None = None
    """Instead of horizon: pruning steps per gradient steps, from "4:1" to "1:9" and beyond."""
    warmup_steps: Annotated[int, Field(ge=0)] | None = None
    """Gradient steps before the first event. Not set: until the learning rate has warmed up, with adapt and uniform
    none."""
    smoothing: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Factor of the running average of saliencies over steps; 0 uses the current step alone. Not set: 0, with the group
    metric 1 - 1 / the steps before the first event."""
    fisher: Literal["step", "adam"] = "step"
    """Second-order term of taylor: the step's own squared gradient, or Adam's second moment."""
    compact_threshold: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Rebuild the model at smaller shapes when this fraction of it is pruned; 1 waits until the end."""
    compact_multiple: Annotated[int, Field(ge=1)] = 64
    """Sizes of rebuilt models, before the last one, are multiples of this."""
    compact_wait: Annotated[int, Field(ge=0)] = 50
    """With horizon and adapt: no rebuild when the last event is fewer steps away than this."""
    milestones: list[str] = Field(default_factory=list)
    """Sizes on the way, such as "120M": a loadable model is saved as each is passed."""

    @property
    def effective_selection(self) -> Selection:
        """The selection in use: what measured best, except for a shape, which only coupled groups reach."""
        return self.selection or ("coupled" if "=" in self.target else "global")

    @property
    def effective_metric(self) -> str:
        """The metric in use: what measured best where none is set."""
        return self.metric or ("group" if self.method == "efficientllm" else super().effective_metric)

    @property
    def num_stages(self) -> int:
        """Stages of methods that prune and train in turns; those that prune once do so at the start."""
        return self.interleaves if self.method in METHODS_OF["interleaves"] else 1

    def effective_smoothing(self, steps_before: int) -> float:
        """The factor in use: a group's derivative is noisy in one step, so it is averaged over those before events."""
        if self.smoothing is not None:
            return self.smoothing
        return round(1 - 1 / steps_before, 3) if self.effective_metric == "group" and steps_before > 1 else 0.0

    @property
    def effective_horizon(self) -> float | None:
        """The horizon in use; None when a ratio or stages decide."""
        if self.ratio is not None or self.keeps_hidden_size:
            return None
        if self.horizon is None:
            return MASK_PHASE if self.method == "sheared" else DEFAULT_HORIZON
        return self.horizon

    @property
    def steps_ratio(self) -> tuple[int, int] | None:
        """(pruning steps, gradient steps) of one iteration, from ``ratio``."""
        if self.ratio is None:
            return None
        match = re.fullmatch(r"\s*([1-9][0-9]*)\s*:\s*([1-9][0-9]*)\s*", self.ratio)
        if match is None:
            raise ValueError(f'ratio: {self.ratio!r} is not pruning steps : gradient steps, such as "4:1" or "1:9"')
        return int(match[1]), int(match[2])

    @model_validator(mode="after")
    def _round_for_file(self) -> PretrainPruneConfig:
        try:
            if (multiple := self.multiple_for(self.target, "target")) != self.round_to:
                self.round_to = multiple
        except UserError as error:
            raise ValueError(str(error)) from None
        return self

    @model_validator(mode="after")
    def _check_timing(self) -> PretrainPruneConfig:
        if self.enabled and not METHODS[self.method].in_training:
            raise ValueError(
                f"method: {self.method} prunes before training: run dwindle prune --method {self.method}, then train "
                "its result with prune.enabled = false"
            )
        for name in ("ratio", "milestones") if self.method == "sheared" else ():
            if getattr(self, name):
                raise ValueError(f"{name}: sheared removes everything after its mask phase (horizon): remove it")
        for name in ("horizon", "ratio") if self.keeps_hidden_size else ():
            if getattr(self, name) is not None:
                when = (
                    "in prune.interleaves stages" if self.method in METHODS_OF["interleaves"] else "once, at the start"
                )
                raise ValueError(f"{name}: method {self.method} prunes {when}: remove it")
        if self.horizon is not None and self.ratio is not None:
            raise ValueError("horizon: give either horizon or ratio, not both (…=none unsets one)")
        _ = self.steps_ratio
        return self


class PostTrainingConfig(PruneConfig):
    """How a model is calibrated and pruned without training."""

    rounds: Annotated[int, Field(ge=1)] | None = None
    """How often groups are rescored on the way to the target. Not set: once, with adapt 50 times (wanda-sp scores
    every layer once, flap all at once)."""
    sequences: Annotated[int, Field(ge=1)] | None = None
    """Calibration sequences. Not set: 64, with adapt and uniform 512."""
    seq_len: Annotated[int, Field(ge=2)] | None = None
    """Tokens per calibration sequence. Not set: 256, with adapt and uniform 64."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of the calibration sample and the random metric."""

    @model_validator(mode="after")
    def _check_trains(self) -> PostTrainingConfig:
        if not METHODS[self.method].without_training:
            raise ValueError(f"method: {self.method} prunes while it trains: set it as prune.method of a recipe")
        return self

    def record(self) -> dict[str, Any]:
        sizes = {"sequences": self.num_sequences, "seq_len": self.num_tokens_per_sequence}
        return super().record() | {"rounds": self.num_rounds} | sizes

    @property
    def num_rounds(self) -> int:
        return self.rounds or (50 if self.method == "adapt" else 1)

    @property
    def num_sequences(self) -> int:
        return self.sequences or (512 if self.method in ("adapt", "uniform") else 64)

    @property
    def num_tokens_per_sequence(self) -> int:
        return self.seq_len or (64 if self.method in ("adapt", "uniform") else 256)
