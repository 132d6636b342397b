"""The commands as a person types them; every user error is one line, exit code 2, and nothing written."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.main import get_command
from typer.testing import CliRunner

import hostile
from dwindle.commands.app import app
from dwindle.data.token_files import write_token_files
from dwindle.pruning.methods import METHODS
from dwindle.sources.loading import load_tokenizer
from tiny import tiny_directory


def process(*arguments: str | Path, cwd: Path) -> subprocess.Popen[str]:
    """A new interpreter, as from a shell, with the network allowed."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "dwindle", *map(str, arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=cwd, env=environment, stdout=pipe, stderr=pipe, text=True)


class Shell:
    """Runs commands in this process, in a folder."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        monkeypatch.chdir(folder)

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        return hostile.shell(*arguments)


@pytest.fixture
def shell(place: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    return Shell(place, monkeypatch)


RECIPE = """
[source]
model = "model"
[data]
train = ["pydoc:train"]
valid = ["pydoc:valid"]
seq_len = 24
valid_tokens = 240
cache_dir = "cache"
[training]
tokens = 2400
tokens_per_step = 240
micro_batch = 5
[prune]
target = "70%"
horizon = 0.8
[checkpoint]
every = 3
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, texts, a recipe, and everything that can be wrong with them."""
    place = tmp_path_factory.mktemp("place")
    tiny_directory(place / "model")
    (place / "recipe.toml").write_text(RECIPE)
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
    _token_files(place)
    return place


def _token_files(place: Path) -> None:
    tokenizer = load_tokenizer(place / "model")
    write_token_files([str(place / "text.txt")], tokenizer, place / "good-tokens")
    write_token_files([str(place / "text.txt")], tokenizer, place / "bad-tokens")
    shard = place / "bad-tokens" / "tokens-00000.bin"
    data = bytearray(shard.read_bytes())
    data[10] ^= 1
    shard.write_bytes(bytes(data))
    index = json.loads((place / "good-tokens" / "index.json").read_text())
    write_token_files([str(place / "text.txt")], tokenizer, place / "other-tokens")
    index["tokenizer"] = "0" * len(index["tokenizer"])
    (place / "other-tokens" / "index.json").write_text(json.dumps(index))


def test_inspect(shell: Shell) -> None:
    code, out, err = shell("inspect", "model", "--json")
    found = json.loads(out)
    assert code == 0 and err == ""
    assert found["hidden"] == 32 and found["layers"][0]["kv_heads"] == 4
    total = sum(t.numel() for t in load_file(shell.folder / "model" / "model.safetensors").values())
    assert found["parameters"]["total"] == total
    parts = ("embedding", "attention", "ffn", "norms")
    assert sum(found["parameters"][part] for part in parts) == total
    assert found["groups"]["ffn"] == 3 * 3 * 32
    table = shell("inspect", "model")[1]
    assert "parameters of one group" in table and "0-2" in table


def test_prune_and_inspect_the_result(shell: Shell) -> None:
    command = ["prune", "model", "--to", "80%", "--out", "smaller", "--data", "text.txt", "short.txt"]
    code, out, err = shell(*command, "--seq-len", "32", "--sequences", "4", "--json")
    assert code == 0, err
    result = json.loads(out)
    assert result["stock"] and result["parameters"]["after"] <= 0.8 * result["parameters"]["before"]
    found = json.loads(shell("inspect", "smaller", "--json")[1])
    assert found["parameters"]["total"] == result["parameters"]["after"]
    files = {path.name for path in (shell.folder / "smaller").iterdir()}
    assert files >= {"model.safetensors", "config.json", "tokenizer.json", "generation_config.json"}
    assert files >= {"structure.json", "ledger.jsonl"}


def test_tokenize_then_pretrain_on_the_token_files(shell: Shell) -> None:
    code, out, _ = shell("tokenize", "text.txt", "short.txt", "--model", "model", "--out", "tokens", "--json")
    assert code == 0 and json.loads(out)["documents"] == 2
    code, out, _ = shell("tokenize", "text.txt", "--model", "model", "--out", "one")
    assert code == 0 and out.rstrip().endswith("tokens of 1 document")
    overrides = ["data.train=tokens", "data.valid=[]", "training.tokens=960"]
    code, out, err = shell("pretrain", "recipe.toml", *overrides, "--out", "on-tokens", "--json")
    assert code == 0, err
    assert json.loads(out)["status"] == "finished"


def test_a_dry_run_trains_nothing(shell: Shell) -> None:
    before = sorted(shell.folder.iterdir())
    code, out, _ = shell("pretrain", "recipe.toml", "prune.target=60%", "--dry-run", "--json")
    plan = json.loads(out)
    assert code == 0 and sorted(shell.folder.iterdir()) == before
    assert plan["steps"] == 10 and plan["tokens"] == 2400 and 3 < plan["events_fewest"] < plan["events_most"]
    assert plan["parameters_target"] == int(0.6 * plan["parameters_before"])
    stages = ["prune.method=adapt", "prune.horizon=none", "prune.interleaves=3"]
    code, out, _ = shell("pretrain", "recipe.toml", *stages, "--dry-run", "--json")
    assert code == 0 and 1 <= json.loads(out)["events_fewest"] <= json.loads(out)["events_most"]
    assert "shape at the end" in shell("pretrain", "recipe.toml", "prune.target=hidden=24", "--dry-run")[1]


def test_a_model_and_its_text_in_one_go(shell: Shell) -> None:
    command = ["pretrain", "model", "text.txt", "--to", "70%", "--tokens", "3k", "training.lr=2e-3", "--json"]
    code, out, err = shell(*command)
    assert code == 0, err
    found = json.loads(out)
    assert found["run"] == "runs/model-to-70pct" and found["target_reached"]
    assert found["quality"]["source_loss"] > 0 and found["quality"]["text"] == ["text.txt"]
    assert "lr = 0.002" in (shell.folder / "runs/model-to-70pct/recipe.toml").read_text()


def test_the_saved_recipe_is_the_resolved_one(shell: Shell) -> None:
    command = ["pretrain", "recipe.toml", "training.lr=2e-4", "training.tokens=720", "--out", "resolved", "--json"]
    code, first, _ = shell(*command)
    assert code == 0
    saved = (shell.folder / "resolved" / "recipe.toml").read_text()
    assert "lr = 0.0002" in saved and str(shell.folder / "model") in saved
    code, out, _ = shell("resume", "resolved", "--json")  # a finished run: nothing to do but say the same
    assert code == 0 and json.loads(out) == json.loads(first) and json.loads(out)["loss"] > 0


def test_sizes_that_quantised_files_do_not_like_are_told(shell: Shell) -> None:
    code, _, err = shell("prune", "model", "--to", "hidden=31,ffn=38", "--sequences", "4", "--out", "odd-sizes")
    assert code == 0
    assert "note: hidden 31 and FFN 38 in all layers: not in blocks of 32, so most rows of a quantized GGUF" in err
    assert "f16; padding by `dwindle export --round 32` avoids it\n" in err  # a shape has the sizes it names
    code, _, err = shell("prune", "model", "--to", "ffn=32", "--sequences", "4", "--out", "even-sizes")
    assert code == 0 and "note:" not in err
    small = ["--sequences", "4", "--seq-len", "32"]
    code, _, err = shell("prune", "model", "--to", "80%", "--selection", "global", *small, "--out", "odd-anywhere")
    assert code == 0 and "--round-to 32, or padding by `dwindle export --round 32`, avoids it" in err
    code, _, err = shell("prune", "model", "--to", "80%", "--method", "adapt", *small, "--out", "odd-layers")
    assert code == 0 and "f16; padding by `dwindle export --round 32` avoids it" in err  # it cannot round


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("prune.selection=global", "f16; prune.round_to=32, or padding by `dwindle export --round 32`, avoids it"),
        ("prune.method=adapt", "f16; padding by `dwindle export --round 32` avoids it"),
    ],
)
def test_a_run_with_odd_sizes_says_what_it_can_do(override: str, said: str, shell: Shell) -> None:
    more = ["prune.horizon=none", "prune.interleaves=2"] if "adapt" in override else []
    out = f"run {override[6:9]}"
    code, _, err = shell("pretrain", "recipe.toml", override, *more, "training.tokens=960", "--out", out)
    assert code == 0 and said in err, err


@pytest.mark.parametrize("command", [["prune", "--to", "80%", "--rounds", "3"], ["quantize"], ["compare"]])
def test_sequences_beyond_the_positions_are_told_once(command: list[str], shell: Shell) -> None:
    to = ["--metrics", "taylor", "--to", "20%"] if command == ["compare"] else []
    out = ["--out", f"beyond {command[0]}"]
    code, _, err = shell(command[0], "model", *command[1:], *to, "--sequences", "4", "--seq-len", "200", *out)
    assert code == 0, err
    told = "warning: seq_len: 200 is more than the 128 positions that the source was made for"
    assert [line for line in err.splitlines() if "positions" in line] == [told]


def test_a_missed_target_is_no_success(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is there, but what follows in a script must not take it for one of that size."""
    from dwindle.pruning.pruner import Pruner

    monkeypatch.setattr(Pruner, "finished", False)
    code, out, err = shell("pretrain", "recipe.toml", "training.tokens=720", "--out", "missed target")
    assert code == 1 and out.startswith("finished: ") and (shell.folder / "missed target" / "model").is_dir()
    assert err.splitlines()[-1].startswith("error: the target was not reached, ")


