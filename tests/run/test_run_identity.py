"""A resumed run is the same run: its whole result, its source and its settings; nothing is begun again unasked."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import dwindle
from dwindle.anatomy.build import aligned
from dwindle.core.config import write_toml
from dwindle.core.errors import UserError
from dwindle.core.run_directory import RunDirectory
from dwindle.pruning.ledger import read_ledger
from dwindle.recipe.recipe import Recipe, load_recipe
from dwindle.run.pretrain import pretrain, resume
from dwindle.sources.common import SourceNotice
from dwindle.training.callbacks import Callback
from dwindle.training.loop import Trainer, TrainingDiverged
from runs import metrics, tiny_recipe
from tiny import tiny_directory, tiny_model

ODD_GENERATION: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.6, "top_p": 0.9},
    "early stopping": {"early_stopping": True, "num_beams": 1},
    "padding": {"pad_token_id": -1},
    "wrong types": {"temperature": "hot", "max_new_tokens": [3]},
}


def write_generation(model: Path, **settings: Any) -> None:
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5], "bos_token_id": 1} | settings))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("place")
    write_generation(tiny_directory(place / "model"), do_sample=True, temperature=0.6)
    return place


def recipe(place: Path, *, steps: int = 12, **tables: Any) -> Recipe:
    given: dict[str, Any] = {
        "data": {"valid": ["pydoc:valid"], "valid_tokens": 240},
        "training": {"micro_batch": 8},
        "prune": {"target": "80%", "horizon": 0.9, "milestones": ["90%"]},
        "checkpoint": {"every": 4},
    }
    return tiny_recipe(place, steps=steps, **{k: given.get(k, {}) | tables.get(k, {}) for k in given | tables})


class Killed(BaseException):
    """The process ends here."""


class KillAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def after_step(self, trainer: Trainer) -> None:
        if trainer.step == self.step:
            raise Killed


def interrupted(settings: Recipe, run: Path, step: int = 6) -> Path:
    with pytest.raises(Killed):
        pretrain(settings, run, callbacks=[KillAt(step)])
    return run


def edit(run: Path, *overrides: str) -> None:
    write_toml(load_recipe(run / "recipe.toml", overrides), run / "recipe.toml")


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("odd", ODD_GENERATION.values(), ids=ODD_GENERATION)
def test_odd_generation_settings_are_dropped_with_a_line(tmp_path: Path, odd: dict[str, Any]) -> None:
    model = tiny_directory(tmp_path / "model")
    write_generation(model, **odd)
    with pytest.warns(SourceNotice, match=r"generation settings .* dropped: "):
        dwindle.prune(model, "90%", metric="magnitude", out=tmp_path / "out")
    saved = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert saved["eos_token_id"] == [2, 5] and not (saved.keys() & (odd.keys() - {"num_beams"}))


def test_what_cannot_be_saved_is_found_before_the_work(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import PreTrainedTokenizerFast

    def refuse(self: Any, *args: Any, **options: Any) -> None:
        raise ValueError("this tokenizer cannot be written")

    def work(*args: Any, **options: Any) -> None:
        raise AssertionError("the work began")

    monkeypatch.setattr(PreTrainedTokenizerFast, "save_pretrained", refuse)
    monkeypatch.setattr("dwindle.run.prune.prune_in_rounds", work)
    monkeypatch.setattr(Trainer, "run", work)
    with pytest.raises(UserError, match="this tokenizer cannot be written"):
        dwindle.prune(place / "model", "90%", out=tmp_path / "out")
    with pytest.raises(UserError, match="this tokenizer cannot be written"):
        pretrain(recipe(place), tmp_path / "run")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("prune", [{}, {"enabled": False, "target": "", "milestones": [], "horizon": None}])
def test_the_whole_result_of_a_resumed_run_equals_the_uninterrupted_one(
    place: Path, tmp_path: Path, prune: dict[str, Any]
) -> None:
    settings = recipe(place, prune=prune)
    pretrain(settings, tmp_path / "a" / "run")
    resume(interrupted(settings, tmp_path / "b" / "run"))
    for folder in ("model", "milestones") if not prune else ("model",):
        whole, resumed = (content(tmp_path / name / "run" / folder) for name in "ab")
        assert whole.keys() == resumed.keys() and whole
        assert [name for name in whole if whole[name] != resumed[name]] == []
    saved = json.loads((tmp_path / "b" / "run" / "model" / "generation_config.json").read_text())
    assert saved["eos_token_id"] == [2, 5] and saved["temperature"] == 0.6


class Alignment(Callback):
    """Where the weights are in memory, modulo torch's own alignment."""

    def on_start(self, trainer: Trainer) -> None:
        self.found = {parameter.data_ptr() % 64 for parameter in trainer.model.parameters()}


def test_weights_of_a_resumed_run_are_aligned_as_in_an_uninterrupted_one(place: Path, tmp_path: Path) -> None:
    """Or matrix products may round differently, as they did in float64 with the second-order update."""
    first, again = Alignment(), Alignment()
    with pytest.raises(Killed):
        pretrain(recipe(place), tmp_path / "run", callbacks=[first, KillAt(6)])
    resume(tmp_path / "run", callbacks=[again])
    assert first.found == again.found == {0}


