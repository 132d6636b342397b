"""Every block of docs/extending.md runs, in order, with tiny models in the place of the real ones."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config

import dwindle
from dwindle.commands import main as cli
from dwindle.pruning import metrics
from dwindle.training.callbacks import Callback
from evaluation.eval_sets import write_sets
from tiny import tiny_directory, tiny_tokenizer

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "extending.md"
TINY = {
    "smollm2-135m": "model",
    "openai-community/gpt2": "gpt2",
    "100M": "80%",
    'tokens = "16M"': "tokens = 1280\ntokens_per_step = 64\nmicro_batch = 4",
    'train = ["books.txt"]': 'train = ["books.txt"]\nseq_len = 16',
}


def blocks() -> list[tuple[str, str]]:
    """(language, code) of every block, at a size for a test."""
    text = PAGE.read_text(encoding="utf-8")
    for real, tiny in TINY.items():
        assert real in text, real
        text = text.replace(real, tiny)
    return re.findall(r"```(\w+)\n(.*?)```", text, re.DOTALL)


@pytest.fixture
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    tiny_directory(tmp_path / "model", max_position_embeddings=256)
    torch.manual_seed(0)
    sizes = GPT2Config(vocab_size=257, n_embd=16, n_layer=2, n_head=2, n_positions=256, bos_token_id=0, eos_token_id=0)
    AutoModelForCausalLM.from_config(sizes).save_pretrained(tmp_path / "gpt2")
    tiny_tokenizer().save_pretrained(tmp_path / "gpt2")
    write_sets(tmp_path / "sets")
    (tmp_path / "books.txt").write_text("It was the best of times, it was the worst of times. " * 60)
    before = dict(metrics._METRICS)
    yield
    metrics._METRICS.clear()
    metrics._METRICS.update(before)
    sys.modules.pop("my_metrics", None)


def forget_metrics() -> None:
    """As in a new process."""
    for name in ("wanda_abs", "blend"):
        metrics._METRICS.pop(name, None)
    sys.modules.pop("my_metrics", None)


def install(project: dict[str, Any]) -> None:
    """What pip writes beside the module of such a project."""
    info = Path(f"my_metrics-{project['version']}.dist-info")
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    lines = [f"{name} = {module}" for name, module in project["entry-points"]["dwindle.metrics"].items()]
    (info / "entry_points.txt").write_text("\n".join(["[dwindle.metrics]", *lines, ""]))


def run_commands(code: str, monkeypatch: pytest.MonkeyPatch) -> str:
    shown = io.StringIO()
    for line in code.splitlines():
        monkeypatch.setattr(sys, "argv", shlex.split(line.removeprefix("$ ")))
        assert sys.argv[0] == "dwindle", line
        with contextlib.redirect_stdout(shown), pytest.raises(SystemExit) as done:
            sys.exit(cli.main())  # type: ignore[func-returns-value]
        assert not done.value.code, line
    return shown.getvalue()


@pytest.mark.usefixtures("_place")
def test_the_blocks_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names: dict[str, Any] = {}
    shown = ""
    for number, (language, code) in enumerate(blocks()):
        if number == 0:
            (tmp_path / "my_metrics.py").write_text(code)
        elif language == "python":
            exec(compile(code, f"block {number}", "exec"), names)
        elif "[project]" in code:
            install(tomllib.loads(code)["project"])
            forget_metrics()
        elif language == "toml":
            (tmp_path / "recipe.toml").write_text(code)
        else:
            assert language == "console"
            shown += run_commands(code, monkeypatch)
    assert [cell.metric for cell in names["table"].cells] == ["wanda", "wanda_abs", "blend"]
    assert names["run"].status == "finished"
    for folder in ("runs/blend/model", "runs/wanda-abs/model", "smaller", "smaller-too"):
        assert (tmp_path / folder / "config.json").is_file(), folder
    assert names["smaller"].after.total == dwindle.inspect("smaller-too").to_json()["parameters"]["total"]
    lines = [json.loads(line) for line in (tmp_path / "runs" / "watched" / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 20 and max(line["embedding_grad"] for line in lines) == names["watch"].largest > 0
    again = names["EmbeddingGradient"]()
    assert dwindle.resume("runs/watched", callbacks=[again]).status == "finished"
    assert again.largest == names["watch"].largest
    with pytest.raises(dwindle.UserError, match="the state of EmbeddingGradient, which this run does not use"):
        dwindle.resume("runs/watched")
    assert "my GPT-2" in shown and "9B" in shown and "ARC-e" in shown


def test_the_page_names_every_hook_and_every_public_name() -> None:
    text = PAGE.read_text(encoding="utf-8")
    hooks = [name for name, value in vars(Callback).items() if callable(value) and not name.startswith("_")]
    assert all(f"`{hook}`" in text for hook in hooks)
    assert all(re.search(rf"\b{name}\b", text) for name in dwindle.__all__)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "(docs/extending.md)" in readme
