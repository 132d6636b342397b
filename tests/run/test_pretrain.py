"""Pretraining from a recipe: exact resumption, exact compaction, the plain loop when pruning is off."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerFast

import dwindle
from dwindle.anatomy.anatomy import Anatomy
from dwindle.anatomy.structure import Structure
from dwindle.core import files
from dwindle.core.errors import UserError
from dwindle.data.batches import BatchStream
from dwindle.data.training_data import open_training_data
from dwindle.pruning.ledger import read_ledger, replay_structure
from dwindle.recipe.recipe import Recipe, load_recipe
from dwindle.run.plan import make_plan
from dwindle.run.pretrain import pretrain, resume
from dwindle.training.callbacks import Callback
from dwindle.training.config import TrainingConfig
from dwindle.training.loop import Trainer
from runs import COMPACT_OFTEN, assert_same_run, die_at, events, go_on, kill, metrics, start, tiny_recipe, wait

pytestmark = pytest.mark.usefixtures("one_thread")


STEPS = 24


def recipe(
    place: Path, *, prune: dict[str, Any] | None = None, steps: int = STEPS, micro_batch: int = 8, **training: Any
) -> Recipe:
    """24 steps of 8 × 24 tokens on a tiny model, to half its size."""
    return tiny_recipe(
        place,
        steps=steps,
        data={"valid": ["pydoc:valid"], "valid_tokens": 240},
        training={"micro_batch": micro_batch} | training,
        prune={"target": "50%", "horizon": 0.7, **COMPACT_OFTEN} | (prune or {}),
        validation={"every": 8},
        checkpoint={"every": 4},
    )


def test_a_run_and_what_it_leaves(place: Path) -> None:
    run = place / "first"
    result = pretrain(recipe(place, prune={"milestones": ["80%", "60%"]}), run)
    assert result.status == "finished" and result.target_reached and result.model == run / "model"
    assert {path.name for path in run.iterdir()} >= {"recipe.toml", "metrics.jsonl", "ledger.jsonl", "checkpoints"}
    model = dwindle.load(run / "model").model
    assert sum(p.numel() for p in model.parameters()) == result.parameters <= 37408 // 2
    source = Anatomy.of(dwindle.load(place / "model").model).source
    structure = Structure.from_json(json.loads((run / "model" / "structure.json").read_text()))
    assert replay_structure(source, read_ledger(run)) == structure
    for name, share in (("80%", 0.8), ("60%", 0.6)):
        milestone = dwindle.load(run / "milestones" / name).model
        count = sum(p.numel() for p in milestone.parameters())
        assert result.parameters < count <= share * 37408
        ledger = read_ledger(run / "milestones" / name)
        assert ledger == read_ledger(run)[: len(ledger)] and ledger[-1]["parameters"] == count
    assert len(events(run, "compact")) >= 2
    assert (run / "model" / "ledger.jsonl").read_bytes() == (run / "ledger.jsonl").read_bytes()


def test_a_card_says_the_loss_of_its_own_model(place: Path) -> None:
    """A milestone is saved before the step is validated: the last measurement is of an earlier, larger model."""
    run = place / "measured"
    settings = recipe(place, prune={"milestones": ["80%", "60%"]})
    settings.validation.every = 4
    result = pretrain(settings, run)
    for name in ("80%", "60%"):
        card = (run / "milestones" / name / "README.md").read_text()
        assert "training tokens" in card and "validation loss" not in card
    assert result.valid_loss == metrics(run)[-1]["valid_loss"]
    source = metrics(run)[0]["source_valid_loss"]
    row = f"| validation loss (nats per token) | {source:.4f} | {result.valid_loss:.4f} |"
    assert row in (run / "model/README.md").read_text()


@pytest.mark.parametrize("folder", ["milestones/80%", "model"])
def test_a_full_disk_is_told_and_the_run_goes_on_later(
    place: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    run = place / f"full disk at {folder.replace('/', ' ')}"
    original = PreTrainedTokenizerFast.save_pretrained

    def full(self: Any, out: Path, *args: Any, **options: Any) -> Any:
        if out.name.startswith(f".{Path(folder).name}.") and (run / "metrics.jsonl").exists():  # not in the dry save
            raise Exception("No space left on device (os error 28)")
        return original(self, out, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(PreTrainedTokenizerFast, "save_pretrained", full)
        with pytest.raises(
            UserError, match=r"could not be written, the disk is full; the last good .* `dwindle resume"
        ):
            pretrain(recipe(place, prune={"milestones": ["80%"]}), run)
    assert not (run / folder).exists() and not [path for path in run.rglob(".*") if path.name != ".lock"]
    assert resume(run).status == "finished" and (run / folder / "tokenizer.json").is_file()


def test_a_full_disk_in_the_first_step_is_told_without_a_run_to_resume(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is worth keeping then: the directory goes, and the same command can be given again."""
    run = place / "full disk in the first step"
    settings = recipe(place, prune={"milestones": ["99.9%"], "horizon": 0.1, "warmup_steps": 0})

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(PreTrainedTokenizerFast, "save_pretrained", full)
        with pytest.raises(UserError, match=r"the disk is full; .* then run the same command again$"):
            pretrain(settings, run)
    assert not run.exists()
    assert pretrain(settings, run).status == "finished" and events(run, "prune")[0]["step"] == 1