def test_a_warning_is_one_line_for_a_person(shell: Shell) -> None:
    options = ["training.tokens=960", "checkpoint.every=2", "--out", "damaged"]
    assert shell("pretrain", "recipe.toml", *options)[0] == 0
    newest = sorted((shell.folder / "damaged" / "checkpoints").iterdir())[-1]
    (newest / "optimizer.safetensors").write_bytes(b"nonsense")
    code, _, err = shell("resume", "damaged")
    assert code == 0
    [line] = [line for line in err.splitlines() if "damaged (" in line]
    assert line.startswith(f"warning: checkpoint damaged/checkpoints/{newest.name} is damaged (optimizer.safetensors")
    assert "CheckpointWarning" not in err and ".py" not in err


def test_stop_signals_save_and_say_how_to_go_on(place: Path) -> None:
    running = process("pretrain", "recipe.toml", "training.tokens=2M", "--out", "stopped", cwd=place)
    deadline = time.monotonic() + 300
    while not (place / "stopped" / "checkpoints").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    running.send_signal(signal.SIGTERM)
    out, err = running.communicate(timeout=300)
    assert running.returncode == 128 + signal.SIGTERM, err
    assert "dwindle resume stopped" in out
    assert list((place / "stopped" / "checkpoints").iterdir()) and not (place / "stopped" / "model").exists()


