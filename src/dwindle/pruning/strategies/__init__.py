"""Which groups are removed next: coupled groups, the global mixture, layer-adaptive or uniform sizes."""

from __future__ import annotations

from dwindle.anatomy.anatomy import Anatomy
from dwindle.pruning.config import PruneConfig
from dwindle.pruning.strategies.base import Strategy
from dwindle.pruning.strategies.coupled import CoupledStrategy
from dwindle.pruning.strategies.file_size import FileStrategy
from dwindle.pruning.strategies.global_mixture import GlobalStrategy
from dwindle.pruning.strategies.layerwise import AdaptStrategy, UniformStrategy
from dwindle.pruning.target import Target


def make_strategy(anatomy: Anatomy, target: Target, config: PruneConfig) -> Strategy:
    """The strategy of a configuration; raises if the target is not reachable."""
    config = config.for_family(anatomy.family)
    if target.file is not None:
        return FileStrategy(anatomy, target, config, make_strategy)
    if config.method == "efficientllm":
        chosen: type[Strategy] = GlobalStrategy if config.effective_selection == "global" else CoupledStrategy
    else:
        chosen = AdaptStrategy if config.method == "adapt" else UniformStrategy
    return chosen(anatomy, target, config)
