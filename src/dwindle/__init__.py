"""dwindle: make a pretrained language model smaller while it keeps training.

import dwindle
model, tokenizer = dwindle.load("smollm2-135m")
result = dwindle.prune("smollm2-135m", to="100M", out="smaller")
dwindle.inspect("smaller")
at_120m = dwindle.replay("smollm2-135m", "smaller/ledger.jsonl", at="120M")
dwindle.pretrain(dwindle.load_recipe("demo"), "runs/demo")
dwindle.resume("runs/demo")
dwindle.pretrain(dwindle.tuning_recipe("runs/demo", ["answers.jsonl"], texts=["books.txt"]), "runs/tuned")
dwindle.trim("smollm2-135m", "32k", out="fewer-tokens")
dwindle.evaluate("smaller", ["piqa", "arc_easy"], data=["sets"])
dwindle.quantize("smaller", scheme="w8a8", out="smaller-w8a8")
dwindle.export_model("smaller", "gguf", "smaller.gguf")
dwindle.generate("smaller.gguf", "Once upon a time")
dwindle.generate_answers("smaller", "prompts.jsonl", "answers.jsonl", tokens=256)
dwindle.win_rate("answers.jsonl", "others.jsonl", judge="judge-model")
dwindle.register_metric("mine", lambda w, g, f: w.abs())
dwindle.register_family("family.toml")
dwindle.check_family("my-model")

``dwindle.export`` is a package, so its function is ``export_model`` here.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dwindle import export
    from dwindle.anatomy.families import register_family
    from dwindle.core.errors import UserError
    from dwindle.evaluation.evaluate import evaluate
    from dwindle.export.exporting import export as export_model
    from dwindle.export.own_loop import save
    from dwindle.export.publishing import push
    from dwindle.pruning.metrics import register_metric
    from dwindle.pruning.pruner import Pruner
    from dwindle.quantization.quantize import quantize
    from dwindle.recipe.recipe import load_recipe
    from dwindle.run.answers import generate_answers
    from dwindle.run.family_check import check_family
    from dwindle.run.generation import generate
    from dwindle.run.inspection import inspect
    from dwindle.run.new import new_recipe
    from dwindle.run.pretrain import pretrain, resume
    from dwindle.run.prune import prune, replay
    from dwindle.run.trim import trim
    from dwindle.run.tune import tuning_recipe
    from dwindle.run.winrate import win_rate
    from dwindle.sources.loading import load

__version__ = "0.1.0"
"""The one place of the version; pyproject.toml, cards and ``dwindle --version`` read it."""

__all__ = [
    "Pruner",
    "UserError",
    "check_family",
    "evaluate",
    "export",
    "export_model",
    "generate",
    "generate_answers",
    "inspect",
    "load",
    "load_recipe",
    "new_recipe",
    "pretrain",
    "prune",
    "push",
    "quantize",
    "register_family",
    "register_metric",
    "replay",
    "resume",
    "save",
    "trim",
    "tuning_recipe",
    "win_rate",
]

_HOMES = {
    "Pruner": "dwindle.pruning.pruner:Pruner",
    "UserError": "dwindle.core.errors:UserError",
    "check_family": "dwindle.run.family_check:check_family",
    "evaluate": "dwindle.evaluation.evaluate:evaluate",
    "export_model": "dwindle.export.exporting:export",
    "generate": "dwindle.run.generation:generate",
    "generate_answers": "dwindle.run.answers:generate_answers",
    "inspect": "dwindle.run.inspection:inspect",
    "load": "dwindle.sources.loading:load",
    "load_recipe": "dwindle.recipe.recipe:load_recipe",
    "new_recipe": "dwindle.run.new:new_recipe",
    "pretrain": "dwindle.run.pretrain:pretrain",
    "prune": "dwindle.run.prune:prune",
    "push": "dwindle.export.publishing:push",
    "quantize": "dwindle.quantization.quantize:quantize",
    "register_family": "dwindle.anatomy.families:register_family",
    "register_metric": "dwindle.pruning.metrics:register_metric",
    "replay": "dwindle.run.prune:replay",
    "resume": "dwindle.run.pretrain:resume",
    "save": "dwindle.export.own_loop:save",
    "trim": "dwindle.run.trim:trim",
    "tuning_recipe": "dwindle.run.tune:tuning_recipe",
    "win_rate": "dwindle.run.winrate:win_rate",
}


def __getattr__(name: str) -> Any:
    """Imports torch only when something that needs it is used, so that ``dwindle --help`` is instant."""
    if name in _HOMES:
        from dwindle.core.errors import speaks_python

        module, _, function = _HOMES[name].partition(":")
        found = getattr(import_module(module), function)
        globals()[name] = found if isinstance(found, type) else speaks_python(found)
        return globals()[name]
    if name == "export":  # a package, so that its function cannot bear the same name here
        return import_module("dwindle.export")
    raise AttributeError(f"module 'dwindle' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Names that are imported on first use are listed too."""
    return sorted({*globals(), *__all__})