PRUNE = ["prune", "model", "--to", "50%"]
PRETRAIN = ["pretrain", "recipe.toml"]
HALVE = ["export", "model", "--to", "hf", "--type", "bf16"]
BAD = {
    "unknown family": (["prune", "gpt2", "--to", "50%"], "error: source gpt2: model type 'gpt2' is not supported: "),
    "target above": (["prune", "model", "--to", "900M"], "--to 900M: the source has"),
    "target below": (["prune", "model", "--to", "100"], "error: --to 100 is below the smallest reachable model"),
    "missing weights": (["prune", "missing", "--to", "50%"], "missing/model.safetensors does not exist"),
    "corrupt weights": (["prune", "corrupt", "--to", "50%"], "corrupt/model.safetensors"),
    "empty data": ([*PRUNE, "--data", "empty.txt"], "empty.txt"),
    "missing data": ([*PRUNE, "--data", "nowhere.txt"], "nowhere.txt"),
    "short text": ([*PRUNE, "--data", "short.txt"], "--data"),
    "output exists": ([*PRUNE, "--out", "existing"], "--out existing already exists"),
    "unknown metric": ([*PRUNE, "--metric", "wonder"], "--metric 'wonder' is unknown"),
    "bad multiple": ([*PRUNE, "--round-to", "0"], "error: --round-to: 0 must be at least 1"),
    "no sequences": ([*PRUNE, "--sequences", "0"], "error: --sequences: 0 must be at least 1"),
    "nothing to predict": ([*PRUNE, "--seq-len", "1"], "error: --seq-len: 1 must be at least 2"),
    "nothing to quantise by": (["quantize", "model", "--seq-len", "1"], "error: --seq-len: 1 must be at least 2"),
    "nothing to measure": (
        ["quantize", "model", "--valid-seq-len", "1"],
        "error: --valid-seq-len: 1 must be at least 2",
    ),
    "nothing to compare by": (["compare", "model", "--seq-len", "1"], "error: --seq-len: 1 must be at least 2"),
    "not of this method": ([*PRUNE, "--amplitude", "1"], "error: --amplitude: is a setting of method adapt, not"),
    "no threads": (["export", "model", "--to", "hf", "--threads", "0"], "error: --threads: 0 must be at least 1"),
    "a size twice": (["prune", "model", "--to", "hidden=24,ffn=32,hidden=16"], "16' gives hidden twice"),
    "not a size": (["prune", "model", "--to", "80%noemb"], "error: --to: '80%noemb' is not a size such as 100M"),
    "non-finite weights": (["prune", "poisoned", "--to", "50%"], "model.layers.1.mlp.up_proj.weight"),
    "no such path": (["prune", "./nothing", "--to", "50%"], "nothing"),
    "bad groups": (
        [*PRUNE, "--groups", "legs"],
        'error: --groups: expected one of "attn", "ffn", "stem", "layer", got "legs"',
    ),
    "no layers": (["prune", "model", "--to", "layers=0"], "error: --to: 'layers=0' is not part of a shape such as"),
    "more layers": (
        ["prune", "model", "--to", "layers=9"],
        "--to layers=9: layers must lie between 1 and",
    ),
    "too few layers": (["prune", "model", "--to", "5%", "--groups", "layer"], "below the smallest reachable model"),
    "too few for it": (["prune", "model", "--to", "5%", "--method", "shortgpt"], "that method shortgpt can reach"),
    "bad attention": (
        [*PRUNE, "--attention", "none"],
        'error: --attention: expected one of "cluster", "regular", got "none"',
    ),
    "stray argument": (["prune", "model", "stray", "--to", "50%"], "stray"),
    "bad device": ([*PRUNE, "--device", "abacus"], "abacus"),
    "no recipe": (["pretrain", "nowhere.toml"], "nowhere.toml"),
    "a recipe called like an option": (["pretrain", "out"], "error: out does not exist"),
    "a name that is almost right": (["inspect", "modl"], "error: source 'modl': did you mean model?"),
    "an alias that is almost right": (["inspect", "smollm2-135"], "did you mean smollm2-135m?"),
    "another tool's name of a key": ([*PRETRAIN, "learning_rate=1e-3"], "learning_rate: did you mean training.lr?"),
    "the same in its table": ([*PRETRAIN, "training.batch_size=8"], "did you mean training.tokens_per_step?"),
    "unknown key": ([*PRETRAIN, "training.learning_rat=1"], "training.learning_rat"),
    "wrong type": ([*PRETRAIN, "training.lr=fast"], "training.lr"),
    "unreachable in these tokens": ([*PRETRAIN, "prune.horizon=none", "prune.ratio=1:9"], "prune.ratio: 1:9 gives 1"),
    "unreachable target": ([*PRETRAIN, "prune.target=100"], "below the smallest reachable model"),
    "missing training text": ([*PRETRAIN, "data.train=nowhere.txt"], "data.train"),
    "corrupt shard": ([*PRETRAIN, "data.train=bad-tokens"], "tokens-00000.bin"),
    "other tokenizer": ([*PRETRAIN, "data.train=other-tokens"], "tokenizer"),
    "poisoned source": ([*PRETRAIN, "source.model=poisoned"], "model.layers.1.mlp.up_proj.weight"),
    "too little text": ([*PRETRAIN, "data.train=short.txt"], "data.train"),
    "validation is trained on": ([*PRETRAIN, "data.valid=pydoc:train"], "data.valid"),
    "no place for token files": ([*PRETRAIN, "data.cache_dir=text.txt"], "error: data.cache_dir /"),
    "a run is there": ([*PRETRAIN, "--out", "good-tokens"], "exists and is not a run"),
    "no run replaces the root": ([*PRETRAIN, "--out", "/", "--overwrite"], "--out / is the root of a file system"),
    "nor the folder it is started in": ([*PRETRAIN, "--out", ".", "--overwrite"], "--out . is the current directory"),
    "nor is a model put there": ([*PRUNE, "--out", "..", "--overwrite"], "--out .. holds the current directory"),
    "nor an export": (["export", "model", "--to", "hf", "--out", "/"], "--out / is the root of a file system"),
    "pruned onto itself": ([*PRUNE, "--out", "model", "--overwrite"], "--out model is the input model"),
    "exported onto itself": ([*HALVE, "--out", "model", "--overwrite"], "--out model is the input model"),
    "exported onto itself, unasked": ([*HALVE, "--out", "./model"], "--out model is the input model"),
    "another's model": ([*HALVE, "--out", "poisoned", "--overwrite"], "--out poisoned already exists and has no"),
    "its own calibration text": ([*PRUNE, "--data", "text.txt", "--out", "text.txt"], "is the input text.txt"),
    "tokenized onto itself": (
        ["tokenize", "text.txt", "--model", "model", "--out", "text.txt"],
        "is the input text.txt",
    ),
    "quantised onto itself": (["quantize", "model", "--out", "model", "--overwrite"], "--out model is the input model"),
    "compared into its source": (["compare", "model", "--out", "model"], "--out model is the input model"),
    "nothing to resume at the root": (["resume", "/"], "has no recipe.toml"),
    "nothing to resume": (["resume", "model"], "recipe.toml"),
    "nothing to resume in processes": (["resume", "model", "--nproc", "2"], "recipe.toml"),
    "more processes than sequences": ([*PRETRAIN, "--nproc", "11"], "error: --nproc 11: a step has 10 sequences"),
    "not a ready-made recipe": (
        ["demo", "--recipe", "dmo"],
        "error: dmo does not exist: give the path of a .toml file",
    ),
    "almost a ready-made recipe": (["pretrain", "smollm2-135m-to-80"], "did you mean smollm2-135m-to-80m?"),
    "a new recipe without its text": (["new", "model", "nowhere.txt", "--to", "50%"], "nowhere.txt"),
    "a new recipe that is there": (
        ["new", "model", "text.txt", "--to", "50%", "--out", "recipe.toml"],
        "--out recipe.toml already exists",
    ),
    "an unknown goal": (["new", "model", "text.txt", "--to", "50%", "--for", "fun", "--out", "x.toml"], "--for 'fun'"),
    "held out twice": ([*PRETRAIN, "data.holdout=0.1"], "data.holdout: cannot be combined with data.valid"),
    "target of a recipe": (
        [*PRETRAIN, "--to", "50%"],
        "--to 50%: needs a model and a text: with a recipe, write prune",
    ),
    "tokens of a recipe": ([*PRETRAIN, "--tokens", "1M"], "--tokens 1M: needs --to"),
    "a GGUF file that is not there": (["generate", "x.gguf", "Hello"], "source x.gguf: does not exist"),
}


