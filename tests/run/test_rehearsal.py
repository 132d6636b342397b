"""The prediction of a run's time: what is measured, and how it is added up."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

from chats import chat_directory, tiny_chats, write_rows
from dwindle.anatomy.anatomy import Anatomy
from dwindle.anatomy.positions import can_be_packed
from dwindle.core.sizes import format_duration
from dwindle.data.batches import BatchStream
from dwindle.data.training_data import TrainingData, open_training_data
from dwindle.distributed.precision import cpu_multiplies_bf16
from dwindle.recipe.recipe import Recipe
from dwindle.run import rehearsal
from dwindle.run.rehearsal import Cost, Rehearsed, _predict, _Rehearsal, cut_evenly, planned
from dwindle.sources.loading import load_config, load_tokenizer
from runs import tiny_recipe


def recipe(place: Path) -> Recipe:
    return tiny_recipe(
        place,
        steps=40,
        data={"valid": ["pydoc:valid"], "valid_tokens": 240},
        training={"micro_batch": 3},
        prune={"target": "50%", "horizon": 0.25, "warmup_steps": 2},
        distill={"weight": 0.5},
        validation={"every": 10},
        checkpoint={"every": 20},
    )


@pytest.mark.parametrize("share", [0.9, 0.5, 0.3, 0.15])
def test_an_even_cut_has_about_the_size(place: Path, share: float) -> None:
    anatomy = Anatomy.of_config(load_config(str(place / "model")))
    most = int(share * anatomy.count(anatomy.source).total)
    kept = cut_evenly(anatomy, anatomy.source, most)
    assert anatomy.source.contains(kept) and 0.7 * most <= anatomy.count(kept).total <= most


def test_the_parts_add_up(place: Path) -> None:
    """By hand: 2 steps without events, 10 with, 28 after; 3 micro-batches each; 10 windows, measured 1 + 4 times."""
    anatomy = Anatomy.of_config(load_config(str(place / "model")))
    start, end = Cost(2.0, 0.5, 0.25, 3.0), Cost(1.0, 0.25, 0.125, 2.0)
    found = Rehearsed(begin_s=7.0, start=start, end=end, disk_bytes_per_s=1e12, memory_bytes=0)
    by_hand = 7 + 2 * 6.25 + 10 * 6.5 + 28 * 3.25 + 10 * (0.25 + 4 * 0.125) + 2 * (3 + 2)
    assert _predict(recipe(place), found, anatomy) == pytest.approx(by_hand, rel=1e-6)
    start.first_s, end.first_s = 40.0, 30.0  # compiling, once at each size
    assert _predict(recipe(place), found, anatomy) == pytest.approx(by_hand + 70, rel=1e-6)
    compiled = recipe(place)
    compiled.training.compile, compiled.prune.selection = True, "global"
    assert _predict(compiled, found, anatomy) == pytest.approx(by_hand + 40 + 3 * 30, rel=1e-6)
    start.first_s = end.first_s = 0.0
    found.disk_bytes_per_s = 1.0  # weights and two moments, three checkpoints; then the model
    size = anatomy.count(anatomy.source).total // 2 * 4
    assert _predict(recipe(place), found, anatomy) == pytest.approx(by_hand + size * (3 * 3 + 1), rel=1e-2)


@pytest.mark.parametrize("settings", [{}, {"prune": {"enabled": False}}], ids=["pruned", "unpruned"])
def test_a_plan_with_its_time_leaves_nothing_behind(
    place: Path, settings: dict[str, dict[str, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    before = sorted(place.rglob("*"))
    chosen = recipe(place)
    if settings:
        chosen.prune = type(chosen.prune)(enabled=False)
    plan = planned(chosen, price=3600.0)
    assert plan.seconds is not None and plan.seconds > 0 and plan.cost == pytest.approx(plan.seconds)
    assert plan.memory_bytes_measured is not None and plan.memory_bytes_measured > 1e6
    assert sorted(place.rglob("*")) == before
    quick = planned(chosen, measure=False)
    assert quick.seconds is None and quick.text_tokens == plan.text_tokens


def test_a_plan_says_when_one_thread_is_much_faster(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are timed with all threads and with one; the number of threads is then what it was."""
    threads = torch.get_num_threads()
    seen: list[int] = []
    run = _Rehearsal._run

    def timed(self: _Rehearsal, steps: int) -> float:
        seen.append(torch.get_num_threads())
        run(self, steps)
        return 3.14 if torch.get_num_threads() > 1 else 1.0

    monkeypatch.setattr(_Rehearsal, "_run", timed)
    monkeypatch.setattr(rehearsal, "_QUICK_S", 1e9)
    try:
        torch.set_num_threads(2)
        assert "one thread trains 3.1 times as fast as 2 here" in planned(recipe(place)).warnings[-1]
        assert torch.get_num_threads() == 2 and seen[-2:] == [2, 1]
        monkeypatch.setattr(rehearsal, "_MUCH_FASTER", 3.2)
        assert not [text for text in planned(recipe(place)).warnings if "thread" in text]
        torch.set_num_threads(1)
        planned(recipe(place))
        assert torch.get_num_threads() == seen[-1] == 1
    finally:
        torch.set_num_threads(threads)


