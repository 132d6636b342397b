"""Pruning in loops that are not ours: equal to our own loop, resumed equal to uninterrupted, saved cut and verified."""

from __future__ import annotations

import copy
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

import dwindle
from dwindle.core.errors import UserError
from dwindle.hf import PruningCallback
from dwindle.pruning.config import PretrainPruneConfig
from dwindle.pruning.layouts import final_count
from dwindle.pruning.ledger import read_ledger
from dwindle.pruning.pacing import training_pacing
from dwindle.pruning.pruner import AttachedPruner, Pruner
from dwindle.pruning.surgery import Prunable
from dwindle.pruning.target import parse_target
from dwindle.training.callbacks import Callback
from dwindle.training.config import TrainingConfig
from dwindle.training.loop import Trainer as OurTrainer
from dwindle.training.optim import LRSchedule, build_optimizer
from tiny import tiny_directory, tiny_model, tiny_tokenizer

STEPS, SEQUENCES, LENGTH, LR, CLIP = 30, 4, 12, 1e-3, 1.0
SETTINGS: dict[str, Any] = {"target": "hidden=30,heads=6,ffn=33", "horizon": 0.8, "warmup_steps": 3}
LATER: dict[str, Any] = {"smoothing": 0.5, "warmup_steps": 1}


def windows(steps: int = STEPS) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(3, 90, (steps * SEQUENCES, LENGTH + 1), generator=generator)


