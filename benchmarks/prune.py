"""Seconds and memory of ``dwindle prune`` at the size of real models, with random weights and random text.

    python -m benchmarks.prune --shape llama-7b --to 5B --rows coupled,global,adapt --out OUT

Writes a source in bf16 to a temporary folder (on a GPU if there is one), then prunes it once for each row, each in a
process of its own, and prints a line of JSON for each. Host memory is the peak of the resident set (``VmHWM``), imports
and CUDA included; ``host_x_file`` relates it to the source's weights.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, PreTrainedTokenizerFast

from benchmarks.select import ROWS
from benchmarks.shapes import SHAPES
from dwindle.anatomy.build import build_on_meta
from dwindle.commands.main import run_command
from dwindle.core.errors import UserError
from dwindle.distributed.safetensors_stream import file_blocks
from dwindle.export.process import peak_memory_bytes
from dwindle.pruning import rounds
from dwindle.run import prune as pruning
from dwindle.sources.loading import chosen_device

_SHARD_BYTES = 4 * 10**9
_NUM_WORDS = 2**17
"""Of the text: more than any row reads."""


@dataclass(frozen=True, slots=True)
class PruneRow:
    """One row: seconds of each part, and peaks of memory."""

    name: str
    device: str
    source_gb: float
    parameters: int
    events: int
    load_s: float
    measure_s: float
    """Loss and samples of source and result."""
    calibrate_s: float
    select_s: float
    """Saliencies, choice and removal of groups."""
    cut_s: float
    save_s: float
    after_load_s: float
    """Everything but loading."""
    start_host_gb: float
    """After imports, before loading."""
    host_gb: float
    host_x_file: float
    gpu_gb: float
    options: dict[str, Any]


class Stopwatch:
    """Seconds spent in functions, which are wrapped where they are looked up."""

    def __init__(self, device: str) -> None:
        self.seconds: dict[str, float] = {}
        self._on_gpu = device.startswith("cuda")

    def watch(self, part: str, owner: Any, name: str) -> None:
        function: Callable[..., Any] = getattr(owner, name)

        @wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = self._now()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[part] = self.seconds.get(part, 0.0) + self._now() - started

        setattr(owner, name, timed)

    def _now(self) -> float:
        if self._on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()


def make_source(shape: str, folder: Path, device: str) -> int:
    """A directory with random bf16 weights in shards, a tokenizer of words and a text of them; bytes of the weights."""
    config = LlamaConfig(**SHAPES[shape], dtype="bfloat16")
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    shards = list(_shards({name: tuple(p.shape) for name, p in build_on_meta(config).named_parameters()}))
    generator, weight_map, total = torch.Generator(device).manual_seed(0), dict[str, str](), 0
    for number, shapes in enumerate(shards, 1):
        file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {name: _drawn(shape, generator) for name, shape in shapes.items()}
        with (folder / file_name).open("wb") as file:
            file.writelines(file_blocks(tensors))
        weight_map |= dict.fromkeys(shapes, file_name)
        total += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    _write_text(folder, config.vocab_size)
    return total


def _shards(shapes: Mapping[str, tuple[int, ...]]) -> Iterator[dict[str, tuple[int, ...]]]:
    shard, size = dict[str, tuple[int, ...]](), 0
    for name, shape in shapes.items():
        num_bytes = 2 * torch.Size(shape).numel()
        if shard and size + num_bytes > _SHARD_BYTES:
            yield shard
            shard, size = {}, 0
        shard[name], size = shape, size + num_bytes
    yield shard


def _drawn(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16, device=generator.device)
    weight = torch.empty(shape, dtype=torch.bfloat16, device=generator.device)
    return weight.normal_(std=0.02, generator=generator)


def _write_text(folder: Path, vocab_size: int) -> None:
    """Every token is a word."""
    words = ["<unk>", *(f"w{number}" for number in range(1, vocab_size))]
    backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="<unk>").save_pretrained(folder)
    chosen = torch.randint(1, vocab_size, (_NUM_WORDS,), generator=torch.Generator().manual_seed(0))
    (folder / "text.txt").write_text(" ".join(words[number] for number in chosen.tolist()))


def measure_prune(
    source: Path, num_bytes: int, to: str, name: str, device: str, options: Mapping[str, Any]
) -> PruneRow:
    """Prune the source once; to be called in a fresh process, because peaks are those of the process."""
    on_gpu, watch = device.startswith("cuda"), Stopwatch(device)
    if on_gpu:
        torch.zeros(1, device=device)  # CUDA starts here, not in the time of loading
    for part, owner, function in (
        ("load", pruning, "load"),
        ("measure", pruning, "_judge"),
        ("measure", pruning.Judge, "judged"),
        ("calibrate", rounds, "calibrate"),
        ("scored", rounds, "_scored"),
        ("rounds", pruning, "prune_in_rounds"),
        ("cut", pruning.Prunable, "compacted"),
        ("save", pruning, "save_model"),
        ("all", pruning, "prune"),
    ):
        watch.watch(part, owner, function)
    start = peak_memory_bytes()
    settings = ROWS[name] | dict(options)
    with tempfile.TemporaryDirectory(dir=source.parent) as folder:
        text, out = str(source / "text.txt"), Path(folder) / "result"
        result = pruning.prune(source, to, data=[text], device=device, out=out, **settings)
    seconds, peak = watch.seconds, peak_memory_bytes()
    calibrated = seconds.get("calibrate", seconds["scored"])  # a method may have a score of its own
    return PruneRow(
        name=name,
        device=torch.cuda.get_device_name() if on_gpu else device,
        source_gb=num_bytes / 1e9,
        parameters=result.after.total,
        events=sum(event["event"] == "prune" for event in result.ledger),
        load_s=seconds["load"],
        measure_s=seconds["measure"],
        calibrate_s=calibrated,
        select_s=seconds["rounds"] - calibrated,
        cut_s=seconds["cut"],
        save_s=seconds["save"],
        after_load_s=seconds["all"] - seconds["load"],
        start_host_gb=start / 1e9,
        host_gb=peak / 1e9,
        host_x_file=peak / num_bytes,
        gpu_gb=torch.cuda.max_memory_allocated() / 1e9 if on_gpu else 0.0,
        options=settings,
    )


def in_new_process(function: Callable[..., Any], *arguments: Any) -> Any:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def main(arguments: list[str] | None = None, show: Callable[[str], None] = print) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", choices=SHAPES, default="llama-7b")
    parser.add_argument("--to", default="5B", help="target, as in dwindle prune --to")
    parser.add_argument("--rows", default="coupled,global,adapt", help=f"among {', '.join(ROWS)}")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--sequences", type=int, help="of the calibration; else the method's own")
    parser.add_argument("--seq-len", type=int, help="of the calibration; else the method's own")
    parser.add_argument("--place", type=Path, help="where the source and the results are written; else a temporary one")
    parser.add_argument("--out", type=Path, help="append the rows as JSON lines to this file")
    given = parser.parse_args(arguments)
    names, device = given.rows.split(","), chosen_device(given.device)
    if unknown := [name for name in names if name not in ROWS]:
        raise UserError(f"--rows {unknown[0]}: choose among {', '.join(ROWS)}")
    options = {key: value for key in ("sequences", "seq_len") if (value := getattr(given, key)) is not None}
    if given.place:
        Path(given.place).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=given.place) as folder:
        source = Path(folder) / "source"
        source.mkdir()
        num_bytes = in_new_process(make_source, given.shape, source, device)
        for name in names:
            row = in_new_process(measure_prune, source, num_bytes, given.to, name, device, options)
            line = json.dumps(asdict(row))
            show(line)
            if given.out is not None:
                with given.out.open("a", encoding="utf-8") as file:
                    file.write(line + "\n")


if __name__ == "__main__":
    run_command(main)
