"""dwindle: make a pretrained language model smaller while it keeps training.

import dwindle
model, tokenizer = dwindle.load("smollm2-135m")
result = dwindle.prune("smollm2-135m", to="100M", out="smaller")
dwindle.inspect("smaller")
at_120m = dwindle.replay("smollm2-135m", "smaller/ledger.jsonl", at="120M")
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dwindle.errors import UserError
    from dwindle.inspection import inspect
    from dwindle.posttraining import prune, replay
    from dwindle.sources import load

__version__ = "0.1.0"

__all__ = ["UserError", "inspect", "load", "prune", "replay"]

_HOMES = {
    "UserError": "dwindle.errors",
    "inspect": "dwindle.inspection",
    "load": "dwindle.sources",
    "prune": "dwindle.posttraining",
    "replay": "dwindle.posttraining",
}


def __getattr__(name: str) -> Any:
    """Imports torch only when something that needs it is used, so that ``dwindle --help`` is instant."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'dwindle' has no attribute {name!r}")
