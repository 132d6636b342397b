"""A run in float8: pruned, compacted, resumed; refused where it cannot work. (On a CPU, which is refused otherwise.)"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dwindle.anatomy.anatomy import Anatomy
from dwindle.core.errors import UserError
from dwindle.distributed.world import World
from dwindle.recipe.recipe import Recipe
from dwindle.run import plan
from dwindle.run.memory import footprint
from dwindle.run.plan import make_plan, parallel_of, teacher_dtype
from dwindle.run.pretrain import pretrain, resume
from dwindle.training.callbacks import Callback
from dwindle.training.float8 import Float8Linear
from dwindle.training.loop import Trainer
from runs import COMPACT_OFTEN, events, metrics, tiny_recipe
from tiny import tiny_directory

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("place")
    tiny_directory(place / "model", hidden_size=64, intermediate_size=96)
    return place


def recipe(place: Path, **training: Any) -> Recipe:
    return tiny_recipe(
        place,
        steps=8,
        sequences=4,
        seq_len=16,
        data={"valid": ["pydoc:valid"], "valid_tokens": 160},
        training={"micro_batch": 4, "precision": "fp8"} | training,
        prune={"target": "50%", "horizon": 0.7, **COMPACT_OFTEN, "compact_multiple": 16},
        checkpoint={"every": 2},
    )


class Watch(Callback):
    """Counts the float8 layers after every step, and stops the run after a step."""

    def __init__(self, last: int = 0) -> None:
        self.last = last
        self.counts: list[int] = []

    def after_step(self, trainer: Trainer) -> None:
        self.counts.append(sum(isinstance(module, Float8Linear) for module in trainer.model.modules()))
        if trainer.step == self.last:
            trainer.stop.request()


def test_compacted_and_resumed_runs_compute_in_float8(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "check_float8", lambda device: None)
    whole, parts, watch, stopped = place / "whole", place / "parts", Watch(), Watch(last=5)
    with torch.backends.mkldnn.flags(enabled=False):
        assert pretrain(recipe(place), whole, callbacks=[watch]).target_reached
        assert pretrain(recipe(place), parts, callbacks=[stopped]).status == "stopped"
        assert resume(parts).status == "finished"
    assert events(whole, "compact") and all(watch.counts), "rebuilt models, too"
    assert len(stopped.counts) < len(watch.counts) == 8
    assert metrics(parts) == metrics(whole)
    ours, theirs = (load_file(run / "model" / "model.safetensors") for run in (parts, whole))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_refused_with_one_line(place: Path) -> None:
    for attempt in (lambda: make_plan(recipe(place)), lambda: pretrain(recipe(place), place / "refused")):
        with pytest.raises(UserError, match=r"^training.precision: fp8 needs a GPU .*: use bf16 or auto$"):
            attempt()
    assert not (place / "refused").exists()
    anatomy = Anatomy.of_config(plan.load_config(str(place / "model")))
    with pytest.raises(UserError, match=r"^training.precision: fp8 is for one process, and there are 2: use bf16$"):
        parallel_of(recipe(place), World(rank=0, size=2), anatomy)


def test_plans_estimate_float8(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, config = recipe(place), plan.load_config(str(place / "model"))
    compiled = settings.training.model_copy(update={"compile": True})
    eager, less, more = (
        footprint(config, training, name).per_token
        for training, name in ((settings.training, "fp8"), (compiled, "fp8"), (compiled, "bf16"))
    )
    assert less < more and eager == footprint(config, settings.training, "bf16").per_token
    assert teacher_dtype("fp8", "cuda") == torch.bfloat16
    monkeypatch.setattr(plan, "check_float8", lambda device: None)
    assert make_plan(settings).precision == "fp8"