@pytest.mark.parametrize("name", BAD)
def test_user_errors(name: str, shell: Shell) -> None:
    arguments, message = BAD[name]
    if "--out" not in arguments and arguments[0] not in ("resume", "generate", "inspect"):
        arguments = [*arguments, "--out", "never.toml" if arguments[0] == "new" else "never"]
    before = {path: path.stat().st_mtime_ns for path in shell.folder.rglob("*") if "cache" not in path.parts}
    code, out, err = shell(*arguments)
    assert code == 2, err
    assert out == ""
    lines = err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ") and message in lines[0], err
    after = {path: path.stat().st_mtime_ns for path in shell.folder.rglob("*") if "cache" not in path.parts}
    assert after == before


def test_a_hub_id_without_network(place: Path) -> None:
    running = process("prune", "someone/model", "--to", "50%", "--out", "never", cwd=place)
    out, err = running.communicate(timeout=300)
    assert running.returncode == 2 and out == ""
    assert len(err.strip().splitlines()) == 1 and "someone/model" in err and not (place / "never").exists()


def test_an_existing_run_is_not_overwritten(shell: Shell) -> None:
    assert shell(*PRETRAIN, "training.tokens=480", "--out", "again")[0] == 0
    code, _, err = shell(*PRETRAIN, "--out", "again")
    assert code == 2 and "dwindle resume again" in err
    assert shell(*PRETRAIN, "training.tokens=480", "--out", "again", "--overwrite")[0] == 0


