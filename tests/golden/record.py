"""Records what the commands compute on tiny models, to the bit, and compares two commits with each other.

Before a change that must not change any result, record the base commit in a worktree of its own; after it, compare:

    git worktree add --detach /tmp/base BASE
    python tests/golden/record.py --src /tmp/base/src --out /tmp/golden.json
    python tests/golden/record.py --against /tmp/golden.json

Everything goes through ``python -m dwindle``, so the two commits need not share a single module name; this file imports
nothing of dwindle. Bits differ between CPUs and builds of torch: a recording is good on the machine that made it, and
is not committed. The whole takes minutes; ``--only NAME,…`` runs some of the cases.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

Record = dict[str, Any]

MODELS: dict[str, tuple[str, Record]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 8}),
    "smollm3": ("smollm3", {"attention_bias": True, "mlp_bias": True}),
    "olmo2": ("olmo2", {}),
    "granite": ("granite", {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.7}),
    "phi3": ("phi3", {}),
}
"""Name: family, and what its configuration has besides the sizes."""

RECIPE = """
source = {model = "../models/llama", device = "cpu"}
data = {train = ["../train.jsonl"], valid = ["../valid.txt"], seq_len = 32, valid_tokens = 256}
training = {tokens = 1536, tokens_per_step = 128, micro_batch = 2, lr = 3e-3, warmup = 2, ce_chunk_tokens = 48}
prune = {target = "60%", horizon = 0.8, compact_threshold = 0.05, compact_multiple = 4, compact_wait = 0}
validation = {every = 4}
checkpoint = {every = 0}
"""
"""12 steps of 4 sequences, in two passes; rebuilt often, so that events follow on a model that has been rebuilt."""

GLOBAL = "prune.selection=global"
CLUSTER = "prune.attention=cluster"
ADAPT = "prune.method=adapt prune.horizon=none prune.interleaves=4"
SECOND = "prune.second_order=true"
TWO = "training.tokens_per_step=224 training.tokens=2688 --nproc 2"
"""7 sequences a step, which two processes do not divide."""


def train(settings: str = "", model: str = "llama") -> str:
    """The command of a run; ``settings`` are overrides of the recipe, or options."""
    return f"pretrain ../recipe.toml source.model=../models/{model} {settings} --out run"


def resumed(settings: str = "", options: str = "") -> list[str]:
    """A run with all that a checkpoint can keep, and a copy that is ended after step 6 (see ``cut``) and resumed."""
    busy = f"{GLOBAL} {CLUSTER} {SECOND} prune.smoothing=0.5 distill.weight=0.5 prune.milestones=80%"
    often = "checkpoint.every=3 checkpoint.keep_last=9"
    return [train(f"{busy} {often} {settings} {options}"), "cut run again 6", f"resume again {options}"]


def prune(options: str = "", model: str = "llama") -> str:
    """The command of a pruning without training."""
    return f"prune ../models/{model} --data ../train.jsonl --sequences 12 --seq-len 32 --to 60% {options} --out pruned"


def quantize(scheme: str) -> str:
    """The command that rounds the pruned model."""
    sizes = "--sequences 8 --seq-len 32 --valid-seq-len 32 --valid-tokens 512"
    return f"quantize pruned --scheme {scheme} --data ../train.jsonl --valid ../valid.txt {sizes} --out {scheme}"


def measure(model: str) -> str:
    """The command that measures perplexity and answers questions."""
    return f"eval {model} --text ../valid.txt --tasks piqa --data .. --items {model}.items"


CASES: dict[str, list[str]] = {
    # While it trains.
    "coupled-regular": [train()],
    "coupled-cluster": [train(CLUSTER, "qwen2")],
    "global-regular": [train(GLOBAL, "llama-tied")],
    "global-cluster": [train(f"{GLOBAL} {CLUSTER}")],
    "global-round-to": [train(f"{GLOBAL} prune.round_to=8", "granite")],
    "adapt": [train(ADAPT)],
    "adapt-second-order": [train(f"{ADAPT} {SECOND} prune.balance=ratio prune.distance=euclidean", "smollm3")],
    "second-order": [train(f"{SECOND} {CLUSTER}")],
    "second-order-global": [train(f"{SECOND} {GLOBAL} prune.gram_tokens=48", "qwen3")],
    "second-order-olmo2": [train(SECOND, "olmo2")],
    "distill": [train("distill.weight=0.5 distill.temperature=2.0", "phi3")],
    "distill-top-k": [train(f"distill.weight=0.5 distill.top_k=8 {GLOBAL} training.z_loss=1e-3")],
    "uncompacted-bf16": [train("prune.compact_threshold=1 training.precision=bf16", "mistral")],
    "smoothing": [
        train("prune.smoothing=0.5 prune.fisher=adam prune.compare=sum training.optimizer=adamw", "llama-tied")
    ],
    "wanda": [train("prune.metric=wanda")],
    "obd": [train(f"prune.metric=obd {CLUSTER} training.activation_checkpointing=true")],
    "round-to-obc": [train("prune.round_to=8 prune.metric=obc")],
    "shape": [train("prune.target=hidden=24,heads=4,ffn=24")],
    "milestones": [train('prune.milestones=["80%","70%"]')],
    "ratio": [train("prune.horizon=none prune.ratio=1:1 prune.target=99% prune.warmup_steps=1")],
    "unpruned": [train("prune.enabled=false source.random_init=true training.schedule=wsd training.precision=fp64")],
    # Interrupted, and on two processes.
    "resume": resumed(),
    "resume-fsdp": resumed("training.parallel=fsdp", "--nproc 2"),
    "ddp": [train(f"training.parallel=ddp {ADAPT} {TWO}", "llama-tied")],
    "fsdp": [train(f"training.parallel=fsdp {SECOND} {TWO}")],
    # Without training.
    "prune-rounds": [prune("--rounds 3")],
    "prune-global": [prune("--rounds 3 --selection global", "llama-tied")],
    "prune-adapt": [prune("--method adapt --rounds 4")],
    "prune-uniform": [prune("--method uniform --rounds 2")],
    "prune-second-order": [prune("--second-order --rounds 2", "phi3")],
    "prune-second-order-global": [prune("--second-order --selection global --attention cluster", "qwen3")],
    "prune-round-to": [prune("--round-to 8 --metric obc")],
    # What is done with a pruned model: one with equal layers, one with layers of their own sizes.
    "after-coupled": [
        prune("--groups ffn,stem"),  # all heads stay: rows of 32, which q8_0 needs
        measure("pruned"),
        quantize("w8a8"),
        measure("w8a8"),
        "export pruned --to gguf --type q8_0 --round 32 --out q8_0.gguf",
        "export pruned --to onnx --out graph",
        "export pruned --to hf --type bf16 --round 32 --out bf16",
    ],
    "after-global": [
        prune("--selection global --attention cluster"),
        quantize("w4"),
        "export pruned --to gguf --type f32 --out f32.gguf",
        measure("f32.gguf"),
        "export pruned --to onnx --out graph",
        "export pruned --to hf --stock --out stock",
    ],
    "compare": [
        "compare ../models/llama --metrics taylor,random --to 20% --second-order --data ../train.jsonl --sequences 8 "
        "--valid ../valid.txt --seq-len 32 --valid-tokens 256 --tokens 1024 --tokens-per-step 128 --out compared"
    ],
    "plan": [f"{train(GLOBAL)} --dry-run", "tokenize ../train.jsonl --model ../models/llama --out tokens"],
}
"""The commands of each case, in order, run in a folder of its own beside the models and texts."""


# What every command reads -------------------------------------------------------------------------------------


def prepare(root: Path) -> None:
    """Models, texts, questions and the recipe: the same for every recording."""
    make_models(root / "models")
    dice = random.Random(0)
    words = ["".join(dice.choices("abcdefghijklmnopqrstuvwxyz", k=dice.randint(2, 7))) for _ in range(150)]

    def sentences(least: int, most: int) -> str:
        count = dice.randint(least, most)
        return " ".join(" ".join(dice.choices(words, k=dice.randint(4, 9))).capitalize() + "." for _ in range(count))

    texts = [{"text": sentences(1, 8)} for _ in range(80)]
    questions = [{key: sentences(1, 2) for key in ("goal", "sol1", "sol2")} | {"label": n % 2} for n in range(12)]
    for name, lines in (("train", texts), ("piqa.validation", questions)):
        (root / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (root / "valid.txt").write_text(sentences(40, 40) + "\n")
    (root / "recipe.toml").write_text(RECIPE)


def make_models(folder: Path) -> None:
    """A tiny model of every kind with a byte-level tokenizer; output projections such that all three types leave."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    end, merges = "<|endoftext|>", [("a", "n"), ("e", "r"), ("o", "r")]  # without any, llama.cpp refuses the file
    entries = [end, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(left + right for left, right in merges)]
    backend = Tokenizer(models.BPE(vocab={entry: number for number, entry in enumerate(entries)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=end, eos_token=end)
    sizes = {"vocab_size": len(entries), "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 128}
    special = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
    for name, (family, options) in MODELS.items():
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**sizes, **special, **options}))
        generator = torch.Generator().manual_seed(len(name))
        with torch.no_grad():
            for key, parameter in sorted(model.named_parameters()):
                noise = torch.randn(parameter.shape, generator=generator)
                scale = 0.06 if "o_proj" in key else 0.5 if "down_proj" in key else 0.2
                parameter.copy_(noise * scale + key.endswith("norm.weight"))
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


