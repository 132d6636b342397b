"""Pruning while training beats pruning once, on a real trained model; and it costs no memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import dwindle
from dwindle.data.config import DataConfig
from dwindle.pruning.config import PretrainPruneConfig
from dwindle.recipe.library import ready_recipes
from dwindle.recipe.recipe import Recipe
from dwindle.run.pretrain import pretrain
from dwindle.sources.config import ModelConfig
from dwindle.training.config import CheckpointConfig, DistillConfig, TrainingConfig
from tiny import tiny_directory

TOKENS = 160_000
MARGIN = 0.08
"""Nats; two seeds gave 3.228 ± 0.012 and 3.049 ± 0.027 (standard deviations)."""


@pytest.mark.slow
def test_pruning_aware_beats_one_shot_on_stories260k(shared_data: Path, tmp_path: Path) -> None:
    """260k to 130k parameters, equal tokens, by more than seeds differ."""
    source = str(shared_data / "models" / "stories260K" / "stories260K.bin")
    paragraphs = (shared_data / "corpus" / "tinystories-sample.txt").read_text().split("\n\n")
    held_out = len(paragraphs) // 8
    (tmp_path / "valid.txt").write_text("\n\n".join(paragraphs[:held_out]))
    (tmp_path / "train.txt").write_text("\n\n".join(paragraphs[held_out:]))

    def train(model: str, name: str, prune: PretrainPruneConfig) -> float:
        recipe = Recipe(
            source=ModelConfig(model=model, device="cpu"),
            data=DataConfig(
                train=[str(tmp_path / "train.txt")],
                valid=[str(tmp_path / "valid.txt")],
                seq_len=128,
                cache_dir=str(tmp_path / "cache"),
            ),
            training=TrainingConfig(tokens=TOKENS, tokens_per_step=4096, micro_batch=32, optimizer="adamw", lr=1e-3),
            prune=prune,
            distill=DistillConfig(weight=0.0),
            checkpoint=CheckpointConfig(every=0),
        )
        result = pretrain(recipe, tmp_path / name)
        assert result.parameters <= 130_016 and result.valid_loss is not None
        return result.valid_loss

    text = [str(tmp_path / "train.txt")]
    dwindle.prune(source, "50%", out=tmp_path / "pruned", data=text, sequences=64, seq_len=128)
    one_shot = train(str(tmp_path / "pruned"), "one-shot", PretrainPruneConfig(enabled=False))
    coupled = PretrainPruneConfig(target="50%", horizon=0.25, selection="coupled", metric="taylor")
    aware = train(source, "aware", coupled)
    print(f"validation loss: one-shot {one_shot:.4f}, pruning-aware {aware:.4f}")
    assert one_shot - aware > MARGIN


MEMORY = """
import json, os, resource, sys
from dwindle.commands.main import main
import torch, transformers, dwindle.run.pretrain
torch.set_num_threads(1)
resident = int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() // 1024
for enabled in ("false", "true"):
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0
        continue
    sys.argv = ["dwindle", *(argument.replace("ENABLED", enabled) for argument in sys.argv[1:])]
    try:
        main()
    except SystemExit as done:
        assert not done.code
    print("peak", json.dumps([enabled, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - resident]), flush=True)
    os._exit(0)
"""

RECIPE = """
[source]
model = "{model}"
[data]
train = ["pydoc:train"]
seq_len = 64
cache_dir = "{cache}"
[training]
tokens = 2560
tokens_per_step = 512
optimizer = "adamw"
[distill]
weight = 0.0
[prune]
target = "60%"
selection = "coupled"
metric = "taylor"
horizon = 0.8
compact_threshold = 0.1
compact_wait = 0
[checkpoint]
every = 0
"""


@pytest.mark.slow
def test_pruning_costs_no_memory(tmp_path: Path) -> None:
    """Peak of a run with events and compactions against the same run without, above the imports; 8M parameters."""
    sizes = {"hidden_size": 384, "intermediate_size": 1536, "num_attention_heads": 8, "num_key_value_heads": 4}
    tiny_directory(tmp_path / "model", num_hidden_layers=3, **sizes)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE.format(model=tmp_path / "model", cache=tmp_path / "cache"))
    arguments = ["pretrain", str(recipe), "prune.enabled=ENABLED", "--out", str(tmp_path / "ENABLED")]
    done = subprocess.run([sys.executable, "-c", MEMORY, *arguments], capture_output=True, text=True, check=True)
    peaks = dict(json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("peak "))
    ledger = (tmp_path / "true" / "ledger.jsonl").read_text()
    assert ledger.count('"compact"') >= 2 and ledger.count('"prune"') > 50
    print(f"peak above the imports, kB: {peaks}, ratio {peaks['true'] / peaks['false']:.3f}")
    assert peaks["true"] <= 1.05 * peaks["false"]


@pytest.mark.parametrize("path", ready_recipes().values(), ids=lambda p: p.stem)
def test_every_recipe_runs_in_a_tiny_form(path: Path, tmp_path: Path) -> None:
    """The same choices on a tiny model and text: schedule, pacing, metric, attention and compaction all take part."""
    from dwindle.recipe.recipe import load_recipe

    recipe = load_recipe(path)
    recipe.source.model = str(tiny_directory(tmp_path / "model"))
    recipe.data = DataConfig(train=["pydoc:train"], valid=["pydoc:valid"], seq_len=16, valid_tokens=64)
    recipe.training.tokens, recipe.training.tokens_per_step, recipe.training.micro_batch = 20 * 64, 64, 4
    recipe.training.warmup, recipe.training.compile = 2, False
    if recipe.task.kind == "chat":
        rows = ({"prompt": f"Question {number}?", "completion": "An answer."} for number in range(20))
        (tmp_path / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        recipe.task.chat, recipe.distill.teacher = [str(tmp_path / "chat.jsonl")], recipe.source.model
        recipe.data = DataConfig(train=["pydoc:train"], holdout=0.2, seq_len=255, valid_tokens=510)
        recipe.training.tokens, recipe.training.tokens_per_step = 4 * 255, 255
        recipe.training.micro_batch = 1
    if recipe.prune.enabled:
        recipe.prune.target, recipe.prune.milestones, recipe.prune.warmup_steps = "75%", [], 0
    if recipe.prune.ratio is not None:
        recipe.prune.ratio = "2:1"
    result = pretrain(recipe, tmp_path / "run")
    assert result.status == "finished" and (result.target_reached or not recipe.prune.enabled)
    assert sum(p.numel() for p in dwindle.load(tmp_path / "run" / "model").model.parameters()) == result.parameters
