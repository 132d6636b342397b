"""The settings that our measurements recommend (docs/results.md): the one table that ``dwindle new`` reads.

Change a value here and every new recipe has it. What depends on the amount of text is scaled by ``run.new``: the
figures below were measured with SmolLM2-135M and 16M tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard, get_args

Goal = Literal["quality", "speed", "stock"]
GOALS: tuple[Goal, ...] = get_args(Goal)


def is_goal(text: str) -> TypeGuard[Goal]:
    return text in GOALS


@dataclass(frozen=True, slots=True)
class Setting:
    """A value of a recipe, and why; the reason becomes the comment beside it."""

    value: Any
    why: str = ""


Settings = Mapping[str, Setting]

TOKENS = 16_000_000
"""Training tokens at most, unless the user says otherwise: what the tables were measured with."""
PASSES = 4
"""Times that a text is read at most: up to here, repeated text is almost as good as new (Muennighoff et al. 2023)."""
LEAST_STEPS = 200
"""With little text, steps become smaller rather than fewer than this."""
HIDDEN = 576
"""Width of the model that the learning rates were measured with: wider ones take less, narrower ones more."""
SEQ_LEN = 1024
TOKENS_PER_STEP = 16384
_RATE = "by the size of a step and the width of the model"

TEACHER: Settings = {"distill.weight": Setting(0.75, "share of the teacher, the untouched source, in the objective")}
HORIZON: Settings = {"prune.horizon": Setting(0.03, "all pruning in 3 % of the steps, once the rate has warmed up")}

EQUAL_LAYERS: Settings = {
    "training.optimizer": Setting("adamw"),
    "training.lr": Setting(1e-3, _RATE),
    "prune.selection": Setting("coupled", "the same group from every layer"),
    "prune.metric": Setting("taylor"),
    "prune.second_order": Setting(True, "repairs the kept weights at each event"),
}

RECOMMENDED: Mapping[Goal, Settings] = {
    "quality": {
        "training.optimizer": Setting("muon", "0.03 nats better than AdamW at 50 %"),
        "training.lr": Setting(1.5e-3, _RATE),
        "prune.selection": Setting("global", "the least salient group of any layer: layers get sizes of their own"),
        "prune.metric": Setting("group", "squared derivative of the loss by a mask on the group"),
        **HORIZON,
        **TEACHER,
    },
    "speed": {
        **EQUAL_LAYERS,
        "prune.round_to": Setting(
            64, "widths that matrix products are fast with: decoding 1.6 instead of 1.4 times as fast"
        ),
        **HORIZON,
        **TEACHER,
    },
    "stock": {**EQUAL_LAYERS, **HORIZON, **TEACHER},
}
"""quality: the lowest loss at a size (layers differ). speed: equal layers of round widths. stock: equal layers."""

CORRECTION: Settings = {
    "prune.enabled": Setting("false"),
    "distill.weight": Setting(0),
    "training.tokens": Setting("1M"),
    "training.optimizer": Setting("adamw"),
    "training.lr": Setting(3e-4, _RATE),
}
"""Teacher correction: the source is trained on the text like this, then pruned with the tokens that are left."""
CORRECTED_FROM = 8_000_000
"""With fewer tokens in all it was not measured, or (6M) gave nothing."""

TUNING: Settings = {
    "training.optimizer": Setting("adamw"),
    "training.lr": Setting(3e-4, _RATE),
}
"""For ``dwindle tune``; the rate is for full steps of 16k tokens."""
TUNING_PASSES = 3
"""Times that conversations are read."""
TUNING_STEPS = 100
"""With few conversations, steps become smaller rather than fewer than this."""

MEANING: Mapping[Goal, str] = {
    "quality": "the lowest loss; layers differ in size, so transformers needs trust_remote_code=True",
    "speed": "equal layers with round widths, which run fastest",
    "stock": "equal layers: a plain model of its family, which every tool loads",
}
