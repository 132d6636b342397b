"""A process group of one rank trains, saves and resumes as a plain process does: NCCL on a GPU, gloo on a CPU.

    PYTHONPATH=src python3 studies/one_rank.py --out OUT                       # starts torchrun itself
    PYTHONPATH=src python3 -m torch.distributed.run --standalone --nproc-per-node 1 studies/one_rank.py --out OUT

Four runs of 12 pruned steps in fp32: two of a plain process (does it repeat itself?), one of FSDP with one shard, and
one that is stopped half-way and resumed by another group. Each is compared with the first. Prints one line of JSON and
writes it to ``one-rank.json`` in ``--out``. Exits with 1 if a loss differs by more than 1e-4, or if a choice in the
ledger or the final structure differs. Scores may differ in their last digits, which depend on the order of sums.
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
    """Notes the backend of a run, and asks the run to stop after a step."""

    def __init__(self, stop_at: int = 0) -> None:
        self.stop_at = stop_at
        self.backends: list[str | None] = []

    def on_start(self, trainer: Trainer) -> None:
        self.backends.append(dist.get_backend() if dist.is_initialized() else None)

    def edit_gradients(self, trainer: Trainer) -> None:
        if trainer.step + 1 == self.stop_at:
            trainer.stop.request()


def tiny_llama(folder: Path) -> str:
    """Four layers with random weights, and bytes as tokens."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8}
    LlamaForCausalLM(LlamaConfig(vocab_size=257, num_key_value_heads=4, **sizes)).save_pretrained(folder)
    letters = ["<|endoftext|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=letters[0]).save_pretrained(folder)
    return str(folder)


def recipe(model: str, device: str, parallel: str) -> Recipe:
    """Compacts often; no CUDA graphs, which a group does not use."""
    training: dict[str, Any] = {"tokens": STEPS * SEQUENCES * SEQ_LEN, "tokens_per_step": SEQUENCES * SEQ_LEN}
    training |= {"micro_batch": 4, "lr": 1e-3, "optimizer": "adamw", "precision": "fp32", "parallel": parallel}
    prune: dict[str, Any] = {"target": "60%", "horizon": 0.8, "warmup_steps": 0}
    tables: dict[str, dict[str, Any]] = {
        "source": {"model": model, "device": device},
        "data": {"train": ["pydoc:train"], "seq_len": SEQ_LEN},
        "training": training | {"cuda_graphs": False},
        "prune": prune | {"compact_threshold": 0.1, "compact_wait": 0, "compact_multiple": 8},
        "distill": {"weight": 0.0},
        "checkpoint": {"every": 4},
    }
    return from_dict(Recipe, tables)


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in RunDirectory(run).metrics.read_text(encoding="utf-8").splitlines()]


def choices(run: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in event.items() if key != "saliency"} for event in read_ledger(run)]


def compared(run: Path, plain: Path) -> dict[str, Any]:
    ours, theirs = ((r / "model" / STRUCTURE).read_bytes() for r in (run, plain))
    return {
        "largest_loss_difference": max(abs(a - b) for a, b in zip(losses(run), losses(plain), strict=True)),
        "same_ledger": choices(run) == choices(plain),
        "same_scores": read_ledger(run) == read_ledger(plain),
        "same_structure": ours == theirs,
    }


def study(place: Path, model: str, device: str) -> dict[str, Any]:
    watches = {"plain": Watch(), "plain again": Watch(), "group": Watch(), "resumed group": Watch(STEPS // 2)}
    for name, watch in watches.items():
        wanted = recipe(model, device, "fsdp" if "group" in name else "none")
        if pretrain(wanted, place / name, callbacks=[watch]).status == "stopped":
            resume(place / name, callbacks=[watch])
    events = [event["event"] for event in read_ledger(place / "plain")]
    return {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        "backends": {name: watch.backends for name, watch in watches.items()},
        "losses": losses(place / "plain"),
        "events": {kind: events.count(kind) for kind in ("prune", "compact")},
        "against_plain": {name: compared(place / name, place / "plain") for name in list(watches)[1:]},
    }


def agrees(found: dict[str, Any], backend: str) -> bool:
    """Whether the groups were made, and computed what a plain process did."""
    expected = {"plain": [None], "plain again": [None], "group": [backend], "resumed group": [backend, backend]}
    groups = [found["against_plain"][name] for name in ("group", "resumed group")]
    same = all(
        group["same_ledger"] and group["same_structure"] and group["largest_loss_difference"] <= TOLERANCE
        for group in groups
    )
    return same and found["backends"] == expected


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="default: a tiny Llama with random weights")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("one-rank"))
    args = parser.parse_args()
    if "RANK" not in os.environ:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
        return subprocess.run([*torchrun, *sys.argv]).returncode
    with tempfile.TemporaryDirectory() as place:
        found = study(Path(place), args.model or tiny_llama(Path(place, "source")), args.device)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "one-rank.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found), flush=True)
    return 0 if agrees(found, "nccl" if args.device == "cuda" else "gloo") else 1


if __name__ == "__main__":
    sys.exit(main())
