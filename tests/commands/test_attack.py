"""What an attack tried: each case ends in one line and exit code 2, or works, and touches nothing else."""

from __future__ import annotations

import json
import lzma
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dwindle
import hostile
from dwindle.core.run_directory import RunDirectory
from dwindle.data.token_files import write_token_files
from hostile import (
    ARRAY,
    F32,
    STRING,
    U8,
    U32,
    assert_ended_well,
    assert_refused,
    changed,
    command,
    edit_json,
    gguf_bytes,
    llama_gguf,
)
from tiny import tiny_directory, tiny_tokenizer

DEEP = 100_000
ESCAPES = "\x1b[2J\x1b]0;owned\x07\r\nerror: fake\u202e"

RECIPE = """
[source]
model = "model"
[data]
train = ["pydoc:train"]
seq_len = 24
[training]
tokens = 960
tokens_per_step = 240
[prune]
target = "70%"
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the cases copy and change: a model, a pruned one, a stopped run, tokens."""
    place = tmp_path_factory.mktemp("made")
    tiny_directory(place / "model")
    (place / "recipe.toml").write_text(RECIPE)
    (place / "books.txt").write_text("Once upon a time. " * 200)
    dwindle.prune(place / "model", "90%", metric="magnitude", out=place / "pruned")
    recipe = dwindle.load_recipe(place / "recipe.toml", [f"source.model={place / 'model'}", "checkpoint.every=2"])
    dwindle.pretrain(recipe, place / "run")
    shutil.rmtree(place / "run" / "model")
    return place


