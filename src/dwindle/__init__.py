"""dwindle: make a pretrained language model smaller while it keeps training.

import dwindle
model, tokenizer = dwindle.load("smollm2-135m")
result = dwindle.prune("smollm2-135m", to="100M", out="smaller")
dwindle.inspect("smaller")
at_120m = dwindle.replay("smollm2-135m", "smaller/ledger.jsonl", at="120M")
dwindle.evaluate("smaller", ["piqa", "arc_easy"], data=["sets"])
dwindle.quantize("smaller", "w8a8", out="smaller-w8a8")
dwindle.export.export("smaller", "gguf", "smaller.gguf")
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dwindle import export
    from dwindle.errors import UserError
    from dwindle.evaluation.evaluate import evaluate
    from dwindle.inspection import inspect
    from dwindle.posttraining import prune, replay
    from dwindle.quantization.quantize import quantize
    from dwindle.sources import load

__version__ = "0.1.0"

__all__ = ["UserError", "evaluate", "export", "inspect", "load", "prune", "quantize", "replay"]

_HOMES = {
    "UserError": "dwindle.errors",
    "evaluate": "dwindle.evaluation.evaluate",
    "inspect": "dwindle.inspection",
    "load": "dwindle.sources",
    "prune": "dwindle.posttraining",
    "quantize": "dwindle.quantization.quantize",
    "replay": "dwindle.posttraining",
}


def __getattr__(name: str) -> Any:
    """Imports torch only when something that needs it is used, so that ``dwindle --help`` is instant."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name == "export":  # a package, so that its function cannot bear the same name here
        return import_module("dwindle.export")
    raise AttributeError(f"module 'dwindle' has no attribute {name!r}")
