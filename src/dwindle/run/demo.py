"""``dwindle demo``: prune SmolLM2-135M to 100M parameters in a few minutes, and compare before and after."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from torch import Tensor

from dwindle.anatomy.anatomy import Anatomy
from dwindle.core.files import folder_size
from dwindle.core.notebook import Shown
from dwindle.core.progress import track
from dwindle.core.run_directory import RunDirectory
from dwindle.core.sizes import format_bytes
from dwindle.core.terminal import right, titled
from dwindle.data.text_windows import validation_windows
from dwindle.evaluation.latency import measure_latency
from dwindle.export.huggingface import check_output, save_model
from dwindle.pruning.ledger import source_event
from dwindle.recipe.recipe import Recipe
from dwindle.run.pretrain import pretrain
from dwindle.run.prune import prune
from dwindle.sources.loading import Loaded, load
from dwindle.training.loss import evaluate_loss

PROMPT = "In Python, a function is"
"""On the topic of the training text, CPython's documentation."""


@dataclass(slots=True)
class DemoModel:
    """One model, a column of the table."""

    name: str
    parameters: int
    tokens_trained: int
    perplexity: float
    size_bytes: int
    sample: str
    ms_per_token: float = 0.0


@dataclass(slots=True)
class Demo(Shown):
    """The models compared, and the text that their perplexity is measured on."""

    columns: list[DemoModel] = field(default_factory=list)
    text: str = ""
    folder: str = ""

    def render(self) -> Group:
        """The table, then a sample of each model."""
        table = Table("", *right(*(column.name for column in self.columns)))
        source = self.columns[0]
        rows: dict[str, Callable[[DemoModel], str]] = {
            "parameters": lambda c: f"{c.parameters:,}",
            "tokens trained": lambda c: f"{c.tokens_trained:,}",
            "perplexity": lambda c: f"{c.perplexity:.2f}",
            "ms per token (CPU)": lambda c: f"{c.ms_per_token:.1f} ({c.ms_per_token / source.ms_per_token:.2f}×)",
            "size on disk": lambda c: f"{format_bytes(c.size_bytes)} ({c.size_bytes / source.size_bytes:.2f}×)",
        }
        for label, show in rows.items():
            table.add_row(label, *(show(column) for column in self.columns))
        samples = [Panel(column.sample, title=column.name, title_align="left") for column in self.columns]
        return Group(titled(f"perplexity on {self.text}; models in {self.folder}", table), *samples)


def run_demo(recipe: Recipe, folder: Path, *, sequences: int, overwrite: bool) -> Demo:
    """Compare the source with post-training pruning and pruning-aware pretraining to the recipe's target."""
    run = RunDirectory(folder / "run")
    for name in ("source", "post-training"):
        check_output(folder / name, overwrite=overwrite)
    run.check_free(overwrite=overwrite)
    data = recipe.data
    source = load(recipe.source.model)
    windows = validation_windows(data.valid, source.tokenizer, data.seq_len, recipe.num_validation_tokens)
    demo = Demo(text=f"{windows[:, 1:].numel():,} held-out tokens of {', '.join(data.valid)}", folder=str(folder))
    models: dict[str, Any] = {"source": source.model}

    _save_source(source, folder / "source", overwrite)
    demo.columns.append(_measure("source", source.model, source.tokenizer, windows, folder / "source", 0))

    once = folder / "post-training"
    pruned = prune(
        source,
        recipe.prune.target,
        out=once,
        data=data.train,
        sequences=sequences,
        seq_len=data.seq_len,
        seed=recipe.training.seed,
        measure=False,
        overwrite=overwrite,
    )
    models["post-training"] = pruned.model
    demo.columns.append(_measure("post-training", pruned.model, source.tokenizer, windows, once, 0))

    result = pretrain(recipe, run.path, overwrite=overwrite)
    if result.model is None:
        raise KeyboardInterrupt(f"continue the pruning-aware run with: {run.resume_command}")
    models["pruning-aware"] = load(result.model).model
    aware = _measure("pruning-aware", models["pruning-aware"], source.tokenizer, windows, result.model, result.tokens)
    demo.columns.append(aware)

    threads = torch.get_num_threads()
    timed = measure_latency(models, runtime="torch", threads=threads, prompt_tokens=32, new_tokens=24, repeats=3)
    for column in demo.columns:
        column.ms_per_token = timed.row(column.name).decode_ms.median
    return demo


def _save_source(source: Loaded, out: Path, overwrite: bool) -> None:
    """Write the source in the same format, so that sizes on disk are comparable."""
    anatomy = Anatomy.of(source.model)
    ledger = [source_event(source.source, anatomy, {})]
    save_model(
        source.model,
        source.tokenizer,
        out,
        structure=anatomy.source,
        source=source.source,
        ledger=ledger,
        overwrite=overwrite,
    )


def _measure(name: str, model: Any, tokenizer: Any, windows: Tensor, folder: Path, tokens: int) -> DemoModel:
    pieces = windows.split(4)  # type: ignore[no-untyped-call]
    total = sum(evaluate_loss(model, part) * len(part) for part in track(pieces, f"perplexity of {name}", len(pieces)))
    return DemoModel(
        name=name,
        parameters=sum(p.numel() for p in model.parameters()),
        tokens_trained=tokens,
        perplexity=float(torch.tensor(total / len(windows)).exp()),
        size_bytes=folder_size(folder),
        sample=_sample(model, tokenizer),
    )


@torch.no_grad()
def _sample(model: Any, tokenizer: Any) -> str:
    inputs = tokenizer(PROMPT, return_tensors="pt")
    generated = model.generate(**inputs, max_new_tokens=48, do_sample=False, repetition_penalty=1.2, pad_token_id=0)
    return str(tokenizer.decode(generated[0], skip_special_tokens=True))
