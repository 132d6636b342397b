"""``dwindle bench train``."""

from __future__ import annotations

from typing import Annotated

import typer

from dwindle.commands.app import Json, print_result
from dwindle.commands.export import bench
from dwindle.errors import UserError


@bench.command()
def train(
    shape: Annotated[str, typer.Option(help="smollm-1.7b, smollm2-360m, smollm2-135m or tiny.")] = "smollm-1.7b",
    rows: Annotated[
        str, typer.Option(help="Which rows; also ffn, attn, stem: second-order events of that type, one in nine steps.")
    ] = "baseline,off,pruning,compacted",
    batch: Annotated[int, typer.Option(min=1, help="Sequences per step.")] = 16,
    seq_len: Annotated[int, typer.Option(min=2, help="Tokens per sequence.")] = 2048,
    steps: Annotated[int, typer.Option(min=1, help="Measured steps per row.")] = 20,
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    precision: Annotated[str, typer.Option(help="bf16, fp32, or auto: bf16 on a GPU.")] = "auto",
    compiled: Annotated[
        bool, typer.Option("--compile/--no-compile", help="torch.compile, per block in our rows.")
    ] = True,
    mode: Annotated[str | None, typer.Option(help="Of torch.compile, such as max-autotune-no-cudagraphs.")] = None,
    chunk_tokens: Annotated[int, typer.Option(min=1, help="Tokens whose logits exist at once.")] = 4096,
    fused_loss: Annotated[bool, typer.Option(help="Compile the loss.")] = True,
    bf16_residual: Annotated[bool, typer.Option(help="Residual stream in bf16.")] = False,
    attention: Annotated[str, typer.Option(help="flash, cudnn or auto.")] = "auto",
    multiples: Annotated[str, typer.Option(help="Compact to multiples of these, such as 64,128.")] = "64",
    rounded: Annotated[
        int, typer.Option(min=0, help="Also compact to a target of the nearest multiples of this, such as 128.")
    ] = 0,
    compacted_batch: Annotated[
        str | None, typer.Option(help="Sequences per step after compaction, such as 16,32; default: --batch.")
    ] = None,
    gram_tokens: Annotated[int, typer.Option(min=1, help="Tokens watched for a second-order update.")] = 4096,
    out: Annotated[str | None, typer.Option(help="Folder for train.jsonl, a line per row.")] = None,
    as_json: Json = False,
) -> None:
    """Tokens/s, utilisation and memory of training, pruning on and off, beside plain transformers."""
    import sys
    from dataclasses import asdict
    from pathlib import Path
    from typing import Any

    from dwindle.bench.train import measure_training, render
    from dwindle.bench.train_parts import TrainBench

    if precision == "auto":
        precision = "bf16" if device == "cuda" else "fp32"
    settings: Any = {"mode": mode, "attention": attention, "precision": precision}
    chosen = TrainBench(
        shape=shape,
        rows=[row.strip() for row in rows.split(",")],
        batch=batch,
        seq_len=seq_len,
        steps=steps,
        device=device,
        compile=compiled,
        chunk_tokens=chunk_tokens,
        fused_loss=fused_loss,
        bf16_residual=bf16_residual,
        multiples=whole_numbers(multiples, "--multiples"),
        rounded=rounded,
        compacted_batches=whole_numbers(compacted_batch or "", "--compacted-batch"),
        gram_tokens=gram_tokens,
        **settings,
    )
    found = measure_training(chosen, Path(out) if out else None, lambda line: print(line, file=sys.stderr, flush=True))
    print_result({"rows": [asdict(row) for row in found]} if as_json else render(found, chosen), as_json)


def whole_numbers(text: str, option: str) -> list[int]:
    """``64,128`` as numbers."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise UserError(f"{option} {text}: not whole numbers above 0: write them as 64,128")
    return [int(part) for part in parts]