def test_a_dry_run_looks_for_the_task_sets(shell: Shell) -> None:
    overrides = ["validation.tasks=arc_easy", "validation.data=nowhere"]
    code, _, err = shell("pretrain", "recipe.toml", *overrides, "--dry-run")
    assert code == 2 and "validation.data" in err and "nowhere" in err


def test_keys_of_a_recipe(shell: Shell) -> None:
    code, out, _ = shell("keys", "distill.", "--json")
    assert code == 0
    assert [key["name"] for key in json.loads(out)][:2] == ["distill.weight", "distill.temperature"]
    code, out, _ = shell("keys", "training.betas")
    assert code == 0 and "[0.9, 0.95]" in " ".join(out.split())  # brackets are not taken for markup
    code, _, err = shell("keys", "nothing")
    assert code == 2 and err.startswith("error: nothing: no key of a recipe contains it")


def test_keys_of_recipes_are_not_called_options(shell: Shell) -> None:
    code, _, err = shell("pretrain", "recipe.toml", "prune.round_to=-1", "--dry-run")
    assert code == 2 and "prune.round_to" in err and "--round-to" not in err


def test_processes_are_counted_before_a_run_is_resumed_or_replaced(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shell(*PRETRAIN, "training.tokens=480", "--out", "counted")[0] == 0
    started: list[int] = []
    monkeypatch.setattr("dwindle.distributed.launch.launch", lambda number, arguments: started.append(number) or 0)
    for command in (["resume", "counted"], [*PRETRAIN, "--out", "counted", "--overwrite"]):
        code, _, err = shell(*command, "--nproc", "11")
        assert code == 2 and "use at most 10, or raise training.tokens_per_step" in err
    assert not started and (shell.folder / "counted" / "model" / "config.json").is_file()
    assert shell("resume", "counted", "--nproc", "10")[0] == 0 and started == [10]


def test_text_of_another_field(shell: Shell) -> None:
    """The message named an option that only tokenize had."""
    (shell.folder / "other.jsonl").write_text(
        json.dumps({"content": "It was a bright cold day in April. " * 40}) + "\n"
    )
    small = ["--sequences", "4", "--seq-len", "24", "--data", "other.jsonl"]
    for command in (["prune", "model", "--to", "80%"], ["quantize", "model", "--valid", "other.jsonl"]):
        code, _, err = shell(*command, *small, "--out", f"{command[0]}-other")
        assert code == 2 and "has no field 'text' (it has: content): set data.text_field or --text-field" in err
        given = ["--text-field", "content", *(["--valid-seq-len", "24"] if command[0] == "quantize" else [])]
        code, _, err = shell(*command, *small, "--out", f"{command[0]}-other", *given)
        assert code == 0, err


def test_every_argument_is_described(shell: Shell) -> None:
    """The usage line of prune named one that was hidden."""
    assert shell("--version")[0] == 0  # which loads all commands
    commands = [get_command(app)]
    for command in commands:
        commands += getattr(command, "commands", {}).values()
        for parameter in command.params:
            assert getattr(parameter, "help", None), f"{command.name}: {parameter.name}"
    assert len(commands) > 15


def test_help_in_80_columns(shell: Shell) -> None:
    """Examples of targets were cut off, methods took a screen, and a required option said what holds without it."""
    assert shell("--version")[0] == 0  # which loads all commands
    shown = {}
    for name in ("prune", "new", "trim"):
        found = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"})
        shown[name] = found.output
    for name in ("prune", "new"):
        assert all(to in shown[name] for to in ("50%nonemb", "hidden=512", "layers=24", "90MB@q8_0")), shown[name]
    methods = shown["prune"].partition("--method")[2].partition("--selection")[0]
    assert len(methods.splitlines()) < 16 and all(name in " ".join(methods.split()) for name in METHODS)
    assert "Not set" not in shown["trim"].partition("--vocab")[2].partition("--out")[0]


def test_a_run_is_told_from_a_model(shell: Shell) -> None:
    assert shell(*PRETRAIN, "training.tokens=480", "--out", "told")[0] == 0
    code, out, err = shell("inspect", "told", "--json")
    assert code == 0 and json.loads(out)["source"] == "told/model"
    assert err == "told is a run: using its model, told/model\n"
    code, _, err = shell("prune", "told", "--to", "50%", "--out", "smaller-still")
    assert code == 2 and "source told: is a run of dwindle pretrain: give its model, told/model" in err


def test_a_stopped_demo_says_how_to_go_on(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    import dwindle.run.demo
    from dwindle.run.result import RunResult

    def stopped(recipe: object, run: Path, **_: object) -> RunResult:
        return RunResult(run, recipe, "stopped", 3, 720, 1, None, None, None, False)

    monkeypatch.setattr(dwindle.run.demo, "pretrain", stopped)
    code, _, err = shell("demo", "--recipe", "recipe.toml", "--out", "shown", "--sequences", "2")
    assert code == 130
    assert err.splitlines()[-1] == "interrupted: continue the pruning-aware run with: dwindle resume shown/run"
    code, _, err = shell("demo", "--recipe", "recipe.toml", "--out", "shown", "--sequences", "2")
    assert code == 2 and err.startswith("error: --out shown/source already exists: ")
    assert shell("demo", "--recipe", "recipe.toml", "--out", "shown", "--sequences", "2", "--overwrite")[0] == 130