def test_the_ledger_has_the_data_of_the_papers_figure(place: Path) -> None:
    """Saliency of the three types and the pruned share of each, over tokens."""
    run = place / "figure"
    pretrain(recipe(place, prune={"attention": "cluster"}), run)
    source = Anatomy.of(dwindle.load(place / "model").model).source
    left = {"attn": len(source.layers[0].query_heads), "ffn": len(source.layers[0].ffn), "stem": len(source.hidden)}
    full, curve = dict(left), []
    for event in events(run, "prune"):
        assert event["saliency"]["ffn"] is None or event["saliency"]["ffn"] > 0
        left[event["type"]] -= len(event["indices"][0])
        curve.append((event["tokens"], {kind: 1 - left[kind] / full[kind] for kind in full}))
    assert [tokens for tokens, _ in curve] == sorted(tokens for tokens, _ in curve)
    assert curve[-1][1]["ffn"] > 0.2 and {event["type"] for event in events(run, "prune")} >= {"ffn", "stem"}
    steps = [event["step"] for event in events(run, "prune")]
    assert steps[0] <= 2 and steps[-1] == round(0.7 * STEPS)  # spread over the horizon, finished at its end


def test_groups_leave_evenly(place: Path) -> None:
    run = place / "even"
    prune = {"groups": ["ffn"], "target": "80%", "horizon": 1.0, "warmup_steps": 8}
    pretrain(recipe(place, steps=48, prune=prune), run)
    by_step: dict[int, int] = {}
    for event in events(run, "prune"):
        by_step[event["step"]] = by_step.get(event["step"], 0) + 1
    assert min(by_step) == 9 and max(by_step) >= 47
    gaps = sorted(by_step)
    assert max(b - a for a, b in pairwise(gaps)) <= 2 and max(by_step.values()) == 1


def test_groups_leave_once_the_rate_has_warmed_up(place: Path) -> None:
    """The default: the horizon begins where the warm-up of the rate ends, and the run's recipe records both."""
    run = place / "after the warm-up"
    pretrain(recipe(place, prune={"warmup_steps": None, "horizon": 0.5}, warmup=7), run)
    steps = [event["step"] for event in events(run, "prune")]
    assert steps[0] == 8 and steps[-1] == 7 + 12
    assert load_recipe(run / "recipe.toml").prune.warmup_steps == 7


def test_rounded_sizes_are_reached_by_the_end_of_the_horizon(place: Path) -> None:
    """The shape is chosen from the first scores and lies below the target's count: the pacing goes on to it."""
    run = place / "rounded"
    result = pretrain(recipe(place, prune={"round_to": 8}), run)
    structure = json.loads((run / "model" / "structure.json").read_text())
    assert result.target_reached and result.parameters <= 37408 // 2
    assert len(structure["hidden"]) % 8 == 0 and all(len(layer["ffn"]) % 8 == 0 for layer in structure["layers"])
    assert 0.6 * STEPS < events(run, "prune")[-1]["step"] <= round(0.7 * STEPS)


class Broken(Callback):
    """The gradients of these steps are not finite; may stop the run before one."""

    def __init__(self, *steps: int, stop_at: int | None = None) -> None:
        self.steps, self.stop_at = steps, stop_at

    def edit_gradients(self, trainer: Trainer) -> None:
        if trainer.step + 1 in self.steps:
            next(trainer.model.parameters()).grad.fill_(float("inf"))  # type: ignore[union-attr]
        trainer.stop.requested = trainer.step + 1 == self.stop_at


@pytest.mark.parametrize(
    "prune", [{"smoothing": 0.0}, {"smoothing": 0.5, "second_order": True}, {"ratio": "6:1", "horizon": None}]
)
def test_groups_due_in_a_skipped_last_step_are_chosen_by_the_saliencies_before(
    place: Path, tmp_path: Path, prune: dict[str, Any]
) -> None:
    """Also those of a checkpoint; groups due in other skipped steps wait for the next."""
    settings = recipe(place, steps=8, prune={"target": "90%", "horizon": 1.0, "selection": "global"} | prune)
    whole = pretrain(settings, tmp_path / "whole", callbacks=[Broken(5, 7, 8)])
    steps = {event["step"] for event in events(tmp_path / "whole", "prune")}
    assert whole.target_reached and whole.skipped_steps == 3
    assert steps & {5, 7, 8} == {8}
    pretrain(settings, tmp_path / "two", callbacks=[Broken(5, 7, 8, stop_at=6)])
    assert resume(tmp_path / "two", callbacks=[Broken(5, 7, 8)]).parameters == whole.parameters
    assert read_ledger(tmp_path / "two") == read_ledger(tmp_path / "whole")