@pytest.fixture
def place(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(made, tmp_path / "place")
    monkeypatch.chdir(tmp_path / "place")
    return tmp_path / "place"


def configured(**changes: Any) -> Callable[[Path], list[str]]:
    def case(place: Path) -> list[str]:
        edit_json(place / "model" / "config.json", **changes)
        return ["inspect", "model"]

    return case


def with_gguf(*change: tuple[str, int, Any], tensors: Callable[[list[Any]], list[Any]] = list) -> Any:
    def case(place: Path) -> list[str]:
        pairs, table, data = llama_gguf()
        for key, kind, value in change:
            pairs = changed(pairs, key, kind, value)
        (place / "m.gguf").write_bytes(gguf_bytes(pairs, tensors(table), data))
        return ["prune", "m.gguf", "--to", "90%", "--metric", "magnitude", "--out", "out"]

    return case


def with_recipe(text: str | bytes, *rest: str) -> Callable[[Path], list[str]]:
    def case(place: Path) -> list[str]:
        (place / "r.toml").write_bytes(text if isinstance(text, bytes) else text.encode())
        return ["pretrain", "r.toml", *rest, "--dry-run"]

    return case


def overridden(*overrides: str) -> Callable[[Path], list[str]]:
    return lambda place: ["pretrain", "recipe.toml", *overrides, "--dry-run"]


def with_file(name: str, content: str | bytes, *arguments: str) -> Callable[[Path], list[str]]:
    def case(place: Path) -> list[str]:
        path = place / name
        path.unlink(missing_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return list(arguments)

    return case


def with_fifo(name: str, *arguments: str) -> Callable[[Path], list[str]]:
    def case(place: Path) -> list[str]:
        (place / name).unlink(missing_ok=True)
        os.mkfifo(place / name)
        return list(arguments)

    return case


def with_link(name: str, target: str, *arguments: str) -> Callable[[Path], list[str]]:
    def case(place: Path) -> list[str]:
        (place / name).unlink(missing_ok=True)
        (place / name).symlink_to(target)
        return list(arguments)

    return case


def with_state(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], list[str]]:
    """A checkpoint whose state was edited, and its checksum with it."""

    def case(place: Path) -> list[str]:
        import hashlib

        for folder in RunDirectory(place / "run").list_checkpoints():
            state = json.loads((folder / "state.json").read_text())
            change(state)
            content = json.dumps(state).encode()
            (folder / "state.json").write_bytes(content)
            edit_json(folder / "checksums.json", **{"state.json": hashlib.sha256(content).hexdigest()})
        return ["resume", "run"]

    return case


def index_outside(name: str) -> Callable[[Path], list[str]]:
    """A weight index that points outside, with a decoy of the same name inside."""

    def case(place: Path) -> list[str]:
        model = place / "model"
        (model / "model.safetensors").rename(model / "evil.safetensors")
        shutil.copy(model / "evil.safetensors", place / "evil.safetensors")
        index = {"metadata": {}, "weight_map": {"model.norm.weight": name.format(place=place)}}
        (model / "model.safetensors.index.json").write_text(json.dumps(index))
        return ["prune", "model", "--to", "90%", "--metric", "magnitude", "--out", "out"]

    return case


def tokens_beyond(place: Path) -> None:
    """A model whose embedding is smaller than its tokenizer."""
    shutil.rmtree(place / "model")
    tiny_directory(place / "model", vocab_size=100)


def other_tokens(*arguments: str) -> Callable[[Path], list[str]]:
    def case(place: Path) -> list[str]:
        tokens_beyond(place)
        return list(arguments)

    return case


def token_files_beyond(place: Path) -> list[str]:
    write_token_files([str(place / "books.txt")], tiny_tokenizer(), place / "tokens")
    tokens_beyond(place)
    return ["pretrain", "recipe.toml", 'data.train=["tokens"]', "--dry-run"]


def xz_bomb(place: Path) -> list[str]:
    with lzma.open(place / "bomb.txt.xz", "wb") as file:
        for _ in range(80):
            file.write(b" " * (1 << 20))
    return ["prune", "model", "--to", "90%", "--data", "bomb.txt.xz", "--out", "out"]


def twice(table: list[Any]) -> list[Any]:
    return [*table, table[0]]


def at_zero(table: list[Any]) -> list[Any]:
    return [(name, shape, kind, 0) for name, shape, kind, _ in table]


def deep_json(place: Path) -> str:
    return "[" * DEEP + "]" * DEEP


REFUSED: dict[str, Callable[[Path], list[str]]] = {
    # trust
    "index ../": index_outside("../evil.safetensors"),
    "index absolute": index_outside("{place}/evil.safetensors"),
    # resources
    "hidden_size 10**9": configured(hidden_size=10**9),
    "intermediate_size 10**9": configured(intermediate_size=10**9),
    "10**6 layers": configured(num_hidden_layers=10**6),
    "vocabulary 10**12": configured(vocab_size=10**12),
    "heads 10**9": configured(num_attention_heads=10**9),
    "gguf hidden 10**9": with_gguf(("llama.embedding_length", U32, 10**9)),
    "gguf channels 10**9": with_gguf(("llama.feed_forward_length", U32, 10**9)),
    "gguf 10**6 layers": with_gguf(("llama.block_count", U32, 10**6)),
    "xz bomb": xz_bomb,
    "recipe /dev/zero": lambda place: ["pretrain", "/dev/zero", "--dry-run"],
    "recipe fifo": with_fifo("r.toml", "pretrain", "r.toml", "--dry-run"),
    "recipe of 2 MB": with_recipe(b"# " + b"x" * (2 << 20)),
    "tokenizer fifo": with_fifo("model/tokenizer.json", "prune", "model", "--to", "90%", "--out", "out"),
    "config fifo": with_fifo("model/config.json", "inspect", "model"),
    "ids beyond, prune": other_tokens("prune", "model", "--to", "90%", "--out", "out"),
    "ids beyond, dry run": other_tokens("pretrain", "recipe.toml", "--dry-run"),
    "ids beyond, tokenize": other_tokens("tokenize", "books.txt", "--model", "model", "--out", "tokens"),
    "ids beyond, run": other_tokens("pretrain", "recipe.toml", "--out", "new"),
    "ids beyond, token files": token_files_beyond,
    # tracebacks: configurations
    "negative hidden_size": configured(hidden_size=-8),
    "zero heads": configured(num_attention_heads=0),
    "negative layers": configured(num_hidden_layers=-1),
    "text as size": configured(hidden_size="32"),
    "unknown rope_type": configured(rope_parameters={"rope_type": "spiral", "rope_theta": 1e4}),
    "unknown hidden_act": configured(hidden_act="wiggle"),
    "padding beyond": configured(pad_token_id=10**6),
    "heads do not divide": configured(num_attention_heads=7),
    "per_layer_config of text": configured(model_type="dwindle_llama", per_layer_config="wide"),
    "per_layer_config of a layer beyond": configured(
        model_type="dwindle_llama", per_layer_config={"7": {"intermediate_size": 8}}
    ),
    "per_layer_config huge": configured(
        model_type="dwindle_llama", per_layer_config={"1": {"intermediate_size": 10**9}}
    ),
    "per_layer_config with other heads": configured(
        model_type="dwindle_llama", per_layer_config={"1": {"queries_per_kv": [1, 10**9]}}
    ),
    "layer_shapes of text": configured(model_type="dwindle_llama", layer_shapes="wide"),
    "layer_shapes too few": configured(model_type="dwindle_llama", layer_shapes=[{}]),
    "layer_shapes huge": configured(
        model_type="dwindle_llama", layer_shapes=[{"intermediate_size": 40, "queries_per_kv": [10**9]}] * 3
    ),
    "config deep": with_file("model/config.json", "[" * DEEP + "]" * DEEP, "inspect", "model"),
    "config deep in a table": with_file(
        "model/config.json", '{"model_type": "llama", "x": ' + "[" * 200 + "]" * 200 + "}", "inspect", "model"
    ),
    "config long number": with_file(
        "model/config.json", '{"model_type": "llama", "hidden_size": ' + "9" * 5000 + "}", "inspect", "model"
    ),
    "config not text": with_file("model/config.json", b"\xff\xfe\x00", "inspect", "model"),
    "model_type with escapes": configured(model_type=ESCAPES),
    # tracebacks: GGUF
    "gguf nested arrays": with_gguf(("x", ARRAY, (ARRAY, [(ARRAY, [(U8, [1])])]))),
    "gguf architecture as number": with_gguf(("general.architecture", U32, 3)),
    "gguf alignment as text": with_gguf(("general.alignment", STRING, "wide")),
    "gguf alignment as list": with_gguf(("general.alignment", ARRAY, (U8, [32]))),
    "gguf split as text": with_gguf(("split.count", STRING, "two")),
    "gguf epsilon as text": with_gguf(("llama.attention.layer_norm_rms_epsilon", STRING, "small")),
    "gguf epsilon as list": with_gguf(("llama.attention.layer_norm_rms_epsilon", ARRAY, (F32, [1.0]))),
    "gguf theta infinite": with_gguf(("llama.rope.freq_base", F32, float("inf"))),
    "gguf heads as list": with_gguf(("llama.attention.head_count", ARRAY, (U32, [2, 1]))),
    "gguf heads as text": with_gguf(("llama.attention.head_count", STRING, "two")),
    "gguf zero heads": with_gguf(("llama.attention.head_count", U32, 0)),
    "gguf key length as text": with_gguf(("llama.attention.key_length", STRING, "4")),
    "gguf scaling as text": with_gguf(("llama.rope.scaling.factor", STRING, "4")),
    "gguf dimensions as text": with_gguf(("llama.rope.dimension_count", STRING, "4")),
    "gguf bos as text": with_gguf(("tokenizer.ggml.bos_token_id", STRING, "<s>")),
    "gguf tokens as numbers": with_gguf(
        ("tokenizer.ggml.model", STRING, "gpt2"),
        ("tokenizer.ggml.tokens", ARRAY, (U32, list(range(16)))),
        ("tokenizer.ggml.merges", ARRAY, (U32, [1, 2])),
    ),
    "gguf tokens as a number": with_gguf(("tokenizer.ggml.model", STRING, "llama"), ("tokenizer.ggml.tokens", U32, 16)),
    "gguf merges without a space": with_gguf(
        ("tokenizer.ggml.model", STRING, "gpt2"),
        ("tokenizer.ggml.tokens", ARRAY, (STRING, [chr(97 + i) for i in range(16)])),
        ("tokenizer.ggml.merges", ARRAY, (STRING, ["ab"])),
    ),
    "gguf same name twice": with_gguf(tensors=twice),
    "gguf all at offset 0": with_gguf(tensors=at_zero),
    "gguf empty": with_file("m.gguf", b"", "inspect", "m.gguf"),
    "gguf huge counts": with_file("m.gguf", b"GGUF\x03\0\0\0" + b"\xff" * 16, "inspect", "m.gguf"),
    # tracebacks: recipes, targets, names
    "recipe deep list": with_recipe("x = " + "[" * DEEP + "]" * DEEP),
    "recipe deep keys": with_recipe(".".join("a" * 5000) + " = 1"),
    "recipe long number": with_recipe("x = " + "9" * 5000),
    "override deep": overridden("data.train=" + "[" * 50_000),
    "override deep key": overridden(".".join("a" * 3000) + "=1"),
    "target of 400 digits": lambda place: ["prune", "model", "--to", "9" * 400, "--out", "out"],
    "shape of 400 digits": lambda place: ["prune", "model", "--to", "hidden=" + "9" * 400, "--out", "out"],
    "recipe target of 400 digits": overridden("prune.target=" + "9" * 400),
    "tokens of 400 digits": overridden("training.tokens=" + "9" * 400),
    "seed of 400 digits": overridden("training.seed=" + "9" * 400),
    "lr of 400 digits": overridden("training.lr=" + "9" * 400),
    "shape ²": lambda place: ["prune", "model", "--to", "hidden=²", "--out", "out"],
    "name of 300": lambda place: ["inspect", "n" * 300],
    "out of 300": lambda place: ["prune", "model", "--to", "90%", "--metric", "magnitude", "--out", "n" * 300],
    "recipe of 300": lambda place: ["pretrain", "n" * 300, "--dry-run"],
    "data of 300": lambda place: ["prune", "model", "--to", "90%", "--data", "n" * 300, "--out", "out"],
    "NUL in a path": overridden('data.train=["a\\u0000.txt"]'),
    "NUL in the source": overridden('source.model="a\\u0000"'),
    "loop as source": with_link("loop", "loop", "inspect", "loop"),
    "loop as recipe": with_link("loop", "loop", "pretrain", "loop", "--dry-run"),
    "loop as output": with_link("loop", "loop", "prune", "model", "--to", "90%", "--out", "loop"),
    "loop as run": with_link("loop", "loop", "pretrain", "recipe.toml", "--out", "loop"),
    "loop as weights": with_link(
        "model/model.safetensors", "model.safetensors", "prune", "model", "--to", "90%", "--out", "out"
    ),
    # tracebacks: checkpoints
    "state without callbacks": with_state(lambda state: state.pop("callbacks")),
    "state without a run": with_state(lambda state: state["callbacks"].pop("RunState")),
    "state of another step": with_state(lambda state: state.update(step=10**6)),
    "state with text": with_state(lambda state: state.update(tokens="many")),
    "state with null": with_state(lambda state: state.update(callbacks=None)),
    "pruner without structure": with_state(lambda state: state["callbacks"]["Pruner"].pop("physical")),
    "pruner beyond the source": with_state(
        lambda state: state["callbacks"]["Pruner"]["physical"]["hidden"].append(10**6)
    ),
    "identity as list": with_state(lambda state: state["callbacks"]["RunState"].update(identity=[])),
    "batches elsewhere": with_state(lambda state: state["batches"].update(next_sample="x")),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_one_line(place: Path, name: str) -> None:
    arguments = REFUSED[name](place)
    before = {path: path.lstat().st_mtime_ns for path in place.rglob("*") if not path.is_dir()}
    line = assert_refused(command(*arguments))
    assert len(line) < 1200 and "Traceback" not in line
    logs = {place / "run" / name for name in ("metrics.jsonl", "ledger.jsonl", ".lock", "recipe.toml")}
    after = {path: path.lstat().st_mtime_ns for path in place.rglob("*") if not path.is_dir()}
    assert after.items() - before.items() <= {(path, after.get(path)) for path in logs}, "something was written"


WORKS: dict[str, Callable[[Path], list[str]]] = {
    "a hub kernel is not loaded": configured(attn_implementation="org/kernel", _attn_implementation="org/kernel"),
    "step-² beside checkpoints": lambda place: ((place / "run/checkpoints/step-²").mkdir(), ["runs", "."])[1],  # type: ignore[func-returns-value]
    "a fifo as metrics": with_fifo("run/metrics.jsonl", "runs", "."),
    "a fifo as ledger": with_fifo("run/ledger.jsonl", "report", "run"),
    "a recipe of zeros": with_link("run/recipe.toml", "/dev/zero", "runs", "."),
    "deep metrics": with_file("run/metrics.jsonl", "[" * DEEP + "\n", "report", "run"),
    "deep structure": with_file("pruned/structure.json", "[" * DEEP, "report", "pruned"),
    "deep recipe among runs": with_file("run/recipe.toml", "x = " + "[" * DEEP, "runs", "."),
    "deep keys among runs": with_file("run/recipe.toml", ".".join("a" * 5000) + " = 1", "runs", "."),
    "escapes in a recipe": with_file(
        "run/recipe.toml", f"[source]\nmodel = {json.dumps(ESCAPES)}\n[prune]\ntarget = '[/b]'\n", "runs", "."
    ),
}


@pytest.mark.parametrize("name", WORKS)
def test_works(place: Path, name: str) -> None:
    result = command(*WORKS[name](place))
    assert result[0] == 0, result
    assert_ended_well(result)


@pytest.mark.parametrize("name", ["x[/b]", "[bold", "\x1b[31mred", "a\nerror: b"])
def test_odd_names_are_printed_plainly(place: Path, name: str) -> None:
    (place / name).parent.mkdir(exist_ok=True)
    (place / "model").rename(place / name)
    for arguments in (["inspect", name], ["prune", name, "--to", "90%", "--metric", "magnitude", "--out", f"{name}!"]):
        code, out, err = command(*arguments)
        assert code == 0 and "\x1b" not in out + err, err
        assert_ended_well((code, out, err))
    assert dwindle.load(place / f"{name}!").model is not None


def test_no_kernel_of_a_configuration_reaches_the_model(place: Path) -> None:
    edit_json(place / "model" / "config.json", attn_implementation="org/kernel", _attn_implementation="org/kernel")
    assert "org/kernel" not in str(dwindle.load(place / "model").model.config._attn_implementation)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_behind_standard_output(place: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "dwindle", "--help"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 2 and done.stderr == "error: standard output: No space left on device\n"


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux to measure a peak of memory")
@pytest.mark.parametrize(("attack", "said"), [("[0] * 10**7", "GB of memory"), ("while True: pass", "the processor")])
def test_the_limits_of_these_tests_are_enforced(attack: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostile, "SECONDS_PER_INPUT", 0.5)
    monkeypatch.setattr(hostile, "BYTES_PER_INPUT", 1 << 20)
    with pytest.raises(hostile.OverLimit, match=said), hostile.limited():
        exec(attack)
