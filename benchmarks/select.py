"""How long each method takes to choose its groups, at the size of real models and without weights.

    python -m benchmarks.select --shape llama-7b --to 5B --rows coupled,global,adapt --out OUT

Saliencies are random. Times are CPU seconds of the choice and of the ledger's lines. The digest is of those lines, so
that two commits can be compared.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import resource
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import LlamaConfig

from benchmarks.shapes import SHAPES
from dwindle.anatomy.anatomy import Anatomy
from dwindle.anatomy.structure import Structure
from dwindle.commands.main import run_command
from dwindle.core.errors import UserError
from dwindle.core.jsonl import json_line
from dwindle.pruning.config import PostTrainingConfig
from dwindle.pruning.layouts import final_count
from dwindle.pruning.ledger import prune_event
from dwindle.pruning.metrics import metric_named
from dwindle.pruning.pacing import Rounds
from dwindle.pruning.saliency import ElementScores, Scores
from dwindle.pruning.strategies import make_strategy, settled
from dwindle.pruning.strategies.base import GroupScores
from dwindle.pruning.target import Target, parse_target

ROWS: dict[str, dict[str, Any]] = {
    "coupled": {"selection": "coupled"},
    "coupled-sums": {"selection": "coupled", "metric": "group"},
    "coupled-rounded": {"selection": "coupled", "metric": "group", "round_to": 32},
    "coupled-layers": {"selection": "coupled", "metric": "group", "groups": ["attn", "ffn", "stem", "layer"]},
    "global": {"selection": "global"},
    "global-saved": {"selection": "global", "compare": "saved"},
    "global-kept-hidden": {"selection": "global", "groups": ["attn", "ffn"]},
    "global-ffn": {"selection": "global", "groups": ["ffn"]},
    "global-cluster": {"selection": "global", "attention": "cluster"},
    "global-rounded": {"selection": "global", "round_to": 32},
    "global-layers": {"selection": "global", "groups": ["attn", "ffn", "stem", "layer"]},
    "adapt": {"method": "adapt", "rounds": 10},
    "uniform": {"method": "uniform"},
    "wanda-sp": {"method": "wanda-sp"},
    "flap": {"method": "flap"},
    "llm-pruner": {"method": "llm-pruner"},
    "minitron": {"method": "minitron"},
    "shortgpt": {"method": "shortgpt"},
}
"""Settings of each row. Only ``coupled`` needs memory, that of all ``down`` projections in float32, as when pruning."""


@dataclass(frozen=True, slots=True)
class SelectRow:
    """One line of the table."""

    name: str
    groups: int
    parameters: int
    choose_s: float
    ledger_s: float
    peak_gb: float
    digest: str


def measure_selection(shape: str, to: str, name: str) -> SelectRow:
    """Choose all groups of one row, round after round."""
    anatomy = Anatomy.of_config(LlamaConfig(**SHAPES[shape]))
    target = parse_target(to, anatomy)
    config = settled(PostTrainingConfig(**ROWS[name]), anatomy, target)
    lines, left, choose_s, ledger_s, num_groups = hashlib.sha256(), anatomy.source, 0.0, 0.0, 0
    for number, rest, choices, seconds in _rounds(anatomy, target, config, name):
        started = time.process_time()
        for line in map(json_line, [prune_event(choice, step=number, tokens=0) for choice in choices]):
            lines.update(line.encode())
        ledger_s += time.process_time() - started
        choose_s, num_groups, left = choose_s + seconds, num_groups + len(choices), rest
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return SelectRow(name, num_groups, anatomy.count(left).total, choose_s, ledger_s, peak, lines.hexdigest()[:12])


def _rounds(
    anatomy: Anatomy, target: Target, config: PostTrainingConfig, name: str
) -> Iterator[tuple[int, Structure, list[Any], float]]:
    """(round, what is left, choices, seconds) of every round; making random scores is not counted."""
    started = time.process_time()
    strategy: Any = make_strategy(anatomy, target, config)
    seconds = time.process_time() - started
    alive, num_events = anatomy.source, 0
    pacing = Rounds(anatomy.count(alive).total, final_count(anatomy, target), config.num_rounds)
    if hasattr(strategy, "_watch"):
        strategy._watch = _Importance(anatomy.num_layers)
    for number in range(1, strategy.num_rounds + 1):
        scores = elements(anatomy) if name == "coupled" else sums(anatomy, alive, number, config)
        started = time.process_time()
        choices = list(strategy.choose(scores, alive, pacing, number, num_events))
        alive = choices[-1].rest if choices else alive
        seconds += time.process_time() - started
        num_events += len(choices)
        yield number, alive, choices, seconds
        seconds = 0.0


class _Importance:
    """Random layer importances, in place of those measured on a model."""

    def __init__(self, num_layers: int) -> None:
        self._values = (-torch.rand(num_layers, generator=torch.Generator().manual_seed(1))).tolist()

    def close(self) -> list[float]:
        return list(self._values)

    def detach(self) -> None: ...


def sums(anatomy: Anatomy, alive: Structure, seed: int, config: PostTrainingConfig) -> Scores:
    """Random sums over groups, as those of a matrix of random elements; infinite for what is pruned."""
    generator, source = torch.Generator().manual_seed(seed), anatomy.source

    def draw(count: int, elements: int) -> Tensor:
        noise = torch.randn(count, generator=generator, dtype=torch.float64)
        return elements * torch.exp(0.3 * noise)

    hidden, width = len(source.hidden), anatomy.head_dim
    heads = [draw(len(la.query_heads), width * hidden) for la in source.layers]
    channels = [draw(len(la.ffn), hidden) for la in source.layers]
    stem = draw(hidden, anatomy.num_output_columns(source))
    scores = Scores(source, heads, channels, stem)
    for number, (full, kept) in enumerate(zip(source.layers, alive.layers, strict=True)):
        gone = [(heads, full.query_heads, kept.query_heads), (channels, full.ffn, kept.ffn)]
        for values, before, after in gone:
            lost = torch.isin(torch.tensor(before), torch.tensor(after, dtype=torch.long), invert=True)
            values[number].masked_fill_(lost, float("inf"))
    if "layer" in config.effective_groups:
        both = [torch.stack([a.sum(), b.sum()]) for a, b in zip(heads, channels, strict=True)]
        scores.blocks = [torch.cat([pair, pair.sum()[None]]) for pair in both]
    return scores


class _Drawn(Mapping[str, Tensor]):
    """The output projections of a model, drawn when they are read."""

    def __init__(self, anatomy: Anatomy) -> None:
        self._shapes = {row.name: row.full_shape for _, row in anatomy.outputs}

    def __getitem__(self, name: str) -> Tensor:
        generator = torch.Generator().manual_seed(list(self._shapes).index(name))
        weight = torch.randn(self._shapes[name], generator=generator)
        return weight * torch.exp(0.2 * torch.randn(weight.shape[1], generator=generator))

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def elements(anatomy: Anatomy) -> GroupScores:
    """Random element scores, from which removals are subtracted."""
    source = anatomy.source
    flags = {
        "attn": [torch.zeros(len(la.query_heads), dtype=torch.bool) for la in source.layers],
        "ffn": [torch.zeros(len(la.ffn), dtype=torch.bool) for la in source.layers],
        "stem": [torch.zeros(len(source.hidden), dtype=torch.bool)],
    }
    model: Any = SimpleNamespace(
        anatomy=anatomy, physical=source, outputs=anatomy.outputs, pruned=flags, parameters=_Drawn(anatomy)
    )
    return ElementScores(model, {}, {}, metric_named("magnitude"))


def render(rows: list[SelectRow]) -> Table:
    table = Table()
    for column in ("row", "groups", "parameters", "choose", "ledger lines", "peak memory", "digest"):
        table.add_column(column, justify="left" if column in ("row", "digest") else "right")
    for row in rows:
        times = (f"{row.choose_s:.2f} s", f"{row.ledger_s:.2f} s", f"{row.peak_gb:.1f} GB")
        table.add_row(row.name, f"{row.groups:,}", f"{row.parameters:,}", *times, row.digest)
    return table


def main(arguments: list[str] | None = None, show: Callable[[Any], None] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", choices=SHAPES, default="llama-7b")
    parser.add_argument("--to", default="5B", help="target, as in dwindle prune --to")
    parser.add_argument("--rows", default=",".join(ROWS), help="which rows, in which order")
    parser.add_argument("--out", type=Path, help="append the rows as JSON lines to this file")
    given = parser.parse_args(arguments)
    show, found = show or Console(width=120).print, list[SelectRow]()
    for name in given.rows.split(","):
        if name not in ROWS:
            raise UserError(f"--rows {name}: choose among {', '.join(ROWS)}")
        found.append(measure_selection(given.shape, given.to, name))
        if given.out is not None:
            with given.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(found[-1])) + "\n")
    show(render(found))


if __name__ == "__main__":
    run_command(main)