@pytest.mark.parametrize(("ratio", "per_step"), [("2:1", {1: 2, 2: 2, 3: 2}), ("1:3", {3: 1, 6: 1, 9: 1})])
def test_ratios_alternate(place: Path, ratio: str, per_step: dict[int, int]) -> None:
    run = place / f"ratio-{ratio[0]}"
    pretrain(recipe(place, prune={"ratio": ratio, "horizon": None, "target": "95%", "groups": ["ffn"]}), run)
    found: dict[int, int] = {}
    for event in events(run, "prune"):
        found[event["step"]] = found.get(event["step"], 0) + 1
    assert {step: found.get(step) for step in per_step} == per_step
    (source,) = events(run, "source")
    assert source["options"]["pacing"]["end_count"] == int(0.95 * source["parameters"])


def test_near_the_last_event_only_the_last_compaction_is_made(place: Path) -> None:
    """The target is reached by step 17: with a wait of 10, only steps up to 7 may compact before it."""
    run = place / "waiting"
    pretrain(recipe(place, prune={"compact_threshold": 1e-9, "compact_multiple": 1, "compact_wait": 10}), run)
    removed = sorted({event["step"] for event in events(run, "prune")})
    early = [step for step in removed if 17 - step >= 10]
    assert early and early != removed[:-1]
    assert [event["step"] for event in events(run, "compact")] == [*early, removed[-1]]


@pytest.mark.parity
@pytest.mark.parametrize(
    ("precision", "tolerance", "attention"), [("fp64", 1e-10, "cluster"), ("fp32", 1e-5, "regular")]
)
def test_when_it_is_compacted_does_not_matter(place: Path, precision: str, tolerance: float, attention: str) -> None:
    losses = {}
    for name, threshold, multiple in (("every event", 1e-9, 1), ("now and then", 0.1, 4), ("at the end", 1.0, 1)):
        run = place / f"compact-{precision}-{attention}-{threshold}"
        options = {"compact_threshold": threshold, "compact_multiple": multiple, "attention": attention}
        pretrain(recipe(place, prune={**options, "smoothing": 0.5}, micro_batch=4, precision=precision), run)
        losses[name] = [line["loss"] for line in metrics(run)] + [metrics(run)[-1]["valid_loss"]]
        compactions, removed = events(run, "compact"), events(run, "prune")
        if name == "every event":
            assert len(compactions) == len({event["step"] for event in removed})
        else:
            assert len(compactions) == (0 if name == "at the end" else pytest.approx(4, abs=2))
    for name in ("every event", "now and then"):
        assert losses[name] == pytest.approx(losses["at the end"], abs=tolerance, rel=0), name


def test_without_pruning_it_is_a_plain_loop(place: Path) -> None:
    """The same tokens through a loop of a few lines give the same bits."""
    run = place / "plain"
    settings = recipe(place, prune={"enabled": False}, micro_batch=4)
    pretrain(settings, run)
    model, tokenizer = dwindle.load(place / "model")
    from dwindle.training.optim import LRSchedule

    data = open_training_data(settings.data, tokenizer, seed=0, cache_dir=place / "cache")
    batches = BatchStream(data.mixture, tokens_per_step=192, micro_batch=4)
    rate = LRSchedule.of(TrainingConfig(tokens=1, lr=3e-3), STEPS).lr_at
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    losses = []
    for step in range(STEPS):
        total = 0.0
        for batch in batches.next_step():
            logits = model(input_ids=batch[:, :-1]).logits.float()
            summed = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum")
            (summed * (1 / 192)).backward()
            total = total + summed.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total / 192))
    assert losses == [line["loss"] for line in metrics(run)]
    written = load_file(run / "model" / "model.safetensors")
    assert all(torch.equal(written[name], p) for name, p in model.named_parameters())


# Killing ------------------------------------------------------------------------------------------------------