# What is recorded ---------------------------------------------------------------------------------------------


def digest(data: bytes) -> str:
    """Short, and still never equal by chance."""
    return hashlib.sha256(data).hexdigest()[:24]


def json_lines(file: Path) -> list[Record]:
    """All lines of a log."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def plain(value: Any) -> Any:
    """JSON that a command has printed or written, less what is measured and versions, and of paths the last part alone.

    ``options`` is what the ledger's first line says of the settings, in names of the code, which may change.
    """
    if isinstance(value, dict):
        volatile = {"seconds", "memory_bytes_measured", "time", "versions", "transformers_version", "options"}
        return {key: plain(inside) for key, inside in value.items() if key not in volatile}
    if isinstance(value, list):
        return [plain(inside) for inside in value]
    return value.rpartition("/")[2] if isinstance(value, str) else value


def safetensors(file: Path) -> Record:
    """Every tensor's type, shape and hash of its bytes."""
    with file.open("rb") as stream:
        header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        data = stream.read()
    header.pop("__metadata__", None)
    return {name: f"{t['dtype']} {t['shape']} {digest(data[slice(*t['data_offsets'])])}" for name, t in header.items()}


def gguf(file: Path) -> Record:
    """Every tensor's type, shape and hash of its bytes, and the metadata."""
    from gguf import GGUFReader

    reader = GGUFReader(file)
    found: Record = {name: plain(field.contents()) for name, field in reader.fields.items()}
    for t in reader.tensors:
        found[t.name] = f"{t.tensor_type.name} {t.shape.tolist()} {digest(t.data.tobytes())}"
    return found