def test_a_plan_says_when_bf16_is_faster(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One step more, in bf16; only where the recipe leaves the precision open, and the CPU's instructions work."""
    seen: list[str] = []
    run = _Rehearsal._run

    def timed(self: _Rehearsal, steps: int) -> float:
        seen.append(self.trainer.precision)
        run(self, steps)
        return 0.5

    monkeypatch.setattr(_Rehearsal, "_run", timed)
    monkeypatch.setattr(rehearsal, "_QUICK_S", 0.0)
    monkeypatch.setattr(rehearsal, "_FASTER", 0.0)
    monkeypatch.setattr(rehearsal, "cpu_multiplies_bf16", lambda: True)
    assert "bf16 trains 0." in planned(recipe(place)).warnings[-1] and seen[-1] == "bf16"
    chosen = recipe(place)
    chosen.training.precision = "fp32"
    assert not planned(chosen).warnings and seen[-1] == "fp32"
    monkeypatch.setattr(rehearsal, "cpu_multiplies_bf16", lambda: False)
    assert not planned(recipe(place)).warnings and seen[-1] == "fp32"


@pytest.mark.parametrize("announced", [True, False])
@pytest.mark.parametrize("code", [0, -4])  # SIGILL
def test_instructions_that_a_cpu_announces_are_tried_by_another_process(
    announced: bool, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[list[str]] = []

    def answer(words: list[str], **_: object) -> subprocess.CompletedProcess[bytes]:
        tried.append(words)
        return subprocess.CompletedProcess(words, code)

    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": announced}, raising=False)
    monkeypatch.setattr(subprocess, "run", answer)
    assert cpu_multiplies_bf16() is (announced and code == 0)
    assert len(tried) == announced


@pytest.mark.parametrize("family", ["llama", "lfm2"])
def test_a_tuning_is_rehearsed_on_rows_like_its_own(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many examples in a row and learned tokens as the run has, which is opened here for comparison."""
    chat_directory(tmp_path / "model", model=family)
    task = {"kind": "chat", "chat": [write_rows(tmp_path / "chat.jsonl", tiny_chats(60))]}
    chosen = tiny_recipe(
        tmp_path, steps=9, sequences=4, seq_len=199, task=task, data={"holdout": 0.1}, prune={"enabled": False}
    )
    made = list[TrainingData]()
    rehearsed = _Rehearsal._data

    def noted(self: _Rehearsal) -> tuple[TrainingData, BatchStream]:
        found = rehearsed(self)
        made.append(found[0])
        return found

    monkeypatch.setattr(_Rehearsal, "_data", noted)
    plan = planned(chosen)
    assert plan.seconds is not None and plan.seconds > 0
    real = open_training_data(
        chosen.data,
        load_tokenizer(chosen.source.model),
        seed=0,
        cache_dir=tmp_path / "cache",
        task=chosen.task,
        packed=can_be_packed(load_config(chosen.source.model)),
    ).mixture
    (random,) = made
    assert random.valid_windows is not None and random.valid_windows.shape[1:] == real.sample_shape == (3, 200)
    count = 5 * real.period
    learned = [mixture.num_predictions(0, count) / count for mixture in (random.mixture, real)]
    assert learned[0] == pytest.approx(learned[1], rel=0.1) and learned[0] < 0.8 * 199
    begins = [(random.mixture.sample(g)[2] == 0).sum() for g in range(5)]
    assert all(n == 1 for n in begins) if family == "lfm2" else all(n > 1 for n in begins)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.5, "0.5 s"),
        (99, "99 s"),
        (150, "2 min"),
        (5900, "98 min"),
        (7200, "2 h"),
        (12000, "3 h 20 min"),
        (266400, "3 d 2 h"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
