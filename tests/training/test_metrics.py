"""The metrics file and the display."""

from __future__ import annotations

import io
import json
import math
import re
from pathlib import Path

import pytest
from rich.console import Console
from tiny_run import VOCAB, RandomBatches, make_trainer, portable_bf16, tiny_llama

from dwindle.anatomy.structure import Group
from dwindle.core.errors import UserError
from dwindle.core.jsonl import JsonLinesFile
from dwindle.pruning.surgery import Prunable
from dwindle.training import display as display_module
from dwindle.training.callbacks import Callback, Validator
from dwindle.training.config import TrainingConfig
from dwindle.training.display import Display
from dwindle.training.loop import Trainer
from dwindle.training.metrics import MetricsWriter
from dwindle.training.optim import build_optimizer

ADAMW = TrainingConfig(tokens=1, lr=1e-2, optimizer="adamw")


class Extra(Callback):
    def after_step(self, trainer: Trainer) -> None:
        if trainer.step == 2:
            trainer.extra_metrics["parameters"] = 123
        trainer.notes["parameters"] = "123 of 100"


def run_with_metrics(path: Path) -> list[dict[str, object]]:
    windows = RandomBatches((2,)).step_tokens(50)
    callbacks = [Extra(), Validator(windows, every=3), MetricsWriter(path)]
    make_trainer(tiny_llama(), callbacks, num_steps=5).run()
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_everything_outside_time_is_deterministic(tmp_path: Path) -> None:
    first, second = (run_with_metrics(tmp_path / name) for name in ("a.jsonl", "b.jsonl"))
    for line in first + second:
        assert line.pop("time")
    assert first == second
    keys = ["step", "tokens", "loss", "grad_norm", "lr", "skipped", "flops_per_token"]
    assert list(first[0]) == [*keys, "source_valid_loss"] and list(first[3]) == keys
    assert [line["step"] for line in first if "source_valid_loss" in line] == [1, 3, 5]
    assert first[1]["parameters"] == 123 and "parameters" not in first[2]
    assert [line["step"] for line in first if "valid_loss" in line] == [3, 5]
    assert [line["tokens"] for line in first] == [48, 96, 144, 192, 240]


def test_flops_and_utilisation_follow_a_compaction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: 6 operations for each weight of a matrix and norm, 12 for each attended channel and token."""
    prunable = Prunable(tiny_llama())

    class CompactAt2(Callback):
        def after_step(self, trainer: Trainer) -> None:
            if trainer.step == 2:
                alive = prunable.alive.without(Group("ffn", (tuple(range(16)), tuple(range(16)))))
                prunable.prune_to(alive, trainer.optimizer)
                rebuilt = prunable.compact(
                    alive,
                    trainer.optimizer,
                    lambda model: build_optimizer(model, ADAMW),
                )
                assert rebuilt is not None
                trainer.replace_model(prunable.model, rebuilt)

    monkeypatch.setattr("dwindle.training.metrics.peak_flops", lambda device: 1e9)
    path = tmp_path / "metrics.jsonl"
    trainer = make_trainer(prunable.model, [CompactAt2(), MetricsWriter(path)], num_steps=4, precision="bf16")
    with portable_bf16():
        trainer.run()
    lines = [json.loads(line) for line in path.read_text().splitlines()]

    def by_hand(ffn: int) -> float:
        layer = 32 * 32 + 2 * 16 * 32 + 32 * 32 + 3 * 32 * ffn + 2 * 32  # q, k and v, o, the FFN, two norms
        return 6 * (2 * layer + 32 + VOCAB * 32) + 12 * 2 * 32 * 12

    assert [line["flops_per_token"] for line in lines] == [by_hand(48), by_hand(48), by_hand(32), by_hand(32)]
    for line in lines:
        assert line["time"]["mfu"] == pytest.approx(line["flops_per_token"] * line["time"]["tokens_per_s"] / 1e9)


def test_numbers_that_json_does_not_know_become_null(tmp_path: Path) -> None:
    lines = JsonLinesFile(tmp_path / "new" / "m.jsonl")
    lines.append({"loss": math.nan, "deep": [{"x": math.inf}], "text": "größer"})
    lines.close()
    lines.append({"step": 2})
    content = (tmp_path / "new" / "m.jsonl").read_text(encoding="utf-8")
    assert content == '{"loss": null, "deep": [{"x": null}], "text": "größer"}\n{"step": 2}\n'


def test_a_full_disk_is_named() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    lines = JsonLinesFile(Path("/dev/full"))
    with pytest.raises(UserError, match=r"/dev/full: cannot be written \(No space left on device\): .* command again$"):
        lines.append({"a": 1})
    lines.close()  # says nothing more, or that would be seen in place of the message


def test_plain_lines_elsewhere_than_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    make_trainer(tiny_llama(), [Extra(), Display(Console(file=out))], num_steps=4).run()
    (line,) = out.getvalue().splitlines()
    assert line.startswith("step 4/4  tokens 192  loss ") and "parameters 123 of 100" in line
    monkeypatch.setattr(display_module, "_PLAIN_LINE_EVERY_S", 0.0)
    make_trainer(tiny_llama(), [Display(Console(file=out))], num_steps=4).run()
    assert len(out.getvalue().splitlines()) == 5


def test_a_live_panel_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setenv("TERM", "xterm")
    console = Console(file=out, force_terminal=True, width=200)
    make_trainer(tiny_llama(), [Extra(), Display(console)], num_steps=3).run()
    text = out.getvalue()
    assert text.index("then the first step") < text.index("3/3") and "123 of 100" in text and "tokens/s" in text
    assert text.endswith("\x1b[?25h"), "the cursor must come back"
    narrow = Console(file=(few := io.StringIO()), force_terminal=True, width=60)
    make_trainer(tiny_llama(), [Extra(), Display(narrow)], num_steps=3).run()
    drawn = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", few.getvalue())
    assert "step 3/3" in drawn and "parameters 123 of 100" in drawn and "…" not in drawn
    monkeypatch.setenv("TERM", "dumb")  # such as Emacs's: it cannot redraw
    plain = Console(file=io.StringIO(), force_terminal=True, width=200)
    make_trainer(tiny_llama(), [Display(plain)], num_steps=3).run()
    assert plain.file.getvalue().startswith("step 3/3")  # type: ignore[attr-defined]
