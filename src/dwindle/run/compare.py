"""Every metric at every size, on the same text: without training, and with the same number of training tokens.

The table of the paper's author feedback ("LLM-Pruner, SparseGPT and Wanda metrics") in miniature. All metrics are
scored from one calibration, so that nothing else differs.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import product
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Group
from rich.table import Table
from torch import Tensor

from dwindle.anatomy.anatomy import Anatomy
from dwindle.core.config import takes
from dwindle.core.drawing import pyplot_settings, write_figure
from dwindle.core.errors import UserError
from dwindle.core.figure import Figure, Panel, Series
from dwindle.core.files import atomic_directory, refuse_existing
from dwindle.core.json_safe import finite
from dwindle.core.names import public_name
from dwindle.core.notebook import Shown
from dwindle.core.progress import Bar
from dwindle.core.sizes import format_count, parse_count
from dwindle.core.terminal import titled
from dwindle.data.config import DataConfig, check_inputs
from dwindle.data.pydoc_text import DEFAULT_TEXT
from dwindle.data.text_windows import calibration_windows, validation_windows
from dwindle.evaluation.evaluate import EvalData, evaluate_model, load_data
from dwindle.pruning.calibration import Calibration, calibrate
from dwindle.pruning.config import PretrainPruneConfig, PruneConfig
from dwindle.pruning.curvature import LayerCurvature
from dwindle.pruning.metrics import Metric, metric_named
from dwindle.pruning.pacing import Rounds
from dwindle.pruning.rounds import group_scores
from dwindle.pruning.second_order import repair
from dwindle.pruning.strategies import is_shallower, make_strategy
from dwindle.pruning.surgery import Prunable
from dwindle.pruning.target import Sizes, Target, parse_target, sizes_of
from dwindle.recipe.recipe import Recipe
from dwindle.run.config import NOT_COMPARED, CompareConfig
from dwindle.run.pretrain import pretrain
from dwindle.sources.config import ModelConfig
from dwindle.sources.loading import Loaded, chosen_device, load, load_config, needed_tokenizer
from dwindle.training.config import CheckpointConfig, DistillConfig, TrainingConfig
from dwindle.training.loss import evaluate_loss

FILE = "compare.json"
FORMAT = "dwindle-compare-1"
DEFAULT_METRICS = ("taylor", "obd", "wanda", "obc", "magnitude", "random")
DEFAULT_RATIOS = ("10%", "36%", "51%", "74%")


@dataclass(slots=True)
class Cell:
    """One metric at one size; losses in nats per token on the held-out text."""

    metric: str
    second_order: bool
    ratio: str
    removed: float
    """The fraction of all parameters that was removed."""
    parameters: int
    shape: Sizes
    loss: float
    """Without training."""
    trained_loss: float | None = None
    """Pruned to the same size while training."""
    tasks: dict[str, float] = field(default_factory=dict)
    """Accuracies without training."""
    trained_tasks: dict[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.metric} + second order" if self.second_order else self.metric


@dataclass(slots=True)
class Comparison(Shown):
    """All cells, and the untouched source beside them."""

    model: str
    parameters: int
    loss: float
    tasks: dict[str, float]
    calibration_tokens: int
    valid_tokens: int
    training_tokens: int
    seed: int
    cells: list[Cell]
    complete: bool = True
    """False where it was interrupted: the other cells are missing."""

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = finite({"format": FORMAT, **asdict(self)})
        return found

    def render(self) -> Group:
        """One row for each metric, one column for each size; with training, ``before → after``."""
        ratios = list(dict.fromkeys(cell.ratio for cell in self.cells))
        title = f"{self.model}: nats per token on held-out text; untouched {self.loss:.3f}"
        if self.training_tokens:
            title += f"; without training → with {format_count(self.training_tokens)} tokens"
        if self.tasks:
            title += f"; below it {_task_words(self.tasks)}, untouched {_average(self.tasks):.1%}"
        table = Table("removed")
        by_place = {(cell.name, cell.ratio): cell for cell in self.cells}
        for ratio in ratios:
            sizes = {cell.parameters for cell in self.cells if cell.ratio == ratio}
            table.add_column(f"{ratio}\n{format_count(max(sizes))} left", justify="right")
        for name in dict.fromkeys(cell.name for cell in self.cells):
            label = f"{name}\n  {_task_words(self.tasks)}" if self.tasks else name
            table.add_row(label, *(_text(by_place.get((name, ratio))) for ratio in ratios))
        return titled(title, table)


def _text(cell: Cell | None) -> str:
    if cell is None:
        return ""
    text = f"{cell.loss:.3f}"
    if cell.trained_loss is not None:
        text += f" → {cell.trained_loss:.3f}"
    if cell.tasks:
        text += f"\n{_average(cell.tasks):.1%}"
        text += f" → {_average(cell.trained_tasks):.1%}" if cell.trained_tasks else ""
    return text


def _average(tasks: dict[str, float]) -> float:
    return sum(tasks.values()) / len(tasks)


def _task_words(tasks: dict[str, float]) -> str:
    return next(iter(tasks)) if len(tasks) == 1 else f"mean of {len(tasks)} tasks"


@takes(CompareConfig, but=NOT_COMPARED)
def compare(
    source: str | PathLike[str],
    *,
    config: CompareConfig,
    metrics: Sequence[str] = DEFAULT_METRICS,
    to: Sequence[str] = DEFAULT_RATIOS,
    data: Sequence[str] = (),
    valid: Sequence[str] = (),
    tasks: Sequence[str] = (),
    task_data: Sequence[str] = (),
    task_limit: int | None = None,
    out: str | PathLike[str] | None = None,
    overwrite: bool = False,
    device: str = "auto",
) -> Comparison:
    """Prune with every metric to every size and measure; ``second_order`` adds a second row for each metric.

    ``to`` lists what is **removed**, as in the paper's table (``"10%"``, ``"10%nonemb"``), or sizes (``"100M"``).
    Without ``valid``, windows of the same text that were not calibrated on are held out; training needs ``valid``. An
    interrupted comparison keeps its finished cells in ``out``.
    """
    device, names = _checked(config, device, metrics)
    needs = frozenset().union(*(metric_named(name).needs for name in names))
    targets = _targets(source, to, config)
    data, valid = _texts(data, valid, config)
    if out is not None:
        _check_output(Path(out), overwrite, [source, *data, *valid])
    questions = load_data(tasks, task_data, limit=task_limit) if tasks else None
    if questions is not None and questions.texts:
        raise UserError(f"--tasks: {questions.texts[0].name} has no accuracy: name others; losses are those of --valid")
    loaded = load(source, device=device)
    needed_tokenizer(loaded.tokenizer, loaded.source)
    windows, held_out = _windows(loaded, data, valid, config)
    work = _Work(loaded, Prunable(loaded.model), config, device, held_out, questions, list(data), list(valid))
    layers = any(is_shallower(target, work.base.anatomy) for target in targets.values())
    found = calibrate(work.base, windows, Metric(_no_score, needs), config.with_layers() if layers else config)
    result = work.untouched(windows.numel())
    try:
        with Bar("comparing", len(names) * len(targets) * len(work.variants)) as bar:
            for name, (ratio, target) in product(names, targets.items()):
                for cell in work.cells(found, name, ratio, target):
                    result.cells.append(cell)
                    bar.advance()
    except KeyboardInterrupt:
        raise KeyboardInterrupt(*_keep_finished(result, out, overwrite)) from None
    if out is not None:
        write_comparison(result, Path(out), overwrite=overwrite)
    return result


def _checked(config: CompareConfig, device: str, metrics: Sequence[str]) -> tuple[str, list[str]]:
    """The device and the metrics in use; refuses what cannot be compared."""
    device = chosen_device(device)
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise UserError("device: cuda is not available on this machine: use cpu")
    if config.method != "efficientllm":
        raise UserError(f"method: {config.method} cannot be compared from one calibration: use efficientllm")
    names = list(dict.fromkeys(metrics))
    if not names:
        raise UserError("metrics: none given: name some, such as taylor,wanda,random")
    return device, names


def _keep_finished(result: Comparison, out: str | PathLike[str] | None, overwrite: bool) -> tuple[str, ...]:
    """Write the cells of an interrupted comparison; returns a note that says so."""
    result.complete = False
    if out is None or not result.cells:
        return ()
    write_comparison(result, Path(out), overwrite=overwrite)
    return (f"cells that are done and in {out}: {len(result.cells)}; start again with --overwrite",)


def removal_target(text: str) -> str:
    """``10%`` and ``0.1`` mean how much is removed; the result is ``--to`` of prune, which says how much is kept."""
    share = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*%\s*(nonemb)?\s*", text)
    plain = re.fullmatch(r"\s*(0?\.\d+)\s*", text)
    if share is None and plain is None:
        return text.strip()
    removed = float(share[1]) if share is not None else 100 * float(plain[1])  # type: ignore[index]
    if not 0 < removed < 100:
        raise UserError(f"--to {text.strip()}: is how much to remove, and must be between 0% and 100%")
    return f"{100 - removed:.10g}%{(share[2] or '') if share is not None else ''}"


def _targets(source: str | PathLike[str], to: Sequence[str], config: CompareConfig) -> dict[str, Target]:
    """All sizes, refused before anything is loaded if one cannot be reached."""
    if not to:
        raise UserError("--to: no size given: list what to remove, such as 10%,36%,51%,74%")
    anatomy = Anatomy.of_config(load_config(source))
    found = {text.strip(): parse_target(removal_target(text), anatomy) for text in to}
    for target in found.values():
        make_strategy(anatomy, target, config)
    return found


def _texts(data: Sequence[str], valid: Sequence[str], config: CompareConfig) -> tuple[Sequence[str], Sequence[str]]:
    if not data:
        data, valid = [f"{DEFAULT_TEXT}:train"], valid or [f"{DEFAULT_TEXT}:valid"]
    check_inputs(list(data), "--data")
    if valid:
        check_inputs(list(valid), "--valid")
    elif config.num_tokens:
        raise UserError("tokens: training on --data needs other text to measure on: name it with --valid")
    if config.num_tokens and config.num_tokens < parse_count(config.tokens_per_step, "tokens_per_step"):
        raise UserError(f"tokens {config.tokens}: is less than one step of {config.tokens_per_step}: give more")
    return data, valid


def _windows(loaded: Loaded, data: Sequence[str], valid: Sequence[str], config: CompareConfig) -> tuple[Tensor, Tensor]:
    """Text to calibrate on and text to measure on, never the same windows."""
    length, count = config.num_tokens_per_sequence, config.num_sequences
    held = 0 if valid else max(config.num_valid_tokens // length, 1)
    tokens = (count + held) * length
    sample = partial(calibration_windows, data, loaded.tokenizer, seed=config.seed, text_field=config.text_field)
    windows, _ = sample(num_sequences=count + held, seq_len=length)
    if valid:
        option, most = "--valid", config.num_valid_tokens
        return windows, validation_windows(
            valid, loaded.tokenizer, length, most, text_field=config.text_field, option=option
        )
    try:  # windows of a short text overlap; one as long as all of them together exists only if they do not
        sample(num_sequences=1, seq_len=tokens)
    except UserError:
        raise UserError(
            f"--data: fewer than {tokens} tokens: {count} sequences of {length} to calibrate on and {held} to measure "
            "on would overlap: give more text, other text with --valid, or smaller --sequences or --valid-tokens"
        ) from None
    return windows[:count], windows[count:]


@dataclass(slots=True)
class _Work:
    loaded: Loaded
    base: Prunable
    config: CompareConfig
    device: str
    held_out: Tensor
    questions: EvalData | None
    data: list[str]
    valid: list[str]

    def untouched(self, calibration_tokens: int) -> Comparison:
        loss, tasks = self.measure(self.base.model)
        return Comparison(
            model=self.loaded.source,
            parameters=self.base.num_parameters,
            loss=loss,
            tasks=tasks,
            calibration_tokens=calibration_tokens,
            valid_tokens=self.held_out.shape[0] * (self.held_out.shape[1] - 1),
            training_tokens=self.config.num_tokens,
            seed=self.config.seed,
            cells=[],
        )

    @property
    def variants(self) -> tuple[bool, ...]:
        """Without and with the second-order update."""
        return (False, True) if self.config.second_order else (False,)

    def cells(self, found: Calibration, name: str, ratio: str, target: Target) -> Iterator[Cell]:
        """The same groups are removed with and without the second-order update; random metrics restart their seed."""
        base, metric = self.base, metric_named(name, seed=self.config.seed * 1000 + 1)
        if metric.curvature is not None:
            assert found.inputs is not None
            found = replace(found, fishers=LayerCurvature(base, found.inputs, metric, self.config.damping))
        strategy, pacing = make_strategy(base.anatomy, target, self.config), Rounds(base.num_parameters, 0, 1)
        choices = list(strategy.choose(group_scores(strategy, base, found, metric), base.alive, pacing, 1, 0))
        keep = choices[-1].rest if choices else base.alive
        for second_order in self.variants:
            pruned = Prunable(deepcopy(base.model), base.anatomy)
            if second_order:
                assert found.inputs is not None
                repair(pruned, keep, found.inputs, damping=self.config.damping)
            pruned.prune_to(keep)
            loss, tasks = self.measure(pruned.compacted())
            cell = Cell(
                metric=name,
                second_order=second_order,
                ratio=ratio,
                removed=1 - pruned.num_parameters / base.num_parameters,
                parameters=pruned.num_parameters,
                shape=sizes_of(keep),
                loss=loss,
                tasks=tasks,
            )
            if self.config.num_tokens:
                cell.trained_loss, cell.trained_tasks = self.measure(self.trained(name, second_order, target))
            yield cell

    def measure(self, model: Any) -> tuple[float, dict[str, float]]:
        """(Validation loss, accuracies.)"""
        loss = evaluate_loss(model, self.held_out, batch=4)
        if self.questions is None:
            return loss, {}
        found = evaluate_model(model, self.loaded.tokenizer, self.questions, quiet=True)
        return loss, found.scores()

    def trained(self, metric: str, second_order: bool, target: Target) -> Any:
        """Pruning-aware pretraining from the source to the same target."""
        config, shape, size = self.config, target.shape, str(target.num_parameters)
        if shape is not None:
            size = ",".join(f"{key}={getattr(shape, key)}" for key in shape.changed(self.base.anatomy.source))
        shared: dict[str, Any] = {name: getattr(config, name) for name in PruneConfig.model_fields}
        shared |= {"metric": metric, "second_order": second_order}
        if config.method == "efficientllm":
            shared["selection"] = config.effective_selection  # as in the cells without training
        with tempfile.TemporaryDirectory(prefix="dwindle-compare-") as folder:
            recipe = Recipe(
                source=ModelConfig(model=self.loaded.source, device=self.device),  # type: ignore[arg-type]
                data=DataConfig(
                    train=self.data,
                    valid=self.valid,
                    text_field=config.text_field,
                    seq_len=config.num_tokens_per_sequence,
                    valid_tokens=max(config.num_valid_tokens, config.num_tokens_per_sequence),
                ),
                training=TrainingConfig(
                    tokens=config.tokens,
                    tokens_per_step=config.tokens_per_step,
                    optimizer="adamw",
                    lr=config.lr,
                    seed=config.seed,
                ),
                prune=PretrainPruneConfig(**shared, target=size),
                distill=DistillConfig(weight=0.0),
                checkpoint=CheckpointConfig(every=0),
            )
            result = pretrain(recipe, Path(folder) / "run")
            if result.model is None:
                raise KeyboardInterrupt
            return load(result.model, device=self.device).model


def _no_score(w_OI: Tensor, g_OI: Tensor, f_OI: Tensor) -> Tensor:
    raise AssertionError("collects for other metrics only")


def _check_output(out: Path, overwrite: bool, sources: Sequence[str | PathLike[str]]) -> None:
    refuse_existing(out, marker=FILE, overwrite=overwrite, sources=sources)
    with pyplot_settings():
        pass  # a missing matplotlib is reported before the work


def write_comparison(result: Comparison, out: Path, *, overwrite: bool) -> None:
    """``compare.json``, and the figure as PNG and SVG."""
    with atomic_directory(out, marker=FILE, overwrite=overwrite) as folder:
        (folder / FILE).write_text(json.dumps(result.to_json(), indent=1) + "\n", encoding="utf-8")
        write_figure(_figure(result), folder, dpi=150)


def _figure(result: Comparison) -> Figure:
    """Loss over what was removed, one line per metric, dashed with second order; with training a second panel."""
    kinds = {"loss": "without training"}
    if result.training_tokens:
        kinds["trained_loss"] = f"with {format_count(result.training_tokens)} tokens"
    metrics = list(dict.fromkeys(cell.metric for cell in result.cells))
    panels: list[Panel] = []
    for kind, title in kinds.items():
        series = [
            Series("source", "size", [0, 100 * max(c.removed for c in result.cells)], [result.loss] * 2, "target")
        ]
        for name in dict.fromkeys(cell.name for cell in result.cells):
            cells = sorted((c for c in result.cells if c.name == name), key=lambda c: c.removed)
            x: list[float | int] = [100 * cell.removed for cell in cells]
            y: list[float | int] = [getattr(cell, kind) for cell in cells]
            style: Literal["dashed", "dots"] = "dashed" if cells[0].second_order else "dots"
            series.append(Series(name, f"task{metrics.index(cells[0].metric)}", x, y, style))
        panels.append(Panel(f"{title}, nats per token on held-out text", "number", series, height=2, legend=not panels))
    title = public_name(result.model) + ("" if result.complete else " (interrupted)")
    return Figure("compare", title, "", "parameters removed", "percent", panels)
