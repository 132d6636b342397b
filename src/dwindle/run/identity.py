"""What makes a run the same run: its settings and its source, kept in every checkpoint and compared by ``resume``."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from fnmatch import fnmatch
from typing import Any

from torch import Tensor
from transformers import GenerationConfig

from dwindle.anatomy.anatomy import Anatomy
from dwindle.core.errors import UserError
from dwindle.core.run_directory import RunDirectory
from dwindle.pruning.target import parse_target
from dwindle.recipe.recipe import Recipe
from dwindle.sources.fingerprint import source_fingerprint
from dwindle.sources.vocabulary import Vocabulary
from dwindle.training.callbacks import Callback
from dwindle.training.checkpoint import Checkpoint

MAY_CHANGE = (
    "logging.*",
    "source.device",
    "training.parallel",
    "training.timeout_s",
    "training.micro_batch",
    "training.activation_checkpointing",
    "training.compile",
    "training.cuda_graphs",
    "training.ce_chunk_tokens",
    "training.max_bad_steps",
    "checkpoint.*",
    "validation.every",
    "validation.batch",
    "validation.data",
)
"""Settings of the machine and of the logs, which decide how a run computes but not what."""
HASHED_ELSEWHERE = (
    "source.model",
    "distill.teacher",
    "vocabulary.text",
    "task.chat",
    "data.train",
    "data.valid",
    "data.sources.*.paths",
    "data.cache_dir",
)
"""Places: files may be moved, since hashes of what they hold are compared."""
AFTER_DIVERGENCE = "training.lr"
DOWNWARDS = "prune.target"


class RunState(Callback):
    """State of the run as a whole: its identity, its changes, and the generation settings of its result."""

    def __init__(self, identity: dict[str, Any], generation: GenerationConfig) -> None:
        self.identity = identity
        self.generation = generation
        self.changes: list[dict[str, Any]] = []
        """What ``resume`` was allowed to change, as events of the ledger."""
        self.new_changes: list[dict[str, Any]] = []
        """Those accepted by this process."""

    def state_dict(self) -> dict[str, Any]:
        generation = self.generation.to_diff_dict()
        return {"identity": self.identity, "generation": generation, "changes": self.changes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.new_changes = self.changes
        self.changes = [*state["changes"], *self.new_changes]


def identity_of(recipe: Recipe, valid_windows: Tensor | None, vocabulary: Vocabulary | None) -> dict[str, Any]:
    """The settings by dotted name, and the hashes of source, teacher, kept tokens and validation text."""
    teacher = recipe.distill.teacher if recipe.teacher_weight else ""
    valid = None if valid_windows is None else hashlib.sha256(valid_windows.numpy().tobytes()).hexdigest()
    return {
        "valid": valid,
        "settings": dict(_flat(recipe.model_dump(mode="json"))),
        "vocabulary": None if vocabulary is None else hashlib.sha256(repr(vocabulary.kept).encode()).hexdigest(),
        "source": source_fingerprint(recipe.source.model),
        "teacher": source_fingerprint(teacher) if teacher else None,
    }


def generation_of(checkpoint: Checkpoint | None) -> GenerationConfig | None:
    """The generation settings that a checkpoint carries."""
    return None if checkpoint is None else GenerationConfig(**_state_in(checkpoint)["generation"])


def accept_changes(
    checkpoint: Checkpoint | None, now: Mapping[str, Any], run: RunDirectory, anatomy: Anatomy
) -> list[dict[str, Any]]:
    """Refuse a recipe or source that is not the checkpoint's; returns the permitted changes of what is computed."""
    if checkpoint is None:
        return []
    saved = _state_in(checkpoint)["identity"]
    hashed = {"source": "source.model", "teacher": "distill.teacher"}
    for key, name in (hashed | {"vocabulary": "vocabulary.text", "valid": "data.valid"}).items():
        if saved[key] != now[key]:
            raise _refused(name, "its content is not the one that the run began with", run)
    changes: dict[str, Any] = {}
    for name in sorted(saved["settings"].keys() | now["settings"].keys()):
        was, wanted = saved["settings"].get(name), now["settings"].get(name)
        if was == wanted or _matches(name, MAY_CHANGE) or _matches(name, HASHED_ELSEWHERE):
            continue
        if name not in saved["settings"] and wanted == _default_of(name):  # a key that is newer than the run
            continue
        _check_change(name, was, wanted, run, anatomy, checkpoint)
        changes[name] = {"was": was, "is": wanted}
    if not changes:
        return []
    return [{"event": "resume", "step": checkpoint.step, "tokens": checkpoint.state["tokens"], "changed": changes}]


def _default_of(name: str) -> Any:
    """The default of a setting such as ``training.lr``; None if it has none."""
    section, _, key = name.partition(".")
    fields: Any = getattr(Recipe.model_fields[section].annotation, "model_fields", {})
    return fields[key].get_default(call_default_factory=True) if key in fields else None


def _check_change(
    name: str, was: Any, wanted: Any, run: RunDirectory, anatomy: Anatomy, checkpoint: Checkpoint
) -> None:
    """Raise unless this setting may change now."""
    if name == AFTER_DIVERGENCE and run.diverged_at is not None:
        return
    if name == AFTER_DIVERGENCE:
        raise _refused(name, f"it was {was!r} and is {wanted!r}, which only a run that diverged may change", run)
    if name == DOWNWARDS and was and wanted:
        chosen = checkpoint.state["callbacks"].get("Pruner", {}).get("chooser", {})
        if "@" in was + wanted:
            raise _refused(name, f"it was {was!r} and is {wanted!r}, and a file's size cannot be changed", run)
        sizes = [parse_target(text, anatomy, name) for text in (was, wanted)]
        has_shape = any(size.shape is not None for size in sizes) or "hidden" in chosen
        if not has_shape and sizes[1].num_parameters <= sizes[0].num_parameters:
            return
        raise _refused(name, f"it was {was!r} and is {wanted!r}: a number of parameters may only be lowered", run)
    raise _refused(name, f"it was {was!r} and is {wanted!r}", run)


def _refused(name: str, problem: str, run: RunDirectory) -> UserError:
    return UserError(f"{name}: {problem}: put it back in {run.recipe}, or start a new run with `dwindle pretrain`")


def _state_in(checkpoint: Checkpoint) -> dict[str, Any]:
    found: dict[str, Any] = checkpoint.state["callbacks"][RunState.__name__]
    return found


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _flat(table: Mapping[str, Any], path: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value
