"""A process group of one rank trains, saves and resumes as a plain process does: NCCL on a GPU, gloo on a CPU.

    PYTHONPATH=src python3 studies/one_rank.py --out OUT                       # starts torchrun itself
    PYTHONPATH=src python3 -m torch.distributed.run --standalone --nproc-per-node 1 studies/one_rank.py --out OUT

Four runs of 12 pruned steps in fp32, all from the same model: two of a plain process (how far it repeats itself), one
of FSDP with one shard, and one that is stopped half-way and resumed by another group. Each is compared with the first.
Prints a line of JSON and writes it to ``one-rank.json`` in ``--out``. Exits with 1 if a loss differs by more than 1e-4,
or a choice in the ledger, or the final structure. Scores in the ledger are left out: their last digits are sums.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from dwindle.core.config import from_dict
from dwindle.core.run_directory import STRUCTURE, RunDirectory
from dwindle.pruning.ledger import read_ledger
from dwindle.recipe.recipe import Recipe
from dwindle.run.pretrain import pretrain, resume
from dwindle.training.callbacks import Callback
from dwindle.training.loop import Trainer

STEPS, SEQUENCES, SEQ_LEN, TOLERANCE = 12, 8, 64, 1e-4


class Watch(Callback):
    """Notes the backend that a run uses, and asks it to stop with a step."""

    def __init__(self, stop_at: int = 0) -> None:
        self.stop_at = stop_at
        self.backend: str | None = None

    def on_start(self, trainer: Trainer) -> None:
        self.backend = dist.get_backend() if dist.is_initialized() else None

    def edit_gradients(self, trainer: Trainer) -> None:
        if trainer.step + 1 == self.stop_at:
            trainer.stop.request()


def tiny_llama(folder: Path) -> None:
    """Four layers with random weights, and bytes as tokens."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8}
    LlamaForCausalLM(LlamaConfig(vocab_size=257, num_key_value_heads=4, **sizes)).save_pretrained(folder)
    letters = ["<|endoftext|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    bytes_only = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytes_only.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=bytes_only, eos_token=letters[0]).save_pretrained(folder)


def recipe(model: str, device: str, cache: Path, parallel: str) -> Recipe:
    """No CUDA graphs, which a group does not use."""
    tokens = SEQUENCES * SEQ_LEN
    training = {"tokens": STEPS * tokens, "tokens_per_step": tokens, "micro_batch": 4, "lr": 1e-3, "optimizer": "adamw"}
    training |= {"precision": "fp32", "parallel": parallel, "cuda_graphs": False}
    prune = {"target": "60%", "horizon": 0.8, "warmup_steps": 0, "compact_threshold": 0.1, "compact_wait": 0}
    tables = {
        "source": {"model": model, "device": device},
        "data": {"train": ["pydoc:train"], "seq_len": SEQ_LEN, "cache_dir": str(cache)},
        "training": training,
        "prune": prune | {"compact_multiple": 8},
        "distill": {"weight": 0.0},
        "checkpoint": {"every": 4},
    }
    return from_dict(Recipe, tables)


def losses(run: Path) -> list[float]:
    lines = map(json.loads, RunDirectory(run).metrics.read_text(encoding="utf-8").splitlines())
    return [line["loss"] for line in lines if "loss" in line]


def choices(run: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in event.items() if key != "saliency"} for event in read_ledger(run)]


def compared(run: Path, reference: Path) -> dict[str, Any]:
    ours, theirs = losses(run), losses(reference)
    structures = [(RunDirectory(r).model / STRUCTURE).read_bytes() for r in (run, reference)]
    return {
        "largest_loss_difference": max(abs(a - b) for a, b in zip(ours, theirs, strict=True)),
        "same_ledger": choices(run) == choices(reference),
        "same_bytes_in_ledger": RunDirectory(run).ledger.read_bytes() == RunDirectory(reference).ledger.read_bytes(),
        "same_structure": structures[0] == structures[1],
    }


def train(place: Path, model: str, device: str) -> dict[str, Any]:
    plain, sharded = (recipe(model, device, place / "tokens", parallel) for parallel in ("none", "fsdp"))
    watches = {"plain": Watch(), "plain again": Watch(), "group": Watch(), "resumed group": Watch(STEPS // 2)}
    for name, watch in watches.items():
        result = pretrain(sharded if "group" in name else plain, place / name, callbacks=[watch])
        if result.status == "stopped":
            assert result.step == STEPS // 2
            resume(place / name, callbacks=[watch])
    assert [watch.backend for watch in watches.values()] == [None, None, *["nccl" if device == "cuda" else "gloo"] * 2]
    newest = RunDirectory(place / "resumed group").list_checkpoints()[-1]
    events = [event["event"] for event in read_ledger(place / "plain")]
    return {
        "backend": watches["group"].backend,
        "device": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        "torch": torch.__version__,
        "steps": STEPS,
        "losses": [losses(place / "plain")[0], losses(place / "plain")[-1]],
        "events": {kind: events.count(kind) for kind in ("prune", "compact")},
        "shards_of_checkpoint": len(list(newest.glob("model-*-of-00001.safetensors"))),
        "against_plain": {name: compared(place / name, place / "plain") for name in list(watches)[1:]},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a model of any kind; default a tiny Llama with random weights")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("one-rank"))
    args = parser.parse_args()
    if "RANK" not in os.environ:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
        return subprocess.run([*launcher, __file__, *sys.argv[1:]]).returncode
    with tempfile.TemporaryDirectory() as place:
        if args.model is None:
            tiny_llama(Path(place, "model"))
        found = train(Path(place), args.model or str(Path(place, "model")), args.device)
    print(json.dumps(found), flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "one-rank.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    groups = [found["against_plain"][name] for name in ("group", "resumed group")]
    same = all(group["same_ledger"] and group["same_structure"] for group in groups)
    return 0 if same and all(group["largest_loss_difference"] <= TOLERANCE for group in groups) else 1


if __name__ == "__main__":
    sys.exit(main())