def test_weights_that_lie_elsewhere_are_moved() -> None:
    """Those of numpy and of files, tied ones once."""
    model = tiny_model("llama", tie_word_embeddings=True)
    for parameter in model.parameters():
        shifted = torch.empty(parameter.numel() + 1, dtype=parameter.dtype)[1:].view(parameter.shape)
        parameter.data = shifted.copy_(parameter.data)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    assert all(parameter.data_ptr() % 64 for parameter in model.parameters())
    after = dict(aligned(model).named_parameters())
    assert not any(parameter.data_ptr() % 64 for parameter in after.values())
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in after)


@pytest.mark.parametrize("how", ["missing", "empty"])
def test_lost_checkpoints_are_not_a_reason_to_begin_again(place: Path, tmp_path: Path, how: str) -> None:
    run = interrupted(recipe(place), tmp_path / "run")
    shutil.rmtree(run / "checkpoints")
    if how == "empty":
        (run / "checkpoints").mkdir()
    before = content(run)
    with pytest.raises(UserError, match=r"holds no checkpoint, although step 4 .* --overwrite`"):
        resume(run)
    assert content(run) == before and metrics(run)[-1]["step"] == 5


def test_a_run_that_never_had_a_checkpoint_begins_again_with_a_line(place: Path, tmp_path: Path) -> None:
    run = interrupted(recipe(place), tmp_path / "run", step=3)
    with pytest.warns(UserWarning, match="begins again"):
        assert resume(run).status == "finished"


class Poison(Callback):
    """Gradients that are not finite while the rate is high."""

    def edit_gradients(self, trainer: Trainer) -> None:
        if trainer.step >= 6 and trainer.config.lr > 1e-3:
            next(trainer.model.parameters()).grad.mul_(float("nan"))


@pytest.mark.parametrize("pruned", [True, False])
def test_a_diverged_run_keeps_its_healthy_checkpoints_and_may_change_its_rate(
    place: Path, tmp_path: Path, pruned: bool
) -> None:
    prune = {} if pruned else {"enabled": False, "target": "", "milestones": [], "horizon": None}
    settings = recipe(place, prune=prune, training={"max_bad_steps": 2}, checkpoint={"every": 2, "keep_last": 1})
    run = tmp_path / "run"
    for attempt in (pretrain, lambda settings, run, callbacks: resume(run, callbacks=callbacks)):
        with pytest.raises(TrainingDiverged, match=r"lower training\.lr in .*recipe\.toml, then `dwindle resume"):
            attempt(settings, run, callbacks=[Poison()])
        assert [path.name for path in RunDirectory(run).list_checkpoints()] == ["step-00000006"]
    edit(run, "training.lr=1e-3")
    with pytest.raises(Killed), pytest.warns(UserWarning, match=r"from step 6 on: training\.lr from 0\.003 to 0\.001"):
        resume(run, callbacks=[Poison(), KillAt(7)])
    with pytest.warns(UserWarning, match="from step 6 on"):  # killed before its next checkpoint: still permitted
        assert resume(run, callbacks=[Poison()]).status == "finished"
    changes = [event for event in read_ledger(run / "model") if event["event"] == "resume"]
    assert [event["changed"] for event in changes] == [{"training.lr": {"was": 0.003, "is": 0.001}}]
    dwindle.replay(place / "model", run / "model" / "ledger.jsonl")


def test_the_rate_of_a_healthy_run_stays(place: Path, tmp_path: Path) -> None:
    run = interrupted(recipe(place), tmp_path / "run")
    edit(run, "training.lr=1e-3")
    with pytest.raises(UserError, match=r"^training\.lr: it was 0\.003 and is 0\.001, which only a run that diverged"):
        resume(run)


REFUSED = {
    "prune.selection": "prune.selection=global",
    "prune.attention": "prune.attention=cluster",
    "prune.second_order": "prune.second_order=true",
    "distill.weight": "distill.weight=0.5",
    "prune.target": "prune.target=85%",
    "training.seed": "training.seed=3",
    "prune.metric": "prune.metric=magnitude",
    "training.clip": "training.clip=0.5",
    "data.valid": "data.valid=[]",
}


@pytest.mark.parametrize("name", REFUSED)
def test_another_setting_is_refused_by_name(place: Path, tmp_path: Path, name: str) -> None:
    run = interrupted(recipe(place), tmp_path / "run")
    before = content(run / "checkpoints")
    edit(run, REFUSED[name])
    with pytest.raises(UserError, match=f"^{name.replace('.', r'[.]')}: "):
        resume(run)
    assert content(run / "checkpoints") == before and metrics(run)[-1]["step"] == 5


def test_another_source_is_refused_and_a_moved_one_is_not(place: Path, tmp_path: Path) -> None:
    run = interrupted(recipe(place), tmp_path / "run")
    other = tiny_directory(tmp_path / "other", seed=7)
    shutil.copytree(place / "model", tmp_path / "moved")
    edit(run, f"source.model={other}")
    with pytest.raises(UserError, match=r"^source\.model: its content is not the one that the run began with"):
        resume(run)
    edit(run, f"source.model={tmp_path / 'moved'}")
    assert resume(run).status == "finished"


def test_what_may_change_changes(place: Path, tmp_path: Path) -> None:
    run = interrupted(recipe(place), tmp_path / "run")
    edit(run, "training.micro_batch=2", "training.cuda_graphs=false", "checkpoint.every=3", "validation.every=2")
    edit(run, "prune.target=70%")
    with pytest.warns(UserWarning, match=r"prune\.target from 80% to 70%"):
        result = resume(run)
    source = read_ledger(run)[0]["parameters"]
    assert result.target_reached and result.parameters <= 0.7 * source
