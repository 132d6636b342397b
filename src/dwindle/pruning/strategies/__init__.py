"""Which groups are removed next: coupled groups, the global mixture, sizes of layers, and other papers' methods."""

from __future__ import annotations

from typing import TypeVar

from dwindle.anatomy.anatomy import Anatomy
from dwindle.core.errors import UserError
from dwindle.pruning.config import PruneConfig
from dwindle.pruning.layouts import widths_differ
from dwindle.pruning.methods import MethodName
from dwindle.pruning.metrics import metric_named
from dwindle.pruning.strategies.base import Strategy, heads_differ
from dwindle.pruning.strategies.coupled import CoupledStrategy
from dwindle.pruning.strategies.file_size import FileStrategy
from dwindle.pruning.strategies.global_mixture import GlobalStrategy
from dwindle.pruning.strategies.layerwise import AdaptStrategy, UniformStrategy
from dwindle.pruning.strategies.peers import FlapStrategy, LlmPrunerStrategy, MinitronStrategy, WandaSpStrategy
from dwindle.pruning.strategies.sheared import ShearedStrategy
from dwindle.pruning.strategies.shortgpt import ShortGptStrategy
from dwindle.pruning.target import Target

_Config = TypeVar("_Config", bound=PruneConfig)

_STRATEGIES: dict[MethodName, type[Strategy]] = {
    "efficientllm": CoupledStrategy,
    "adapt": AdaptStrategy,
    "uniform": UniformStrategy,
    "wanda-sp": WandaSpStrategy,
    "flap": FlapStrategy,
    "llm-pruner": LlmPrunerStrategy,
    "minitron": MinitronStrategy,
    "sheared": ShearedStrategy,
    "shortgpt": ShortGptStrategy,
}


def is_shallower(target: Target, anatomy: Anatomy) -> bool:
    """Whether a target names fewer layers than the source has."""
    return target.shape is not None and target.shape.layers < len(anatomy.source.places)


def settled(config: _Config, anatomy: Anatomy, target: Target) -> _Config:
    """The configuration with the groups that this family has; a target that names layers makes them prunable.

    Without a set selection it is global where the layers' heads differ, because coupled groups cannot remove those, or
    their FFN widths, if these are to be multiples.
    """
    if is_shallower(target, anatomy):
        config = config.with_layers()
    config = config.for_family(anatomy.family)
    if config.method == "efficientllm" and config.selection is None and target.shape is None:
        heads = "attn" in config.effective_groups and config.attention == "regular" and heads_differ(anatomy)
        if heads or ("ffn" in config.effective_groups and widths_differ(anatomy.source, config.round_to)):
            config = config.model_copy(update={"selection": "global"})
    if config.has_own_score:
        return config
    scores_inputs = metric_named(config.effective_metric).curvature is not None
    if "layer" in config.effective_groups and scores_inputs and any(kind == "whole" for kind, _ in anatomy.outputs):
        raise UserError(
            f"metric {config.effective_metric}: does not score the blocks that stand in the place of attention in this "
            "family: choose taylor or group, or leave layer out of the groups"
        )
    return config


def make_strategy(anatomy: Anatomy, target: Target, config: PruneConfig) -> Strategy:
    """The strategy of a configuration; raises if the target is not reachable."""
    config = settled(config, anatomy, target)
    if target.file is not None:
        return FileStrategy(anatomy, target, config, make_strategy)
    if config.method == "efficientllm" and config.effective_selection == "global":
        return GlobalStrategy(anatomy, target, config)
    return _STRATEGIES[config.method](anatomy, target, config)
