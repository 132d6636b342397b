"""What is fuzzed. A target takes one input and may only return, or raise ``UserError``: the message of one line.

Each has a maker of inputs. They call the functions behind the commands, hundreds of times a second; that
commands turn a ``UserError`` into one line and exit code 2 is tested elsewhere (``tests/commands``).
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import lzma
import os
import shutil
import socket
import threading
from collections.abc import Callable
from contextlib import redirect_stderr, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import tomli_w
import torch
from inputs import changed_bytes, changed_tree, noise, perhaps_changed, scalar, text, unsigned
from rich.table import Table

import dwindle
from dwindle.anatomy.anatomy import Anatomy
from dwindle.core.config import to_toml
from dwindle.core.errors import UserError
from dwindle.core.run_directory import RunDirectory
from dwindle.core.sizes import parse_count, parse_size
from dwindle.core.terminal import PlainConsole, plain
from dwindle.data.readers import read_documents
from dwindle.data.token_files import open_token_files, write_token_files
from dwindle.pruning.ledger import ledger_until, read_ledger, verified_structure
from dwindle.recipe.recipe import load_recipe, resolve_recipe
from dwindle.report.run import open_run
from dwindle.report.runs import list_runs, render_runs
from dwindle.report.server import ReportServer
from dwindle.report.summary import summarise
from dwindle.run.pretrain import resume
from dwindle.sources import huggingface
from dwindle.sources.gguf_file import open_gguf
from dwindle.sources.gguf_model import gguf_config, gguf_tensors
from dwindle.sources.loading import load_tokenizer
from dwindle.training.loop import Trainer
from hostile import ARRAY, BOOL, F32, I32, STRING, U8, U32, U64, edit_json, gguf_bytes, llama_gguf
from tiny import tiny_directory, tiny_tokenizer

RECIPE: dict[str, Any] = {
    "source": {"model": "model", "device": "cpu"},
    "data": {"train": ["pydoc:train"], "valid": [], "seq_len": 24, "valid_tokens": 240},
    "training": {"tokens": 960, "tokens_per_step": 240, "lr": 1e-3, "warmup": 0.1, "betas": [0.9, 0.95], "seed": 1},
    "prune": {"target": "70%", "horizon": 0.5, "milestones": ["80%"], "groups": ["attn", "ffn"], "round_to": 1},
    "distill": {"weight": 0.5, "temperature": 2.0},
    "validation": {"every": 0},
    "checkpoint": {"every": 2, "keep_last": 1},
}
GENERATION = {"eos_token_id": [2, 5], "do_sample": True, "temperature": 0.6, "top_p": 0.9, "num_beams": 1}
GGUF_KEYS = (
    "general.architecture", "general.alignment", "split.count", "llama.attention.key_length", "llama.rope.scaling.type",
    "llama.attention.value_length", "llama.rope.dimension_count", "llama.rope.scaling.factor", "llama.expert_count",
    "llama.rope.scale_linear", "tokenizer.ggml.model", "tokenizer.ggml.tokens", "tokenizer.ggml.token_type",
    "tokenizer.ggml.scores", "tokenizer.ggml.merges", "tokenizer.ggml.pre", "tokenizer.ggml.eos_token_id",
    "tokenizer.ggml.add_bos_token", "tokenizer.chat_template", "llama.rope.scaling.original_context_length",
)  # fmt: skip


@dataclass
class Place:
    """A folder with a model, a run and everything else that targets change; made once."""

    folder: Path

    def __post_init__(self) -> None:
        tiny_directory(self.folder / "model")
        os.chdir(self.folder)

    @cached_property
    def config(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "model" / "config.json").read_text())
        return found | {"num_hidden_layers": 1}  # a model is built for every input that is accepted

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        return dwindle.prune(self.folder / "model", "80%", metric="magnitude").ledger[:12]

    @cached_property
    def anatomy(self) -> Anatomy:
        return Anatomy.of_config(huggingface.read_config(self.folder / "model", "model"))

    @cached_property
    def run(self) -> Path:
        (self.folder / "prose.txt").write_text("Once upon a time there was a run. " * 60)
        data = RECIPE["data"] | {"train": [str(self.folder / "prose.txt")]}
        recipe = RECIPE | {"data": data, "distill": {}, "checkpoint": {"every": 2}}
        (self.folder / "run.toml").write_text(tomli_w.dumps(recipe))
        dwindle.pretrain(load_recipe(self.folder / "run.toml"), self.folder / "run")
        shutil.rmtree(self.folder / "run" / "model")
        return self.folder / "run"

    @cached_property
    def tokens(self) -> Path:
        (self.folder / "text.txt").write_text("Once upon a time. " * 30)
        write_token_files([str(self.folder / "text.txt")], tiny_tokenizer(), self.folder / "tokens", shard_tokens=300)
        return self.folder / "tokens"

    @cached_property
    def server(self) -> ReportServer:
        from dwindle.report.run import Run

        server = ReportServer(Run(self.run))
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return server

    def write(self, name: str, content: bytes | str) -> Path:
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))
        return path


def as_json(tree: Any) -> bytes:
    return json.dumps(tree).encode()


# GGUF ------------------------------------------------------------------------------------------------------


def _typed(random: Random, kind: int) -> Any:
    if kind == STRING:
        known = random.choice(("gpt2", "llama", "linear", "yarn", "deci", "qwen2", text(random, 6)))
        return known.encode("utf-8", "replace")
    if kind == ARRAY:
        inner = random.choice((U8, U32, I32, F32, BOOL, STRING, U64))
        return inner, [_typed(random, inner) for _ in range(random.choice((0, 1, 2, 16, 20)))]
    if kind == F32:
        return random.choice((0.0, 1e-5, 1e4, -1.0, float("inf"), float("nan"), 1e38))
    if kind == BOOL:
        return random.random() < 0.5
    return unsigned(random, {U8: 8, U32: 32, I32: 31, U64: 64}[kind])


def gguf_input(random: Random, place: Place) -> bytes:
    pairs, tensors, data = llama_gguf()
    for _ in range(random.randrange(4)):
        key = random.choice([*GGUF_KEYS, *(pair[0] for pair in pairs)])
        kind = random.choice((U8, U32, I32, F32, BOOL, STRING, U64, ARRAY, ARRAY))
        pairs = [pair for pair in pairs if pair[0] != key] + [(key, kind, _typed(random, kind))]
    for _ in range(random.randrange(3)):
        number = random.randrange(len(tensors))
        name, shape, kind, offset = tensors[number]
        what = random.randrange(4)
        if what == 0:
            name = random.choice(("rope_freqs.weight", "token_embd.weight", "output.weight", "x"))
        elif what == 1:
            shape = tuple(unsigned(random) for _ in range(random.randrange(4)))
        elif what == 2:
            kind = random.randrange(41)
        else:
            offset = unsigned(random)
        tensors[number] = (name, shape, kind, offset)
    return perhaps_changed(random, gguf_bytes(pairs, tensors, data))


def gguf(place: Place, content: bytes) -> None:
    file = open_gguf(place.write("fuzzed.gguf", content))
    config = gguf_config(file)
    Anatomy.of_config(config)
    load_tokenizer_or_none(place.folder / "fuzzed.gguf")
    gguf_tensors(file, config, torch.float32)


def load_tokenizer_or_none(path: Path) -> None:
    try:
        tokenizer = load_tokenizer(path)
    except UserError:
        return
    tokenizer("a text")


# Hugging Face directories ----------------------------------------------------------------------------------


def config_input(random: Random, place: Place) -> bytes:
    families = ("llama", "llama", "qwen2", "qwen3", "phi3", "olmo2", "granite", "dwindle_llama", "gpt2")
    tree = place.config | {"rope_scaling": None, "layer_shapes": None, "model_type": random.choice(families)}
    return perhaps_changed(random, as_json(changed_tree(random, tree)))


def config(place: Place, content: bytes) -> None:
    folder = place.write("fuzzed-model/config.json", content).parent
    Anatomy.of_config(huggingface.read_config(folder, "fuzzed"))
    huggingface.generation_of(folder, "fuzzed")


def generation_input(random: Random, place: Place) -> bytes:
    return perhaps_changed(random, as_json(changed_tree(random, GENERATION)))


def generation(place: Place, content: bytes) -> None:
    folder = place.write("generation/generation_config.json", content).parent
    place.write("generation/config.json", as_json(place.config))
    huggingface.generation_of(folder, "fuzzed").save_pretrained(place.folder / "generation-saved")


def index_input(random: Random, place: Place) -> bytes:
    files = {"model.norm.weight": "model.safetensors", "lm_head.weight": "b.safetensors"}
    tree = {"metadata": {"total_size": 1}, "weight_map": files}
    return perhaps_changed(random, as_json(changed_tree(random, tree)))


def index(place: Place, content: bytes) -> None:
    folder = place.write("indexed/model.safetensors.index.json", content).parent
    place.write("indexed/config.json", as_json(place.config))
    huggingface.read_model(folder, None, torch.device("cpu"), "fuzzed")
    raise AssertionError("an index without weights was accepted")


# Recipes, sizes, text --------------------------------------------------------------------------------------


def _toml(tree: Any) -> bytes:
    """TOML has no null and fewer texts than JSON."""

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {plain(str(key)): clean(item) for key, item in value.items() if item is not None}
        if isinstance(value, list):
            return [clean(item) for item in value if item is not None]
        return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value

    return tomli_w.dumps(clean(tree)).encode()


def recipe_input(random: Random, place: Place) -> bytes:
    return perhaps_changed(random, _toml(changed_tree(random, RECIPE)))


def recipe(place: Place, content: bytes) -> None:
    found = resolve_recipe(load_recipe(place.write("fuzzed.toml", content)))
    to_toml(found)
    place.write("listed/recipe.toml", content)
    render_runs(list_runs(place.folder / "listed"))


def override_input(random: Random, place: Place) -> str:
    keys = [f"{table}.{key}" for table, own in RECIPE.items() for key in own]
    typed = (text(random), str(scalar(random)), text(random, 12, "[]{}\"'=.,0123456789abM%\\"))
    return f"{random.choice((random.choice(keys), text(random)))}={random.choice(typed)}"


def override(place: Place, given: str) -> None:
    place.write("plain.toml", _toml(RECIPE))
    load_recipe(place.folder / "plain.toml", [given])


def size_input(random: Random, place: Place) -> str:
    return random.choice((text(random), text(random, 14, "0123456789.,_%kMBnonembhidffn=eE+- ")))


def size(place: Place, given: str) -> None:
    for parse in (parse_size, parse_count):
        try:
            parse(given, "--to")
        except UserError:
            continue


def text_input(random: Random, place: Place) -> tuple[str, bytes]:
    lines = b'{"text": "once"}\n{"text": "upon"}\n'
    packed = {"": lines, ".gz": gzip.compress(lines, mtime=0), ".xz": lzma.compress(lines)}
    suffix = random.choice(sorted(packed))
    return random.choice((".jsonl", ".txt")) + suffix, changed_bytes(random, packed[suffix])


def documents(place: Place, given: tuple[str, bytes]) -> None:
    for _ in read_documents(str(place.write(f"fuzzed{given[0]}", given[1]))):
        pass


def printed_input(random: Random, place: Place) -> str:
    return text(random, 40)


def printed(place: Place, given: str) -> None:
    shown = io.StringIO()
    table = Table(given, title=given, caption=given)
    table.add_row(given)
    PlainConsole(file=shown, width=80).print(table, given)
    assert all(letter.isprintable() or letter in "\n\t" for letter in shown.getvalue()), ascii(shown.getvalue())


# Ledgers, logs, tokens, checkpoints, requests ----------------------------------------------------------------


def _lines(events: Any) -> bytes:
    return b"".join(as_json(event) + b"\n" for event in events)


def ledger_input(random: Random, place: Place) -> bytes:
    return perhaps_changed(random, _lines(changed_tree(random, place.events)))


def ledger(place: Place, content: bytes) -> None:
    """Whatever is accepted describes a part of the source, with the right counts."""
    path = place.write("fuzzed-run/ledger.jsonl", content)
    summarise(open_run(path.parent))
    events = read_ledger(path)
    structure = verified_structure(place.anatomy, events, str(path))
    ledger_until(events, 3)
    assert place.anatomy.source.contains(structure)


METRICS = [{"step": n, "tokens": 9 * n, "loss": 3.0, "time": {"began": 1e9, "running": n}} for n in (1, 2, 3)]


def metrics_input(random: Random, place: Place) -> bytes:
    return perhaps_changed(random, _lines(changed_tree(random, METRICS)))


def metrics(place: Place, content: bytes) -> None:
    place.write("fuzzed-run/metrics.jsonl", content)
    place.write("fuzzed-run/ledger.jsonl", _lines(place.events))
    summarise(open_run(place.folder / "fuzzed-run"))
    render_runs(list_runs(place.folder / "fuzzed-run"))


def token_input(random: Random, place: Place) -> tuple[bytes, bytes]:
    tree = json.loads((place.tokens / "index.json").read_text())
    content = (place.tokens / "tokens-00000.bin").read_bytes()
    return perhaps_changed(random, as_json(changed_tree(random, tree))), perhaps_changed(random, content)


def tokens(place: Place, given: tuple[bytes, bytes]) -> None:
    folder = place.folder / "fuzzed-tokens"
    if not folder.exists():
        shutil.copytree(place.tokens, folder)
    place.write("fuzzed-tokens/index.json", given[0])
    place.write("fuzzed-tokens/tokens-00000.bin", given[1])
    files = open_token_files(folder)
    files.verify()
    files.check_ids(257)
    files.read(0, min(files.num_tokens, 10))


def state_input(random: Random, place: Place) -> bytes:
    newest = RunDirectory(place.run).list_checkpoints()[-1]
    return as_json(changed_tree(random, json.loads((newest / "state.json").read_text())))


def checkpoint(place: Place, content: bytes) -> None:
    """An edited state with a matching checksum; training itself is left out."""
    folder = place.folder / "fuzzed-resume"
    if not folder.exists():
        shutil.copytree(place.run, folder)
    for log in ("metrics.jsonl", "ledger.jsonl", "recipe.toml"):  # resume cuts logs at the step that a state says
        shutil.copyfile(place.run / log, folder / log)
    newest = RunDirectory(folder).list_checkpoints()[-1]
    (newest / "state.json").write_bytes(content)
    edit_json(newest / "checksums.json", **{"state.json": hashlib.sha256(content).hexdigest()})
    with mock.patch.object(Trainer, "run", return_value="stopped"):
        resume(folder)


def request_input(random: Random, place: Place) -> bytes:
    host = f"Host: 127.0.0.1:{place.server.server_port}\r\nConnection: close\r\n"
    usual = f"GET /data/loss.json HTTP/1.1\r\n{host}\r\n".encode()
    return changed_bytes(random, usual) if random.random() < 0.8 else noise(random, 60)


def request(place: Place, content: bytes) -> None:
    with redirect_stderr(io.StringIO()) as said:
        for sent in (content, b"GET /data.json HTTP/1.0\r\nHost: 127.0.0.1:%d\r\n\r\n" % place.server.server_port):
            with socket.create_connection(("127.0.0.1", place.server.server_port), timeout=20) as connection:
                reply = b""
                try:
                    connection.sendall(sent)
                    connection.shutdown(socket.SHUT_WR)
                    while block := connection.recv(1 << 16):
                        reply += block
                except ConnectionError:
                    pass
    assert b" 200 " in reply[:20] and "Traceback" not in said.getvalue(), (reply[:80], said.getvalue())


Target = tuple[Callable[[Random, Place], Any], Callable[[Place, Any], None]]

TARGETS: dict[str, Target] = {
    "gguf": (gguf_input, gguf),
    "config.json": (config_input, config),
    "generation_config.json": (generation_input, generation),
    "safetensors index": (index_input, index),
    "recipe": (recipe_input, recipe),
    "override": (override_input, override),
    "size": (size_input, size),
    "text": (text_input, documents),
    "terminal": (printed_input, printed),
    "ledger": (ledger_input, ledger),
    "metrics": (metrics_input, metrics),
    "token files": (token_input, tokens),
    "checkpoint": (state_input, checkpoint),
    "request": (request_input, request),
}


def survives(name: str, place: Place, given: Any) -> None:
    """One input: the target returns, or refuses it. Commands print a ``UserError`` or an ``OSError`` as one line."""
    with suppress(UserError, OSError):
        TARGETS[name][1](place, given)
