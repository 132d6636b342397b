"""Pruning without training: calibrate, choose, remove, in one round or in several with new saliencies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

from torch import Tensor

from dwindle.anatomy.anatomy import Anatomy
from dwindle.core.progress import Bar
from dwindle.pruning.calibration import Calibration, calibrate
from dwindle.pruning.config import PostTrainingConfig
from dwindle.pruning.event_bounds import check_rounds
from dwindle.pruning.layouts import final_count
from dwindle.pruning.ledger import Event, prune_event, source_event
from dwindle.pruning.metrics import Metric, metric_named
from dwindle.pruning.pacing import Rounds
from dwindle.pruning.rotation import check_rotatable, sliced_size
from dwindle.pruning.saliency import ElementScores, Once, score_model
from dwindle.pruning.second_order import repair
from dwindle.pruning.strategies import make_strategy, settled
from dwindle.pruning.strategies.base import Choice, GroupScores, Strategy
from dwindle.pruning.surgery import Prunable
from dwindle.pruning.target import Target

FEW_ROUNDS = 50
"""Up to here the number of rounds is not compared with the number of events, which takes seconds for large models."""
_COMPACT_SHARE = 0.1
"""Pruned fraction at which a strategy of many rounds has the model rebuilt, so that later rounds are faster."""


def check_prunable(anatomy: Anatomy, target: Target, config: PostTrainingConfig) -> None:
    """Raise for impossible settings and targets before any weights are read."""
    if config.method == "slicegpt":
        check_rotatable(anatomy)
        sliced_size(anatomy, target, config)
        return
    if not config.has_own_score:
        metric_named(config.effective_metric)
    strategy = make_strategy(anatomy, target, config)
    if config.num_rounds > FEW_ROUNDS:
        check_rounds(config.num_rounds, strategy.event_bounds(_pacing(anatomy, target, config)), FEW_ROUNDS)


def needs_text(config: PostTrainingConfig) -> bool:
    """Whether there is anything to calibrate."""
    if config.has_own_score or config.second_order or config.method == "adapt":
        return True
    return bool(metric_named(config.effective_metric).needs)


def prune_in_rounds(
    prunable: Prunable, target: Target, config: PostTrainingConfig, windows: Tensor | None, source: str
) -> list[Event]:
    """Prune the model in place; the ledger of what was removed."""
    anatomy = prunable.anatomy
    config = settled(config, anatomy, target)
    strategy, pacing = make_strategy(anatomy, target, config), _pacing(anatomy, target, config)
    events, num_events = [source_event(source, anatomy, config.record())], 0
    passes, num_rounds = 1 if windows is None else len(windows), strategy.num_rounds
    with Bar("pruning", num_rounds * passes) if num_rounds > 1 else nullcontext() as bar:
        for number in range(1, num_rounds + 1):
            found, scores = _scored(strategy, prunable, windows, config, number, bar)
            chosen = strategy.choose(scores, prunable.alive, pacing, number, num_events)
            choices = list(_with_bar(chosen, prunable.num_parameters, pacing.end_count) if bar is None else chosen)
            if bar is not None and found.loss is None and not config.has_own_score:  # calibration advances the bar
                bar.advance(passes)
            if not choices:
                continue
            events += strategy.notes(number)
            events += [prune_event(choice, step=number, tokens=0) for choice in choices]
            num_events += len(choices)
            strategy.repair(prunable, choices[-1].rest)
            remove(prunable, choices, found, config)
            if strategy.compacts_between_rounds and prunable.pruned_share >= _COMPACT_SHARE:
                prunable.compact()
    return events


def _scored(
    strategy: Strategy,
    prunable: Prunable,
    windows: Tensor | None,
    config: PostTrainingConfig,
    number: int,
    bar: Bar | None,
) -> tuple[Calibration, GroupScores]:
    """What a round found on the text, and the saliencies that follow."""
    if config.has_own_score:
        assert windows is not None
        return Calibration(), strategy.measure(prunable, windows, bar)
    metric = metric_named(config.effective_metric, seed=config.seed * 1000 + number)
    if strategy.watches_layers:
        strategy.listen(prunable.model)
    found = calibrate(prunable, windows, metric, config, always=strategy.watches_layers, bar=bar)
    found.gradients = Once(found.gradients)  # all that follows are the scores
    if isinstance(found.fishers, dict):
        found.fishers = Once(found.fishers)
    return found, group_scores(strategy, prunable, found, metric)


def _with_bar(choices: Iterator[Choice], count: int, goal: int) -> Iterator[Choice]:
    """Progress in parameters: the number of groups is not known before they are chosen."""
    with Bar("selecting groups", max(count - goal, 1)) as bar:
        for choice in choices:
            bar.advance(count - choice.num_parameters)
            count = choice.num_parameters
            yield choice


def group_scores(strategy: Strategy, prunable: Prunable, found: Calibration, metric: Metric) -> GroupScores:
    """The saliencies of one calibration in the form that a strategy works with."""
    if metric.squares_sums:
        assert found.groups is not None
        return found.groups.copy()
    make = ElementScores if strategy.uses_elements else score_model
    blocks = "layer" in strategy.config.effective_groups
    return make(prunable, found.gradients, found.fishers, metric, blocks=blocks)


def remove(prunable: Prunable, choices: list[Choice], found: Calibration, config: PostTrainingConfig) -> None:
    """Zero the chosen groups; with ``second_order`` the remaining weights are updated first."""
    rest = choices[-1].rest
    if config.second_order:
        assert found.inputs is not None
        repair(prunable, rest, found.inputs, damping=config.damping)
    prunable.prune_to(rest)


def _pacing(anatomy: Anatomy, target: Target, config: PostTrainingConfig) -> Rounds:
    return Rounds(anatomy.count(anatomy.source).total, final_count(anatomy, target), config.num_rounds)