def written(place: Path) -> Record:
    """What is at a place: a run with its models and newest checkpoint, a model, or an exported file.

    Not the random state of a checkpoint: where it matters, the resumed runs show it.
    """
    if place.suffix == ".gguf":
        return gguf(place)
    found: Record = {}
    for file in sorted(place.iterdir()):
        if file.suffix == ".safetensors" and file.stem != "rng":
            found[file.name] = safetensors(file)
        elif file.name in ("metrics.jsonl", "ledger.jsonl"):
            found[file.name] = plain(json_lines(file))
        elif file.name in ("structure.json", "config.json", "quantization.json", "compare.json"):
            found[file.name] = plain(json.loads(file.read_text()))
        elif file.suffix in (".onnx", ".data"):
            found[file.name] = digest(file.read_bytes())
    inside = [*place.glob("milestones/*"), *sorted(place.glob("checkpoints/*"))[-1:], *place.glob("model")]
    return found | {str(folder.relative_to(place)): written(folder) for folder in inside}


# Running and comparing ----------------------------------------------------------------------------------------


def run(words: list[str], folder: Path, src: Path) -> subprocess.CompletedProcess[str]:
    """Python with the code of ``src``, on one thread and without anything that differs from run to run."""
    threads = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
    settings = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONHASHSEED": "0"}
    settings |= {"PYTHONPATH": str(src), "CUDA_VISIBLE_DEVICES": "", **dict.fromkeys(threads, "1")}
    environment = os.environ | settings
    return subprocess.run([sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True)


def run_case(name: str, root: Path, src: Path) -> Record:
    """What every command of a case has printed and written, or what the first that failed has said."""
    folder, found = root / name, Record()
    folder.mkdir()
    for command in CASES[name]:
        words = shlex.split(command)
        if words[0] == "cut":
            cut(folder / words[1], folder / words[2], after=int(words[3]))
            continue
        done = run(["-m", "dwindle", *words, "--json"], folder, src)
        if done.returncode:
            return {"failed": f"{command}: exit code {done.returncode}: {done.stderr.strip()[-1500:]}"}
        out = words[words.index("--out") + 1] if "--out" in words else words[1]
        record = {"printed": plain(json.loads(done.stdout.splitlines()[-1]))}
        if words[0] == "eval":
            record["items"] = json_lines(folder / f"{out}.items")
        elif words[0] != "tokenize" and "--dry-run" not in words:
            record["written"] = written(folder / out)
        found[f"{words[0]} {out}"] = record
    if "resume again" in found:
        whole, again = (found[command]["written"] for command in ("pretrain run", "resume again"))
        if different := list(differences(whole, again)):
            return {"failed": f"the resumed run differs from the whole one: {different[:3]}"}
    return found


def cut(whole: Path, copy: Path, after: int) -> None:
    """A copy of a run as if it had been killed before the next checkpoint was written."""
    shutil.copytree(whole, copy)
    shutil.rmtree(copy / "model")
    for checkpoint in (copy / "checkpoints").iterdir():
        if int(checkpoint.name.removeprefix("step-")) > after:
            shutil.rmtree(checkpoint)


def differences(old: Any, new: Any, path: str = "") -> Iterator[str]:
    """Where two records differ, with both values; floats are equal when their digits are."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in old | new:
            yield from differences(old.get(key, "missing"), new.get(key, "missing"), f"{path}/{key}")
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for number, pair in enumerate(zip(old, new, strict=True)):
            yield from differences(*pair, f"{path}[{number}]")
    elif json.dumps(old) != json.dumps(new):
        yield f"{path}: {json.dumps(old)[:90]} → {json.dumps(new)[:90]}"


def header(src: Path) -> Record:
    """Where a recording holds, and of what commit it is."""
    information = Path("/proc/cpuinfo")  # of Linux only
    cpu = re.search(r"model name\s*: (.*)", information.read_text()) if information.is_file() else None
    describe = ["git", "-C", str(src), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    commit = subprocess.run(describe, capture_output=True, text=True).stdout.strip()
    packages = {name: version(name) for name in ("torch", "transformers", "numpy")}
    return {"cpu": cpu[1] if cpu else "", **packages, "commit": commit}


def main() -> int:
    """Runs the cases and prints a line for each; 1 when one failed or differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--src", type=Path, default=Path(__file__).parents[2] / "src", help="whose code runs")
    parser.add_argument("--out", type=Path, help="where to write the recording")
    parser.add_argument("--against", type=Path, help="an earlier recording to compare with")
    parser.add_argument("--only", default=",".join(CASES), help="names of cases, with commas")
    parser.add_argument("--jobs", type=int, default=2, help="cases at a time")
    options = parser.parse_args()
    names, src = options.only.split(","), options.src.resolve()
    if unknown := set(names) - set(CASES):
        parser.error(f"no such case: {', '.join(unknown)}; there are {', '.join(CASES)}")
    imported = run(["-c", "import dwindle; print(dwindle.__file__)"], Path.cwd(), src).stdout.strip()
    if not Path(imported).is_relative_to(src):
        parser.error(f"--src {src}: python imports {imported or 'nothing'}")
    about, good, cases = header(src), True, Record()
    base: Record = json.loads(options.against.read_text()) if options.against else {}
    for key, value in base.get("header", {}).items():
        if key != "commit" and value != about[key]:
            print(f"warning: recorded with {key} {value}, this is {about[key]}: bits may differ")
    with tempfile.TemporaryDirectory(prefix="golden-") as temporary, ThreadPoolExecutor(options.jobs) as pool:
        root = Path(temporary)
        prepare(root)
        for name, found in zip(names, pool.map(lambda name: run_case(name, root, src), names), strict=True):
            cases[name] = found
            lines = list(differences(base["cases"].get(name, "missing"), found)) if base else []
            lines = [found["failed"]] if "failed" in found else lines
            verdict = "FAILED" if "failed" in found else f"{len(lines)} DIFFERENCES" if lines else "equal"
            print(f"{name}: {verdict if base or lines else 'recorded'}", *lines[:12], sep="\n    ", flush=True)
            good = good and not lines
    if options.out:
        options.out.write_text(json.dumps({"header": about, "cases": cases}, indent=1) + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