class Batches:
    """The windows in order, two micro-batches a step."""

    num_tokens_per_step = num_predictions = SEQUENCES * LENGTH

    def __init__(self) -> None:
        self.position, self.windows = 0, windows()

    def next_step(self) -> list[Tensor]:
        rows = self.windows[self.position : self.position + SEQUENCES]
        self.position += SEQUENCES
        return list(rows.split(SEQUENCES // 2))

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Losses(Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def after_step(self, trainer: OurTrainer) -> None:
        assert trainer.last is not None
        self.seen.append(trainer.last.loss)


def fresh(**options: Any) -> Any:
    return tiny_model("llama", dtype=torch.float32, vocab_size=100, attention_bias=False, mlp_bias=False, **options)


def adamw_config(**options: Any) -> TrainingConfig:
    """The settings of transformers' AdamW."""
    betas = [0.9, 0.999]
    return TrainingConfig(tokens=1, optimizer="adamw", lr=LR, betas=betas, eps=1e-8, weight_decay=0.01, **options)


def our_loop(place: Path, model: Any, settings: dict[str, Any]) -> tuple[list[float], Pruner]:
    """The reference: the loop and the pruner of ``dwindle pretrain``."""
    config = adamw_config(clip=CLIP, schedule="constant", warmup=0)
    optimizer = build_optimizer(model, config)
    prunable = Prunable(model)
    anatomy, prune = prunable.anatomy, PretrainPruneConfig(**settings, compact_threshold=1.0)
    prune.smoothing = prune.effective_smoothing(settings["warmup_steps"])
    target = parse_target(prune.target, anatomy)
    pruner = Pruner(
        prunable,
        target,
        training_pacing(
            prune,
            start=anatomy.count(anatomy.source).total,
            end=final_count(anatomy, target),
            first_step=settings["warmup_steps"],
            num_steps=STEPS,
        ),
        config=prune,
        ledger=place / "reference.jsonl",
        source="llama",
        rebuild=lambda *_: pytest.fail("nothing is rebuilt"),
    )
    losses = Losses()
    trainer = OurTrainer(
        model,
        optimizer,
        LRSchedule.of(config, STEPS),
        Batches(),
        config=config,
        num_steps=STEPS,
        callbacks=[pruner, losses],
    )
    trainer.run()
    return losses.seen, pruner


def arguments(place: Path, cls: Any = TrainingArguments, **options: Any) -> Any:
    defaults: dict[str, Any] = {
        "output_dir": str(place),
        "max_steps": STEPS,
        "per_device_train_batch_size": SEQUENCES // 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": LR,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.01,
        "max_grad_norm": CLIP,
        "optim": "adamw_torch",
        "train_sampling_strategy": "sequential",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": False,
        "seed": 0,
    }
    return cls(**defaults | options)


def dataset(*, shifted: bool = False) -> Any:
    """``shifted``: without the last token of each window, which our own loop does not feed to the model either."""
    if shifted:
        return [{"input_ids": row[:-1], "labels": row[:-1], "shift_labels": row[1:]} for row in windows()]
    return [{"input_ids": row, "labels": row} for row in windows()]


def logged(trainer: Any) -> list[float]:
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def assert_equal(pruner: Pruner, reference: Pruner, losses: list[float], expected: list[float]) -> None:
    assert losses == pytest.approx(expected, abs=1e-6)
    ours, theirs = pruner.ledger.events, reference.ledger.events
    kinds = [event["event"] for event in ours]
    assert kinds.count("prune") >= 10 and [event["event"] for event in theirs] == kinds
    for one, other in zip(ours, theirs, strict=True):
        assert {k: v for k, v in one.items() if k != "saliency"} == {k: v for k, v in other.items() if k != "saliency"}
        for kind, value in (other.get("saliency") or {}).items():
            assert one["saliency"][kind] == (None if value is None else pytest.approx(value, rel=1e-3))
    weights = dict(reference.prunable.model.named_parameters())
    for name, weight in pruner.prunable.model.named_parameters():
        torch.testing.assert_close(weight, weights[name], atol=1e-6, rtol=0)
    assert pruner.finished


@pytest.mark.parametrize(
    "settings",
    [
        SETTINGS,
        {"target": "80%", "selection": "global", "attention": "cluster", "horizon": 0.8} | LATER,
        {"target": "80%", "method": "adapt", "interleaves": 12, "warmup_steps": 0},
        {"target": "80%", "horizon": 0.5, "second_order": True, "fisher": "adam", "warmup_steps": 2},
    ],
    ids=["coupled", "global", "adapt", "second-order"],
)
def test_trainer_prunes_as_our_loop_does(tmp_path: Path, settings: dict[str, Any]) -> None:
    expected, reference = our_loop(tmp_path, fresh(), settings)
    callback = PruningCallback(**settings)
    args = arguments(tmp_path / "out", remove_unused_columns=False)
    reads_inputs = settings.get("second_order") or settings.get("method") == "adapt"
    data = dataset(shifted=bool(reads_inputs))
    trainer = Trainer(fresh(), args, train_dataset=data, callbacks=[callback])
    trainer.train()
    assert callback.pruner is not None
    assert_equal(callback.pruner.pruner, reference, logged(trainer), expected)
    assert read_ledger(tmp_path / "out") == callback.pruner.pruner.ledger.events


def test_sft_trainer_prunes_as_our_loop_does(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    expected, reference = our_loop(tmp_path, fresh(), SETTINGS)
    callback = PruningCallback(**SETTINGS)
    options = {"max_length": LENGTH + 1, "packing": False, "gradient_checkpointing": False, "bf16": False}
    trainer = trl.SFTTrainer(
        fresh(),
        arguments(tmp_path / "out", trl.SFTConfig, **options),
        train_dataset=datasets.Dataset.from_dict({"input_ids": windows().tolist()}),
        processing_class=tiny_tokenizer(),
        callbacks=[callback],
    )
    trainer.train()
    assert callback.pruner is not None
    assert_equal(callback.pruner.pruner, reference, logged(trainer), expected)


def plain_loop(pruner: AttachedPruner, optimizer: Any, steps: range) -> list[float]:
    """A loop as people write it."""
    losses = []
    batches = windows().split(SEQUENCES)
    for step in steps:
        total = 0.0
        for rows in batches[step].split(SEQUENCES // 2):
            loss = pruner.model(input_ids=rows, labels=rows).loss / 2
            loss.backward()
            total += loss.item()
        pruner.after_backward()
        torch.nn.utils.clip_grad_norm_(pruner.model.parameters(), CLIP)
        optimizer.step()
        pruner.after_step(num_tokens=SEQUENCES * LENGTH)
        optimizer.zero_grad()
        losses.append(total)
    return losses


def adamw(model: Any) -> torch.optim.Optimizer:
    return build_optimizer(model, adamw_config())


def test_plain_pytorch_prunes_as_our_loop_does(tmp_path: Path) -> None:
    """Also when the model is cut on the way: the moments and the scheduler's optimizer are carried over."""
    expected, reference = our_loop(tmp_path, fresh(), SETTINGS)
    model = fresh()
    optimizer = adamw(model)
    pruner = dwindle.Pruner.attach(model, optimizer, num_steps=STEPS, ledger=tmp_path / "own.jsonl", **SETTINGS)
    losses = plain_loop(pruner, optimizer, range(30))
    smaller = pruner.compact()
    assert smaller is pruner.model is not model and pruner.num_parameters < pruner.pruner.end_count * 1.2
    losses += plain_loop(pruner, optimizer, range(30, STEPS))
    assert losses == pytest.approx(expected, abs=1e-6)
    ours, theirs = pruner.pruner.ledger.events, reference.ledger.events
    removed = [event["indices"] for event in ours if event["event"] == "prune"]
    assert removed == [event["indices"] for event in theirs if event["event"] == "prune"] and len(removed) >= 10
    assert ours == read_ledger(tmp_path / "own.jsonl")
    whole = reference.prunable.compacted().state_dict()
    for name, weight in pruner.pruner.prunable.compacted().state_dict().items():
        torch.testing.assert_close(weight, whole[name], atol=1e-6, rtol=0)


def test_plain_pytorch_continues_from_its_state(tmp_path: Path) -> None:
    settings = SETTINGS | {"smoothing": 0.5}
    model = fresh()
    optimizer = adamw(model)
    pruner = Pruner.attach(model, optimizer, num_steps=STEPS, ledger=tmp_path / "ledger.jsonl", **settings)
    losses = plain_loop(pruner, optimizer, range(20))
    weights, moments = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    state = json.loads(json.dumps(pruner.state_dict()))
    again = fresh()
    again.load_state_dict(weights)
    fresh_optimizer = adamw(again)
    fresh_optimizer.load_state_dict(moments)
    losses += plain_loop(pruner, optimizer, range(20, STEPS))
    whole = (tmp_path / "ledger.jsonl").read_bytes()
    pruner.close()
    second = Pruner.attach(
        again, fresh_optimizer, num_steps=STEPS, ledger=tmp_path / "ledger.jsonl", state=state, **settings
    )
    assert plain_loop(second, fresh_optimizer, range(20, STEPS)) == pytest.approx(losses[20:], abs=1e-12)
    assert (tmp_path / "ledger.jsonl").read_bytes() == whole


def test_saliencies_stay_in_host_memory_wherever_the_model_is(tmp_path: Path) -> None:
    """Scores come from the device at every step, and are averaged with the restored ones."""
    settings = SETTINGS | {"smoothing": 0.5, "num_steps": STEPS}
    model = fresh()
    optimizer = adamw(model)
    pruner = Pruner.attach(model, optimizer, **settings)
    plain_loop(pruner, optimizer, range(2))
    elsewhere = fresh().to("meta")
    second = Pruner.attach(elsewhere, adamw(elsewhere), state=pruner.state_dict(), **settings)
    restored = second.pruner.tensors()
    assert restored.keys() == pruner.pruner.tensors().keys() != set()
    assert {tensor.device.type for tensor in restored.values()} == {"cpu"}


def test_muon_goes_on_with_fused_projections_of_a_cut_model() -> None:
    """Masked and compacted models train alike: the parts of ``qkv`` and ``gate_up`` are those of smaller matrices."""

    def trained(cut_after: int) -> list[float]:
        model = tiny_model("phi3", dtype=torch.float64, vocab_size=100)
        optimizer = build_optimizer(model, TrainingConfig(tokens=1, optimizer="muon", lr=LR))
        pruner = Pruner.attach(model, optimizer, num_steps=STEPS, target="70%", horizon=0.3)
        losses = plain_loop(pruner, optimizer, range(cut_after))
        assert pruner.finished
        pruner.compact()
        return losses + plain_loop(pruner, optimizer, range(cut_after, STEPS))

    assert trained(15) == pytest.approx(trained(STEPS), abs=1e-9)


def test_a_state_needs_its_ledger(tmp_path: Path) -> None:
    """Without its first lines a ledger describes no model."""
    model = fresh()
    optimizer = adamw(model)
    pruner = Pruner.attach(model, optimizer, num_steps=STEPS, ledger=tmp_path / "ledger.jsonl", **SETTINGS)
    plain_loop(pruner, optimizer, range(6))
    state = pruner.state_dict()
    pruner.close()
    with pytest.raises(UserError, match=r"moved\.jsonl: has 0 bytes and the checkpoint expects at least \d+: restore"):
        Pruner.attach(model, optimizer, num_steps=STEPS, ledger=tmp_path / "moved.jsonl", state=state, **SETTINGS)
    assert Pruner.attach(model, optimizer, num_steps=STEPS, state=state, **SETTINGS).step == 6  # without a ledger


class Stop(TrainerCallback):  # type: ignore[misc]
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop |= state.global_step == 23


def test_a_checkpoint_of_the_trainer_continues(tmp_path: Path) -> None:
    """Resumed equals uninterrupted; the ledger is cut back to what the checkpoint knows."""

    def trained(place: Path, extra: list[Any], resume: bool = False, **options: Any) -> tuple[Any, PruningCallback]:
        callback = PruningCallback(**SETTINGS, smoothing=0.3)
        args = arguments(place, save_strategy="steps", save_steps=20, save_total_limit=1, **options)
        trainer = Trainer(fresh(), args, train_dataset=dataset(), callbacks=[callback, *extra])
        trainer.train(resume_from_checkpoint=resume or None)
        return trainer, callback

    whole, pruned = trained(tmp_path / "whole", [])
    trained(tmp_path / "out", [Stop()])
    second, resumed = trained(tmp_path / "out", [], resume=True)
    assert pruned.pruner is not None and resumed.pruner is not None
    assert logged(second) == logged(whole)
    assert (tmp_path / "out" / "ledger.jsonl").read_bytes() == (tmp_path / "whole" / "ledger.jsonl").read_bytes()
    for name, weight in resumed.pruner.model.state_dict().items():
        assert torch.equal(weight, pruned.pruner.model.state_dict()[name]), name
    place = tmp_path / "without"
    Trainer(
        fresh(), arguments(place, save_strategy="steps", save_steps=2, max_steps=2), train_dataset=dataset()
    ).train()
    second = Trainer(
        fresh(), arguments(place, max_steps=3), train_dataset=dataset(), callbacks=[PruningCallback("80%")]
    )
    with pytest.raises(UserError, match="has no state of a PruningCallback"):
        second.train(resume_from_checkpoint=True)


def test_saved_cut_and_trained_on(tmp_path: Path) -> None:
    """``save`` writes what our own runs write; ``compact`` lets the next ``train`` work on the smaller model."""
    source = tiny_directory(tmp_path / "model", vocab_size=300)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    callback = PruningCallback("80%", horizon=0.5)
    with pytest.raises(UserError, match="has not trained yet"):
        callback.save(tmp_path / "smaller")
    trainer = Trainer(model, arguments(tmp_path / "out", max_steps=12), train_dataset=dataset(), callbacks=[callback])
    trainer.train()
    out = callback.save(tmp_path / "smaller", tiny_tokenizer())
    facts = dwindle.inspect(out).to_json()
    assert callback.pruner is not None and facts["parameters"]["total"] == callback.pruner.num_parameters
    before = dwindle.inspect(source).to_json()["parameters"]["total"]
    assert callback.pruner.num_parameters <= math.floor(0.8 * before)
    assert "model" in (out / "README.md").read_text() and read_ledger(out) == read_ledger(tmp_path / "out")
    at_90 = dwindle.replay(str(source), str(out / "ledger.jsonl"), at=3)
    assert callback.pruner.num_parameters < at_90.after.total < before

    callback.compact(trainer)
    assert sum(p.numel() for p in trainer.model.parameters()) == callback.pruner.num_parameters
    expected = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    saved = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, trust_remote_code=True)
    for name, weight in saved.named_parameters():
        assert torch.equal(weight, expected[name])
    steps = {int(state["step"]) for state in trainer.optimizer.state.values()}
    trainer.train()
    assert steps == {12} and {int(state["step"]) for state in trainer.optimizer.state.values()} == {24}
    assert not torch.equal(trainer.model.lm_head.weight, expected["lm_head.weight"])
    dwindle.save(callback.pruner, tmp_path / "later")
    assert dwindle.inspect(tmp_path / "later").to_json()["parameters"] == facts["parameters"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fp16": True}, "fp16: its gradients are scaled"),
        ({"world_size": 2}, "in one process"),
        ({"load_best_model_at_end": True}, "load_best_model_at_end: would bring"),
        ({"restore_callback_states_from_checkpoint": True}, "restore_callback_states_from_checkpoint: would put"),
    ],
)
def test_refused_in_a_line(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    from dwindle.hf import _check

    args, names = arguments(tmp_path), ("world_size", "n_gpu", "fp16", "load_best_model_at_end")
    names += ("restore_callback_states_from_checkpoint",)
    with pytest.raises(UserError, match=message):
        _check(type("Args", (), {**{name: getattr(args, name) for name in names}, **options}), fresh())


def test_settings_and_optimizers_are_refused_in_a_line() -> None:
    with pytest.raises(UserError, match="horizont"):
        PruningCallback("80%", horizont=0.5)
    for own in ({"milestones": ["90%"]}, {"compact_threshold": 0.1}):
        with pytest.raises(UserError, match="is for dwindle's own loop"):
            PruningCallback("80%", **own)
    model = fresh()
    with pytest.raises(UserError, match="target: give the final size"):
        Pruner.attach(model, adamw(model), num_steps=4)
    with pytest.raises(UserError, match="milestones: is for dwindle's own loop"):
        Pruner.attach(model, adamw(model), num_steps=4, target="80%", milestones=["90%"])
    for method in ({}, {"ratio": "1:1"}, {"method": "adapt"}):
        with pytest.raises(UserError, match="warmup_steps: 4 leaves none of the 4 steps for events: lower it"):
            Pruner.attach(model, adamw(model), num_steps=4, target="80%", warmup_steps=4, **method)
    smoothed = Pruner.attach(model, adamw(model), num_steps=9, target="hidden=30,heads=6,ffn=33", warmup_steps=4)
    assert smoothed.pruner.config.smoothing == 0.75, "the rule of recipes"
    optimizer = torch.optim.RMSprop(model.parameters())
    pruner = Pruner.attach(model, optimizer, num_steps=4, target="80%", horizon=1.0)
    with pytest.raises(UserError, match="optimizer: RMSprop keeps 'square_avg'"):
        plain_loop(pruner, optimizer, range(1))
    muon = build_optimizer(model, TrainingConfig(tokens=1, optimizer="muon"))
    for optimizer in (torch.optim.SGD(model.parameters(), lr=LR), muon):
        with pytest.raises(UserError, match=f'fisher: "adam" needs AdamW, {type(optimizer).__name__} keeps no second'):
            Pruner.attach(model, optimizer, num_steps=4, target="80%", metric="taylor", fisher="adam")
    model.lm_head.weight.requires_grad_(False)
    with pytest.raises(UserError, match=r"lm_head.weight is frozen"):
        Pruner.attach(model, adamw(model), num_steps=4, target="80%")


def test_a_ledger_of_another_run_is_not_emptied(tmp_path: Path) -> None:
    ledger = tmp_path / "out" / "ledger.jsonl"
    ledger.parent.mkdir()
    ledger.write_text("of another run\n")
    model, options = fresh(), {"num_steps": 4, "target": "80%", "ledger": ledger}
    with pytest.raises(UserError, match=r"ledger\.jsonl: holds the events of another run: .* overwrite=True"):
        Pruner.attach(model, adamw(model), **options)
    args = arguments(ledger.parent, max_steps=1)
    trainer = Trainer(fresh(), args, train_dataset=dataset(), callbacks=[PruningCallback("80%")])
    with pytest.raises(UserError, match="holds the events of another run"):
        trainer.train()
    assert ledger.read_text() == "of another run\n"
    Trainer(fresh(), args, train_dataset=dataset(), callbacks=[PruningCallback("80%", overwrite=True)]).train()
    assert read_ledger(ledger)[0]["event"] == "source"


def test_plain_pytorch_needs_neither_accelerate_nor_the_trainer(tmp_path: Path) -> None:
    """And without them, ``dwindle.hf`` says how they are installed."""
    script = """
import sys
sys.modules["accelerate"] = sys.modules["accelerate.state"] = sys.modules["transformers.trainer"] = None
import torch, dwindle
from tiny import tiny_model
model = tiny_model("llama", dtype=torch.float32, vocab_size=100)
optimizer = torch.optim.AdamW(model.parameters())
pruner = dwindle.Pruner.attach(model, optimizer, num_steps=2, target="90%", horizon=1.0)
for _ in range(2):
    ids = torch.randint(3, 90, (2, 9))
    pruner.model(input_ids=ids, labels=ids).loss.backward()
    pruner.after_backward()
    optimizer.step()
    pruner.after_step()
    optimizer.zero_grad()
assert pruner.finished
dwindle.save(pruner, "smaller")
try:
    import dwindle.hf
except dwindle.UserError as error:
    print(error)
"""
    path = os.pathsep.join([str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")])
    command, env = [sys.executable, "-c", script], {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("dwindle.hf needs transformers' Trainer and accelerate: run `pip install")
    assert (tmp_path / "smaller" / "structure.json").is_file()


def test_the_blocks_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "your-own-loop.md").read_text(encoding="utf-8")
    tiny = {"HuggingFaceTB/SmolLM2-135M": "model", "max_steps=1000": "max_steps=6, use_cpu=True, report_to='none'"}
    for real, small in tiny.items():
        assert real in text
        text = text.replace(real, small)
    tiny_directory(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"dataset": dataset(), "torch": torch, "batches": windows(6).split(SEQUENCES)}
    for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        names["model"] = AutoModelForCausalLM.from_pretrained("model", dtype=torch.float32)
        exec(compile(code, "your-own-loop.md", "exec"), names)
    before = dwindle.inspect("model").to_json()["parameters"]["total"]
    for folder in ("smaller", "smaller-too"):
        assert dwindle.inspect(folder).to_json()["parameters"]["total"] <= 0.6 * before
