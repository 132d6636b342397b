"""The commands as a person types them; every user error is one line, exit code 2, and nothing written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tiny import tiny_directory


def dwindle(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "dwindle", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, texts and everything that can be wrong with them."""
    place = tmp_path_factory.mktemp("place")
    tiny_directory(place / "model")
    (place / "text.txt").write_text("It was a bright cold day in April, and the clocks were striking thirteen. " * 40)
    (place / "short.txt").write_text("Too short.")
    (place / "empty.txt").write_text("")
    (place / "existing").mkdir()
    (place / "existing" / "config.json").write_text("{}")
    tiny_directory(place / "corrupt")
    weights = place / "corrupt" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    tiny_directory(place / "missing")
    (place / "missing" / "model.safetensors").unlink()
    tiny_directory(place / "poisoned")
    tensors = load_file(place / "poisoned" / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = torch.nan
    save_file(tensors, place / "poisoned" / "model.safetensors", metadata={"format": "pt"})
    (place / "gpt2").mkdir()
    (place / "gpt2" / "config.json").write_text('{"model_type": "gpt2"}')
    return place


def test_inspect(place: Path) -> None:
    done = dwindle("inspect", "model", "--json", cwd=place)
    found = json.loads(done.stdout)
    assert done.returncode == 0 and done.stderr == ""
    assert found["hidden"] == 32 and found["layers"][0]["kv_heads"] == 4
    total = sum(t.numel() for t in load_file(place / "model" / "model.safetensors").values())
    assert found["parameters"]["total"] == total
    parts = ("embedding", "attention", "ffn", "norms")
    assert sum(found["parameters"][part] for part in parts) == total
    assert found["groups"]["ffn"] == 3 * 3 * 32
    table = dwindle("inspect", "model", cwd=place).stdout
    assert "what one group weighs" in table and "0-2" in table


def test_prune_and_inspect_the_result(place: Path) -> None:
    command = ["prune", "model", "--to", "80%", "--out", "smaller", "--data", "text.txt", "short.txt"]
    done = dwindle(*command, "--seq-len", "32", "--sequences", "4", "--json", cwd=place)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["stock"] and result["parameters"]["after"] <= 0.8 * result["parameters"]["before"]
    found = json.loads(dwindle("inspect", "smaller", "--json", cwd=place).stdout)
    assert found["parameters"]["total"] == result["parameters"]["after"]
    files = {path.name for path in (place / "smaller").iterdir()}
    assert files >= {"model.safetensors", "config.json", "tokenizer.json", "generation_config.json"}
    assert files >= {"structure.json", "ledger.jsonl"}


BAD = {
    "unknown family": (["prune", "gpt2", "--to", "50%"], "'gpt2' is not supported: supported are"),
    "target above": (["prune", "model", "--to", "900M"], "--to 900M: the source has"),
    "target below": (["prune", "model", "--to", "100"], "below the smallest reachable model"),
    "missing weights": (["prune", "missing", "--to", "50%"], "missing"),
    "corrupt weights": (["prune", "corrupt", "--to", "50%"], "model.safetensors"),
    "empty data": (["prune", "model", "--to", "50%", "--data", "empty.txt"], "empty.txt"),
    "missing data": (["prune", "model", "--to", "50%", "--data", "nowhere.txt"], "nowhere.txt"),
    "short text": (["prune", "model", "--to", "50%", "--data", "short.txt"], "--data"),
    "output exists": (["prune", "model", "--to", "50%", "--out", "existing"], "--out existing already exists"),
    "unknown metric": (["prune", "model", "--to", "50%", "--metric", "wonder"], "metric 'wonder' is unknown"),
    "non-finite weights": (["prune", "poisoned", "--to", "50%"], "model.layers.1.mlp.up_proj.weight"),
    "hub without network": (["prune", "someone/model", "--to", "50%"], "someone/model"),
    "no such path": (["prune", "./nothing", "--to", "50%"], "nothing"),
    "bad groups": (["prune", "model", "--to", "50%", "--groups", "legs"], "groups legs"),
    "bad attention": (["prune", "model", "--to", "50%", "--attention", "none"], "attention 'none'"),
    "stray argument": (["prune", "model", "stray", "--to", "50%"], "stray"),
    "bad device": (["prune", "model", "--to", "50%", "--device", "abacus"], "abacus"),
}


@pytest.mark.parametrize("name", BAD)
def test_user_errors(name: str, place: Path) -> None:
    arguments, message = BAD[name]
    if "--out" not in arguments:
        arguments = [*arguments, "--out", "never"]
    before = sorted(path.name for path in place.iterdir())
    done = dwindle(*arguments, cwd=place)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ") and message in lines[0], done.stderr
    assert sorted(path.name for path in place.iterdir()) == before