def fatal_places() -> list[tuple[str, Callable[[], None]]]:
    from dwindle.pruning.pruner import Pruner
    from dwindle.pruning.surgery import Prunable
    from dwindle.training import callbacks, checkpoint

    return [
        ("between an event and its checkpoint", lambda: die_at(Prunable, "prune_to", 2)),
        ("between an event and its ledger line", lambda: die_at(Prunable, "prune_to", 4)),
        ("right after a compaction", lambda: die_at(Pruner, "compact", 1)),
        ("inside a compaction", lambda: die_at(Prunable, "compact", 2, before=True)),
        ("while a checkpoint is written", lambda: die_at(files.os, "fsync", 3)),
        ("before a checkpoint is renamed", lambda: die_at(checkpoint, "commit_checkpoint", 1, before=True)),
        ("right after a checkpoint", lambda: die_at(callbacks, "write_checkpoint", 2)),
        ("while the model is written", lambda: die_at(files, "_put_in_place", 2, before=True)),
    ]


class StopAtThree(Callback):
    def after_step(self, trainer: Trainer) -> None:
        if trainer.step == 3:
            trainer.stop.request()


def test_a_second_run_reads_on_where_the_first_ended(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in teacher correction: adapt on the first tokens, then prune on those after them; also when resumed."""
    seen: list[list[int]] = []

    class Recorded(BatchStream):
        def next_step(self) -> list[torch.Tensor]:
            batches = super().next_step()
            seen.extend(torch.cat(batches).tolist())
            return batches

    monkeypatch.setattr("dwindle.run.pretrain.BatchStream", Recorded)
    first = tiny_recipe(place, steps=4, prune={"enabled": False})
    pretrain(first, place / "adapted")
    skipped = first.num_tokens + 23  # not a whole sequence of 24 more
    adapted = {"model": str(place / "adapted" / "model"), "device": "cpu"}
    second = tiny_recipe(place, steps=6, source=adapted, data={"skip": skipped}, prune={"target": "80%"})
    assert pretrain(second, place / "half", callbacks=[StopAtThree()]).status == "stopped"
    resume(place / "half", callbacks=[StopAtThree()])
    data = open_training_data(first.data, dwindle.load(place / "model").tokenizer, seed=0, cache_dir=place / "cache")
    assert seen == [data.mixture.sample(g).tolist() for g in range(8 * (4 + 6))]
    assert make_plan(second).text_passes["train"] == pytest.approx(80 / data.mixture.sources[0].num_windows, rel=0.05)


def test_killed_while_it_begins(place: Path) -> None:
    """Before its recipe is there, and before the micro-batch of this machine is kept in it: nothing is in the way."""
    run = place / "begun"
    settings = recipe(place, steps=4, micro_batch=0, prune={"enabled": False})
    for name in ("rename", "replace"):
        child = start(lambda name=name: (die_at(files.os, name, 1, before=True), go_on(settings, run)))  # type: ignore[misc]
        assert os.WIFSIGNALED(wait(child) or 0)
        assert run.exists() == (name == "replace")
    assert wait(start(lambda: go_on(settings, run))) == 0
    assert (run / "model").is_dir()
    assert not [path for path in [*run.rglob(".*"), *place.glob(".begun*")] if path.name != ".lock"], "leftovers"


@pytest.mark.parity
@pytest.mark.slow
@pytest.mark.parametrize("attention", ["regular", "cluster"])
def test_killed_and_resumed_equals_uninterrupted(place: Path, attention: str) -> None:
    """A dozen kills of a real process: at random moments, and at the places where it would hurt; see make faults."""
    prune = {"attention": attention, "smoothing": 0.6, "fisher": "adam", "milestones": ["70%"]}
    settings = recipe(place, prune=prune, micro_batch=4)
    reference, run = place / f"reference-{attention}", place / f"killed-{attention}"
    assert wait(start(lambda: pretrain(settings, reference))) == 0
    chance, kills = random.Random(attention), 0
    for name, prepare in fatal_places():
        child = start(lambda prepare=prepare: (prepare(), go_on(settings, run)))  # type: ignore[misc]
        status = wait(child)
        assert status is not None and (status == 0 or os.WIFSIGNALED(status)), name
        kills += status != 0
        if name != "while the model is written":
            child = start(lambda: go_on(settings, run))
            if wait(child, chance.uniform(0.02, 0.5)) is None:
                kill(child)
                kills += 1
    wanted, patience = 14 if attention == "regular" else 10, 0.9
    while kills < wanted:
        if (run / "model").exists():  # it got through, or was killed while it tidied up: once more, and killed sooner
            assert wait(start(lambda: go_on(settings, run))) == 0
            assert_same_run(run, reference)
            shutil.rmtree(run)
            patience *= 0.7
        child = start(lambda: go_on(settings, run))
        if wait(child, chance.uniform(0.02, max(0.04, patience))) is None:
            kill(child)
            kills += 1
    assert wait(start(lambda: go_on(settings, run))) == 0
    assert_same_run(run, reference)
