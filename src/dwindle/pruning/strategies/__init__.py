"""Which groups are removed next: coupled groups, the global mixture, sizes of layers, and other papers' methods."""

from __future__ import annotations

from dwindle.anatomy.anatomy import Anatomy
from dwindle.pruning.config import PruneConfig
from dwindle.pruning.methods import MethodName
from dwindle.pruning.strategies.base import Strategy
from dwindle.pruning.strategies.coupled import CoupledStrategy
from dwindle.pruning.strategies.global_mixture import GlobalStrategy
from dwindle.pruning.strategies.layerwise import AdaptStrategy, UniformStrategy
from dwindle.pruning.strategies.peers import FlapStrategy, LlmPrunerStrategy, MinitronStrategy, WandaSpStrategy
from dwindle.pruning.strategies.sheared import ShearedStrategy
from dwindle.pruning.target import Target

_STRATEGIES: dict[MethodName, type[Strategy]] = {
    "efficientllm": CoupledStrategy,
    "adapt": AdaptStrategy,
    "uniform": UniformStrategy,
    "wanda-sp": WandaSpStrategy,
    "flap": FlapStrategy,
    "llm-pruner": LlmPrunerStrategy,
    "minitron": MinitronStrategy,
    "sheared": ShearedStrategy,
}


def make_strategy(anatomy: Anatomy, target: Target, config: PruneConfig) -> Strategy:
    """The strategy of a configuration; raises if the target is not reachable."""
    config = config.for_family(anatomy.family)
    if config.method == "efficientllm" and config.effective_selection == "global":
        return GlobalStrategy(anatomy, target, config)
    return _STRATEGIES[config.method](anatomy, target, config)
