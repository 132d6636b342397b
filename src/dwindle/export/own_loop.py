"""``save``: writes the model of a pruner in another loop as ``dwindle pretrain`` writes its own."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

from dwindle.export.huggingface import write_model
from dwindle.export.verification import fixed_prompts, verify_transformers
from dwindle.pruning.pruner import AttachedPruner


def save(pruner: AttachedPruner, out: str | PathLike[str], tokenizer: Any = None, *, overwrite: bool = False) -> Path:
    """Write the compacted model with structure, ledger and card; its logits are compared before.

    The trained model is not changed.
    """
    prunable = pruner.pruner.prunable
    smaller: Any = prunable.compacted().eval()
    prompts = fixed_prompts(tokenizer, smaller.config)
    training = prunable.model.training
    about: Any = {
        "structure": prunable.alive,
        "source": pruner.pruner.source,
        "ledger": pruner.pruner.ledger.events,
        "results": {"training tokens": pruner.tokens} if pruner.tokens else None,
    }
    with write_model(smaller, tokenizer, out, overwrite=overwrite, **about) as folder:
        try:
            verify_transformers(folder, prunable.model.eval(), prompts, written=smaller)
        finally:
            prunable.model.train(training)
    return Path(out)
